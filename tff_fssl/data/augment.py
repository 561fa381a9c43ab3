"""Views of images: plain, weakly augmented and strongly augmented.

Every function maps a batch uint8 [B, H, W, C] (C 1 or 3, B may be 0) to float32
[B, H, W, C], normalized by (x / 255 - mean) / std, in the graph. Random draws
are a function of the seed only, and each image has its own draws.

A weak view is mirrored with probability 1/2 (if `flip`), then cropped at random
from the image padded by reflection with 1/8 of each side, rounded down (4
pixels of 32; at least 1 for sides of 8 or more). With `crop_and_flip` off, it
is the image as it is.

A strong view is a weak view with its own draws, to which operations of
`image_ops` are applied, drawn uniformly and with replacement from all 14, and
then cutout.

*   Policy `fl2`, as in (FL)^2's code: 3 operations, all applied. Arguments are
    uniform: factors of brightness, color, contrast and sharpness in [.05, .95),
    4 to 7 bits, rotation within 30 degrees, shear within .3, solarize threshold
    in [0, 256), translation within .3 of the side. Cutout has side s, uniform
    in [0, .5) of the width, and a center c with coordinates in (1, side]. It
    extends from low = floor(max(0, c - s / 2)) to floor(min(side, low + s)),
    both inclusive, and is filled with (125, 123, 114). So boxes at the left and
    upper edges are not truncated, as in the code. Otherwise its box is
    FixMatch's.
*   Policy `fixmatch`, RandAugment as in FixMatch's code (Sohn et al. 2020, n 2,
    m 10): 2 operations, each applied with probability 1/2 and at its own level
    L, uniform in 1, ..., 9: factors .1 + .18 L, 4 - floor(.4 L) bits, rotation
    +-floor(3 L) degrees, shear +-.03 L, solarize threshold 256 - floor(25.6 L),
    translation +-floor(L) pixels of 32, in proportion for other sides. Cutout
    of half the shorter side around a pixel, truncated at all edges, is filled
    with gray. Deviation: in FixMatch's code, pixels that a geometric operation
    uncovers end up gray unless an operation on values follows. Here they stay
    black, as in `fl2`.
*   Policy `sage`, as in SAGE's code (Liu et al., CVPR 2025): as `fixmatch`, but
    factors .05 + .09 L, 4 + floor(.4 L) bits, translation +-floor(.03 L side),
    and a box of half the shorter side s, from low = floor(max(0, u - s / 4)) to
    floor(min(side, low + s / 2)), both inclusive, for u uniform in [0, side).

*   Policy `semifl`, as in the code of SemiFL (Diao et al., NeurIPS 2022) and of
    FedDB: 2 of 15 operations, each applied with a probability that is uniform
    in [.2, .8), thus 1/2, at its greatest strength: factors 1.9, 4 bits,
    rotation +-30 degrees, shear +-.3 (interpolated), solarize threshold 0,
    translation +-100 pixels, which leave a side of 32 black. Two are not in
    `image_ops`: inversion, and a gray box of 40 pixels, from low =
    floor(max(0, u - 20)) to floor(min(side, low + 40)), both inclusive, for u
    uniform in [0, side). No cutout follows.
*   Policy `fedmatch`, as in FedMatch's code (Jeong et al., ICLR 2021): 6
    operations, all applied, of the 14 without equalize. For each image, a bound
    in {2, 3, 4, 5} is drawn, and for each operation a level L, uniform in 0,
    ..., bound - 1: factors of color and sharpness 1 +- .1 L, of contrast 1 +-
    .5 L / 9, of brightness 1 +- .3 L / 9, round(8 - 4 L / 9) bits, rotation by
    40 L degrees, shear +-.3 L / 9, solarize threshold 256 - 25 L / 9,
    translation +-.2 L / 9 of the side. Pixels that a rotation uncovers are
    gray. No cutout follows. Deviation: shears take the nearest pixel, not
    Pillow's bicubic mean.
*   Policy `weak`, for ablations: no operations.

For images with one channel, color changes nothing, and cutout fills with the
luminance of its color.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

from tff_fssl.data import image_ops
from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.lazy import np, tf

# Different salts make views with the same seed independent.
WEAK_SALT = 0x5EED0001
STRONG_SALT = 0x5EED0002


class Views(NamedTuple):
  """Functions that convert stored examples to inputs of a network.

  Attributes:
    plain: x -> normalized, float32.
    weak: (x, seed) -> weakly augmented, normalized. `seed` is int32 [2]. A
      `RandomView` is faster in training than another function.
    strong: (x, seed) -> strongly augmented, normalized, likewise.
    accepts: x -> whether all values of these examples are possible, bool
      scalar. Other clients are rejected. None: all are possible, as any bytes
      can be an image.
  """

  plain: Callable[[tf.Tensor], tf.Tensor]
  weak: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
  strong: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
  accepts: Callable[[tf.Tensor], tf.Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class RandomView:
  """A random view in two parts, so that several seeds can share one.

  Attributes:
    num_draws: K, the number of random numbers for an example.
    render: (examples [N, ...], draws float32 [N, K] in [0, 1)) -> their views.
      Each is a function of its own example and draws only.
    salt: int32. Views with the same seed but other salts are independent.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import augment
    >>> noisy = augment.RandomView(
    ...   num_draws=2, render=lambda x, draws: x + draws - 0.5, salt=1
    ... )
    >>> x, seed = tf.zeros([2, 2]), tf.constant([0, 7])
    >>> print(noisy(x, seed).numpy().round(3))  # Examples have own draws.
    [[-0.051  0.095]
     [-0.06  -0.038]]
    >>> print(noisy(x[:1], seed).numpy().round(3))  # The seed determines them.
    [[-0.051  0.095]]
  """

  num_draws: int
  render: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
  salt: int

  def draw(self, num: tf.Tensor | int, seed: tf.Tensor) -> tf.Tensor:
    """Draws for `num` examples from `seed`, int32 [2]: float32 [num, K]."""
    seed = tf.bitwise.bitwise_xor(tf.cast(seed, tf.int32), [0, self.salt])
    return tf.random.stateless_uniform(
      [num, self.num_draws], seed, alg='philox'
    )

  def __call__(self, examples: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Renders the view of examples with one seed."""
    return self.render(examples, self.draw(tf.shape(examples)[0], seed))


def input_shape(views: Views, stored: tf.TensorSpec) -> tuple[int | None, ...]:
  """Finds the shape of one example as the network sees it.

  Args:
    views: The preprocessing. `plain` is traced.
    stored: The spec of a batch of stored examples, [None, ...].

  Returns:
    The shape, with None for a dimension that `plain` does not fix.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import augment
    >>> views = augment.build_views((8, 8, 1), mean=(0.5,), std=(1,), flip=True)
    >>> augment.input_shape(views, tf.TensorSpec([None, 8, 8, 1], tf.uint8))
    (8, 8, 1)
  """
  plain = tf.function(views.plain, autograph=False)
  outputs = plain.get_concrete_function(stored).outputs
  return tuple(outputs[0].shape[1:])


# Operations of `semifl` that are not in `image_ops.OPS`.
_BOX, _SMOOTH_SHEAR_X, _SMOOTH_SHEAR_Y = range(
  len(image_ops.OPS), len(image_ops.OPS) + 3
)


@dataclasses.dataclass(frozen=True)
class _Policy:
  """A policy for strong views.

  Attributes:
    num_ops: The number of operations.
    probability: The probability of applying each operation.
    arguments: (ops int32 [B, N], draws float32 [B, N]) -> float32 [B, N], the
      operations' arguments.
    boxes: draws float32 [B, 3] -> int32 [B, 4], cutout boxes for `fill_boxes`.
      None: there are none.
    fill: The RGB colour of cutout.
    pool: Indices of the operations to draw from: of `image_ops.OPS`, or one of
      the operations below.
    uncovered: The value of pixels that a rotation uncovers.
  """

  num_ops: int
  probability: float
  arguments: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
  boxes: Callable[[tf.Tensor], tf.Tensor] | None
  fill: tuple[int, int, int]
  pool: Sequence[int] = tuple(range(len(image_ops.OPS)))
  uncovered: int = 0

  @property
  def _num_boxes(self) -> int:
    """Returns the boxes of an image: one at last, or one in each operation."""
    return self.num_ops if _BOX in self.pool else 1

  @property
  def num_draws(self) -> int:
    """Returns the random numbers for an image."""
    return 3 * (self.num_ops + self._num_boxes)

  def change(
    self, images: tf.Tensor, draws: tf.Tensor, fill: tuple[int, ...]
  ) -> tf.Tensor:
    """Changes images.

    Args:
      images: float32 [B, H, W, C].
      draws: float32 [B, num_draws], in [0, 1).
      fill: The colour of cutout, C values.

    Returns:
      float32 [B, H, W, C].
    """
    first, of_ops, others = tf.split(
      draws, [3, 3 * self.num_ops, 3 * (self._num_boxes - 1)], axis=1
    )
    places = tf.split(tf.concat([first, others], 1), self._num_boxes, axis=1)
    boxes = [self.boxes(of_box) for of_box in places] if self.boxes else []
    ops, args = _choose_ops(self, of_ops)
    for i in range(self.num_ops):
      if _BOX in self.pool:
        images = _apply_of_semifl(images, ops[:, i], args[:, i], boxes[i], fill)
      else:
        images = image_ops.apply(images, ops[:, i], args[:, i], self.uncovered)
    if _BOX in self.pool or not boxes:
      return images
    return image_ops.fill_boxes(images, boxes[0], fill)


def _check(
  image_shape: tuple[int, ...],
  policy: str,
  mean: tuple[float, ...],
  std: tuple[float, ...],
) -> None:
  """Rejects arguments of `build_views` that are not allowed."""
  height, width, channels = image_shape
  if channels not in (1, 3) or min(height, width) < 1:
    raise UsageError(
      f'images of {list(image_shape)}: must be [height, width, channels] with 1'
      ' or 3 channels'
    )
  if len(mean) != channels or len(std) != channels or min(std) <= 0:
    raise UsageError(
      f'mean {tuple(mean)} and std {tuple(std)}: must be one number for each'
      f' of {channels} channels, with std greater than 0'
    )
  if policy not in names.AUGMENTATION_POLICIES:
    allowed = names.AUGMENTATION_POLICIES
    raise UsageError(
      f'augmentation policy {policy!r}: allowed are {", ".join(allowed)}'
      f'{closest(policy, allowed)}'
    )


def build_views(
  image_shape: tuple[int, ...],
  *,
  policy: str = names.FL2,
  mean: tuple[float, ...],
  std: tuple[float, ...],
  flip: bool,
  crop_and_flip: bool = True,
) -> Views:
  """Builds the views of a data set's images.

  Args:
    image_shape: (height, width, channels), channels 1 or 3.
    policy: The policy for strong views, of `names.AUGMENTATION_POLICIES`.
    mean: Mean of pixels / 255, per channel.
    std: Standard deviation of pixels / 255, per channel, > 0.
    flip: Whether views may be mirrored.
    crop_and_flip: Whether weak views, and those that become strong, are cropped
      and mirrored at all.

  Returns:
    The views.

  Raises:
    UsageError: If an argument is not allowed.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import augment
    >>> views = augment.build_views((8, 8, 1), mean=(0,), std=(1,), flip=True)
    >>> x = tf.reshape(tf.cast(tf.range(0, 256, 4), tf.uint8), [1, 8, 8, 1])
    >>> for view in (views.plain(x), views.weak(x, [0, 3])):
    ...   print(view[0, 4, :, 0].numpy().round(2))  # The weak one is mirrored.
    [0.5  0.52 0.53 0.55 0.56 0.58 0.6  0.61]
    [0.72 0.74 0.72 0.71 0.69 0.67 0.66 0.64]
  """
  _check(image_shape, policy, mean, std)
  height, width, channels = image_shape
  strong_policy = _POLICIES[policy](height, width)
  fill: tuple[int, ...] = strong_policy.fill
  if channels == 1:
    gray = image_ops.convert_to_gray(tf.constant([[[fill]]], tf.uint8))
    fill = (gray.numpy().item(),)
  padding = _padding(height), _padding(width)
  # One number for every value, since broadcasting over a short axis is slow.
  pixels = height * width
  scale = np.tile(1 / (255 * np.array(std)), pixels).astype(np.float32)
  shift = np.tile(-np.array(mean) / np.array(std), pixels).astype(np.float32)

  def plain(images):
    values = tf.cast(tf.reshape(images, [-1, pixels * channels]), tf.float32)
    return tf.reshape(values * scale + shift, [-1, *image_shape])

  def weaken(images, draws):
    if not crop_and_flip:
      return tf.cast(images, tf.float32)
    # Drawn even if unused, so that `flip` does not change the other draws.
    flips = draws[:, 0] < (0.5 if flip else 0.0)
    offset_y, offset_x = (
      tf.cast(draws[:, 1 + i] * (2 * pad + 1), tf.int32)
      for i, pad in enumerate(padding)
    )
    return image_ops.flip_and_crop(images, flips, offset_y, offset_x, padding)

  def weak(images, draws):
    images = tf.ensure_shape(images, [None, *image_shape])
    return plain(weaken(images, draws))

  def strong(images, draws):
    images = tf.ensure_shape(images, [None, *image_shape])
    images = weaken(images, draws[:, :3])
    return plain(strong_policy.change(images, draws[:, 3:], fill))

  return Views(
    plain,
    RandomView(3, weak, WEAK_SALT),
    RandomView(3 + strong_policy.num_draws, strong, STRONG_SALT),
  )


def _apply_of_semifl(
  images: tf.Tensor,
  ops: tf.Tensor,
  args: tf.Tensor,
  boxes: tf.Tensor,
  fill: tuple[int, ...],
) -> tf.Tensor:
  """Applies one operation to each image, perhaps one of `_Policy.pool`'s own.

  Args:
    images: float32 [B, H, W, C].
    ops: int32 [B].
    args: float32 [B].
    boxes: int32 [B, 4], for images whose operation is a box.
    fill: The colour of boxes.

  Returns:
    float32 [B, H, W, C].
  """
  own = tf.where(ops < len(image_ops.OPS), ops, 0)
  images = image_ops.apply(images, own, args)
  # An empty box fills nothing.
  is_box = tf.equal(ops, _BOX)[:, None]
  images = image_ops.fill_boxes(
    images, tf.where(is_box, boxes, [1, 1, 0, 0]), fill
  )
  sheared = tf.where(ops > _BOX)
  smooth = image_ops.shear_smoothly(
    tf.gather_nd(images, sheared),
    tf.equal(tf.gather_nd(ops, sheared), _SMOOTH_SHEAR_Y),
    tf.gather_nd(args, sheared),
  )
  return tf.tensor_scatter_nd_update(images, sheared, smooth)


def _padding(side: int) -> int:
  return max(side // 8, 1) if side >= 8 else 0


def _choose_ops(
  policy: _Policy, draws: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Derives operations and arguments, both [B, N], from draws [B, 3 N]."""
  which, how, whether = tf.split(draws, 3, axis=1)
  ops = tf.cast(which * len(policy.pool), tf.int32)
  if tuple(policy.pool) != _Policy.pool:
    ops = tf.gather(tf.constant(policy.pool), ops)
  args = policy.arguments(ops, how)
  if policy.probability < 1:
    # Operation 0 is the identity.
    ops = tf.where(whether < policy.probability, ops, 0)
  return ops, args


def _boxes(
  height: int,
  width: int,
  edges: Callable[[tf.Tensor, tf.Tensor, int], tuple[tf.Tensor, tf.Tensor]],
) -> Callable[[tf.Tensor], tf.Tensor]:
  """Makes boxes of edges.

  Args:
    height: The height of images.
    width: Their width.
    edges: (draw of the size, draw of the place, length of an axis) -> the lower
      and the upper edge in this axis.

  Returns:
    As `_Policy.boxes`.
  """

  def boxes(draws):
    left, right = edges(draws[:, 0], draws[:, 1], width)
    upper, lower = edges(draws[:, 0], draws[:, 2], height)
    return tf.cast(tf.stack([left, upper, right, lower], axis=1), tf.int32)

  return boxes


def _fl2_policy(height: int, width: int) -> _Policy:
  ranges = {
    'posterize': (4, 8),
    'solarize': (0, 256),
    'brightness': (0.05, 0.95),
    'color': (0.05, 0.95),
    'contrast': (0.05, 0.95),
    'sharpness': (0.05, 0.95),
    'rotate': (-30, 30),
    'shear_x': (-0.3, 0.3),
    'shear_y': (-0.3, 0.3),
    'translate_x': (-0.3 * width, 0.3 * width),
    'translate_y': (-0.3 * height, 0.3 * height),
  }
  bounds = np.array(
    [ranges.get(op, (0, 0)) for op in image_ops.OPS], np.float32
  )

  def arguments(ops, draws):
    low_high = tf.gather(tf.constant(bounds), ops)
    low, high = low_high[..., 0], low_high[..., 1]
    return low + draws * (high - low)

  def edges(size_draw, draw, size):
    side = size_draw * (0.5 * width)
    center = size + draw * (1 - size)
    low = tf.floor(tf.maximum(center - side / 2, 0))
    return low, tf.minimum(low + side, size)

  boxes = _boxes(height, width, edges)
  return _Policy(3, 1.0, arguments, boxes, (125, 123, 114))


def _fixmatch_policy(height: int, width: int) -> _Policy:
  half = min(height, width) // 2 // 2

  def edges(_, draw, size):
    center = tf.cast(draw * size, tf.int32)
    return tf.maximum(center - half, 0), tf.minimum(center + half, size) - 1

  table = _levels(
    height,
    width,
    factor=lambda level: 0.1 + level * 1.8 / 10,
    bits=lambda level: 4 - int(level * 4 / 10),
    # At most 10 pixels of 32.
    pixels=lambda level, side: int(level * side / 32),
  )
  boxes = _boxes(height, width, edges)
  return _Policy(2, 0.5, table, boxes, (127, 127, 127))


def _sage_policy(height: int, width: int) -> _Policy:
  side = min(height, width) / 2

  def edges(_, draw, size):
    low = tf.floor(tf.maximum(draw * size - side / 2, 0))
    return low, tf.floor(tf.minimum(low + side, size))

  table = _levels(
    height,
    width,
    factor=lambda level: 0.05 + level * 0.9 / 10,
    bits=lambda level: 4 + int(level * 4 / 10),
    pixels=lambda level, side: int(level * 0.3 * side / 10),
  )
  boxes = _boxes(height, width, edges)
  return _Policy(2, 0.5, table, boxes, (127, 127, 127))


def _levels(
  height: int,
  width: int,
  *,
  factor: Callable[[int], float],
  bits: Callable[[int], int],
  pixels: Callable[[int, int], int],
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  """Makes the arguments of operations at levels 1 to 9, with either sign."""

  def argument(op, level, sign):
    if op in ('brightness', 'color', 'contrast', 'sharpness'):
      return factor(level)
    if op == 'posterize':
      return bits(level)
    if op == 'solarize':
      return 256 - int(level * 256 / 10)
    if op == 'rotate':
      return sign * int(level * 30 / 10)
    if op in ('shear_x', 'shear_y'):
      return sign * level * 0.3 / 10
    if op in ('translate_x', 'translate_y'):
      return sign * pixels(level, width if op == 'translate_x' else height)
    return 0.0

  table = np.array(
    [
      [argument(op, level, sign) for level in range(1, 10) for sign in (1, -1)]
      for op in image_ops.OPS
    ],
    np.float32,
  )

  def arguments(ops, draws):
    column = tf.cast(draws * table.shape[1], tf.int32)
    return tf.gather(table.reshape(-1), ops * table.shape[1] + column)

  return arguments


def _semifl_policy(height: int, width: int) -> _Policy:
  def edges(_, draw, size):
    low = tf.floor(tf.maximum(draw * size - 20.0, 0))
    return low, tf.minimum(low + 40.0, size)

  strengths = {
    'posterize': 4,
    **dict.fromkeys(('brightness', 'color', 'contrast', 'sharpness'), 1.9),
    'rotate': 30,
    'translate_x': 100,
    'translate_y': 100,
  }
  table = [strengths.get(op, 0) for op in image_ops.OPS] + [0, 0.3, 0.3]
  signed = [image_ops.OPS.index(f'translate_{axis}') for axis in 'xy']
  signed += [image_ops.OPS.index('rotate'), _SMOOTH_SHEAR_X, _SMOOTH_SHEAR_Y]

  def arguments(ops, draws):
    values = tf.gather(tf.constant(table, tf.float32), ops)
    is_signed = tf.reduce_any([tf.equal(ops, op) for op in signed], axis=0)
    return tf.where(is_signed & (draws < 0.5), -values, values)

  left_out = ('identity', 'shear_x', 'shear_y')
  pool = [i for i, op in enumerate(image_ops.OPS) if op not in left_out]
  # At threshold 0, solarize is inversion, of which there are two.
  pool += [image_ops.OPS.index('solarize'), _BOX]
  pool += [_SMOOTH_SHEAR_X, _SMOOTH_SHEAR_Y]
  boxes = _boxes(height, width, edges)
  return _Policy(2, 0.5, arguments, boxes, (127, 127, 127), pool)


def _fedmatch_policy(height: int, width: int) -> _Policy:
  factors = {'brightness': 0.3, 'color': 0.9, 'contrast': 0.5, 'sharpness': 0.9}
  shifts = {
    **dict.fromkeys(('shear_x', 'shear_y'), 0.3),
    'translate_x': 0.2 * width,
    'translate_y': 0.2 * height,
  }

  def argument(op, level, sign):
    share = level / 9
    if op in factors:
      return 1 + sign * factors[op] * share
    unsigned = {
      'posterize': round(8 - 4 * share),
      'solarize': 256 - 25 * share,
      'rotate': 360 * share,
    }
    return unsigned.get(op, sign * shifts.get(op, 0.0) * share)

  # The greatest bound is 5.
  columns = [(level, sign) for level in range(5) for sign in (1, -1)]
  table = np.array(
    [[argument(op, *column) for column in columns] for op in image_ops.OPS],
    np.float32,
  )

  def arguments(ops, draws):
    # The first digit of the first draw is the image's bound. What follows it,
    # and each operation's level, is a draw again.
    first = 4 * draws[:, :1]
    bound = 2 + tf.floor(first)
    draws = bound * tf.concat([first - tf.floor(first), draws[:, 1:]], axis=1)
    level = tf.minimum(tf.floor(draws), bound - 1)
    is_negative = tf.cast(draws - level >= 0.5, tf.int32)
    column = 2 * tf.cast(level, tf.int32) + is_negative
    return tf.gather(table.reshape(-1), ops * len(columns) + column)

  pool = [i for i, op in enumerate(image_ops.OPS) if op != 'equalize']
  return _Policy(6, 1.0, arguments, None, (0, 0, 0), pool, uncovered=128)


_POLICIES = {
  names.FL2: _fl2_policy,
  names.FIXMATCH: _fixmatch_policy,
  names.SAGE: _sage_policy,
  names.SEMIFL: _semifl_policy,
  names.FEDMATCH: _fedmatch_policy,
  names.WEAK: lambda *_: _Policy(0, 1.0, lambda _, how: how, None, (0, 0, 0)),
}
