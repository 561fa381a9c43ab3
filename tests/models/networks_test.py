"""The networks: sizes, names, padding, initial weights."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.data import names as data_names
from tff_fssl.models import adapter
from tff_fssl.models import names
from tff_fssl.models import networks

_CIFAR = (32, 32, 3)
_GRAY = (28, 28, 1)
_DIGITS = (8, 8, 1)
_layers = tf.keras.layers


def _num_trainable(model):
  return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@pytest.mark.parametrize(
  'name,image_shape,num_classes,norm,num_parameters',
  [
    # specs/flfl_semifl.md, E12.
    ('wrn28_2', _CIFAR, 10, 'bn', 1_467_610),
    ('wrn28_2', _CIFAR, 10, 'gn', 1_467_610),
    ('wrn28_8', _CIFAR, 100, 'bn', 23_401_012),
    ('wrn28_2', _GRAY, 10, 'bn', 535_610),
    # FedMatch's ResNet-9: 1728 + 73728 + 2 * 147456 + 294912 + 1179648
    # + 2 * 2359296 + 5120. Norms add 2 * (64 + 3 * 128 + 256 + 3 * 512).
    ('resnet9', _CIFAR, 10, 'none', 6_568_640),
    ('resnet9', _CIFAR, 10, 'bn', 6_573_120),
    # specs/sage_feddb_cbafed_feddure_proxyfl.md, T2.
    ('resnet8', _CIFAR, 10, 'bn', 1_227_594),
    ('resnet8', _CIFAR, 100, 'bn', 1_250_724),
    # specs/fedmatch_protofssl.md: HAT's 6,524,362; ResNet-18 with biases.
    ('alexnet', _CIFAR, 10, 'none', 6_524_362),
    ('resnet18', _CIFAR, 10, 'none', 10_996_234),
    # Two layers of 256 with biases, and 2,570 for the classifier.
    ('mlp', _CIFAR, 10, 'none', 3_072 * 256 + 256 * 256 + 2 * 256 + 2_570),
    ('mlp', _CIFAR, 10, 'bn', 3_072 * 256 + 256 * 256 + 4 * 256 + 2_570),
    # 27 * 32 + 288 * 64 + 576 * 96 + 864 * 128, norms 2 * 320, 129 * 10.
    ('cnn', _CIFAR, 10, 'bn', 187_114),
    ('cnn', _CIFAR, 10, 'none', 186_794),
    ('cnn', _DIGITS, 10, 'bn', 186_538),
    # 27 * 16 + 144 * 32 + 288 * 48 + 432 * 64, norms 2 * 160, 65 * 10.
    ('cnn_narrow', _CIFAR, 10, 'bn', 47_482),
    # NIID-Bench's, as its replication by Flower counts it.
    ('lenet', (28, 28, 1), 10, 'none', 44_426),
    ('linear', (768,), 4, 'none', 769 * 4),
    ('linear', _DIGITS, 10, 'bn', 65 * 10),
    ('mlp', (768,), 4, 'none', 769 * 256 + 257 * 256 + 257 * 4),
  ],
)
def test_parameters(name, image_shape, num_classes, norm, num_parameters):
  model = networks.build_network(name, image_shape, num_classes, norm)
  assert _num_trainable(model) == num_parameters


@pytest.mark.parametrize('norm,more', [('none', 300), ('bn', 600), ('gn', 600)])
def test_text_cnn_is_kims(norm, more):
  model = networks.build_network(
    'text_cnn', (64,), 4, norm, vocabulary_size=1_000
  )
  # 128 numbers a word; 100 filters of 3, 4 and 5 words; 300 features.
  expected = 128_000 + 128 * 100 * (3 + 4 + 5) + more + 301 * 4
  assert _num_trainable(model) == expected
  assert model.input_shape == (None, 64)
  # Words out of range are the nearest in range.
  x = np.zeros((2, 64), np.float32)
  hostile = x.copy()
  hostile[0, 3], hostile[1, 4] = -5, 1e9
  x[1, 4] = 999
  np.testing.assert_array_equal(model(hostile), model(x))


@pytest.mark.parametrize(
  'name,shape,size,words',
  [
    ('text_cnn', (8,), 0, 'takes texts, but the data set has vectors'),
    ('text_cnn', _DIGITS, 0, 'takes texts, but the data set has images'),
    ('mlp', (8,), 99, 'allowed are text_cnn and FILE.py:function'),
    ('cnn', (8,), 0, 'allowed are linear, mlp and FILE.py:function'),
    ('keras:MobileNetV2', (8,), 0, 'takes images'),
  ],
)
def test_networks_of_other_inputs_are_refused(name, shape, size, words):
  with pytest.raises(hparams.UsageError, match=words):
    networks.build_network(name, shape, 2, 'none', vocabulary_size=size)


def test_wide_resnet_has_the_spec_channels_of_batch_norm():
  model = networks.build_network('wrn28_2', _CIFAR, 10, 'bn')
  layers = [
    layer
    for layer in model.layers
    if isinstance(layer, tf.keras.layers.BatchNormalization)
  ]
  # specs/flfl_semifl.md, E12.
  assert sum(layer.gamma.shape[0] for layer in layers) == 1_808
  assert {layer.epsilon for layer in layers} == {1e-5}


def test_wide_resnet_depth_follows_the_image():
  def blocks(side):
    model = networks.build_network('wrn28_2', (side, side, 1), 2, 'none')
    adds = [x.name for x in model.layers if x.name.endswith('_add')]
    stages = [name.split('_')[0] for name in adds]
    return [stages.count(stage) for stage in dict.fromkeys(stages)]

  # n = int((27 / stages - 1) / 2), specs/flfl_semifl.md, section 6.
  assert blocks(32) == [4, 4, 4]
  assert blocks(28) == [6, 6]
  assert blocks(8) == [13]
  assert blocks(64) == [2, 2, 2, 2]


@pytest.mark.parametrize(
  'name, norm, image_shape',
  [
    ('wrn28_2', 'bn', (9, 12, 2)),
    ('resnet8', 'gn', (9, 12, 2)),
    ('resnet9', 'none', (9, 12, 2)),
    ('resnet18', 'bn', _DIGITS),
    ('alexnet', 'none', (9, 12, 2)),
    ('lenet', 'none', (9, 12, 2)),
    ('mlp', 'bn', (9, 12, 2)),
    ('cnn', 'gn', _DIGITS),
    ('cnn', 'bn', (9, 12, 2)),
  ],
)
def test_maps_images_to_logits(name, norm, image_shape):
  # Neither side is a power of two, or there is one channel.
  more = max(names.MODELS[name].least_side - 8, 0)
  height, width, channels = image_shape
  image_shape = (height + more, width + more, channels)
  model = networks.build_network(name, image_shape, 7, norm)
  assert model.input_shape == (None, *image_shape)
  assert model.output_shape == (None, 7)
  assert model.layers[-1].name == 'logits'
  assert len(model.get_layer('features').output.shape) == 2
  images = tf.random.stateless_normal([2, *image_shape], [0, 1])
  logits = model(images, training=True)
  assert logits.shape == (2, 7) and logits.dtype == tf.float32
  assert np.all(np.isfinite(logits))


@pytest.mark.parametrize('name', ['wrn28_2', 'resnet8', 'resnet9', 'cnn'])
def test_names_do_not_depend_on_what_was_built_before(name):
  def all_names():
    model = networks.build_network(name, _GRAY, 10)
    return [x.name for x in model.layers], [v.path for v in model.weights]

  first = all_names()
  tf.keras.layers.Conv2D(1, 1)(tf.zeros([1, 1, 1, 1]))
  assert all_names() == first
  assert len(set(first[0])) == len(first[0])
  assert len(set(first[1])) == len(first[1])


def test_resnet8s_classifier_starts_as_pytorchs():
  network = adapter.Network(
    lambda: networks.build_network('resnet8', _CIFAR, 10), seed=1
  )
  kernel, bias = (v.numpy() for v in network.trainable_variables[-2:])
  assert np.abs(kernel).max() <= 1 / 16
  assert 0.02 < np.abs(bias).max() <= 1 / 16 and len(set(bias)) == 10


def _stem(size, stride, kernel, image):
  """The network's convolution of one channel, with given weights."""
  inputs = tf.keras.Input([*image.shape, 1])
  outputs = networks._conv(  # pylint: disable=protected-access
    inputs, 1, size=size, stride=stride, initializer='zeros', name='conv'
  )
  model = tf.keras.Model(inputs, outputs)
  model.set_weights([np.reshape(kernel, [size, size, 1, 1])])
  return model(image[None, :, :, None].astype(np.float32))[0, :, :, 0].numpy()


def test_strides_are_padded_on_all_sides():
  image = np.arange(16).reshape(4, 4)
  # PyTorch's padding of 1: windows begin at rows and columns -1 and 1. Their
  # first elements are image[-1, -1] = 0, ..., image[1, 1] = 5.
  first = np.zeros((3, 3))
  first[0, 0] = 1
  np.testing.assert_array_equal(_stem(3, 2, first, image), [[0, 0], [0, 5]])
  # And their sums: the first window holds 0, 1, 4 and 5.
  np.testing.assert_array_equal(
    _stem(3, 2, np.ones((3, 3)), image), [[10, 24], [51, 90]]
  )
  np.testing.assert_array_equal(
    _stem(1, 2, np.ones((1, 1)), image), [[0, 2], [8, 10]]
  )
  np.testing.assert_array_equal(
    _stem(3, 1, np.ones((3, 3)), image)[0], [10, 18, 24, 18]
  )


def test_initial_weights():
  network = adapter.Network(
    lambda: networks.build_network('wrn28_2', _CIFAR, 10), seed=3
  )
  model = network.model
  kernel = model.get_layer('stage3_block2_conv1').kernel.numpy()
  np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 128)), rtol=0.01)
  # Not truncated: some of 147,456 are beyond 3.5 deviations.
  assert np.abs(kernel).max() > 3.5 * np.sqrt(2 / (9 * 128))
  shortcut = model.get_layer('stage3_block1_shortcut').kernel.numpy()
  np.testing.assert_allclose(shortcut.std(), np.sqrt(2 / 128), rtol=0.05)
  logits = model.get_layer('logits')
  bound = 1 / np.sqrt(128)
  assert 0.95 * bound < np.abs(logits.kernel).max() <= bound
  np.testing.assert_array_equal(logits.bias, np.zeros(10))


def test_without_norm_a_wide_resnet_does_not_explode():
  network = adapter.Network(
    lambda: networks.build_network('wrn28_2', _CIFAR, 10, 'none'), seed=3
  )
  images = tf.random.stateless_normal([8, *_CIFAR], [0, 1])
  assert np.abs(network.model(images)).max() < 20


@pytest.mark.parametrize(
  'channels,groups', [(1, 1), (6, 1), (16, 4), (32, 8), (96, 24), (512, 32)]
)
def test_groups_divide_channels(channels, groups):
  assert networks.num_groups(channels) == groups


def test_every_named_network_can_be_built():
  for name, info in names.MODELS.items():
    if data_names.IMAGES not in info.inputs:
      continue
    side = info.least_side
    assert networks.build_network(name, (side, side, 1), 2).name == name
    if side > 1:
      with pytest.raises(hparams.UsageError, match=f'at least {side} x {side}'):
        networks.build_network(name, (side, side - 1, 1), 2)


@pytest.mark.parametrize(
  'name,image_shape,norm,message',
  [
    ('cn', _CIFAR, 'bn', "--model=cn: allowed are.*did you mean 'cnn'"),
    ('cnn', _CIFAR, 'sbm', "unknown norm 'sbm'; known are bn, gn, none"),
    ('wrn28_2', (7, 8, 1), 'bn', 'at least 8 x 8.*these are 7 x 8'),
    ('cnn', (3, 3, 1), 'bn', 'at least 4 x 4'),
  ],
)
def test_user_errors(name, image_shape, norm, message):
  with pytest.raises(hparams.UsageError, match=message):
    networks.build_network(name, image_shape, 10, norm)


def _write(tmp_path, text):
  path = tmp_path / 'own.py'
  path.write_text(text)
  return str(path)


def test_a_network_of_keras():
  model = networks.build_network('keras:MobileNetV3Small', _CIFAR, 7, 'bn')
  assert model.name == 'MobileNetV3Small' and model.output_shape == (None, 7)
  # Images are normalized already.
  assert not [x for x in model.layers if isinstance(x, _layers.Rescaling)]
  assert all(x.activation.__name__ == 'linear' for x in model.layers[-1:])


@pytest.mark.parametrize(
  'name, image_shape, norm, message',
  [
    ('keras:MobileNetV9', _CIFAR, 'bn', "did you mean 'MobileNetV2'"),
    ('keras:MobileNetV2', _DIGITS, 'bn', 'at least 32'),
    ('keras:MobileNetV2', _CIFAR, 'gn', '--norm=gn.*allowed are sbn and bn'),
    ('keras:MobileNetV2', _CIFAR, 'none', 'allowed are sbn and bn'),
    ('keras:EfficientNetB0', _CIFAR, 'bn', 'normalizes pixels by itself'),
    ('keras:', _CIFAR, 'bn', '--model=keras:: allowed are'),
    ('keras:a.b', _CIFAR, 'bn', 'allowed are'),
  ],
)
def test_networks_of_keras_that_cannot_be(name, image_shape, norm, message):
  with pytest.raises(hparams.UsageError, match=message) as error:
    networks.build_network(name, image_shape, 10, norm)
  assert '\n' not in str(error.value)


def test_a_network_of_ones_own(tmp_path):
  path = _write(
    tmp_path,
    'import tensorflow as tf\n'
    'def build(images, num_classes, norm):\n'
    '  x = tf.keras.layers.Flatten(name=norm)(images)\n'
    '  return tf.keras.layers.Dense(num_classes)(x)\n',
  )
  model = networks.build_network(f'{path}:build', _DIGITS, 5, 'gn')
  assert model.name == 'build' and model.output_shape == (None, 5)
  assert model.layers[1].name == 'gn'
  # Of layers without a name, too, all builds have the same names.
  again = networks.build_network(f'{path}:build', _DIGITS, 5, 'gn')
  with tf.Graph().as_default():
    other = networks.build_network(f'{path}:build', _DIGITS, 5, 'gn')
  for built in (again, other):
    assert [v.name for v in built.weights] == [v.name for v in model.weights]


@pytest.mark.parametrize(
  'text, message',
  [
    ('1 / 0\ndef build(x, c, n): pass', r'ZeroDivisionError.*line 1\)'),
    ('def build(x, *rest): raise OSError("no")', 'OSError: no'),
    ('def build(x, c, n): return 3', 'must return the logits.*returned int'),
  ],
)
def test_files_that_build_no_network(tmp_path, text, message):
  path = _write(tmp_path, text)
  with pytest.raises(hparams.UsageError, match=message) as error:
    networks.build_network(f'{path}:build', _DIGITS, 5, 'bn')
  assert '\n' not in str(error.value)
