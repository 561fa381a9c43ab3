"""Pillow's image operations on batches, in the graph, each image its own.

An image of the batch gets the operation and the argument that are given for
it. Results are Pillow's, bit for bit: uint8 after every operation, the nearest
pixel, black where an image is moved away. Only what an operation needs is
computed, and only for the images that it is for: the batch is split by kind of
operation and put together again.

Operations and their arguments (those of Pillow's functions):

*   identity, autocontrast, equalize: none. As in Pillow, equalize leaves images
    of less than about 256 pixels alone.
*   posterize: bits kept of each channel, 1 to 8.
*   solarize: values >= the argument are inverted, 0 to 256.
*   brightness, color, contrast, sharpness: the factor of
    `PIL.ImageEnhance.*.enhance`, >= 0; 1 changes nothing. color changes nothing
    of images with one channel.
*   rotate: degrees, counter-clockwise.
*   shear_x, shear_y: the coefficient of `Image.transform(AFFINE)`.
*   translate_x, translate_y: pixels, likewise: positive moves the image to the
    left, or up.
"""

import math

import numpy as np
import tensorflow as tf

# By kind, which is told from the position: identity, table, blend, affine.
OPS = (
  'identity',
  'autocontrast',
  'equalize',
  'posterize',
  'solarize',
  'brightness',
  'color',
  'contrast',
  'sharpness',
  'rotate',
  'shear_x',
  'shear_y',
  'translate_x',
  'translate_y',
)
_FIRST_BLEND = OPS.index('brightness')
_FIRST_AFFINE = OPS.index('rotate')
_KINDS = [
  (op != 0) + (op >= _FIRST_BLEND) + (op >= _FIRST_AFFINE)
  for op in range(len(OPS))
]

# Pillow turns RGB into gray by integers, 16 bits after the point.
_GRAY_WEIGHTS = (19595, 38470, 7471)


def apply(images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor) -> tf.Tensor:
  """Applies one operation to each image.

  Args:
    images: uint8 [B, H, W, C], C 1 or 3; all but B static; B may be 0.
    ops: int32 [B], indices into `OPS`.
    args: float32 [B], their arguments; see the module's description.

  Returns:
    uint8 [B, H, W, C].
  """
  kinds = tf.gather(tf.constant(_KINDS), ops)
  order = tf.dynamic_partition(tf.range(tf.shape(ops)[0]), kinds, 4)
  parts = [tf.gather(images, order[0])]
  for indices, function in zip(order[1:], (_table, _blend, _affine)):
    parts.append(
      function(
        tf.gather(images, indices),
        tf.gather(ops, indices),
        tf.gather(args, indices),
      )
    )
  return tf.ensure_shape(tf.dynamic_stitch(order, parts), images.shape)


def _is(ops: tf.Tensor, name: str, rank: int) -> tf.Tensor:
  """Which operations are `name`, bool [B, 1, ...] of a rank."""
  flags = tf.equal(ops, OPS.index(name))
  return tf.reshape(flags, [-1] + [1] * (rank - 1))


def _offset_by_channel(images: tf.Tensor) -> tf.Tensor:
  """Values plus 256 times the number of image and channel, int32."""
  channels = images.shape[-1]
  starts = tf.range(tf.shape(images)[0] * channels) * 256
  return tf.cast(images, tf.int32) + tf.reshape(starts, [-1, 1, 1, channels])


def _stretched_tables(low: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
  """Autocontrast's tables, int32 [B, C, 256], from extremes [B, C, 1]."""
  # In double precision, operation by operation as in Pillow, for results fall
  # on the edges between integers.
  values = tf.range(256, dtype=tf.int32)
  scale = 255.0 / tf.cast(tf.maximum(high - low, 1), tf.float64)
  offset = -tf.cast(low, tf.float64) * scale
  stretched = tf.cast(values, tf.float64) * scale + offset
  stretched = tf.cast(tf.clip_by_value(stretched, 0.0, 255.0), tf.int32)
  return tf.where(high > low, stretched, values)


def _equalized_tables(images: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
  """Equalize's tables, int32 [B, C, 256]; `high` are maxima [B, C, 1]."""
  channels = images.shape[-1]
  size = tf.shape(images)[0] * channels * 256
  histogram = tf.math.bincount(
    _offset_by_channel(images), minlength=size, maxlength=size
  )
  histogram = tf.reshape(histogram, [-1, channels, 256])
  below = tf.cumsum(histogram, axis=-1, exclusive=True)
  # All pixels but those of the highest value are spread over 255 steps.
  step = tf.gather(below, high, batch_dims=2) // 255
  tables = tf.minimum((step // 2 + below) // tf.maximum(step, 1), 255)
  return tf.where(step > 0, tables, tf.range(256, dtype=tf.int32))


def _table(images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor) -> tf.Tensor:
  """Operations that map each channel's values by a table."""
  values = tf.range(256, dtype=tf.int32)
  low = tf.cast(tf.reduce_min(images, [1, 2]), tf.int32)[..., None]
  high = tf.cast(tf.reduce_max(images, [1, 2]), tf.int32)[..., None]
  args = args[:, None, None]
  # Clipped, for these are computed for the other operations' arguments too.
  dropped = 8 - tf.clip_by_value(tf.cast(args, tf.int32), 0, 8)
  posterized = values - values % tf.bitwise.left_shift(1, dropped)
  solarized = tf.where(tf.cast(values, tf.float32) < args, values, 255 - values)
  tables = tf.where(_is(ops, 'posterize', 3), posterized, solarized)
  tables = tf.where(
    _is(ops, 'autocontrast', 3), _stretched_tables(low, high), tables
  )
  # Histograms cost: they are made only of the images that need them.
  chosen = tf.where(tf.equal(ops, OPS.index('equalize')))
  equalized = _equalized_tables(
    tf.gather_nd(images, chosen), tf.gather_nd(high, chosen)
  )
  tables = tf.tensor_scatter_nd_update(tables, chosen, equalized)
  tables = tf.reshape(tf.cast(tables, tf.uint8), [-1])
  return tf.gather(tables, _offset_by_channel(images))


def to_gray(images: tf.Tensor) -> tf.Tensor:
  """Pillow's luminance, int32 [B, H, W, 1], of uint8 [B, H, W, C]."""
  values = tf.cast(images, tf.int32)
  if images.shape[-1] == 1:
    return values
  red, green, blue = (
    values[..., i : i + 1] * weight for i, weight in enumerate(_GRAY_WEIGHTS)
  )
  return tf.bitwise.right_shift(red + green + blue + 2**15, 16)


def _smooth(images: tf.Tensor) -> tf.Tensor:
  """Pillow's SMOOTH filter of float32 images; the outermost pixels stay."""
  _, height, width, _ = images.shape
  if min(height, width) < 3:
    return images
  rows = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
  box = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
  inner = images[:, 1:-1, 1:-1]
  # The kernel is 1 but for 5 in the middle; 13 of a sum is never half-way.
  inner = tf.floor((box + 4.0 * inner) * (1 / 13) + 0.5)
  middle = tf.concat([images[:, 1:-1, :1], inner, images[:, 1:-1, -1:]], axis=2)
  return tf.concat([images[:, :1], middle, images[:, -1:]], axis=1)


def _blend(images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor) -> tf.Tensor:
  """Operations that blend with, or away from, a degenerate image."""
  values = tf.cast(images, tf.float32)
  gray = to_gray(images)
  total = tf.reduce_sum(gray, [1, 2], keepdims=True)
  num_pixels = images.shape[1] * images.shape[2]
  # Rounded half up, in integers.
  mean = (2 * total + num_pixels) // (2 * num_pixels)
  flat = tf.where(
    _is(ops, 'color', 4),
    gray,
    tf.where(_is(ops, 'contrast', 4), mean, tf.zeros_like(mean)),
  )
  degenerate = tf.where(
    _is(ops, 'sharpness', 4), _smooth(values), tf.cast(flat, tf.float32)
  )
  factor = tf.reshape(args, [-1, 1, 1, 1])
  blended = degenerate + factor * (values - degenerate)
  return tf.cast(tf.clip_by_value(blended, 0.0, 255.0), tf.uint8)


def _gather_pixels(images: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
  """Pixels of the batch by number, [B, H, W]; black for those below 0."""
  _, height, width, channels = images.shape
  pixels = tf.reshape(images, [-1, channels])
  black = tf.shape(pixels)[0]
  pixels = tf.pad(pixels, [[0, 1], [0, 0]])
  index = tf.where(index < 0, black, index)
  return tf.ensure_shape(
    tf.gather(pixels, index), [None, height, width, channels]
  )


def _affine(images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor) -> tf.Tensor:
  """Operations that fetch each pixel from another place."""
  _, height, width, _ = images.shape
  args = tf.cast(args, tf.float64)
  zero = tf.zeros_like(args)

  def only(name, value=args, otherwise=zero):
    return tf.where(tf.equal(ops, OPS.index(name)), value, otherwise)

  # x_in = xx x + xy y + x0, y_in = yx x + yy y + y0, of pixels' centres.
  angle = only('rotate') * (-math.pi / 180)
  cosine, sine = tf.cos(angle), tf.sin(angle)
  xx, xy = cosine, sine + only('shear_x')
  yx, yy = -sine + only('shear_y'), cosine
  center_x, center_y = width / 2, height / 2
  turned = tf.equal(ops, OPS.index('rotate'))
  x0 = tf.where(
    turned, center_x - xx * center_x - xy * center_y, only('translate_x')
  )
  y0 = tf.where(
    turned, center_y - yx * center_x - yy * center_y, only('translate_y')
  )

  def fixed(value):
    # Pillow's numbers have 16 bits after the point.
    value = tf.cast(tf.floor(value * 65536 + 0.5), tf.int32)
    return tf.reshape(value, [-1, 1, 1])

  columns = tf.range(width)[None, None, :]
  rows = tf.range(height)[None, :, None]
  x = fixed(xx) * columns + (fixed(xy) * rows + fixed(x0 + (xx + xy) * 0.5))
  y = fixed(yx) * columns + (fixed(yy) * rows + fixed(y0 + (yx + yy) * 0.5))
  x = tf.bitwise.right_shift(x, 16)
  y = tf.bitwise.right_shift(y, 16)
  inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
  first = tf.range(tf.shape(images)[0])[:, None, None] * (height * width)
  return _gather_pixels(images, tf.where(inside, first + y * width + x, -1))


def flip_and_crop(
  images: tf.Tensor,
  flip: tf.Tensor,
  offset_y: tf.Tensor,
  offset_x: tf.Tensor,
  padding: tuple[int, int],
) -> tf.Tensor:
  """Crops of images that were padded by reflection, then mirrored.

  Args:
    images: uint8 [B, H, W, C].
    flip: bool [B], whether to mirror left and right.
    offset_y: int32 [B], upper edge of the crop, 0 to twice the padding.
    offset_x: int32 [B], its left edge.
    padding: Of height and width, at each side; less than the side.

  Returns:
    uint8 [B, H, W, C].
  """
  _, height, width, _ = images.shape

  def source(offset, size, pad):
    position = tf.abs(offset[:, None] + (tf.range(size) - pad)[None, :])
    return (size - 1) - tf.abs((size - 1) - position)

  rows = source(offset_y, height, padding[0])
  columns = source(offset_x, width, padding[1])
  columns = tf.where(flip[:, None], tf.reverse(columns, [1]), columns)
  first = tf.range(tf.shape(images)[0])[:, None] * (height * width)
  index = (first + rows * width)[:, :, None] + columns[:, None, :]
  return _gather_pixels(images, index)


def fill_boxes(
  images: tf.Tensor, boxes: tf.Tensor, fill: tuple[int, ...]
) -> tf.Tensor:
  """Fills a box in each image.

  Args:
    images: uint8 [B, H, W, C].
    boxes: int32 [B, 4]: left, upper, right and lower edge, all inside the box.
    fill: C values.

  Returns:
    uint8 [B, H, W, C].
  """
  _, height, width, channels = images.shape
  # Pixels' values side by side: broadcasting over short last axes is slow.
  lines = tf.reshape(images, [-1, height, width * channels])

  def within(low, high, size, repeats=1):
    position = tf.repeat(tf.range(size), repeats)[None, :]
    inside = (position >= low[:, None]) & (position <= high[:, None])
    return tf.cast(inside, tf.uint8)

  left, upper, right, lower = tf.unstack(boxes, axis=1)
  rows = within(upper, lower, height)[:, :, None]
  columns = within(left, right, width, channels)[:, None, :]
  color = tf.constant(np.tile(np.array(fill, np.uint8), width))
  # uint8 wraps around: exactly `color` inside, exactly the image outside.
  filled = lines + rows * columns * (color - lines)
  return tf.reshape(filled, tf.shape(images))
