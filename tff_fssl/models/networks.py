"""The named networks, as Keras models from images, vectors or texts to logits.

All networks are functional models with explicitly named layers, so that all
builds of a network have the same names. They end with a layer 'features'
(float32 [B, F]) and a layer 'logits'. None has softmax, and only `text_cnn` has
dropout.

`norm` chooses the layers that follow (in Wide ResNets: precede) convolutions:

*   'bn': batch normalization, epsilon 1e-5.
*   'gn': group normalization, epsilon 1e-5, with at least 4 channels per group
    and at most 32 groups.
*   'none': no layers. Convolutions then have the bias that the norm would have
    had (except in ResNet-9, which has no biases). The last convolution of each
    residual branch of a Wide ResNet starts at 0. Otherwise the variance of
    activations would double at every block (Fixup, Zhang et al. 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
import importlib
import inspect
import runpy
import traceback

from tff_fssl import files
from tff_fssl.data import names as data_names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.hparams import import_function
from tff_fssl.lazy import tf
from tff_fssl.models import keras_state
from tff_fssl.models import names

_EPSILON = 1e-5
# Keras's momentum is the weight of the old moment, 1 - PyTorch's. Its default
# of 0.99 needs more steps than a round of local training has.
_MOMENTUM = 0.9

# Layers that sum many values or give probabilities compute in it even if
# convolutions do not (`compute_dtype` of `adapter.Network`). In less, sums lose
# digits, and a probability may cross a threshold. Moments of batch
# normalization are always float32.
_EXACT = 'float32'


def _kaiming_fan_out() -> tf.keras.initializers.Initializer:
  """Makes PyTorch's kaiming_normal_(mode='fan_out', nonlinearity='relu')."""
  return tf.keras.initializers.VarianceScaling(
    2.0, 'fan_out', 'untruncated_normal'
  )


def _uniform_fan_in() -> tf.keras.initializers.Initializer:
  """Makes PyTorch's default of linear layers: U(-1/sqrt(in), 1/sqrt(in))."""
  return tf.keras.initializers.VarianceScaling(1.0 / 3.0, 'fan_in', 'uniform')


def _lecun_normal() -> tf.keras.initializers.Initializer:
  """Makes FedMatch's initializer, Keras's default `VarianceScaling()`."""
  return tf.keras.initializers.VarianceScaling(
    1.0, 'fan_in', 'truncated_normal'
  )


def num_groups(channels: int) -> int:
  """Returns the number of groups: at most 32, of at least 4 channels each.

  Args:
    channels: The layer's channels, at least 1.

  Returns:
    The largest divisor of `channels` up to min(32, channels / 4), at least 1.

  Examples:
    >>> from tff_fssl.models import networks
    >>> [networks.num_groups(channels) for channels in (6, 16, 100, 512)]
    [1, 4, 25, 32]
  """
  limit = max(1, min(32, channels // 4))
  return max(g for g in range(1, limit + 1) if channels % g == 0)


def _norm(x: tf.Tensor, norm: str, name: str) -> tf.Tensor:
  """Normalizes `x` as `norm` says."""
  if norm == 'bn':
    layer = tf.keras.layers.BatchNormalization(
      epsilon=_EPSILON, momentum=_MOMENTUM, name=name
    )
  elif norm == 'gn':
    layer = tf.keras.layers.GroupNormalization(
      num_groups(x.shape[-1]), epsilon=_EPSILON, dtype=_EXACT, name=name
    )
  else:
    return x
  return layer(x)


def _conv(
  x: tf.Tensor,
  filters: int,
  *,
  name: str,
  size: int = 3,
  stride: int = 1,
  bias: bool = False,
  initializer: tf.keras.initializers.Initializer | None = None,
) -> tf.Tensor:
  """Convolves `x`, padded by (size - 1) / 2 zeros on every side.

  Initial weights are Kaiming normal by fan-out, unless another `initializer` is
  given.

  This is PyTorch's padding. Keras's 'same' pads only the bottom and the right
  for strides above 1 on even sizes, and equals PyTorch's otherwise.
  """
  padding = 'same'
  if stride > 1 and size > 1:
    x = tf.keras.layers.ZeroPadding2D((size - 1) // 2, name=f'{name}_padding')(
      x
    )
    padding = 'valid'
  return tf.keras.layers.Conv2D(
    filters,
    size,
    stride,
    padding,
    use_bias=bias,
    kernel_initializer=initializer or _kaiming_fan_out(),
    name=name,
  )(x)


def _relu(x: tf.Tensor, name: str) -> tf.Tensor:
  return tf.keras.layers.ReLU(name=name)(x)


def _dense(
  x: tf.Tensor,
  num_classes: int,
  *,
  bias: bool = True,
  initializer: tf.keras.initializers.Initializer | None = None,
  bias_initializer: tf.keras.initializers.Initializer | None = None,
) -> tf.Tensor:
  return tf.keras.layers.Dense(
    num_classes,
    use_bias=bias,
    kernel_initializer=initializer or _uniform_fan_in(),
    bias_initializer=bias_initializer or 'zeros',
    dtype=_EXACT,
    name='logits',
  )(x)


def _average(x: tf.Tensor) -> tf.Tensor:
  return tf.keras.layers.GlobalAveragePooling2D(dtype=_EXACT, name='features')(
    x
  )


def _wide_resnet_block(
  x: tf.Tensor, filters: int, stride: int, norm: str, name: str
) -> tf.Tensor:
  """Applies a pre-activation block.

  If the width changes, the shortcut is a convolution of the activated input.
  """
  bias = norm == 'none'
  activated = _relu(_norm(x, norm, f'{name}_norm1'), f'{name}_relu1')
  shortcut = x
  if x.shape[-1] != filters:
    shortcut = _conv(
      activated,
      filters,
      size=1,
      stride=stride,
      bias=bias,
      name=f'{name}_shortcut',
    )
  y = _conv(activated, filters, stride=stride, bias=bias, name=f'{name}_conv1')
  y = _relu(_norm(y, norm, f'{name}_norm2'), f'{name}_relu2')
  zeros = tf.keras.initializers.Zeros() if norm == 'none' else None
  y = _conv(y, filters, bias=bias, initializer=zeros, name=f'{name}_conv2')
  return tf.keras.layers.Add(name=f'{name}_add')([shortcut, y])


def _wide_resnet(
  x: tf.Tensor, num_classes: int, norm: str, *, width: int
) -> tf.Tensor:
  """Builds Wide ResNet-28-`width` of SemiFL's and (FL)^2's code.

  Each stage except the first halves the image. Stages are added until its side
  is below 16: 32 x 32 images get the usual three stages of four blocks, 28 x 28
  images two stages of six. Convolutions start from Kaiming normal by fan-out,
  the linear layer from weights U(-1/sqrt(in), 1/sqrt(in)) and bias 0.
  """
  num_stages = min(x.shape[1:3]).bit_length() - 3
  num_blocks = int(((28 - 1) / num_stages - 1) / 2)
  x = _conv(x, 16, bias=norm == 'none', name='stem')
  for stage in range(num_stages):
    for block in range(num_blocks):
      stride = 2 if stage and not block else 1
      name = f'stage{stage + 1}_block{block + 1}'
      x = _wide_resnet_block(x, 16 * 2**stage * width, stride, norm, name)
  x = _relu(_norm(x, norm, 'norm'), 'relu')
  return _dense(_average(x), num_classes)


def build_resnet9(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds ResNet-9 of FedMatch's code (Jeong et al. 2021, table 3).

  It has no biases. Pooling follows the ReLU, and no ReLU follows the additions.
  The norm, which FedMatch does not have, is between convolution and ReLU. The
  last pooling covers the whole map, FedMatch's 4 x 4 for images of 32 x 32.
  Initial weights are truncated normal, of variance 1 / fan-in.
  """

  def conv(x: tf.Tensor, filters: int, index: int) -> tf.Tensor:
    x = _conv(x, filters, initializer=_lecun_normal(), name=f'conv{index}')
    return _relu(_norm(x, norm, f'norm{index}'), f'relu{index}')

  def pool(x: tf.Tensor, index: int) -> tf.Tensor:
    return tf.keras.layers.MaxPooling2D(2, name=f'pool{index}')(x)

  x = pool(conv(conv(x, 64, 1), 128, 2), 2)
  x = tf.keras.layers.Add(name='add4')([x, conv(conv(x, 128, 3), 128, 4)])
  x = pool(conv(x, 256, 5), 5)
  x = pool(conv(x, 512, 6), 6)
  x = tf.keras.layers.Add(name='add8')([x, conv(conv(x, 512, 7), 512, 8)])
  x = tf.keras.layers.GlobalMaxPooling2D(name='features')(x)
  return _dense(x, num_classes, bias=False, initializer=_lecun_normal())


def build_resnet18(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds ResNet-18 of ProtoFSSL's code: 17 convolutions and a classifier.

  Convolutions are 3 x 3. Without the classifier it is ProtoFSSL's ResNet-17. As
  in ResNet-9, pooling follows the ReLU, no ReLU follows the additions, and the
  last pooling covers the whole map. The shortcut of a stage's first addition
  starts from the pooled map.
  """

  def conv(x: tf.Tensor, filters: int, index: int) -> tf.Tensor:
    x = _conv(
      x,
      filters,
      bias=norm == 'none',
      initializer=_lecun_normal(),
      name=f'conv{index}',
    )
    return _relu(_norm(x, norm, f'norm{index}'), f'relu{index}')

  def add(x: tf.Tensor, y: tf.Tensor, index: int) -> tf.Tensor:
    return tf.keras.layers.Add(name=f'add{index}')([x, y])

  x = conv(x, 64, 1)
  index = 2
  for filters in (64, 128, 256, 512):
    if filters > 64:
      x = conv(x, filters, index)
      x = tf.keras.layers.MaxPooling2D(2, name=f'pool{index}')(x)
      x = add(x, conv(x, filters, index + 1), index + 1)
    else:
      x = add(x, conv(conv(x, filters, 2), filters, 3), 3)
    index += 3
    x = add(x, conv(conv(x, filters, index - 1), filters, index), index)
    index += 1
  x = tf.keras.layers.GlobalMaxPooling2D(name='features')(x)
  return _dense(x, num_classes, initializer=_lecun_normal())


def build_resnet8(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds SAGE's ResNet-8: a convolution and three basic blocks.

  The stages are 64, 128 and 256 wide, and ProxyFL uses the same network.
  """

  def conv(x: tf.Tensor, filters: int, name: str, **options: int) -> tf.Tensor:
    x = _conv(x, filters, bias=norm == 'none', name=name, **options)
    return _norm(x, norm, f'{name}_norm')

  x = _relu(conv(x, 64, 'conv'), 'relu')
  for index, filters in enumerate((64, 128, 256), 1):
    stride, name = 1 + (index > 1), f'block{index}'
    y = _relu(conv(x, filters, f'{name}_conv1', stride=stride), f'{name}_relu1')
    y = conv(y, filters, f'{name}_conv2')
    if stride > 1:
      x = conv(x, filters, f'{name}_shortcut', size=1, stride=stride)
    x = tf.keras.layers.Add(name=f'{name}_add')([x, y])
    x = _relu(x, f'{name}_relu2')
  # PyTorch's default.
  bias = tf.keras.initializers.RandomUniform(-(256**-0.5), 256**-0.5)
  return _dense(_average(x), num_classes, bias_initializer=bias)


def build_alexnet(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds the AlexNet-like network of FedMatch's appendix, after HAT.

  Unpadded convolutions of 64 (4 x 4), 128 (3 x 3) and 256 (2 x 2) channels,
  each followed by ReLU and pooling, precede two hidden layers of 2,048. It has
  no dropout: HAT has, but FedMatch does not mention it.
  """
  for index, (filters, size) in enumerate(((64, 4), (128, 3), (256, 2)), 1):
    x = tf.keras.layers.Conv2D(
      filters,
      size,
      use_bias=norm == 'none',
      kernel_initializer=_kaiming_fan_out(),
      name=f'conv{index}',
    )(x)
    x = _relu(_norm(x, norm, f'norm{index}'), f'relu{index}')
    x = tf.keras.layers.MaxPooling2D(2, name=f'pool{index}')(x)
  x = tf.keras.layers.Flatten(name='flatten')(x)
  return _dense(_hidden(x, (2048, 2048), 'none'), num_classes)


def build_mlp(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds two hidden layers of 256, for vectors and small images."""
  x = tf.keras.layers.Flatten(name='flatten')(x)
  return _dense(_hidden(x, (256, 256), norm), num_classes)


def build_linear(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds a linear classifier."""
  # Without hidden layers, nothing is normalized.
  del norm
  return _dense(tf.keras.layers.Flatten(name='features')(x), num_classes)


# Kim's 300 dimensions are word2vec's. These embeddings start at random.
_EMBEDDING, _WIDTHS, _FILTERS = 128, (3, 4, 5), 100


def build_text_cnn(
  x: tf.Tensor, num_classes: int, norm: str, vocabulary_size: int
) -> tf.Tensor:
  """Builds CNN-rand of Kim (2014), for texts of words.

  Layers: embeddings, 100 convolutions of each of 3, 4 and 5 words, ReLU, the
  maximum over the text, dropout of 1/2. Unlike in Kim's network, embeddings
  have 128 numbers instead of 300, a norm may follow the convolutions, and the
  length of the classifier's weights is not bounded. Initial embeddings are
  U(-.25, .25), as in Kim's code. The end of a text is a word, number 0.
  """
  # A word out of range would be an error. Our data are checked, but an
  # exported model may be given anything.
  x = tf.keras.ops.clip(x, 0.0, vocabulary_size - 1.0)
  x = tf.keras.layers.Embedding(
    vocabulary_size,
    _EMBEDDING,
    embeddings_initializer=tf.keras.initializers.RandomUniform(-0.25, 0.25),
    name='embedding',
  )(x)
  found = []
  for width in _WIDTHS:
    y = tf.keras.layers.Conv1D(
      _FILTERS,
      width,
      use_bias=norm == 'none',
      kernel_initializer='glorot_uniform',
      name=f'conv{width}',
    )(x)
    y = _relu(_norm(y, norm, f'norm{width}'), f'relu{width}')
    found.append(tf.keras.layers.GlobalMaxPooling1D(name=f'max{width}')(y))
  x = tf.keras.layers.Concatenate(name='concatenation')(found)
  x = tf.keras.layers.Dropout(0.5, dtype=_EXACT, name='features')(x)
  return _dense(x, num_classes)


def _hidden(x: tf.Tensor, widths: Sequence[int], norm: str) -> tf.Tensor:
  """Applies dense layers with ReLU. The last output is 'features'."""
  for index, width in enumerate(widths, 1):
    x = tf.keras.layers.Dense(
      width,
      use_bias=norm == 'none',
      kernel_initializer='he_normal',
      name=f'hidden{index}',
    )(x)
    x = _norm(x, norm, f'hidden_norm{index}')
    last = index == len(widths)
    x = tf.keras.layers.ReLU(
      name='features' if last else f'hidden_relu{index}',
      dtype=_EXACT if last else None,
    )(x)
  return x


def build_cnn(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds four convolutions for CPUs: 32, 64, 96 and 128 channels.

  The first convolution halves images of 16 x 16 and more. The number of
  parameters does not depend on the image size.
  """
  return _cnn(x, num_classes, norm, (32, 64, 96, 128))


def build_cnn_narrow(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds `build_cnn`'s network with half as many channels."""
  return _cnn(x, num_classes, norm, (16, 32, 48, 64))


def _cnn(
  x: tf.Tensor, num_classes: int, norm: str, widths: Sequence[int]
) -> tf.Tensor:
  """Builds convolutions of so many channels, with pooling after the second."""
  # On large maps, memory access costs more than arithmetic.
  stem_stride = 2 if min(x.shape[1:3]) >= 16 else 1
  for index, filters in enumerate(widths, start=1):
    if index > 2:
      x = tf.keras.layers.MaxPooling2D(2, name=f'pool{index - 1}')(x)
    stride = stem_stride if index == 1 else 1
    x = _conv(
      x, filters, stride=stride, bias=norm == 'none', name=f'conv{index}'
    )
    x = _relu(_norm(x, norm, f'norm{index}'), f'relu{index}')
  return _dense(_average(x), num_classes)


def build_lenet(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds the LeNet of NIID-Bench (Li et al. 2022).

  Two convolutions of 5 x 5 without padding (6 and 16 channels), each with ReLU
  and 2 x 2 maxima, then dense layers of 120 and 84. All initial weights and
  biases are PyTorch's: U(-1/sqrt(in), 1/sqrt(in)).
  """

  def bias(inputs: int) -> tf.keras.initializers.Initializer:
    bound = inputs**-0.5
    return tf.keras.initializers.RandomUniform(-bound, bound)

  for index, filters in enumerate((6, 16), start=1):
    x = tf.keras.layers.Conv2D(
      filters,
      5,
      kernel_initializer=_uniform_fan_in(),
      bias_initializer=bias(25 * x.shape[-1]),
      name=f'conv{index}',
    )(x)
    x = _relu(_norm(x, norm, f'norm{index}'), f'relu{index}')
    x = tf.keras.layers.MaxPooling2D(2, name=f'pool{index}')(x)
  x = tf.keras.layers.Flatten(name='flat')(x)
  for name, width in (('hidden1', 120), ('hidden2', 84)):
    x = tf.keras.layers.Dense(
      width,
      kernel_initializer=_uniform_fan_in(),
      bias_initializer=bias(x.shape[-1]),
      name=name,
    )(x)
    x = _relu(x, 'features' if width == 84 else f'{name}_relu')
  return _dense(x, num_classes, bias_initializer=bias(84))


def build_wrn28_2(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds Wide ResNet-28-2."""
  return _wide_resnet(x, num_classes, norm, width=2)


def build_wrn28_8(x: tf.Tensor, num_classes: int, norm: str) -> tf.Tensor:
  """Builds Wide ResNet-28-8."""
  return _wide_resnet(x, num_classes, norm, width=8)


def _application(
  name: str, images: tf.Tensor, num_classes: int, norm: str
) -> tf.Tensor:
  """Builds an untrained network of `keras.applications`."""
  flag = f'--model={names.KERAS}{name}'
  known = [
    n for n, f in vars(tf.keras.applications).items() if inspect.isfunction(f)
  ]
  if name not in known:
    raise UsageError(
      f'{flag}: keras.applications has no {name}{closest(name, known)}'
    )
  build = getattr(tf.keras.applications, name)
  if name.startswith('EfficientNetB'):
    raise UsageError(
      f'{flag}: normalizes pixels by itself, and ours are normalized; take'
      f' {names.KERAS}EfficientNetV2B0, or build it in a file of your own'
      ' (--model=FILE.py:function)'
    )
  settings = {}
  if 'include_preprocessing' in inspect.signature(build).parameters:
    # Ours are normalized already.
    settings['include_preprocessing'] = False
  try:
    model = build(
      weights=None,
      input_tensor=images,
      input_shape=images.shape[1:],
      classes=num_classes,
      classifier_activation=None,
      **settings,
    )
  except ValueError as error:
    # The images are too small for the network.
    raise UsageError(f'{flag}: {files.first_line(error)}') from error
  has_batch_norm = bool(keras_state.batch_norms(model))
  if norm == 'gn' or (norm == 'none' and has_batch_norm):
    raise UsageError(
      f'--norm={norm}: {names.KERAS}{name} comes with its own layers; allowed'
      f' {"are sbn and bn" if has_batch_norm else "is none"}'
    )
  return model.outputs[0]


def _call_file(
  model: str, images: tf.Tensor, num_classes: int, norm: str
) -> tf.Tensor:
  """Calls `FILE.py:function` for the logits."""
  path, _, function = model.rpartition(':')
  try:
    logits = runpy.run_path(path)[function](images, num_classes, norm)
  except Exception as error:  # pylint: disable=broad-except
    # The user's code may fail in any way.
    where = traceback.extract_tb(error.__traceback__)[-1]
    raise UsageError(
      f'--model={model}: {type(error).__name__}:'
      f' {files.first_line(error)} ({where.filename}, line {where.lineno})'
    ) from error
  if not isinstance(logits, type(images)):
    raise UsageError(
      f'--model={model}: it must return the logits, a Keras tensor made from'
      f' the images; it returned {type(logits).__name__}'
    )
  return logits


def build_network(
  name: str,
  input_shape: Sequence[int],
  num_classes: int,
  norm: str = 'bn',
  *,
  vocabulary_size: int = 0,
) -> tf.keras.Model:
  """Builds a named network.

  Args:
    name: A name in `names.MODELS`, `keras:NAME` or `FILE.py:function`.
    input_shape: (height, width, channels) of images, (numbers,) of vectors or
      (words,) of texts.
    num_classes: Width of the output, at least 2.
    norm: One of `names.NORM_NAMES`: see the module's docstring.
    vocabulary_size: The number of different words for texts, else 0.

  Returns:
    A model from float32 [B, *input_shape] to logits, float32 [B, num_classes].

  Raises:
    UsageError: If the name or the norm is unknown, the network is for other
      examples, the images are too small, or the network cannot be built.

  Examples:
    >>> from tff_fssl.models import networks
    >>> network = networks.build_network(
    ...   'resnet9', (32, 32, 3), num_classes=10, norm='gn'
    ... )
    >>> network.output_shape, network.count_params()
    ((None, 10), 6573120)
  """
  names.check_model(name)
  if norm not in names.NORM_NAMES:
    raise UsageError(
      f'unknown norm {norm!r}; known are {", ".join(names.NORM_NAMES)}'
      f'{closest(norm, names.NORM_NAMES)}'
    )
  kind = data_names.IMAGES if len(input_shape) == 3 else data_names.VECTORS
  if vocabulary_size:
    kind = data_names.TEXTS
  names.check_inputs(name, kind)
  images = tf.keras.Input(input_shape, name=kind.noun)
  if name not in names.MODELS:
    # Keras numbers the layers that it names, and checkpoints have the names.
    importlib.import_module('keras.src.utils.naming').reset_uids()
  if name.startswith(names.KERAS):
    application = name.removeprefix(names.KERAS)
    logits = _application(application, images, num_classes, norm)
    return tf.keras.Model(images, logits, name=application)
  if (parts := names.file_and_function(name)) is not None:
    logits = _call_file(name, images, num_classes, norm)
    return tf.keras.Model(images, logits, name=parts[1])
  info = names.MODELS[name]
  side = info.least_side
  if kind == data_names.IMAGES and min(input_shape[:2]) < side:
    height, width, _ = input_shape
    raise UsageError(
      f'model {name!r} needs images of at least {side} x {side} pixels; these'
      f' are {height} x {width}'
    )
  vocabulary = (vocabulary_size,) if vocabulary_size else ()
  builder = import_function(info.builder)
  logits = builder(images, num_classes, norm, *vocabulary)
  return tf.keras.Model(images, logits, name=name)
