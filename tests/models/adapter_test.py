"""The adapter between local training and Keras."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.models import adapter
from tff_fssl.models import networks
from tff_fssl.models.weights import Weights

_LAYERS = tf.keras.layers


def _model(*, last=None, extra=()) -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([4, 4, 2]),
      _LAYERS.Conv2D(3, 3),
      _LAYERS.BatchNormalization(),
      *extra,
      _LAYERS.GlobalAveragePooling2D(),
      _LAYERS.Dense(5, activation=last),
    ]
  )


def _images(size=6):
  return tf.random.stateless_normal([size, 4, 4, 2], [0, 7])


def test_initial_weights_are_a_function_of_the_seed():
  first = adapter.Network(_model, seed=1).initial_weights()
  _model()  # Moves the counter that Keras names layers by.
  with tf.Graph().as_default():
    network = adapter.Network(_model, seed=1)
    with tf.compat.v1.Session() as session:
      session.run([v.value.initializer for v in network.model.variables])
      again = session.run(list(network.trainable_variables))
  other = adapter.Network(_model, seed=2).initial_weights()
  for a, b in zip(first.trainable, again):
    np.testing.assert_array_equal(a, b)
  assert not np.array_equal(first.trainable[0], other.trainable[0])
  # Layers of one shape differ.
  twins = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([3]), _LAYERS.Dense(3), _LAYERS.Dense(3)]
    ),
    seed=1,
  ).initial_weights()
  assert not np.array_equal(twins.trainable[0], twins.trainable[2])


@pytest.mark.parametrize('rank', [2, 4])
def test_training_normalizes_by_the_batch_and_tracks_nothing(rank):
  shape = [3] if rank == 2 else [4, 4, 3]

  def model_fn():
    return tf.keras.Sequential(
      [tf.keras.Input(shape), _LAYERS.BatchNormalization(), _LAYERS.Flatten()]
    )

  network = adapter.Network(model_fn, seed=0)
  images = 5 + 2 * tf.random.stateless_normal([8, *shape], [1, 1])
  outputs = tf.reshape(network.logits(images, training=True), images.shape)
  axes = list(range(rank - 1))
  mean, variance = tf.nn.moments(outputs, axes)
  np.testing.assert_allclose(mean, np.zeros(3), atol=1e-5)
  np.testing.assert_allclose(variance, np.ones(3), atol=1e-2)
  np.testing.assert_array_equal(network.non_trainable_variables[0], np.zeros(3))
  recorded = network.moments(images)
  mean, variance = tf.nn.moments(images, axes)
  np.testing.assert_allclose(recorded[0].mean, mean, rtol=1e-5)
  np.testing.assert_allclose(recorded[0].variance, variance, rtol=1e-4)
  assert float(recorded[0].count) == np.prod([8, *shape]) / 3


def test_moving_averages_are_kerass_own_if_asked_for():
  network = adapter.Network(_model, seed=0, track_moving_averages=True)
  before = np.array(network.non_trainable_variables[1])
  network.logits(_images(), training=True)
  assert not np.array_equal(before, network.non_trainable_variables[1])


def test_inference_without_statistics_uses_the_batch():
  network = adapter.Network(_model, seed=0)
  weights = network.initial_weights()
  network.assign(weights)
  batch = network.inference_logits(_images())
  np.testing.assert_allclose(
    batch, network.logits(_images(), training=True), atol=1e-6
  )
  network.assign(weights._replace(statistics_count=tf.constant(1.0)))
  assert float(network.weights_now().statistics_count) == 1.0
  stored = network.inference_logits(_images())
  np.testing.assert_allclose(
    stored, network.logits(_images(), training=False), atol=1e-6
  )
  assert not np.allclose(batch, stored)


def test_normalization_by_the_weights_that_are_assigned():
  """Keras's layer copies them when it is built."""
  with tf.Graph().as_default():
    network = adapter.Network(
      lambda: tf.keras.Sequential(
        [
          tf.keras.Input([2]),
          _LAYERS.Normalization(),
          _LAYERS.Dense(2, 'linear', False, 'ones'),
        ]
      )
    )

    @tf.function
    def run():
      mean, variance = tf.constant([1.0, 2.0]), tf.constant([4.0, 9.0])
      weights = Weights(
        (tf.eye(2),), (mean, variance, tf.constant(7, tf.int64)), 1.0
      )
      network.assign(weights)
      return network.logits(tf.constant([[3.0, 8.0]]), training=True)

    logits = run()
    with tf.compat.v1.Session() as session:
      session.run([v.value.initializer for v in network.model.variables])
      np.testing.assert_allclose(session.run(logits), [[1.0, 2.0]])


def test_perturbed_weights_are_restored_exactly():
  network = adapter.Network(_model, seed=0)
  before = [np.array(v) for v in network.trainable_variables]
  change = [tf.fill(v.shape, 0.1) for v in network.trainable_variables]
  with network.perturbed(change):
    for v, b in zip(network.trainable_variables, before):
      np.testing.assert_allclose(v, b + 0.1, rtol=1e-6)
  for v, b in zip(network.trainable_variables, before):
    np.testing.assert_array_equal(v, b)


def test_a_perturbation_changes_all_weights_or_none():
  network = adapter.Network(_model, seed=0)
  first = network.trainable_variables[0]
  with network.perturbed(()):
    pass
  with pytest.raises(ValueError, match='shorter'):
    with network.perturbed([tf.zeros(first.shape)]):
      pass


@pytest.mark.parametrize('moves', [True, False])
def test_moving_averages_at_perturbed_weights(moves):
  network = adapter.Network(_model, seed=0, track_moving_averages=True)
  before = [np.array(v) for v in network.non_trainable_variables]
  change = [tf.fill(v.shape, 0.1) for v in network.trainable_variables]
  with network.perturbed(change, moves_averages=moves):
    network.logits(_images(), training=True)
  after = [np.array(v) for v in network.non_trainable_variables]
  assert moves == any(np.any(a != b) for a, b in zip(after, before))


def test_frozen_layers_stay_as_they_are():
  def model_fn():
    model = _model()
    model.layers[1].trainable = False  # Batch norm.
    return model

  network = adapter.Network(model_fn, seed=0)
  assert not network.is_static
  np.testing.assert_allclose(
    network.logits(_images(), training=True),
    network.logits(_images(), training=False),
  )


@pytest.mark.parametrize('norm', ['bn', 'none'])
def test_bfloat16_computes_in_it_and_keeps_float32(norm):
  def model_fn():
    return networks.build_network('cnn', (8, 8, 1), 5, norm)

  images = tf.random.stateless_normal([16, 8, 8, 1], [0, 3])
  gradients, logits = [], []
  for dtype in ('float32', 'bfloat16'):
    network = adapter.Network(model_fn, seed=2, compute_dtype=dtype)
    assert {v.dtype for v in network.model.weights} == {'float32'}
    convolution = network.model.get_layer('conv1')
    assert convolution(images).dtype == dtype
    with tf.GradientTape() as tape:
      logits.append(network.logits(images, training=True))
      loss = tf.reduce_mean(tf.square(logits[-1]))
    gradients.append(tape.gradient(loss, network.trainable_variables))
    for moments in network.moments(images):
      assert moments.mean.dtype == moments.variance.dtype == tf.float32
  assert tf.keras.config.dtype_policy().name == 'float32'
  assert logits[0].dtype == logits[1].dtype == tf.float32
  assert not np.array_equal(*logits)
  np.testing.assert_allclose(*logits, rtol=0.05, atol=0.05)
  norms = [tf.linalg.global_norm(g) for g in gradients]
  difference = [a - b for a, b in zip(*gradients)]
  assert {g.dtype for g in gradients[1]} == {tf.float32}
  assert tf.linalg.global_norm(difference) < 0.05 * norms[0]


def test_bfloat16_leaves_the_perturbed_weights_exact():
  network = adapter.Network(_model, seed=0, compute_dtype='bfloat16')
  before = network.initial_weights().trainable
  small = [tf.fill(w.shape, 1e-5) for w in before]
  with network.perturbed(small):
    for w, v in zip(before, network.trainable_variables):
      np.testing.assert_array_equal(w + 1e-5, v.read_value())
  for w, v in zip(before, network.trainable_variables):
    np.testing.assert_array_equal(w, v.read_value())


def test_bfloat16_that_no_layer_takes_up_is_refused():
  def model_fn():
    return tf.keras.Sequential(
      [tf.keras.Input([3]), _LAYERS.Dense(3, dtype='float32')]
    )

  with pytest.raises(hparams.UsageError, match='no layer .* computes in it'):
    adapter.Network(model_fn, compute_dtype='bfloat16')


@pytest.mark.parametrize('norm', ['sbn to gn', 'gn to sbn'])
def test_the_weights_of_another_network_are_not_assigned(norm):
  """The two differ in nothing but how many variables do not train."""
  built, other = (
    adapter.Network(
      lambda kind=kind: networks.build_network('cnn', (8, 8, 1), 10, kind)
    )
    for kind in (('bn', 'gn') if norm == 'sbn to gn' else ('gn', 'bn'))
  )
  weights = other.initial_weights()
  assert len(weights.trainable) == len(built.trainable_variables)
  with pytest.raises(ValueError, match='zip'):
    built.assign(weights)


def test_preprocessing_layers_survive_an_eager_check():
  def model_fn():
    layers = tf.keras.layers
    return tf.keras.Sequential(
      [
        tf.keras.Input((2, 2, 1)),
        layers.Normalization(),
        layers.Flatten(),
        layers.Dense(2),
      ]
    )

  assert adapter.Network(model_fn, seed=1).num_outputs == 2
