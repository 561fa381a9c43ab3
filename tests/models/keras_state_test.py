"""Initial values, precision, batch normalization and random layers.

Draws of random layers are a function of seed, images, and place.
"""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.models import adapter
from tff_fssl.models import keras_state

_LAYERS = tf.keras.layers
_SHAPE = (6, 6, 2)
_SEED = (5, 6)


class _Own(_LAYERS.Layer):
  """A user's layer, which draws by Keras's generator."""

  def __init__(self):
    super().__init__()
    self.generator = tf.keras.random.SeedGenerator()

  def call(self, x, training=None):
    if not training:
      return x
    draw, shape = tf.keras.random, tf.shape(x)
    return (
      x * draw.uniform(shape, seed=self.generator)
      + draw.normal(shape, stddev=0.1, seed=self.generator)
      + draw.truncated_normal(shape, stddev=0.1, seed=self.generator)
    )


def _sequence(*layers):
  return [_LAYERS.Reshape([12, 6]), *layers]


class _Attention(_LAYERS.Layer):
  def __init__(self, layer):
    super().__init__()
    self.layer = layer

  def call(self, x, training=None):
    arguments = (
      ([x, x],) if 'Multi' not in type(self.layer).__name__ else (x, x)
    )
    return self.layer(*arguments, training=training)


_KERAS_LAYERS = {
  'Dropout': lambda: [_LAYERS.Dropout(0.5)],
  'Dropout, seeded': lambda: [_LAYERS.Dropout(0.5, seed=1)],
  'Dropout of blocks': lambda: [
    _LAYERS.Dropout(0.5, noise_shape=(None, 1, 1, 1))
  ],
  'SpatialDropout1D': lambda: _sequence(_LAYERS.SpatialDropout1D(0.5)),
  'SpatialDropout2D': lambda: [_LAYERS.SpatialDropout2D(0.5)],
  'SpatialDropout3D': lambda: [
    _LAYERS.Reshape([6, 6, 1, 2]),
    _LAYERS.SpatialDropout3D(0.5),
  ],
  'GaussianDropout': lambda: [_LAYERS.GaussianDropout(0.5)],
  'GaussianNoise': lambda: [_LAYERS.GaussianNoise(0.5)],
  'AlphaDropout': lambda: [_LAYERS.AlphaDropout(0.5)],
  'LSTM': lambda: _sequence(_LAYERS.LSTM(3, dropout=0.5)),
  'LSTM, recurrent': lambda: _sequence(_LAYERS.LSTM(3, recurrent_dropout=0.5)),
  'GRU': lambda: _sequence(_LAYERS.GRU(3, dropout=0.5, recurrent_dropout=0.5)),
  'SimpleRNN': lambda: _sequence(
    _LAYERS.SimpleRNN(3, dropout=0.5, recurrent_dropout=0.5)
  ),
  'Bidirectional': lambda: _sequence(
    _LAYERS.Bidirectional(_LAYERS.LSTM(3, dropout=0.5))
  ),
  'ConvLSTM1D': lambda: [_LAYERS.ConvLSTM1D(2, 3, dropout=0.5)],
  'MultiHeadAttention': lambda: _sequence(
    _Attention(_LAYERS.MultiHeadAttention(2, 3, dropout=0.5))
  ),
  'Attention': lambda: _sequence(_Attention(_LAYERS.Attention(dropout=0.5))),
  'RandomFlip': lambda: [_LAYERS.RandomFlip()],
  'RandomRotation': lambda: [_LAYERS.RandomRotation(0.4)],
  'RandomZoom': lambda: [_LAYERS.RandomZoom(0.4)],
  'RandomTranslation': lambda: [_LAYERS.RandomTranslation(0.4, 0.4)],
  'RandomContrast': lambda: [_LAYERS.RandomContrast(0.9)],
  'RandomBrightness': lambda: [
    _LAYERS.RandomBrightness(0.9, value_range=(0, 1))
  ],
  'RandomCrop': lambda: [_LAYERS.RandomCrop(3, 3)],
  'own': lambda: [_Own()],
}


# Seconds each; what they are made of is tried above them.
_LONG = (
  'LSTM',
  'LSTM, recurrent',
  'GRU',
  'Bidirectional',
  'ConvLSTM1D',
  'MultiHeadAttention',
  'Dropout, seeded',
  'SpatialDropout1D',
  'SpatialDropout3D',
  'RandomZoom',
  'RandomTranslation',
)
_each_layer = pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.slow] if name in _LONG else [])
    for name in _KERAS_LAYERS
  ],
)


def _model(*layers):
  model = tf.keras.Sequential([tf.keras.Input(_SHAPE), *layers])
  rank = len(model.output_shape)
  pool = {
    2: [],
    3: [_LAYERS.GlobalAveragePooling1D()],
    4: [_LAYERS.GlobalAveragePooling2D()],
    5: [_LAYERS.GlobalAveragePooling3D()],
  }[rank]
  for layer in (*pool, _LAYERS.Dense(4, name='logits')):
    model.add(layer)
  return model


def _images(seed=1, size=16):
  # Not symmetric, so that mirroring shows.
  return (
    tf.random.stateless_uniform([size, *_SHAPE], [0, seed])
    * tf.range(1.0, 7.0)[:, None, None]
  )


def _logits(network, images, seed=_SEED):
  with network.draws(tf.constant(seed)):
    return network.logits(images, training=True).numpy()


@_each_layer
def test_layers_of_keras_draw_from_the_seed_alone(name):
  make = lambda: _model(*_KERAS_LAYERS[name]())
  if name in ('RandomFlip', 'RandomRotation', 'RandomTranslation'):
    # Pooling would hide where pixels went.
    make = lambda: tf.keras.Sequential(
      [
        tf.keras.Input(_SHAPE),
        *_KERAS_LAYERS[name](),
        _LAYERS.Flatten(),
        _LAYERS.Dense(4),
      ]
    )
  network = adapter.Network(make, seed=1)
  assert network.is_random
  images = _images()
  first = _logits(network, images)
  np.testing.assert_array_equal(first, _logits(network, images))
  assert not np.array_equal(first, _logits(network, images, (5, 7)))
  tf.random.set_seed(99)
  np.testing.assert_array_equal(
    first, _logits(adapter.Network(make, seed=1), images)
  )
  evaluated = network.logits(images, training=False).numpy()
  assert not np.array_equal(first, evaluated)
  np.testing.assert_array_equal(
    evaluated, network.logits(images, training=False)
  )


def _in_graph(make, seed=_SEED):
  """Logits at W, at W + 0 in a condition, and of other images, in a graph."""
  values = _images().numpy()
  with tf.Graph().as_default():
    network = adapter.Network(make, seed=1)
    images, zero = tf.constant(values), tf.constant(0.0)

    @tf.function
    def run():
      with network.draws(tf.constant(seed)):
        others = network.logits(images[:7] + 0.0, training=True)
        logits = network.logits(images, training=True)
        perturbed = tf.cond(
          zero < 1.0,
          lambda: network.logits(images, training=True),
          lambda: logits,
        )
      return logits, perturbed, others

    logits = run()
    with tf.compat.v1.Session() as session:
      session.run([v.value.initializer for v in network.model.variables])
      return session.run(logits)


@_each_layer
def test_a_second_pass_of_the_same_images_repeats_the_first(name):
  make = lambda: _model(*_KERAS_LAYERS[name]())
  first = _in_graph(make)
  np.testing.assert_array_equal(first[0], first[1])
  if not name == 'RandomFlip':
    assert not np.array_equal(first[0][:7], first[2])


def test_every_layer_and_every_tensor_has_draws_of_its_own():
  seen = []
  network = adapter.Network(
    lambda: _model(
      *(
        layer
        for _ in range(2)
        for layer in (
          _LAYERS.Dropout(0.5),
          _LAYERS.Lambda(lambda x: (seen.append(x), tf.ones_like(x))[1]),
        )
      )
    ),
    seed=1,
  )
  ones = [tf.ones([8, *_SHAPE]) for _ in range(2)]
  seen.clear()
  with network.draws(tf.constant(_SEED)):
    for images in (ones[0], ones[1], ones[0]):
      network.logits(images, training=True)
  masks = [x.numpy() > 0 for x in seen]
  for i in range(4):
    for j in range(i):
      # Independent: equal at about half of 576 places.
      assert abs(np.mean(masks[i] == masks[j]) - 0.5) < 0.1
  np.testing.assert_array_equal(masks[0], masks[4])
  np.testing.assert_array_equal(masks[1], masks[5])


def test_dropout_keeps_its_share_and_scales_it():
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input([1000]),
        _LAYERS.Dropout(0.3),
        _LAYERS.Dense(2, kernel_initializer='ones'),
      ]
    ),
    seed=1,
  )
  logits = _logits(network, tf.ones([64, 1000]))[:, 0]
  # 64,000 draws: a mean of 1000, of standard deviation 2.6.
  assert abs(logits.mean() - 1000) < 15
  assert logits.std() > 10


def test_perturbed_weights_see_the_draws_of_the_weights():
  network = adapter.Network(lambda: _model(_LAYERS.Dropout(0.5)), seed=1)
  images = _images()

  @tf.function
  def run(scale):
    with network.draws(tf.constant(_SEED)):
      network.logits(_images(2), training=True)
      plain = network.logits(images, training=True)
      change = [scale * v for v in network.trainable_variables]
      with network.perturbed(change):
        # As in (FL)^2: within a condition.
        perturbed = tf.cond(
          scale >= 0.0,
          lambda: network.logits(images, training=True),
          lambda: plain,
        )
    return plain, perturbed

  plain, same = run(tf.constant(0.0))
  np.testing.assert_array_equal(plain, same)
  plain, double = run(tf.constant(1.0))
  np.testing.assert_allclose(2 * plain, double, rtol=1e-6)


def test_training_without_a_seed_is_a_mistake():
  network = adapter.Network(lambda: _model(_LAYERS.Dropout(0.5)), seed=1)
  with pytest.raises(ValueError, match='Network.draws'):
    network.logits(_images(), training=True)
  plain = adapter.Network(lambda: _model(_LAYERS.ReLU()), seed=1)
  assert not plain.is_random


def _initial_values(seed):
  created = []
  with tf.Graph().as_default(), keras_state.seeded_variables(seed, created):
    layers = [tf.keras.layers.Dense(3), tf.keras.layers.Dense(3)]
    x = tf.keras.Input([3])
    for layer in layers:
      x = layer(x)
    variables = [v.value for v in created]
    with tf.compat.v1.Session() as session:
      session.run([v.initializer for v in variables])
      return session.run(variables)


def test_initial_values_follow_from_seed_and_place():
  first, again, other = (
    _initial_values(1),
    _initial_values(1),
    _initial_values(2),
  )
  assert len(first) == 4
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.any(first[0] != other[0])
  assert np.any(first[0] != first[2])


def test_without_a_seed_all_is_zero():
  assert not any(np.any(value) for value in _initial_values(None))


@pytest.mark.parametrize('fails', [False, True])
def test_a_policy_ends_with_its_context(fails):
  before = tf.keras.config.dtype_policy().name
  try:
    with keras_state.policy('bfloat16'):
      assert tf.keras.layers.Dense(1).compute_dtype == 'bfloat16'
      if fails:
        raise KeyError
  except KeyError:
    pass
  assert tf.keras.config.dtype_policy().name == before
  with keras_state.policy('float32'):
    assert tf.keras.config.dtype_policy().name == before


@pytest.mark.parametrize(
  'shape, axis', [([6, 4, 5, 3], -1), ([6, 4, 5, 3], 1), ([6, 3], -1)]
)
@pytest.mark.parametrize('has_scale', [True, False])
def test_normalizes_as_keras_does_in_training(shape, axis, has_scale):
  layer = _LAYERS.BatchNormalization(
    axis=axis, scale=has_scale, center=has_scale, gamma_initializer='he_normal'
  )
  inputs = 3 + tf.random.stateless_normal(shape, [1, 2])
  expected = layer(inputs, training=True)
  averages = [np.asarray(v) for v in layer.non_trainable_weights]
  outputs, moments = keras_state.normalize_batch(layer, inputs)
  for average, variable in zip(
    averages, layer.non_trainable_weights, strict=True
  ):
    np.testing.assert_array_equal(variable, average)
  mean, variance, count = moments()
  np.testing.assert_allclose(outputs, expected, atol=1e-5)
  others = [a for a in range(len(shape)) if a != axis % len(shape)]
  moments = tf.nn.moments(inputs, others)
  np.testing.assert_allclose(mean, moments[0], rtol=1e-5)
  np.testing.assert_allclose(variance, moments[1], rtol=1e-4)
  assert float(count) == np.prod([shape[a] for a in others])


def test_batch_norms_are_listed_at_any_depth():
  model = tf.keras.Sequential(
    [
      tf.keras.Input([3]),
      _LAYERS.BatchNormalization(name='frozen', trainable=False),
      tf.keras.Sequential(
        [tf.keras.Input([3]), _LAYERS.BatchNormalization(name='inner')]
      ),
      _LAYERS.Dense(3),
    ]
  )
  found = {layer.name for layer in keras_state.batch_norms(model)}
  assert found == {'frozen', 'inner'}
  assert [x.name for x in keras_state.trained_batch_norms(model)] == ['inner']
