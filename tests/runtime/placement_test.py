"""Where operations run, on logical devices, in a process of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = """
import collections, json
import numpy as np
import tensorflow as tf
cpu, = tf.config.list_physical_devices('CPU')
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
tf.debugging.set_log_device_placement(True)
from tff_fssl import runtime
import tensorflow_federated as tff


@tff.tensorflow.computation(
    tff.SequenceType(tff.TensorType(np.float32, [2, 8, 8, 1])))
def train(ds):
  kernel = tf.Variable(tf.ones([3, 3, 1, 2]))

  @tf.function
  def run():
    for x in iter(ds):
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.conv2d(x, kernel, 1, 'SAME') ** 2)
      kernel.assign_sub(1e-4 * tape.gradient(loss, kernel))
    return kernel.read_value()

  return run()


@tff.federated_computation(
    tff.FederatedType(train.type_signature.parameter, tff.CLIENTS))
def comp(x):
  return tff.federated_mean(tff.federated_map(train, x))


def make(i):
  x = np.random.default_rng(i).normal(size=(3, 2, 8, 8, 1))
  return tf.data.Dataset.from_tensor_slices(x.astype(np.float32))


def run(client_devices):
  context = runtime.build_context(
      runtime.Settings(client_devices=client_devices, client_threads=2))
  tff.framework.set_default_context(context)
  cohort = [lambda i=i: make(i) for i in range(4)]
  print(f'BEGIN {client_devices}', flush=True)
  return comp(cohort).tolist()


results = [run(d) for d in ('cpu:1,cpu:2', 'cpu:1', 'cpu')]
print('END', flush=True)
print('RESULT ' + json.dumps(results))
"""


@pytest.fixture(scope='module')
def output(tmp_path_factory):
  # A file: AutoGraph reads the source.
  program = tmp_path_factory.mktemp('placement') / 'placement_program.py'
  program.write_text(_PROGRAM)
  environment = {
    **os.environ,
    'PYTHONPATH': str(_ROOT),
    'TF_CPP_MIN_LOG_LEVEL': '0',
  }
  done = subprocess.run(
    [sys.executable, str(program)],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stdout[-3000:]
  return done.stdout


def _devices(output, client_devices, op_type):
  """The numbers of the CPU devices that an op type ran on."""
  part = output.split(f'BEGIN {client_devices}\n')[1]
  part = re.split(r'^(?:BEGIN|END)', part, flags=re.MULTILINE)[0]
  return {
    int(device)
    for device in re.findall(rf'\({op_type}\): \S*device:CPU:(\d)', part)
  }


@pytest.mark.parametrize(
  'op_type', ['Conv2D', 'Conv2DBackpropFilter', 'VarHandleOp']
)
@pytest.mark.parametrize(
  ['client_devices', 'expected'],
  [('cpu:1,cpu:2', {1, 2}), ('cpu:1', {1}), ('cpu', {0})],
)
def test_training_runs_on_the_client_devices(
  output, op_type, client_devices, expected
):
  assert _devices(output, client_devices, op_type) == expected


@pytest.mark.parametrize('op_type', ['MakeIterator', 'RealDiv'])
def test_input_and_aggregation_run_at_the_host(output, op_type):
  assert _devices(output, 'cpu:1,cpu:2', op_type) == {0}


def test_devices_do_not_change_a_bit(output):
  first, *others = json.loads(output.split('RESULT ')[1])
  assert all(other == first for other in others)
