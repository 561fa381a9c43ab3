"""Pillow's image operations in the graph, a different one for each image.

Each image of a batch has its own operation and argument. Results equal Pillow's
bit for bit: they are whole numbers after every operation, geometric operations
take the nearest pixel, and uncovered pixels are black unless told otherwise.
The batch is split by kind of operation and put together again, so that each
operation is computed only for the images that need it.

Functions take images of any type with values from 0 to 255, and return float32,
which holds these exactly. GPUs lack several of the operations for uint8.

Operations and their arguments (those of Pillow's functions):

*   identity, autocontrast, equalize: no argument. As in Pillow, equalize does
    not change images of less than about 256 pixels.
*   posterize: the bits to keep of each channel, 1 to 8.
*   solarize: values >= the argument are inverted, 0 to 256.
*   brightness, color, contrast, sharpness: the factor of
    `PIL.ImageEnhance.*.enhance`, >= 0; 1 changes nothing. color does not change
    images with one channel.
*   rotate: degrees, counter-clockwise.
*   shear_x, shear_y: the coefficient of `Image.transform(AFFINE)`.
*   translate_x, translate_y: pixels, as coefficients of
    `Image.transform(AFFINE)`: positive ones move the image to the left, or up.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math

from tff_fssl.lazy import np, tf

# Ordered by kind, which follows from the index: identity, table, blend, affine.
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

# Pillow converts RGB to gray in fixed point, with 16 bits after the point.
_GRAY_WEIGHTS = (19595, 38470, 7471)


def apply(
  images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor, uncovered: int = 0
) -> tf.Tensor:
  """Applies one operation to each image.

  Args:
    images: [B, H, W, C], C 1 or 3. All but B static. B may be 0.
    ops: int32 [B], indices into `OPS`.
    args: float32 [B], their arguments. See the module's docstring.
    uncovered: The value, 0 to 255, of pixels that a rotation uncovers.

  Returns:
    float32 [B, H, W, C].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import image_ops
    >>> image = tf.reshape(tf.constant([10, 100, 200], tf.uint8), [1, 1, 3, 1])
    >>> for name, argument in (('solarize', 128.0), ('translate_x', 1.0)):
    ...   op = tf.constant([image_ops.OPS.index(name)])
    ...   changed = image_ops.apply(image, op, tf.constant([argument]))
    ...   print(name, changed.numpy().ravel())
    solarize [ 10. 100.  55.]
    translate_x [100. 200.   0.]
  """
  images = tf.cast(images, tf.float32)
  kinds = tf.gather(tf.constant(_KINDS), ops)
  order = tf.dynamic_partition(tf.range(tf.shape(ops)[0]), kinds, 4)
  parts = [tf.gather(images, order[0])]
  affine = functools.partial(_affine, uncovered=uncovered)
  functions: tuple[Callable[..., tf.Tensor], ...] = (_table, _blend, affine)
  for indices, function in zip(order[1:], functions):
    parts.append(
      function(
        tf.gather(images, indices),
        tf.gather(ops, indices),
        tf.gather(args, indices),
      )
    )
  return tf.ensure_shape(tf.dynamic_stitch(order, parts), images.shape)


def _is(ops: tf.Tensor, name: str, rank: int) -> tf.Tensor:
  """Compares operations with `name`: bool [B, 1, ...] of rank `rank`."""
  flags = tf.equal(ops, OPS.index(name))
  return tf.reshape(flags, [-1] + [1] * (rank - 1))


def _offset_sort_by_name(images: tf.Tensor) -> tf.Tensor:
  """Adds 256 * (image index * channels + channel index) to values, int32."""
  channels = images.shape[-1]
  starts = tf.range(tf.shape(images)[0] * channels) * 256
  return tf.cast(images, tf.int32) + tf.reshape(starts, [-1, 1, 1, channels])


def _stretched_tables(low: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
  """Autocontrast's tables, int32 [B, C, 256], from extremes [B, C, 1]."""
  # In double precision and in Pillow's order of operations, since results fall
  # on the edges between integers.
  values = tf.range(256, dtype=tf.int32)
  scale = 255.0 / tf.cast(tf.maximum(high - low, 1), tf.float64)
  offset = -tf.cast(low, tf.float64) * scale
  stretched = tf.cast(values, tf.float64) * scale + offset
  stretched = tf.cast(tf.clip_by_value(stretched, 0.0, 255.0), tf.int32)
  return tf.where(high > low, stretched, values)


def _equalized_tables(images: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
  """Computes equalize's tables, int32 [B, C, 256], by maxima [B, C, 1]."""
  channels = images.shape[-1]
  size = tf.shape(images)[0] * channels * 256
  histogram = tf.math.bincount(
    _offset_sort_by_name(images), minlength=size, maxlength=size
  )
  histogram = tf.reshape(histogram, [-1, channels, 256])
  below = tf.cumsum(histogram, axis=-1, exclusive=True)
  # All pixels except those of the highest value are spread over 255 steps.
  step = tf.gather(below, high, batch_dims=2) // 255
  tables = tf.minimum((step // 2 + below) // tf.maximum(step, 1), 255)
  return tf.where(step > 0, tables, tf.range(256, dtype=tf.int32))


def _table(images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor) -> tf.Tensor:
  """Applies operations that map each channel's values by a table."""
  values = tf.range(256, dtype=tf.int32)
  low = tf.cast(tf.reduce_min(images, [1, 2]), tf.int32)[..., None]
  high = tf.cast(tf.reduce_max(images, [1, 2]), tf.int32)[..., None]
  args = args[:, None, None]
  # Clipped, since the arguments of other operations get here, too.
  dropped = 8 - tf.clip_by_value(tf.cast(args, tf.int32), 0, 8)
  posterized = values - values % tf.bitwise.left_shift(1, dropped)
  solarized = tf.where(tf.cast(values, tf.float32) < args, values, 255 - values)
  tables = tf.where(_is(ops, 'posterize', 3), posterized, solarized)
  tables = tf.where(
    _is(ops, 'autocontrast', 3), _stretched_tables(low, high), tables
  )
  # Histograms are expensive: only the images that need them get one.
  chosen = tf.where(tf.equal(ops, OPS.index('equalize')))
  equalized = _equalized_tables(
    tf.gather_nd(images, chosen), tf.gather_nd(high, chosen)
  )
  tables = tf.tensor_scatter_nd_update(tables, chosen, equalized)
  tables = tf.reshape(tf.cast(tables, tf.float32), [-1])
  return tf.gather(tables, _offset_sort_by_name(images))


def convert_to_gray(images: tf.Tensor) -> tf.Tensor:
  """Computes Pillow's luminance.

      floor((19595 R + 38470 G + 7471 B) / 2^16 + 1/2)

  Args:
    images: [B, H, W, C], C 1 or 3.

  Returns:
    int32 [B, H, W, 1], in [0, 255]. Images of one channel are unchanged.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import image_ops
    >>> colors = tf.cast(255 * tf.eye(3, dtype=tf.int32)[None, None], tf.uint8)
    >>> print(image_ops.convert_to_gray(colors).numpy().ravel())  # R, G, B.
    [ 76 150  29]
  """
  values = tf.cast(images, tf.int32)
  if images.shape[-1] == 1:
    return values
  red, green, blue = (
    values[..., i : i + 1] * weight for i, weight in enumerate(_GRAY_WEIGHTS)
  )
  return tf.bitwise.right_shift(red + green + blue + 2**15, 16)


def _smooth(images: tf.Tensor) -> tf.Tensor:
  """Applies Pillow's SMOOTH filter to float32 images, except at the edges."""
  _, height, width, _ = images.shape
  if min(height, width) < 3:
    return images
  rows = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
  box = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
  inner = images[:, 1:-1, 1:-1]
  # The kernel is 5 in the middle, else 1. Its sum is 13, so that no quotient is
  # halfway between integers.
  inner = tf.floor((box + 4.0 * inner) * (1 / 13) + 0.5)
  middle = tf.concat([images[:, 1:-1, :1], inner, images[:, 1:-1, -1:]], axis=2)
  return tf.concat([images[:, :1], middle, images[:, -1:]], axis=1)


def _blend(images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor) -> tf.Tensor:
  """Applies operations that blend with a degenerate image, or away from it."""
  gray = convert_to_gray(images)
  # Twice the sum exceeds int32 in images above 4 million pixels.
  total = tf.reduce_sum(tf.cast(gray, tf.int64), [1, 2], keepdims=True)
  num_pixels = images.shape[1] * images.shape[2]
  # Rounds half up, in integers.
  mean = tf.cast((2 * total + num_pixels) // (2 * num_pixels), gray.dtype)
  flat = tf.where(
    _is(ops, 'color', 4),
    gray,
    tf.where(_is(ops, 'contrast', 4), mean, tf.zeros_like(mean)),
  )
  degenerate = tf.where(
    _is(ops, 'sharpness', 4), _smooth(images), tf.cast(flat, tf.float32)
  )
  factor = tf.reshape(args, [-1, 1, 1, 1])
  blended = degenerate + factor * (images - degenerate)
  return tf.floor(tf.clip_by_value(blended, 0.0, 255.0))


def _gather_pixels(images: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
  """Gathers pixels of the batch by index [B, H, W], black for negative ones."""
  _, height, width, channels = images.shape
  pixels = tf.reshape(images, [-1, channels])
  black = tf.shape(pixels)[0]
  pixels = tf.pad(pixels, [[0, 1], [0, 0]])
  index = tf.where(index < 0, black, index)
  return tf.ensure_shape(
    tf.gather(pixels, index), [None, height, width, channels]
  )


def _affine(
  images: tf.Tensor, ops: tf.Tensor, args: tf.Tensor, uncovered: int
) -> tf.Tensor:
  """Applies operations that fetch each pixel from another place."""
  _, height, width, _ = images.shape
  args = tf.cast(args, tf.float64)

  def only(name):
    return tf.where(tf.equal(ops, OPS.index(name)), args, tf.zeros_like(args))

  # For centers of pixels: x_in = xx x + xy y + x0, y_in = yx x + yy y + y0.
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
    # Pillow computes in fixed point, with 16 bits after the point.
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
  images = _gather_pixels(images, tf.where(inside, first + y * width + x, -1))
  if not uncovered:
    return images
  is_uncovered = turned[:, None, None] & ~inside
  return tf.where(is_uncovered[..., None], float(uncovered), images)


def shear_smoothly(
  images: tf.Tensor, along_y: tf.Tensor, coefficients: tf.Tensor
) -> tf.Tensor:
  """Shears images by bilinear interpolation, as Pillow does.

  Args:
    images: [B, H, W, C]. All but B static.
    along_y: bool [B], whether `shear_y` is meant, else `shear_x`.
    coefficients: float32 [B], of `Image.transform(AFFINE, BILINEAR)`. They are
      rounded to six decimals.

  Returns:
    float32 [B, H, W, C].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import image_ops
    >>> image = tf.reshape(tf.constant([10, 100, 200], tf.uint8), [1, 1, 3, 1])
    >>> along_y = tf.constant([False])
    >>> smooth = image_ops.shear_smoothly(image, along_y, tf.constant([0.5]))
    >>> print(smooth.numpy().ravel())
    [ 32. 125. 200.]
  """
  images = tf.cast(images, tf.float32)
  _, height, width, _ = images.shape
  # In Pillow's precision and order: results are cut off to integers.
  by = tf.round(tf.cast(coefficients, tf.float64) * 1e6) / 1e6
  by = tf.reshape(by, [-1, 1, 1])
  along_y = tf.reshape(along_y, [-1, 1, 1])
  columns = (tf.range(width, dtype=tf.float64) + 0.5)[None, None, :]
  rows = (tf.range(height, dtype=tf.float64) + 0.5)[None, :, None]
  # A shear moves pixels along one axis only, so that two of the four neighbours
  # have all the weight.
  at = tf.where(along_y, by * columns + rows, columns + by * rows)
  size = tf.where(along_y, height, width)
  inside = (at >= 0.0) & (at < tf.cast(size, tf.float64))
  at -= 0.5
  low = tf.floor(at)
  share = (at - low)[..., None]
  low = tf.cast(low, tf.int32)
  first = tf.range(tf.shape(images)[0])[:, None, None] * (height * width)
  place = tf.where(
    along_y,
    tf.range(width)[None, None, :],
    tf.range(height)[None, :, None] * width,
  )

  def neighbour(offset):
    moved = tf.clip_by_value(low + offset, 0, size - 1)
    moved *= tf.where(along_y, width, 1)
    index = tf.where(inside, first + place + moved, -1)
    return tf.cast(_gather_pixels(images, index), tf.float64)

  here = neighbour(0)
  return tf.cast(tf.floor(here + (neighbour(1) - here) * share), tf.float32)


def flip_and_crop(
  images: tf.Tensor,
  flip: tf.Tensor,
  offset_y: tf.Tensor,
  offset_x: tf.Tensor,
  padding: tuple[int, int],
) -> tf.Tensor:
  """Pads images by reflection, crops them, then mirrors some.

  Args:
    images: [B, H, W, C].
    flip: bool [B], whether to mirror left and right.
    offset_y: int32 [B], upper edge of the crop, 0 to twice the padding.
    offset_x: int32 [B], left edge of the crop, 0 to twice the padding.
    padding: Padding of height and width on each side, less than the side.

  Returns:
    float32 [B, H, W, C].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import image_ops
    >>> image = tf.reshape(tf.constant([1, 2, 3, 4], tf.uint8), [1, 1, 4, 1])
    >>> left = tf.constant([0])
    >>> for flip in (False, True):  # Padded by reflection: 2 1 2 3 4 3.
    ...   cropped = image_ops.flip_and_crop(
    ...     image, tf.constant([flip]), left, left, padding=(0, 1)
    ...   )
    ...   print(cropped.numpy().ravel())
    [2. 1. 2. 3.]
    [3. 2. 1. 2.]
  """
  images = tf.cast(images, tf.float32)
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
    images: [B, H, W, C].
    boxes: int32 [B, 4]: left, upper, right and lower edge, all inclusive.
    fill: C values.

  Returns:
    float32 [B, H, W, C].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import image_ops
    >>> images = tf.zeros([1, 3, 4, 1], tf.uint8)
    >>> filled = image_ops.fill_boxes(images, tf.constant([[1, 0, 2, 1]]), (7,))
    >>> print(filled.numpy()[0, :, :, 0])
    [[0. 7. 7. 0.]
     [0. 7. 7. 0.]
     [0. 0. 0. 0.]]
  """
  images = tf.cast(images, tf.float32)
  _, height, width, channels = images.shape
  # Values of pixels in one axis, since broadcasting over a short one is slow.
  lines = tf.reshape(images, [-1, height, width * channels])

  def within(low, high, size, repeats=1):
    position = tf.repeat(tf.range(size), repeats)[None, :]
    inside = (position >= low[:, None]) & (position <= high[:, None])
    return tf.cast(inside, tf.float32)

  left, upper, right, lower = tf.unstack(boxes, axis=1)
  rows = within(upper, lower, height)[:, :, None]
  columns = within(left, right, width, channels)[:, None, :]
  color = tf.constant(np.tile(np.array(fill, np.float32), width))
  # Exactly `color` inside, exactly the image outside.
  filled = lines + rows * columns * (color - lines)
  return tf.reshape(filled, tf.shape(images))
