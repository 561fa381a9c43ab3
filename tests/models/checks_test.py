"""Odd models: they train, or one line says why not."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.data import augment
from tff_fssl.models import adapter
from tff_fssl.models import checks

_LAYERS = tf.keras.layers
_SHAPE = (8, 8, 3)
_CLASSES = 4


def _sequential(*layers, head=True, given=True):
  """Convolution, `layers`, pooling and, if `head`, logits."""
  return tf.keras.Sequential(
    [
      *([tf.keras.Input(_SHAPE)] if given else []),
      _LAYERS.Conv2D(4, 3),
      *layers,
      _LAYERS.GlobalAveragePooling2D(),
      *([_LAYERS.Dense(_CLASSES)] if head else []),
    ]
  )


def _ending(*layers):
  """A model whose logits go through `layers`."""
  model = _sequential()
  x = model.outputs[0]
  for layer in layers:
    x = layer(x)
  return tf.keras.Model(model.inputs, x)


class Subclassed(tf.keras.Model):
  """`call` is given; layers and a metric are attributes."""

  def __init__(self, call, *layers, **kwargs):
    super().__init__(**kwargs)
    self.flatten = _LAYERS.Flatten()
    self.dense = _LAYERS.Dense(_CLASSES)
    self.tracker = tf.keras.metrics.Mean(name='tracker')
    self.more = list(layers)
    self.function = call

  def call(self, images, training=None):
    x = self.dense(self.flatten(images))
    return self.function(self, x, training)


def _subclassed(call=lambda self, x, training: x, *layers):
  return Subclassed(call, *layers)


class NoTrainingArgument(tf.keras.Model):
  def __init__(self):
    super().__init__()
    self.flatten, self.dense = _LAYERS.Flatten(), _LAYERS.Dense(_CLASSES)
    self.dropout = _LAYERS.Dropout(0.5)

  def call(self, images):
    return self.dense(self.dropout(self.flatten(images)))


class LayerOf(_LAYERS.Layer):
  """Calls a function, which may make use of weights of the layer's own."""

  def __init__(self, function, dtype=None, **weight):
    super().__init__(name='odd', dtype=dtype)
    self.function = function
    self.own = self.add_weight([4], name='own', **weight) if weight else None
    self.untracked = [None]

  def call(self, x, training=None):
    return self.function(self, x, training)


class Copying(_LAYERS.Layer):
  """Copies a weight when it is built."""

  def build(self, input_shape):
    self.own = self.add_weight([4], initializer='ones', name='own')
    self.copied = 2.0 * self.own

  def call(self, x):
    return x * self.copied


class Positions(_LAYERS.Layer):
  """As in vision transformers: its embedding's gradient is sparse."""

  def __init__(self):
    super().__init__()
    self.flat = _LAYERS.Reshape([-1, 4])
    self.embedding = _LAYERS.Embedding(36, 4)
    self.square = _LAYERS.Reshape([6, 6, 4])

  def call(self, x):
    return self.square(self.flat(x) + self.embedding(tf.range(36)))


def _frozen():
  model = _sequential(_LAYERS.BatchNormalization())
  model.layers[0].trainable = False
  return model


def _shared_layer():
  layer = _LAYERS.Conv2D(4, 3, padding='same')
  return _sequential(layer, _LAYERS.ReLU(), layer)


def _nested():
  images = tf.keras.Input(_SHAPE)
  return tf.keras.Model(images, _sequential(_LAYERS.Dropout(0.5))(images))


def _compiled():
  model = _sequential(_LAYERS.BatchNormalization())
  model.compile('adam', 'mse', metrics=['accuracy'])
  return model


def _normalization():
  return _sequential(
    _LAYERS.Rescaling(2.0), _LAYERS.Normalization(mean=0.5, variance=2.0)
  )


def _counting():
  """With an int64 counter among its weights."""
  return _sequential(_LAYERS.Normalization(axis=-1))


def _in_function():
  model = _subclassed()
  model.call = tf.function(model.call)
  return model


_WORKING = {
  'sequential': _sequential,
  'without input': lambda: _sequential(given=False),
  'any size': lambda: tf.keras.Sequential(
    [
      tf.keras.Input([None, None, 3]),
      _LAYERS.Conv2D(4, 3),
      _LAYERS.GlobalMaxPooling2D(),
      _LAYERS.Dense(_CLASSES),
    ]
  ),
  'subclassed': _subclassed,
  'subclassed, built by its author': lambda: (
    model := _subclassed(),
    model(tf.zeros([1, *_SHAPE])),
  )[0],
  'subclassed, in a tf.function': _in_function,
  'no training argument': NoTrainingArgument,
  'nested': _nested,
  'shared layer': _shared_layer,
  'frozen layer': _frozen,
  'compiled': _compiled,
  'mirrored': lambda: _mirrored(),
  'normalization': _normalization,
  'int64 counter': _counting,
  'embedding': lambda: _sequential(Positions()),
  'layer not used': lambda: _sequential(
    LayerOf(lambda layer, x, training: x, initializer='zeros')
  ),
  'synchronized batch norm': lambda: _sequential(
    _LAYERS.BatchNormalization(synchronized=True),
  ),
  'log-probabilities': lambda: _ending(_LAYERS.Activation('log_softmax')),
  'positive logits': lambda: _ending(_LAYERS.ReLU()),
  'mixed bfloat16': lambda: tf.keras.Sequential(
    [
      tf.keras.Input(_SHAPE),
      _LAYERS.Flatten(),
      _LAYERS.Dense(_CLASSES, dtype='mixed_bfloat16'),
    ]
  ),
  'recurrent': lambda: tf.keras.Sequential(
    [
      tf.keras.Input(_SHAPE),
      _LAYERS.Reshape([8, 24]),
      _LAYERS.LSTM(5, dropout=0.5, recurrent_dropout=0.5),
      _LAYERS.Dense(_CLASSES),
    ]
  ),
  'attention': lambda: (
    images := tf.keras.Input(_SHAPE),
    x := _LAYERS.Reshape([16, 12])(images),
    x := _LAYERS.MultiHeadAttention(2, 6, dropout=0.5)(x, x),
    x := _LAYERS.GlobalAveragePooling1D()(x),
    tf.keras.Model(images, _LAYERS.Dense(_CLASSES)(x)),
  )[-1],
  'TF initializer': lambda: _sequential(
    _LAYERS.Conv2D(
      4, 1, kernel_initializer=tf.random_normal_initializer(0.0, 0.1)
    )
  ),
  'nothing dropped': lambda: _sequential(_LAYERS.Dropout(0.0)),
}


def _set_trainable(model, value):
  model.trainable = value
  return model


def _inputs(num, as_dict=False):
  images = [tf.keras.Input(_SHAPE, name=f'image{i}') for i in range(num)]
  model = _sequential()
  logits = _LAYERS.Add()([model(i) for i in images] * 2)
  if as_dict:
    return tf.keras.Model({i.name: i for i in images}, logits)
  return tf.keras.Model(images, logits)


def _outputs(make):
  model = _sequential()
  return tf.keras.Model(model.inputs, make(model.outputs[0]))


_SHARED = tf.keras.Sequential(
  [
    tf.keras.Input(_SHAPE, name='shared_images'),
    _LAYERS.Flatten(name='shared_flatten'),
    _LAYERS.Dense(_CLASSES, name='shared_logits'),
  ]
)


def _raise():
  raise ValueError('the file of weights is not there')


def _manual_softmax(x):
  x = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
  return x / tf.reduce_sum(x, -1, keepdims=True)


def _mirrored():
  with tf.distribute.MirroredStrategy(['/cpu:0']).scope():
    return _sequential()


def _drawing(draw):
  return _sequential(LayerOf(lambda layer, x, training: x + draw(tf.shape(x))))


def _count_calls(layer, x, training):
  layer.own.assign_add(tf.ones([4]))
  return x


def _late_variable(layer, x, training):
  layer.untracked.append(tf.Variable(tf.ones([4])))
  return x * layer.untracked[-1]


_REFUSED = {
  # What model_fn gives.
  'None': (lambda: None, 'returned None; it must build'),
  'a class': (lambda: Subclassed, "returned <class .*Subclassed'>"),
  'a layer': (lambda: _LAYERS.Dense(4), 'returned Dense'),
  'a module': (tf.Module, 'returned Module'),
  'an error': (_raise, 'ValueError: the file of weights is not there'),
  'an instance': (lambda: _SHARED, "'shared_logits' is older than this"),
  'a part that is one': (
    lambda: tf.keras.Sequential([_SHARED, _LAYERS.Dense(_CLASSES)]),
    "'shared_logits' is older than this",
  ),
  # Inputs and outputs.
  'two inputs': (lambda: _inputs(2), 'has 2 inputs'),
  'a dict of two': (lambda: _inputs(2, as_dict=True), 'has 2 inputs'),
  'another size': (
    lambda: tf.keras.Sequential(
      [tf.keras.Input([9, 8, 3]), _LAYERS.Flatten(), _LAYERS.Dense(_CLASSES)]
    ),
    r'takes images of shape \(9, 8, 3\); the views give \(8, 8, 3\)',
  ),
  'uint8 images': (
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input(_SHAPE, dtype='uint8'),
        _LAYERS.Rescaling(1.0),
        _LAYERS.Flatten(),
        _LAYERS.Dense(_CLASSES),
      ]
    ),
    r'takes images uint8 \[B, 8, 8, 3\]',
  ),
  'batches of 3': (
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input(_SHAPE, batch_size=3),
        _LAYERS.Flatten(),
        _LAYERS.Dense(_CLASSES),
      ]
    ),
    'batches of any size',
  ),
  'channels unknown': (
    lambda: tf.keras.Sequential(
      [tf.keras.Input([8, 8, None]), _LAYERS.Conv2D(4, 3)]
    ),
    'model_fn raised TypeError',
  ),
  'two outputs': (lambda: _outputs(lambda y: [y, y]), 'list of 2'),
  'a dict': (lambda: _outputs(lambda y: {'logits': y}), 'dict of 1'),
  'subclass, dict': (
    lambda: _subclassed(lambda self, x, training: {'a': x, 'b': x}),
    'dict of 2',
  ),
  'subclass, tuple': (
    lambda: _subclassed(lambda self, x, training: (x, x)),
    'tuple of 2',
  ),
  'subclass, None': (
    lambda: _subclassed(lambda self, x, training: None),
    'gives None; it must give',
  ),
  'subclass, error': (
    lambda: _subclassed(lambda self, x, training: tf.reshape(x, [7, 5, 3])[:0]),
    r'cannot be called on images float32 \[B, 8, 8, 3\]',
  ),
  'rank 4': (
    lambda: tf.keras.Sequential([tf.keras.Input(_SHAPE), _LAYERS.Conv2D(4, 3)]),
    r'gives float32 \[B, 6, 6, 4\]; it must give logits, float32 \[B, 4\]',
  ),
  'rank 1': (
    lambda: _ending(_LAYERS.Lambda(lambda x: x[:, 0])),
    r'gives float32 \[B\]',
  ),
  'width unknown': (
    lambda: _subclassed(
      lambda self, x, training: tf.reshape(x, [tf.shape(x)[0], -1])[
        :, : x[0, 0] > 0
      ]
    ),
    'model',
  ),
  'other width': (
    lambda: _ending(_LAYERS.Dense(7)),
    r'output shape \(None, 7\); a data set of 4 classes needs \(None, 4\)',
  ),
  'classes': (
    lambda: _ending(_LAYERS.Lambda(lambda x: tf.cast(x, tf.int32))),
    r'gives int32 \[B, 4\]',
  ),
  # Probabilities.
  'softmax': (lambda: _ending(_LAYERS.Dense(4, 'softmax')), 'must give logits'),
  'sigmoid': (lambda: _ending(_LAYERS.Dense(4, 'sigmoid')), 'must give logits'),
  'softmax, then more': (
    lambda: _ending(
      _LAYERS.Softmax(),
      _LAYERS.Reshape([4, 1]),
      _LAYERS.Flatten(),
      _LAYERS.Activation('linear', dtype='float32'),
      _LAYERS.Dropout(0.0),
    ),
    'must give logits',
  ),
  'nested softmax': (
    lambda: tf.keras.Sequential(
      [tf.keras.Input(_SHAPE), _ending(_LAYERS.Softmax())]
    ),
    'must give logits',
  ),
  'softmax in a tf.function': (
    lambda: _subclassed(
      lambda self, x, training: tf.function(tf.nn.sigmoid)(x)
    ),
    'must give logits',
  ),
  'softmax in inference': (
    lambda: _subclassed(
      lambda self, x, training: x if training else tf.nn.softmax(x)
    ),
    'must give logits',
  ),
  'softmax by hand': (
    lambda: _ending(_LAYERS.Lambda(_manual_softmax)),
    'not negative and sum to 1',
  ),
  'mean of softmaxes': (
    lambda: _ending(
      _LAYERS.Lambda(lambda x: (tf.nn.softmax(x) + tf.nn.softmax(2 * x)) / 2)
    ),
    'not negative and sum to 1',
  ),
  # Randomness that is not seeded.
  'tf.random.normal, seeded': (
    lambda: _drawing(lambda shape: tf.random.normal(shape, seed=1)),
    "'odd' .*global random state",
  ),
  'tf.random.Generator': (
    lambda: _drawing(tf.random.get_global_generator().normal),
    'global random state',
  ),
  'tf.nn.dropout': (
    lambda: _subclassed(lambda self, x, training: tf.nn.dropout(x, 0.5)),
    'global random state',
  ),
  'in a condition': (
    lambda: _sequential(
      LayerOf(
        lambda layer, x, training: tf.cond(
          tf.reduce_sum(x) > 0.0, lambda: tf.random.shuffle(x), lambda: x
        )
      )
    ),
    'global random state',
  ),
  'dropout in evaluation': (
    lambda: _subclassed(
      lambda self, x, training: self.more[0](x, training=True),
      _LAYERS.Dropout(0.5, name='always'),
    ),
    "'always' draws random numbers outside of a training step",
  ),
  'random initial value': (
    lambda: _sequential(
      _LAYERS.Conv2D(
        4, 1, kernel_initializer=lambda shape, dtype: tf.random.normal(shape)
      )
    ),
    'initial value of .* global random state',
  ),
  # What a step does.
  'tf.py_function': (
    lambda: _sequential(
      LayerOf(
        lambda layer, x, training: tf.ensure_shape(
          tf.py_function(lambda y: y, [x], tf.float32), x.shape
        )
      )
    ),
    'calls Python',
  ),
  'state': (
    lambda: _sequential(LayerOf(_count_calls, trainable=False)),
    "'odd' .* changes 'odd/own|changes 'own",
  ),
  'spectral normalization': (
    lambda: _sequential(
      _LAYERS.SpectralNormalization(_LAYERS.Conv2D(4, 1), name='spectral')
    ),
    "'spectral' .SpectralNormalization",
  ),
  'a metric in call': (
    lambda: _subclassed(
      lambda self, x, training: (self.tracker.update_state(x), x)[1]
    ),
    'not among the weights',
  ),
  'a variable in call': (
    lambda: _sequential(LayerOf(_late_variable, initializer='ones')),
    'model',
  ),
  'renorm': (
    lambda: _sequential(_LAYERS.BatchNormalization(renorm=True, name='norm')),
    "'norm' .* has renorm",
  ),
  'activity regularizer': (
    lambda: _sequential(
      _LAYERS.Conv2D(4, 1, activity_regularizer='l2', name='active')
    ),
    "'active' .*adds a loss that depends on its input",
  ),
  'add_loss': (
    lambda: _sequential(
      LayerOf(
        lambda layer, x, training: (layer.add_loss(tf.reduce_sum(x)), x)[1]
      )
    ),
    "'odd' .*adds a loss that depends on its input",
  ),
  'a copy of a weight': (
    lambda: _sequential(Copying(name='copying')),
    "'copying' .* read a weight when it was built",
  ),
  'a mask': (
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input(_SHAPE),
        _LAYERS.Reshape([8, 24]),
        _LAYERS.Masking(),
        _LAYERS.BatchNormalization(name='norm'),
        _LAYERS.Flatten(),
        _LAYERS.Dense(_CLASSES),
      ]
    ),
    "'norm' .* gets a mask",
  ),
  "another's variable": (
    lambda: (
      v := tf.Variable(tf.ones([4])),
      _sequential(_LAYERS.Lambda(lambda x: x * v, name='sneaky')),
    )[-1],
    "'sneaky' .* not among the weights",
  ),
  # Weights.
  'nothing to train': (
    lambda: _set_trainable(_sequential(), False),
    'has no trainable weights',
  ),
  'no weights': (
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input(_SHAPE),
        _LAYERS.GlobalAveragePooling2D(),
        _LAYERS.Lambda(lambda x: tf.concat([x, x[:, :1]], -1)),
      ]
    ),
    'has no trainable weights',
  ),
  'float64': (
    lambda: tf.keras.Sequential(
      [
        tf.keras.Input(_SHAPE),
        _LAYERS.Flatten(),
        _LAYERS.Dense(_CLASSES, dtype='float64', name='double'),
      ]
    ),
    'double.* is float64',
  ),
  'constraint': (
    lambda: _sequential(
      _LAYERS.Conv2D(4, 1, kernel_constraint=tf.keras.constraints.NonNeg())
    ),
    'kernel.* has a constraint',
  ),
  'float16': (
    lambda: _sequential(_LAYERS.Conv2D(4, 1, dtype='mixed_float16')),
    'computes in float16',
  ),
}


def _network(model_fn, **kwargs):
  return adapter.Network(
    model_fn, seed=1, num_classes=_CLASSES, image_shape=_SHAPE, **kwargs
  )


def _step(network):
  """Loss and gradients of one step."""
  images = tf.random.stateless_normal([3, *_SHAPE], [1, 2])
  with network.draws(tf.constant([3, 4])), tf.GradientTape() as tape:
    logits = network.logits(images, training=True)
    loss = tf.reduce_sum(
      tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2], logits)
    )
  gradients = network.gradients(tape, loss)
  return loss, gradients, network.logits(images, training=False)


def _in_graph(model_fn, **kwargs):
  """What `_step` gives where TFF traces: in a graph of its own."""
  with tf.Graph().as_default():
    network = _network(model_fn, **kwargs)
    result = tf.function(lambda: _step(network))()
    with tf.compat.v1.Session() as session:
      session.run([v.value.initializer for v in network.model.variables])
      return session.run(result)


@pytest.mark.parametrize('name', _WORKING)
def test_works(name):
  loss, gradients, logits = _in_graph(_WORKING[name])
  assert np.isfinite(loss)
  assert all(np.all(np.isfinite(g)) for g in gradients)
  assert logits.shape == (3, _CLASSES)
  again = _in_graph(_WORKING[name])
  np.testing.assert_array_equal(logits, again[2])
  for one, other in zip(gradients, again[1], strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('name', _REFUSED)
def test_is_refused_in_one_line(name):
  model_fn, words = _REFUSED[name]
  with tf.Graph().as_default():
    with pytest.raises(hparams.UsageError, match=words) as caught:
      _network(model_fn)
  assert '\n' not in str(caught.value)
  assert len(str(caught.value)) < 400


def test_a_model_in_place_of_its_function_is_refused():
  with pytest.raises(hparams.UsageError, match='give a function that builds'):
    adapter.Network(_sequential())


@pytest.mark.parametrize('scale', [1 / 255, 1 / 127.5])
def test_pixels_are_not_scaled_twice(scale):
  model = _sequential(_LAYERS.Rescaling(scale))
  stored = tf.TensorSpec([None, *_SHAPE], tf.uint8)
  channels = _SHAPE[-1]

  def check(std):
    views = augment.build_views(
      _SHAPE, mean=(0,) * channels, std=(std,) * channels, flip=False
    )
    checks.check_scale(model, views, stored)

  check(1 / 255)  # Pixels as they are.
  with pytest.raises(hparams.UsageError, match='values up to 1; remove'):
    check(1)


# Layers that go anywhere in a model, and whether they do.
_ANYWHERE = {
  'convolution': (lambda: _LAYERS.Conv2D(4, 3, padding='same'), True),
  'regularized': (
    lambda: _LAYERS.Conv2D(4, 1, kernel_regularizer='l2'),
    True,
  ),
  'batch norm': (_LAYERS.BatchNormalization, True),
  'group norm': (lambda: _LAYERS.GroupNormalization(2), True),
  'normalization': (_LAYERS.Normalization, True),
  'dropout': (lambda: _LAYERS.Dropout(0.5), True),
  'noise': (lambda: _LAYERS.GaussianNoise(0.1), True),
  'flip': (_LAYERS.RandomFlip, True),
  'embedding': (Positions, True),
  'bfloat16': (lambda: _LAYERS.Conv2D(4, 1, dtype='mixed_bfloat16'), True),
  'drawing': (
    lambda: LayerOf(lambda _, x, training: x + tf.random.normal([])),
    False,
  ),
  'drawing in training': (
    lambda: LayerOf(
      lambda _, x, training: tf.nn.dropout(x, 0.5) if training else x
    ),
    False,
  ),
  'counting': (lambda: LayerOf(_count_calls, trainable=False), False),
  'active': (lambda: _LAYERS.ReLU(activity_regularizer='l2'), False),
  'renorm': (
    lambda: _LAYERS.BatchNormalization(renorm=True),
    False,
  ),
  'float64': (lambda: _LAYERS.Conv2D(4, 1, dtype='float64'), False),
}
_ENDINGS = {
  'nothing': (list, True),
  'linear': (lambda: [_LAYERS.Activation('linear')], True),
  'scaled': (lambda: [_LAYERS.Rescaling(0.1)], True),
  'softmax': (lambda: [_LAYERS.Softmax()], False),
  'sigmoid and shape': (
    lambda: [_LAYERS.Activation('sigmoid'), _LAYERS.Reshape([_CLASSES])],
    False,
  ),
  'by hand': (lambda: [_LAYERS.Lambda(_manual_softmax)], False),
}


def _composed(layers, ending, style):
  """A model of them, made in one of Keras's ways."""
  parts = [
    _LAYERS.Conv2D(4, 3),
    *(_ANYWHERE[name][0]() for name in layers),
    _LAYERS.GlobalAveragePooling2D(),
    _LAYERS.Dense(_CLASSES),
    *_ENDINGS[ending][0](),
  ]
  if style == 'sequential':
    return tf.keras.Sequential(parts)
  if style == 'nested':
    inner = tf.keras.Sequential([tf.keras.Input(_SHAPE), *parts[:-2]])
    return tf.keras.Sequential([tf.keras.Input(_SHAPE), inner, *parts[-2:]])
  if style == 'functional':
    x = images = tf.keras.Input(_SHAPE)
    for part in parts:
      x = part(x)
    return tf.keras.Model(images, x)

  class Subclassed(tf.keras.Model):
    def __init__(self):
      super().__init__()
      self.parts = parts

    def call(self, x):
      for part in self.parts:
        x = part(x)
      return x

  return Subclassed()


@pytest.mark.slow
@hypothesis.settings(max_examples=60)
@hypothesis.given(
  layers=st.lists(st.sampled_from(sorted(_ANYWHERE)), max_size=3),
  ending=st.sampled_from(sorted(_ENDINGS)),
  style=st.sampled_from(['functional', 'sequential', 'nested', 'subclassed']),
)
def test_compositions_work_or_are_refused(layers, ending, style):
  good = _ENDINGS[ending][1] and all(_ANYWHERE[name][1] for name in layers)
  make = lambda: _composed(layers, ending, style)
  try:
    loss, gradients, _ = _in_graph(make)
  except hparams.UsageError as e:
    assert not good, e
    assert '\n' not in str(e)
    return
  assert good
  assert np.isfinite(loss)
  for one, other in zip(gradients, _in_graph(make)[1], strict=True):
    np.testing.assert_array_equal(one, other)


class _OfFunction(tf.keras.Model):
  """Applies a function to its Dense layer's outputs."""

  def __init__(self, function):
    super().__init__(name='tiny')
    self.dense = tf.keras.layers.Dense(2, name='dense')
    self.counter = self.add_weight([], trainable=False, name='counter')
    self.function = function

  def call(self, inputs):
    return self.function(self, self.dense(inputs))


def _count(model, logits):
  model.counter.assign_add(1.0)
  return logits


def _check(function, **kwargs):
  with tf.Graph().as_default():
    model = _OfFunction(function)
    model(tf.keras.Input([3]))
    may_change = [model.counter] if kwargs.get('may_count') else []
    checks.check_forward_pass(model, model, [3], may_change=may_change)


def test_a_plain_pass_is_accepted():
  _check(lambda model, logits: logits)
  _check(_count, may_count=True)
