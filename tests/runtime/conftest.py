"""What the runtime's tests share: contexts, and one small learning process."""

import collections
import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

# pylint: disable=wrong-import-position
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tff_model

from tff_fssl import runtime

_ELEMENT_SPEC = collections.OrderedDict(
  x=tf.TensorSpec([None, 8, 8, 1], tf.float32),
  y=tf.TensorSpec([None], tf.int32),
)


@pytest.fixture(scope='session')
def call():
  """Calls a computation in a context."""

  def fn(context, computation, *args):
    with tff.framework.get_context_stack().install(context):
      return computation(*args)

  return fn


@pytest.fixture(scope='session')
def in_process():
  return runtime.build_context(runtime.Settings(client_threads=1))


@pytest.fixture(scope='session')
def worker():
  with runtime.build_context(runtime.Settings('tff_worker')) as context:
    yield context


@pytest.fixture(scope='session')
def fed_avg():
  """Weighted FedAvg on a network with a convolution and batch norm."""

  def model_fn():
    initializer = tf.keras.initializers.GlorotUniform(seed=1)
    network = tf.keras.Sequential(
      [
        tf.keras.layers.InputLayer((8, 8, 1)),
        tf.keras.layers.Conv2D(4, 3, kernel_initializer=initializer),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.ReLU(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(3, kernel_initializer=initializer),
      ]
    )
    return tff_model.KerasModel(network, _ELEMENT_SPEC)

  return tff.learning.algorithms.build_weighted_fed_avg(
    model_fn,
    client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.05, 0.9),
    loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
  )


@pytest.fixture(scope='session')
def make_dataset():
  """A client's dataset, a function of its number."""

  def fn(client):
    rng = np.random.default_rng(client)
    num_examples = 8 + 4 * (client % 3)
    return tf.data.Dataset.from_tensor_slices(
      collections.OrderedDict(
        x=rng.normal(size=(num_examples, 8, 8, 1)).astype(np.float32),
        y=rng.integers(0, 3, num_examples).astype(np.int32),
      )
    ).batch(8)

  return fn


@pytest.fixture(scope='session')
def train(call):
  """Rounds of a learning process: the last state and all metrics."""

  def fn(context, process, cohort, num_rounds, state=None):
    if state is None:
      state = call(context, process.initialize)
    metrics = []
    for _ in range(num_rounds):
      output = call(context, process.next, state, cohort)
      state = output.state
      metrics.append(output.metrics)
    return state, metrics

  return fn
