"""The Ray runtime on clusters of several nodes."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

pytest.importorskip('ray')
pytestmark = pytest.mark.slow

_TOKEN = {'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN': 'a1' * 16}
_START = """
import os, sys, threading, time
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import ray
from ray.cluster_utils import Cluster
from tff_fssl import hparams, runtime

@tff.tensorflow.computation(np.float32)
def work(x):
  # About a second of sums, so that nodes can be lost meanwhile.
  y = tf.while_loop(
    lambda i, y: i < 300_000,
    lambda i, y: (i + 1, y * 0.999 + x),
    (0, 0.0),
  )[1]
  return tf.sin(y)

@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def total(x):
  return tff.federated_sum(tff.federated_map(work, x))

COHORT = [np.float32(0.1 * n) for n in range(10)]

def expected():
  settings = runtime.Settings(clients_per_group=1)
  return runtime.build_context(settings).invoke(total, COHORT)

def start(cluster, **settings):
  ray.init(address=cluster.address, log_to_driver=False, logging_level='ERROR')
  settings = runtime.Settings('ray', ray_address=cluster.address, **settings)
  return runtime.build_context(settings, warn=lambda line: print('TOLD', line))
"""


def _run(script, env, timeout=500):
  return subprocess.run(
    [sys.executable, '-c', _START + textwrap.dedent(script)],
    env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3', **env},
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def test_lost_node():
  result = _run(
    """
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
    second = cluster.add_node(num_cpus=1)
    context = start(cluster, ray_workers=2)
    wanted = expected()
    while len(context.pool.names) < 2:
      assert context.invoke(total, COHORT) == wanted
    lose = threading.Timer(1.0, lambda: cluster.remove_node(second))
    lose.start()
    assert context.invoke(total, COHORT) == wanted
    lose.join()
    # Its worker has gone with it; without it, rounds go on.
    assert context.invoke(total, COHORT) == wanted
    cluster.add_node(num_cpus=1)
    deadline = time.time() + 90
    while len(context.pool.names) < 2 and time.time() < deadline:
      assert context.invoke(total, COHORT) == wanted
    print('WORKERS', len(context.pool.names))
    context.close()
    ray.shutdown()
    cluster.shutdown()
    """,
    _TOKEN,
  )
  assert result.returncode == 0, result.stderr[-3000:]
  assert 'was lost' in result.stdout
  assert 'WORKERS 2' in result.stdout


def test_killed_driver_leaves_no_worker():
  result = _run(
    """
    import signal
    context = runtime.build_context(runtime.Settings('ray', ray_workers=2))
    context.invoke(total, COHORT)
    for name in context.pool.names:
      print('PID', name.split('process ')[1].rstrip(')'))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    """,
    {},
  )
  pids = [int(line[4:]) for line in result.stdout.splitlines() if 'PID' in line]
  assert pids
  deadline = time.monotonic() + 60
  while any(os.path.exists(f'/proc/{pid}') for pid in pids):
    assert time.monotonic() < deadline
    time.sleep(0.5)


@pytest.mark.parametrize('trusted', [False, True])
def test_cluster_without_token(trusted):
  result = _run(
    f"""
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
    context = start(cluster, ray_trusted_network={trusted})
    try:
      context.invoke(total, COHORT[:1])
      print('RAN')
    except hparams.UsageError as error:
      print('REFUSED', error)
    """,
    {'RAY_AUTH_MODE': 'disabled'},
  )
  if trusted:
    assert 'RAN' in result.stdout, result.stderr[-3000:]
  else:
    assert 'has no token authentication' in result.stdout, result.stderr[-3000:]
    assert '--ray_trusted_network' in result.stdout


def test_gpus_are_resources():
  result = _run(
    """
    # Nothing here has a GPU: Ray believes what it is told.
    cluster = Cluster(
      initialize_head=True, head_node_args=dict(num_cpus=8, num_gpus=1)
    )
    ray.init(address=cluster.address, log_to_driver=False)
    def build(**settings):
      return runtime.build_context(runtime.Settings('ray', **settings))
    context = build(clients_per_gpu=3, client_devices='gpu')
    print('WORKERS', context.pool.target(), context.about)
    try:
      context.invoke(total, COHORT[:1])
    except hparams.UsageError as error:
      print('REFUSED', error)
    context.pool.close()
    context = build(client_devices='cpu', ray_workers=1)
    print('RAN', context.invoke(total, COHORT[:1]) is not None)
    """,
    _TOKEN,
  )
  assert 'WORKERS 3' in result.stdout, result.stderr[-3000:]
  assert 'TensorFlow sees none there' in result.stdout
  assert 'RAN True' in result.stdout


@pytest.mark.parametrize(
  ['settings', 'message'],
  [
    ("ray_address='127.0.0.1:1'", '--ray_address=127.0.0.1:1: cannot connect'),
    ("client_devices='gpu'", 'the cluster has no GPU'),
  ],
)
def test_mistakes(settings, message):
  result = _run(
    f"""
    try:
      runtime.build_context(runtime.Settings('ray', {settings}))
    except hparams.UsageError as error:
      print('REFUSED', error)
    """,
    {},
  )
  assert message in result.stdout, result.stderr[-3000:]
