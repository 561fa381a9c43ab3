import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.data import image_ops


@pytest.fixture(scope='module')
def apply_ops():
  """`image_ops.apply` in a graph, traced once for each shape of images."""
  traced = {}

  def apply(images, ops, args):
    shape = images.shape[1:]
    if shape not in traced:
      traced[shape] = tf.function(
        image_ops.apply,
        input_signature=[
          tf.TensorSpec([None, *shape], tf.uint8),
          tf.TensorSpec([None], tf.int32),
          tf.TensorSpec([None], tf.float32),
        ],
      )
    return traced[shape](images, ops, args)

  yield apply
  traced.clear()


def _images(kind, rng):
  """Images of one kind, uint8 [B, H, W, C]."""
  shape, low, high = {
    'noise': ((60, 32, 32, 3), 0, 256),
    'pale': ((30, 32, 32, 3), 100, 110),
    'two_values': ((20, 32, 32, 3), 254, 256),
    'constant': ((5, 32, 32, 3), 7, 8),
    'saturated': ((3, 32, 32, 3), 255, 256),
    'gray': ((30, 28, 28, 1), 0, 256),
    'oblong': ((20, 20, 31, 3), 0, 256),
    'tiny': ((10, 2, 5, 3), 0, 256),
  }[kind]
  return rng.integers(low, high, shape, np.uint8)


def _check_against_pillow(pillow, apply_ops, images, rng):
  # Many images, operations and arguments in one batch, as in use.
  names = np.repeat(image_ops.OPS, len(images))
  bounds = np.array([pillow.ranges.get(name, (0, 1)) for name in names])
  args = rng.uniform(*bounds.T).astype(np.float32)
  # The ends of the ranges too.
  args[:: len(images)] = bounds[:: len(images), 0]
  args = np.minimum(args, np.nextafter(bounds[:, 1], 0)).astype(np.float32)
  batch = np.tile(images, (len(image_ops.OPS), 1, 1, 1))
  ops = np.repeat(np.arange(len(image_ops.OPS), dtype=np.int32), len(images))
  order = rng.permutation(len(ops))
  results = apply_ops(batch[order], ops[order], args[order]).numpy()
  for i, result in zip(order, results):
    expected = pillow.apply(batch[i], names[i], args[i])
    np.testing.assert_array_equal(
      result, expected, err_msg=f'{names[i]}({args[i]})'
    )


@pytest.mark.parametrize(
  'kind',
  [
    'noise',
    'pale',
    'two_values',
    'constant',
    'saturated',
    'gray',
    'oblong',
    'tiny',
  ],
)
def test_every_op_equals_pillow(pillow, apply_ops, kind):
  rng = np.random.default_rng(0)
  _check_against_pillow(pillow, apply_ops, _images(kind, rng), rng)


def test_every_op_equals_pillow_on_digits(pillow, apply_ops, digits):
  _check_against_pillow(
    pillow, apply_ops, digits.train.x[:100], np.random.default_rng(1)
  )


_FACTORS = [
  *np.linspace(0.05, 0.95, 19),
  *(0.1 + 0.18 * level for level in range(1, 10)),
]
# All magnitudes that the policies draw; of intervals, fine steps and all whole
# numbers.
_MAGNITUDES = {
  'identity': [0],
  'autocontrast': [0],
  'equalize': [0],
  'posterize': range(1, 9),
  'solarize': range(257),
  'brightness': _FACTORS,
  'color': _FACTORS,
  'contrast': _FACTORS,
  'sharpness': _FACTORS,
  'rotate': np.arange(-30, 30.5, 0.5),
  'shear_x': np.linspace(-0.3, 0.3, 61),
  'shear_y': np.linspace(-0.3, 0.3, 61),
  'translate_x': [*range(-9, 10), *np.linspace(-9.6, 9.6, 25)],
  'translate_y': [*range(-9, 10), *np.linspace(-9.6, 9.6, 25)],
}


@pytest.mark.parametrize('name', image_ops.OPS)
def test_all_magnitudes_equal_pillow_on_real_images(
  pillow, apply_ops, photographs, name
):
  photographs = photographs[::5]
  for arg in np.float32(_MAGNITUDES[name]):
    results = apply_ops(
      photographs,
      np.full(20, image_ops.OPS.index(name), np.int32),
      np.full(20, arg),
    ).numpy()
    expected = [pillow.apply(image, name, arg) for image in photographs]
    np.testing.assert_array_equal(results, expected, err_msg=f'{name}({arg})')


def test_every_whole_argument_equals_pillow(pillow, apply_ops):
  # Where arguments are integers, edges between pixels are hit exactly.
  rng = np.random.default_rng(3)
  image = _images('noise', rng)[:1]
  for name, (low, high) in pillow.ranges.items():
    step = (high - low) / 80 if high - low < 3 else 1
    args = np.arange(low, high, step).astype(np.float32)
    ops = np.full(len(args), image_ops.OPS.index(name), np.int32)
    results = apply_ops(np.repeat(image, len(args), 0), ops, args).numpy()
    for arg, result in zip(args, results):
      np.testing.assert_array_equal(
        result, pillow.apply(image[0], name, arg), err_msg=f'{name}({arg})'
      )


def test_color_changes_nothing_of_gray_images(apply_ops, digits):
  images = digits.train.x[:5]
  ops = np.full(5, image_ops.OPS.index('color'), np.int32)
  result = apply_ops(images, ops, np.linspace(0, 2, 5, dtype=np.float32))
  np.testing.assert_array_equal(result, images)


@pytest.mark.parametrize('channels', [1, 3])
def test_boxes_equal_pillow(pillow, channels):
  rng = np.random.default_rng(4)
  images = rng.integers(0, 256, (50, 12, 16, channels), np.uint8)
  left, right = np.sort(rng.integers(0, 17, (2, 50)), axis=0)
  upper, lower = np.sort(rng.integers(0, 13, (2, 50)), axis=0)
  boxes = np.stack([left, upper, right, lower], 1).astype(np.int32)
  fill = (125, 0, 255)[:channels]
  results = image_ops.fill_boxes(tf.constant(images), boxes, fill).numpy()
  for image, box, result in zip(images, boxes, results):
    expected = pillow.fill_box(image, tuple(box.tolist()), fill)
    np.testing.assert_array_equal(result, expected)


def test_flip_and_crop_equals_padding_by_reflection():
  rng = np.random.default_rng(5)
  images = rng.integers(0, 256, (81, 10, 12, 3), np.uint8)
  y, x = (a.astype(np.int32) for a in divmod(np.arange(81), 9))
  flip = rng.random(81) < 0.5
  results = image_ops.flip_and_crop(
    tf.constant(images), flip, y, x, padding=(4, 4)
  ).numpy()
  padded = np.pad(images, [(0, 0), (4, 4), (4, 4), (0, 0)], 'reflect')
  for i, result in enumerate(results):
    expected = padded[i, y[i] : y[i] + 10, x[i] : x[i] + 12]
    if flip[i]:
      expected = expected[:, ::-1]
    np.testing.assert_array_equal(result, expected)


def test_batches_of_no_image_of_one_and_of_one_op(pillow, apply_ops):
  image = np.random.default_rng(6).integers(0, 256, (1, 8, 8, 3), np.uint8)
  empty = apply_ops(image[:0], np.zeros(0, np.int32), np.zeros(0, np.float32))
  assert empty.shape == (0, 8, 8, 3)
  assert empty.dtype == tf.float32
  for op, name in enumerate(image_ops.OPS):
    result = apply_ops(image, np.array([op], np.int32), np.float32([0.5]))
    assert result.shape == image.shape
    if name not in ('posterize', 'solarize'):
      expected = pillow.apply(image[0], name, 0.5)
      np.testing.assert_array_equal(result[0], expected)


def test_contrast_of_a_large_image(pillow, apply_ops):
  image = np.full([1, 2100, 2100, 3], 250, np.uint8)
  image[0, :, :1050] = 240
  op = np.array([image_ops.OPS.index('contrast')], np.int32)
  ours = apply_ops(image, op, np.float32([0.5])).numpy()[0]
  np.testing.assert_array_equal(ours, pillow.apply(image[0], 'contrast', 0.5))
