"""FLOPs of traced functions against counts by hand."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.models import flops
from tff_fssl.models import networks


def _graph(function, *shapes):
  specs = [tf.TensorSpec(shape) for shape in shapes]
  return tf.function(function).get_concrete_function(*specs).graph


def _flops(function, *shapes, **options):
  return flops.count_flops(_graph(function, *shapes), **options)


def _exactly(number):
  return flops.Flops(number, number)


_KERNEL = np.ones([3, 3, 2, 5], np.float32)


@pytest.mark.parametrize(
  'function, shapes, multiplications',
  [
    (tf.matmul, ([4, 3], [3, 5]), 4 * 3 * 5),
    (lambda a, b: tf.matmul(a, b, True, True), ([3, 4], [5, 3]), 4 * 3 * 5),
    (tf.matmul, ([7, 4, 3], [7, 3, 5]), 7 * 4 * 3 * 5),
    (
      lambda a, b: tf.matmul(a, b, adjoint_a=True),
      ([7, 3, 4], [7, 3, 5]),
      7 * 4 * 3 * 5,
    ),
    (lambda a, b: tf.einsum('bij,jk->bik', a, b), ([7, 4, 3], [3, 5]), 420),
    (lambda a, b: tf.einsum('...j,jk->...k', a, b), ([7, 4, 3], [3, 5]), 420),
    (lambda a: tf.einsum('ij->ji', a), ([4, 3],), 0),
    # Each of 6 x 7 outputs, or 3 x 4 with stride 2, for each of 8 images.
    (lambda x: tf.nn.conv2d(x, _KERNEL, 1, 'SAME'), ([8, 6, 7, 2],), 30240),
    (lambda x: tf.nn.conv2d(x, _KERNEL, 2, 'SAME'), ([8, 6, 7, 2],), 8640),
    # Two groups.
    (
      lambda x: tf.nn.conv2d(x, np.ones([3, 3, 2, 6], 'f'), 1, 'SAME'),
      ([8, 6, 7, 4],),
      8 * 42 * 9 * 2 * 6,
    ),
    (
      lambda x: tf.nn.depthwise_conv2d(x, _KERNEL, [1] * 4, 'SAME'),
      ([8, 6, 7, 2],),
      8 * 42 * 9 * 2 * 5,
    ),
    (
      lambda x: tf.nn.conv3d(x, np.ones([2, 3, 3, 2, 5], 'f'), [1] * 5, 'SAME'),
      ([8, 4, 6, 7, 2],),
      8 * 4 * 42 * 18 * 2 * 5,
    ),
    (lambda a: tf.nn.softmax(a) * 2.0 + 1.0, ([4, 3],), 0),
  ],
)
def test_products_and_convolutions(function, shapes, multiplications):
  assert _flops(function, *shapes) == _exactly(2 * multiplications)


@pytest.mark.parametrize('depthwise', [False, True])
def test_each_gradient_of_a_convolution_costs_as_much(depthwise):
  def run(*operands, wanted):
    with tf.GradientTape() as tape:
      tape.watch(operands)
      if depthwise:
        y = tf.nn.depthwise_conv2d(*operands, [1] * 4, 'VALID')
      else:
        y = tf.nn.conv2d(*operands, 1, 'VALID')
      loss = tf.reduce_sum(y * y)
    return tape.gradient(loss, [operands[i] for i in wanted])

  once = 2 * 8 * 4 * 5 * 9 * 2 * 5  # 'VALID': 4 x 5 outputs.
  for wanted in ([0], [1], [0, 1]):
    found = _flops(
      functools.partial(run, wanted=wanted), [8, 6, 7, 2], [3, 3, 2, 5]
    )
    assert found == _exactly((1 + len(wanted)) * once), wanted


def test_unused_results_do_not_count():
  def run(a, b):
    unused = tf.matmul(a, b)
    with tf.GradientTape() as tape:
      tape.watch(b)
      product = tf.matmul(a, b)
    gradient = tape.gradient(product, b)
    del unused
    return product, gradient

  graph = _graph(run, [4, 3], [3, 5])
  assert flops.count_flops(graph) == _exactly(2 * 120)
  assert flops.count_flops(graph, graph.outputs[:1]) == _exactly(120)


def test_branches_and_calls():
  inner = tf.function(lambda a, b: tf.matmul(a, b))

  def run(a, b):
    large = tf.reduce_sum(a) > 1.0

    def twice():
      first = inner(a, b)
      return tf.cond(large, lambda: first + inner(a, b + 1.0), lambda: first)

    return tf.cond(large, twice, lambda: tf.zeros([4, 5]))

  assert _flops(run, [4, 3], [3, 5]) == flops.Flops(0, 2 * 120)

  def switch(a, b):
    return tf.switch_case(
      tf.cast(a[0, 0], tf.int32),
      [lambda: a @ b, lambda: a @ b + a @ (b + 1.0)],
    )

  assert _flops(switch, [4, 3], [3, 5]) == flops.Flops(120, 240)


def test_loops():
  def run(x, w):
    total = tf.zeros([5])
    for i in tf.range(tf.shape(x)[0]):
      total += tf.reduce_sum(x[i : i + 4] @ w, axis=0)
    return total

  with pytest.raises(flops.UnknownFlopsError, match='while'):
    _flops(run, [8, 3], [3, 5])
  assert _flops(run, [None, 3], [3, 5], per_example=True) == _exactly(2 * 15)

  def without_products(x):
    for _ in tf.range(tf.shape(x)[0]):
      x += 1.0
    return x

  assert _flops(without_products, [8, 3]) == _exactly(0)


def test_shapes_that_are_not_known():
  with pytest.raises(flops.UnknownFlopsError, match='MatMul'):
    _flops(tf.matmul, [None, 3], [3, 5])
  with pytest.raises(flops.UnknownFlopsError, match='MatMul'):
    _flops(tf.matmul, None, [3, 5])


def test_a_network_for_texts():
  model = networks.build_network(
    'text_cnn', (64,), 4, 'none', vocabulary_size=256
  )
  # A filter of w words has 64 - w + 1 places in a text; looking words up is no
  # multiplication.
  filters = sum((65 - w) * w * 128 * 100 for w in (3, 4, 5))
  assert _flops(model, [7, 64]) == _exactly(2 * 7 * (filters + 300 * 4))
