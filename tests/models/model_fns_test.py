import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.hparams import UsageError
from tff_fssl.models import adapter
from tff_fssl.models import model_fns
from tff_fssl.models import networks


def _cnn():
  return networks.build_network('cnn', (8, 8, 1), 10, 'bn')


def _values(train_layers, seed=0):
  """Weights of a `cnn` whose other layers do not train."""
  model = _cnn()
  model_fns.freeze(model, train_layers)
  rng = np.random.default_rng(seed)
  return {
    name: rng.uniform(0.1, 1.0, v.shape).astype(np.float32)
    for name, v in model_fns.frozen_variables(model).items()
  }


def test_layers_whose_whole_names_match_train():
  model = _cnn()
  model_fns.freeze(model, 'conv4|norm4|logit')
  names = [v.path.split('/')[0] for v in model.trainable_weights]
  assert names == ['conv4', 'norm4', 'norm4']
  held = list(model_fns.frozen_variables(model))
  assert held[:5] == ['conv1/0', *(f'norm1/{i}' for i in range(4))]
  assert held[-2:] == ['logits/0', 'logits/1']
  assert len(held) == len(model.weights) - 5


def test_layers_may_train_again():
  model = _cnn()
  model_fns.freeze(model, 'logits')
  model_fns.freeze(model, '.*')
  assert not model_fns.frozen_variables(model)
  assert len(model.trainable_variables) == 14


@pytest.mark.parametrize(
  'train_layers, words',
  [
    ('(', 'is not a regular expression'),
    ('conv', 'conv3, norm3, conv4, norm4, logits (9 layers)'),
  ],
)
def test_refuses_what_lets_nothing_train(train_layers, words):
  with pytest.raises(UsageError) as error:
    model_fns.freeze(_cnn(), train_layers)
  assert words in str(error.value)


def test_refuses_layers_of_the_same_name():
  inner = tf.keras.Sequential(
    [tf.keras.Input([3]), tf.keras.layers.Dense(4, name='same')]
  )
  model = tf.keras.Sequential(
    [tf.keras.Input([3]), inner, tf.keras.layers.Dense(4, name='same')]
  )
  with pytest.raises(UsageError, match="two layers named 'same'"):
    model_fns.freeze(model, 'same')


def test_weights_of_another_network_are_refused():
  values = _values('logits')
  values['conv2/0'] = values['conv2/0'][..., :3]
  with pytest.raises(UsageError, match=r'is \(3, 3, 32, 3\) in the weights'):
    model_fns.FrozenFn(_cnn, 'logits', values)()
  del values['conv2/0']
  with pytest.raises(UsageError, match='conv2/0 is missing in the weights'):
    model_fns.FrozenFn(_cnn, 'logits', values)()
  with pytest.raises(UsageError, match='missing in the model'):
    model_fns.FrozenFn(_cnn, 'conv1|logits', _values('logits'))()


def _logits(network, images, weights):
  network.assign(weights)
  return network.logits(images, training=False)


def test_a_network_is_the_whole_one_but_its_weights_are_what_trains():
  """Frozen weights are in no set of weights, and in each pass."""
  values = _values('conv4|norm4|logits')
  partly = adapter.Network(
    model_fns.FrozenFn(_cnn, 'conv4|norm4|logits', values), seed=5
  )
  assert len(partly.weight_specs.trainable) == 5
  assert len(partly.weight_specs.non_trainable) == 2  # Moments of norm4.
  assert len(partly.batch_norm_layers) == 1
  assert partly.variances == (1,)
  weights = partly.initial_weights()

  whole = adapter.Network(_cnn, seed=5)
  by_name = {
    **{f'{k.split("/")[0]}/{k.split("/")[1]}': v for k, v in values.items()}
  }
  for layer in whole.model.layers:
    for index, variable in enumerate(layer.weights):
      if f'{layer.name}/{index}' in by_name:
        variable.assign(by_name[f'{layer.name}/{index}'])
  images = np.random.default_rng(1).normal(size=(3, 8, 8, 1))
  images = tf.constant(images, tf.float32)
  expected = whole.logits(images, training=False)
  np.testing.assert_array_equal(_logits(partly, images, weights), expected)

  # In a graph, as clients have it, and after the weights were lost.
  @tf.function
  def again(weights):
    return _logits(partly, images, weights)

  for variable in partly.model.variables:
    variable.assign(tf.zeros_like(variable))
  np.testing.assert_allclose(again(weights), expected, rtol=1e-5)


def test_no_gradient_reaches_frozen_weights():
  values = _values('logits')
  network = adapter.Network(model_fns.FrozenFn(_cnn, 'logits', values), seed=5)
  network.assign(network.initial_weights())
  with tf.GradientTape() as tape:
    images = tf.ones([2, 8, 8, 1])
    loss = tf.reduce_sum(network.logits(images, training=True) ** 2)
  kernel, bias = network.gradients(tape, loss)
  assert kernel.shape == [128, 10] and np.any(kernel) and np.any(bias)
  # Batch norm that does not train normalizes by its own moments.
  assert not network.is_static
  for name, variable in network.frozen_variables.items():
    np.testing.assert_array_equal(variable, values[name])


def test_without_the_classifier():
  model_fn = model_fns.FrozenFn(_cnn, 'conv4', _values('conv4'))
  network = adapter.Network(model_fns.remove_classifier(model_fn), seed=1)
  assert len(network.trainable_variables) == 1
  assert 'logits/0' not in network.frozen_variables
  assert len(network.frozen_variables) == 3 + 4 * 4


@pytest.mark.parametrize(
  'name, width, num_weights', [('resnet9', 512, 6_563_520), ('cnn', 128, None)]
)
def test_named_networks(name, width, num_weights):
  whole_fn = functools.partial(
    networks.build_network, name, (32, 32, 3), 10, 'none'
  )
  model_fn = model_fns.remove_classifier(whole_fn)
  assert model_fn.num_classes() == model_fn.num_classes(10) == 10
  with tf.Graph().as_default():
    model, whole = model_fn(), whole_fn()
    assert model.output_shape == (None, width)
    assert len(model.weights) == len(whole.weights) - len(
      whole.layers[-1].weights
    )
    if num_weights:  # Table 6.
      assert model.count_params() == num_weights
  assert model_fns.remove_classifier(model_fn) is model_fn


def test_batch_norm_stays_ours():
  model_fn = model_fns.remove_classifier(tiny_task.model_fn)
  network = adapter.Network(model_fn, seed=1)
  assert network.is_static and network.num_outputs == 4
  before = [v.numpy() for v in network.non_trainable_variables]
  images = tf.random.stateless_uniform([5, *tiny_task.IMAGE_SHAPE], [1, 2])
  network.logits(images, training=True)
  for variable, old in zip(
    network.non_trainable_variables, before, strict=True
  ):
    np.testing.assert_array_equal(variable, old)
  assert len(network.moments(images)) == 1


def _subclassed():
  class Model(tf.keras.Model):
    def call(self, inputs):
      return inputs

  return Model()


@pytest.mark.parametrize(
  'model_fn',
  [
    _subclassed,
    lambda: tf.keras.Sequential([tf.keras.layers.Dense(3)]),
    lambda: tf.keras.Sequential(
      [tf.keras.Input([4]), tf.keras.layers.Dense(3), tf.keras.layers.ReLU()]
    ),
  ],
  ids=['subclassed', 'not built', 'no classifier'],
)
def test_other_models_are_refused(model_fn):
  with pytest.raises(UsageError, match='ends with a Dense layer'):
    adapter.Network(model_fns.remove_classifier(model_fn))


def test_a_wrong_number_of_classes_is_refused():
  model_fn = model_fns.remove_classifier(tiny_task.model_fn)
  with pytest.raises(UsageError, match='a data set of 7 classes'):
    model_fn.num_classes(7)
