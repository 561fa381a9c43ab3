import gpu_kernels
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.data import image_ops
from tff_fssl.data import names
from tff_fssl.hparams import UsageError

_SHAPES = {'cifar10': (32, 32, 3), 'fashion_mnist': (28, 28, 1)}
_SHAPES['digits'] = (8, 8, 1)
_POLICIES = {
  'fl2': augment._fl2_policy,
  'fixmatch': augment._fixmatch_policy,
  'sage': augment._sage_policy,
  'semifl': augment._semifl_policy,
  'fedmatch': augment._fedmatch_policy,
}
# They draw operations of their own, and have no cutout.
_OWN_OPS = {'semifl', 'fedmatch'}
_OPS = [*image_ops.OPS, 'box', 'smooth_shear_x', 'smooth_shear_y']


def _normalization(name):
  info = names.DATA_SETS[name]
  return info.mean, info.std


def _views(name, policy='fl2', flip=True, **more):
  mean, std = _normalization(name)
  return augment.build_views(
    _SHAPES[name], policy=policy, mean=mean, std=std, flip=flip, **more
  )


def _images(name, count=16, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (count, *_SHAPES[name]), np.uint8)


def _pixels(view, name):
  """A view as uint8 again, and that it was exactly that."""
  mean, std = _normalization(name)
  values = (view.numpy() * std + mean) * 255
  np.testing.assert_allclose(values, np.rint(values), atol=2e-3)
  return np.rint(values).astype(np.uint8)


@pytest.mark.parametrize('name', _SHAPES)
def test_plain_view_is_normalised(name):
  images = _images(name)
  mean, std = _normalization(name)
  expected = (images / 255 - mean) / std
  view = _views(name).plain(tf.constant(images))
  assert view.dtype == tf.float32
  np.testing.assert_allclose(view, expected, atol=1e-5)


@pytest.mark.parametrize('name', _SHAPES)
def test_weak_view_is_a_mirrored_crop(name):
  images = _images(name, 300)
  results = _pixels(
    _views(name).weak(tf.constant(images), tf.constant([1, 2])), name
  )
  side = images.shape[1]
  pad = {32: 4, 28: 3, 8: 1}[side]
  padded = np.pad(
    images, [(0, 0), (pad, pad), (pad, pad), (0, 0)], mode='reflect'
  )
  seen = []
  for i, result in enumerate(results):
    matches = [
      (y, x, flip)
      for y in range(2 * pad + 1)
      for x in range(2 * pad + 1)
      for flip in (False, True)
      if np.array_equal(
        padded[i, y : y + side, x : x + side][:, :: -1 if flip else 1], result
      )
    ]
    assert len(matches) == 1
    seen.append(matches[0])
  y, x, flip = np.array(seen).T
  assert set(y) == set(x) == set(range(2 * pad + 1))
  assert 0.4 < flip.mean() < 0.6
  assert abs(np.corrcoef(y, x)[0, 1]) < 0.2


def test_no_flip():
  images = np.zeros((200, *_SHAPES['digits']), np.uint8)
  images[:, :, :4] = 255
  for policy in _POLICIES:
    views = _views('digits', policy, flip=False)
    weak = _pixels(views.weak(tf.constant(images), [3, 4]), 'digits')
    assert np.all(weak[:, :, :3] == 255)
    assert np.all(weak[:, :, 5:] == 0)


def test_weak_view_without_crop_and_flip_is_the_image():
  images = _images('cifar10', 9)
  views = _views('cifar10', crop_and_flip=False)
  weak = _pixels(views.weak(tf.constant(images), [3, 4]), 'cifar10')
  np.testing.assert_array_equal(weak, images)


def test_strong_view_of_policy_weak_is_another_weak_view():
  images = tf.constant(_images('cifar10', 9))
  views = _views('cifar10', 'weak')
  strong = views.strong(images, [3, 4])
  draws = views.strong.draw(9, [3, 4])
  np.testing.assert_array_equal(strong, views.weak.render(images, draws[:, :3]))
  assert np.any(strong != views.weak(images, [3, 4]))


def _expected_box(policy, u, height, width):
  """Cutout's box as in the authors' code; edges included."""
  if policy == 'fl2':
    side = 0.5 * u[0] * width
    # np.random.uniform(n) has n for its lower bound and 1 for its upper.
    x, y = width + u[1] * (1 - width), height + u[2] * (1 - height)
    left, upper = int(max(0, x - side / 2)), int(max(0, y - side / 2))
    return (left, upper, min(width, left + side), min(height, upper + side))
  if policy == 'sage':
    side = min(height, width) // 2
    left = int(max(0, u[1] * width - side / 2))
    upper = int(max(0, u[2] * height - side / 2))
    return left, upper, min(width, left + side), min(height, upper + side)
  if policy == 'semifl':
    left, upper = (
      int(max(0, v * s - 20)) for v, s in zip(u[1:], (width, height))
    )
    return left, upper, min(width, left + 40), min(height, upper + 40)
  half = min(height, width) // 4
  x, y = int(u[1] * width), int(u[2] * height)
  left, upper = max(0, x - half), max(0, y - half)
  return left, upper, min(width, x + half) - 1, min(height, y + half) - 1


@pytest.mark.parametrize('policy', _POLICIES)
@pytest.mark.parametrize('name', _SHAPES)
def test_strong_view_equals_pillow_with_the_same_draws(pillow, name, policy):
  height, width, channels = _SHAPES[name]
  images, seed = _images(name, 60), [5, -6]
  rules = _POLICIES[policy](height, width)
  result = _pixels(_views(name, policy).strong(tf.constant(images), seed), name)

  draws = _views(name, policy).strong.draw(len(images), seed)
  pad = augment._padding(height)
  offsets = tf.cast(draws[:, 1:3] * (2 * pad + 1), tf.int32)
  weak = (
    image_ops.flip_and_crop(
      tf.constant(images),
      draws[:, 0] < 0.5,
      offsets[:, 0],
      offsets[:, 1],
      (pad, pad),
    )
    .numpy()
    .astype(np.uint8)
  )
  num = rules.num_ops
  ops, args = (
    t.numpy() for t in augment._choose_ops(rules, draws[:, 6 : 6 + 3 * num])
  )
  draws = draws.numpy()
  fill = rules.fill if channels == 3 else {'fl2': (123,)}.get(policy, (127,))
  for i, image in enumerate(weak):
    places = [draws[i, 3:6], draws[i, 6 + 3 * num :]]
    boxes = [_expected_box(policy, u, height, width) for u in places if len(u)]
    for place, (op, arg) in enumerate(zip(ops[i], args[i])):
      if _OPS[op] == 'box':
        image = pillow.fill_box(image, boxes[place], fill)
        continue
      covered = pillow.apply(np.full_like(image, 255), _OPS[op], arg) > 0
      image = pillow.apply(image, _OPS[op], arg)
      if (policy, _OPS[op]) == ('fedmatch', 'rotate'):
        image = np.where(covered, image, np.uint8(128))
    if policy not in _OWN_OPS:
      image = pillow.fill_box(image, boxes[0], fill)
    np.testing.assert_array_equal(result[i], image)


# (FL)^2's list and FixMatch's: the same 14, no inversion, no cutout.
_BY_FACTOR = ('brightness', 'color', 'contrast', 'sharpness')
_LIST = {
  *('identity', 'autocontrast', 'equalize', 'posterize', 'solarize'),
  *_BY_FACTOR,
  *('rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y'),
}
_SIGNED_LEVELS = [sign * level for level in range(1, 10) for sign in (1, -1)]
_INTERVALS = {
  **dict.fromkeys(_BY_FACTOR, (0.05, 0.95)),
  'solarize': (0, 256),
  'rotate': (-30, 30),
  'shear_x': (-0.3, 0.3),
  'shear_y': (-0.3, 0.3),
  'translate_x': (-9.6, 9.6),
  'translate_y': (-9.6, 9.6),
}
_LEVELS = {
  **dict.fromkeys(_BY_FACTOR, [0.1 + 0.18 * level for level in range(1, 10)]),
  'posterize': [4, 4, 3, 3, 2, 2, 2, 1, 1],
  'solarize': [231, 205, 180, 154, 128, 103, 77, 52, 26],
  'rotate': [3 * level for level in _SIGNED_LEVELS],
  'shear_x': [0.03 * level for level in _SIGNED_LEVELS],
  'shear_y': [0.03 * level for level in _SIGNED_LEVELS],
  'translate_x': _SIGNED_LEVELS,
  'translate_y': _SIGNED_LEVELS,
}
_SAGE_LEVELS = {
  **_LEVELS,
  **dict.fromkeys(_BY_FACTOR, [0.05 + 0.09 * level for level in range(1, 10)]),
  'posterize': [4, 4, 5, 5, 6, 6, 6, 7, 7],
  # floor(.96 L) pixels of 32.
  **dict.fromkeys(
    ('translate_x', 'translate_y'),
    [sign * level for level in range(9) for sign in (1, -1)],
  ),
}


@pytest.fixture(scope='module', params=sorted({*_POLICIES} - _OWN_OPS))
def chosen(request):
  """(policy, operations' names [B, N], their arguments [B, N])."""
  rules = _POLICIES[request.param](32, 32)
  draws = _views('cifar10', request.param).strong.draw(50_000, [1, 2])
  ops, args = augment._choose_ops(rules, draws[:, 6:])
  return request.param, np.array(image_ops.OPS)[ops], args.numpy()


def _check_frequencies(values, expected):
  """Chi-square; `expected` maps each value to its probability."""
  seen, counts = np.unique(values, return_counts=True)
  wanted = np.array(sorted(expected))
  if wanted.dtype.kind == 'f':
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)
  else:
    np.testing.assert_array_equal(seen, wanted)
  shares = np.array([expected[v] for v in sorted(expected)])
  assert stats.chisquare(counts, shares * len(values)).pvalue > 0.001


def test_ops_are_drawn_uniformly_from_the_list(chosen):
  policy, ops, _ = chosen
  assert ops.shape[1] == {'fl2': 3}.get(policy, 2)
  # The others leave an operation out half the time.
  probability = {'fl2': 1.0}.get(policy, 0.5)
  share = dict.fromkeys(_LIST, probability / 14)
  share['identity'] += 1 - probability
  for slot in ops.T:
    _check_frequencies(slot, share)
  # With replacement, and one slot says nothing of another.
  pairs = np.char.add(np.char.add(ops[:, 0], ' '), ops[:, 1])
  _check_frequencies(
    pairs,
    {f'{a} {b}': p * q for a, p in share.items() for b, q in share.items()},
  )


def test_magnitudes_are_drawn_uniformly(chosen):
  policy, ops, args = chosen
  for name in _LIST - {'identity', 'autocontrast', 'equalize'}:
    values = args[ops == name]
    if policy != 'fl2':
      levels = np.float64((_SAGE_LEVELS if policy == 'sage' else _LEVELS)[name])
      of_level, counts = np.unique(levels, return_counts=True)
      _check_frequencies(values, dict(zip(of_level, counts / len(levels))))
    elif name == 'posterize':
      _check_frequencies(values.astype(int), dict.fromkeys(range(4, 8), 1 / 4))
    else:
      low, high = _INTERVALS[name]
      uniform, edge = stats.uniform(low, high - low), 0.01 * (high - low)
      assert low - 1e-6 <= values.min() <= low + edge, name
      assert high - edge <= values.max() <= high + 1e-6, name
      assert stats.kstest(values, uniform.cdf).pvalue > 0.001, name
  # Slots have magnitudes of their own.
  both = np.all(ops[:, :2] == 'rotate', axis=1)
  assert abs(np.corrcoef(args[both, :2].T)[0, 1]) < 5 / np.sqrt(both.sum())


def test_semifl_draws_from_its_own_list():
  rules = _POLICIES['semifl'](32, 32)
  draws = _views('cifar10', 'semifl').strong.draw(50_000, [1, 2])
  ops, args = augment._choose_ops(rules, draws[:, 6:12])
  names_of_ops = np.array(_OPS)[ops]
  share = dict.fromkeys([_OPS[i] for i in rules.pool], 1 / 30)
  assert len(rules.pool) == 15 and len(share) == 14
  share |= {'identity': 1 / 2, 'solarize': 2 / 30}
  for slot in names_of_ops.T:
    _check_frequencies(slot, share)
  for name, strength in (('rotate', 30), ('smooth_shear_y', 0.3)):
    values = np.round(args[names_of_ops == name], 6)
    _check_frequencies(values, {strength: 1 / 2, -strength: 1 / 2})
  for name, strength in (('color', 1.9), ('solarize', 0), ('posterize', 4)):
    values = args[names_of_ops == name].numpy()
    np.testing.assert_array_equal(values, np.float32(strength))


def test_fedmatch_draws_a_bound_for_each_image():
  rules = _POLICIES['fedmatch'](32, 32)
  draws = _views('cifar10', 'fedmatch').strong.draw(50_000, [1, 2])
  ops, args = augment._choose_ops(rules, draws[:, 6:])
  names_of_ops, args = np.array(_OPS)[ops], args.numpy()
  share = dict.fromkeys(_LIST - {'equalize'}, 1 / 13)
  for slot in names_of_ops.T:
    _check_frequencies(slot, share)
  # A bound in 2, ..., 5, then a level below it.
  levels = [
    sum(1 / bound / 4 for bound in (2, 3, 4, 5) if level < bound)
    for level in range(5)
  ]
  rotations = np.round(args[names_of_ops == 'rotate'] / 40).astype(int)
  _check_frequencies(rotations, dict(enumerate(levels)))
  signs = np.sign(args[names_of_ops == 'shear_x']).astype(int)
  half = (1 - levels[0]) / 2
  _check_frequencies(signs, {-1: half, 0: levels[0], 1: half})
  assert set(np.unique(args[names_of_ops == 'posterize'])) == {6, 7, 8}
  # Levels of one image share the bound, so that two are likelier to be high.
  both = [names_of_ops[:, i] == 'rotate' for i in (0, 1)]
  pairs = np.round(args[both[0] & both[1], :2] / 40)
  high = np.all(pairs >= 3, axis=1)
  expected = (0 + 0 + (1 / 4) ** 2 + (2 / 5) ** 2) / 4
  assert abs(high.mean() - expected) < 4 * np.sqrt(expected / len(high))
  assert expected > 1.9 * (levels[3] + levels[4]) ** 2


@pytest.mark.skipif(
  not gpu_kernels.are_known(), reason='needs a TensorFlow for GPUs'
)
@pytest.mark.parametrize(
  'view, policy',
  [
    ('plain', 'fl2'),
    ('weak', 'fl2'),
    ('strong', 'fl2'),
    ('strong', 'semifl'),
    ('strong', 'fedmatch'),
    # Of operations that the others have, too.
    pytest.param('strong', 'fixmatch', marks=pytest.mark.slow),
    pytest.param('strong', 'sage', marks=pytest.mark.slow),
  ],
)
def test_no_view_leaves_the_gpu(view, policy):
  views = _views('cifar10', policy)
  make = {'plain': lambda x: views.plain(x)}.get(
    view, lambda x: getattr(views, view)(x, [1, 2])
  )
  spec = tf.TensorSpec([None, *_SHAPES['cifar10']], tf.uint8)
  traced = tf.function(make, autograph=False).get_concrete_function(spec)
  graph = traced.graph.as_graph_def()
  assert not gpu_kernels.missing(graph, in_loops=False)


@pytest.mark.parametrize('policy', _POLICIES)
def test_views_are_a_function_of_the_seed(policy):
  images, views = tf.constant(_images('cifar10')), _views('cifar10', policy)
  for view in (views.weak, views.strong):
    a, b, c, d = (view(images, s) for s in ([1, 2], [1, 2], [1, 3], [2, 2]))
    np.testing.assert_array_equal(a, b)
    for other in (c, d):
      differs = np.any(a.numpy() != other.numpy(), axis=(1, 2, 3))
      assert differs.mean() > 0.8
  # Images of one batch have draws of their own, whatever the batch's size.
  same = tf.repeat(images[:1], 16, axis=0)
  assert len(np.unique(views.strong(same, [1, 2]), axis=0)) > 12
  np.testing.assert_array_equal(
    views.strong(images, [1, 2])[:5], views.strong(images[:5], [1, 2])
  )


def test_weak_and_strong_views_of_one_seed_are_independent():
  images = np.zeros((400, *_SHAPES['cifar10']), np.uint8)
  images[:, :, :16] = 255
  views = _views('cifar10')
  mirrored = [
    view(tf.constant(images), [1, 2]).numpy()[:, 16, 2].mean(-1)
    < view(tf.constant(images), [1, 2]).numpy()[:, 16, -3].mean(-1)
    for view in (views.weak, views.strong)
  ]
  assert 0.35 < np.mean(mirrored[0] == mirrored[1]) < 0.65


def test_views_work_wherever_graphs_do():
  name = 'digits'
  views, images = _views(name, 'fl2'), _images(name, 7)
  expected = views.strong(tf.constant(images), [1, 0])
  spec = tf.TensorSpec([None, *_SHAPES[name]], tf.uint8)

  @tf.function(input_signature=[spec])
  def dynamic(x):
    view = views.strong(x, [1, 0])
    assert view.shape.as_list() == [None, *_SHAPES[name]]
    return view

  @tf.function(input_signature=[spec])
  def looped(x):
    view = tf.zeros(tf.shape(x))
    for i in tf.range(2):
      view = views.strong(x, tf.stack([i, 0]))
      view.set_shape([None, *_SHAPES[name]])
    return view

  np.testing.assert_array_equal(dynamic(images), expected)
  np.testing.assert_array_equal(looped(images), expected)
  for view in (views.plain, lambda x: views.weak(x, [1, 0]), dynamic):
    assert view(tf.constant(images[:0])).shape == (0, *_SHAPES[name])
  with tf.Graph().as_default() as graph:
    view = views.strong(tf.constant(images), [1, 0])
    with tf.compat.v1.Session(graph=graph) as session:
      np.testing.assert_array_equal(session.run(view), expected)


@pytest.mark.parametrize('value', [0, 128, 255])
def test_constant_images_stay_finite(value):
  images = tf.fill([64, 32, 32, 3], tf.constant(value, tf.uint8))
  for policy in _POLICIES:
    view = _views('cifar10', policy).strong(images, [7, 7])
    assert np.all(np.isfinite(view))


def test_sides_that_are_small_or_unequal():
  for shape in ((1, 1, 1), (4, 4, 3), (7, 9, 1), (20, 31, 3)):
    c = shape[2]
    for policy in _POLICIES:
      views = augment.build_views(
        shape, policy=policy, mean=(0.5,) * c, std=(0.5,) * c, flip=True
      )
      images = tf.cast(
        tf.random.stateless_uniform([20, *shape], [1, 2], 0, 256, tf.int32),
        tf.uint8,
      )
      assert views.strong(images, [1, 2]).shape == images.shape
      assert views.weak(images, [1, 2]).shape == images.shape


@pytest.mark.parametrize(
  'changes,message',
  [
    ({'policy': 'fixmach'}, "did you mean 'fixmatch'"),
    ({'mean': (0.5,)}, 'one number for each of 3'),
    ({'std': (0.5, 0.0, 0.5)}, 'greater than 0'),
    ({'image_shape': (32, 32, 4)}, '1 or 3 channels'),
  ],
)
def test_bad_arguments_are_refused(changes, message):
  kwargs = {
    'image_shape': (32, 32, 3),
    'mean': (0.5,) * 3,
    'std': (0.5,) * 3,
    'flip': True,
  }
  with pytest.raises(UsageError, match=message):
    augment.build_views(**(kwargs | changes))


def test_boxes_of_sage_have_17_pixels_but_at_far_edges():
  draws = np.zeros([5, 3], np.float32)
  draws[:, 1] = [0.0, 0.2, 0.25, 0.5, 0.999]
  draws[:, 2] = 0.5
  boxes = augment._sage_policy(32, 32).boxes(tf.constant(draws)).numpy()
  # Left edges of floor(max(0, u - 8)), and ends that are inside.
  np.testing.assert_array_equal(boxes[:, 0], [0, 0, 0, 8, 23])
  np.testing.assert_array_equal(boxes[:, 2], [16, 16, 16, 24, 32])
  assert set(boxes[:, 1]) == {8} and set(boxes[:, 3]) == {24}
