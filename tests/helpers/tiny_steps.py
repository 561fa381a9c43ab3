"""A step of an algorithm on a few numbers, and its gradient by differences."""

import numpy as np
from scipy import special
import tensorflow as tf

from tff_fssl.interface import base
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

# Round 3, step 2 of 4.
TIME = base.StepTime(*tf.constant([3, 2, 4]))
# The weights k of a network with the logits k x for two classes.
K = np.array([0.9, -0.4])
X = {
  'weak': np.array([1.0, 2.0, -3.0, 0.5]),
  'strong': np.array([1.2, 1.5, -2.0, 0.1]),
  'weak_0': np.array([1.0, 2.0, -3.0, 0.5]),
  'weak_1': np.array([0.8, 2.2, -2.5, 0.7]),
}
WEIGHTS = np.array([1.0, 1.0, 0.0, 1.0])
LABELS = np.array([0, 1, 1, 0])


class Identity:
  """A network whose inputs are its logits."""

  def logits(self, images, *, training, weights=None):
    assert training
    return images


class Descents(dict):
  """The gradients by which a step moves networks, by name. It moves none."""

  def __call__(self, name, gradients, rate_factor=1.0):
    self[name] = gradients


IDENTITY = base.Networks(Identity(), {})


def examples(labels=None, weights=None, **views):
  """The examples of a batch; labels are unknown unless given."""
  views = {name: tf.constant(v, tf.float32) for name, v in views.items()}
  (size,) = {len(v) for v in views.values()}
  labels = [-1] * size if labels is None else labels
  weights = [1.0] * size if weights is None else weights
  return base.BatchExamples(
    views, tf.constant(labels, tf.int32), tf.constant(weights, tf.float32)
  )


def batch(time=TIME, **streams):
  return base.Batch(streams, {}, time, tf.constant([1, 2]))


def full_batch(algorithm, scale=None, **given):
  """A batch of all streams of an algorithm, with the views of `X`."""
  form = (lambda x: x[:, None]) if scale is None else (lambda x: x[:, None] * K)
  return batch(
    **{
      name: examples(
        labels=LABELS,
        **given,
        **{view: form(X[view]) for view in stream.views},
      )
      for name, stream in algorithm.streams().items()
    }
  )


def means(metrics):
  return {name: float(t / n) for name, (t, n) in metrics.items() if float(n)}


def networks():
  """A network with the weights `K`."""
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([1]), tf.keras.layers.Dense(2, use_bias=False)]
    )
  )
  kernel = tf.constant(K[None], tf.float32)
  network.assign(Weights((kernel,), (), tf.constant(1.0)))
  return base.Networks(network, {})


def gradient(algorithm):
  """The gradient of a step on `full_batch`, float32 [2]."""
  result = algorithm.step(networks(), full_batch(algorithm))
  return np.array(result.gradients[0][0])


def check_gradient(algorithm, reference):
  """Compares a step with differences of `reference`, a function of k.

  In float64, with targets and masks held constant at `K`.
  """
  result = algorithm.step(networks(), full_batch(algorithm, weights=WEIGHTS))
  expected = [
    (reference(K + d) - reference(K - d)) / 2e-6 for d in 1e-6 * np.eye(2)
  ]
  assert np.abs(expected).min() > 1e-3
  np.testing.assert_allclose(result.gradients[0][0], expected, rtol=1e-4)


def check_fillers(algorithm):
  """Beside blank fillers, the loss is that of the others, or 0."""

  def losses(weights):
    blank = {
      name: examples(
        labels=LABELS,
        weights=weights,
        **{
          view: np.where(np.array(weights) > 0, X[view], 1e3)[:, None] * K
          for view in stream.views
        },
      )
      for name, stream in algorithm.streams().items()
    }
    _, metrics = algorithm.unlabeled_loss(IDENTITY, batch(**blank))
    return {k: (float(a), float(b)) for k, (a, b) in metrics.items()}

  assert all(pair == (0.0, 0.0) for pair in losses([0.0] * 4).values())
  for weights in ([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]):
    assert all(0 <= total < 50.0 for total, _ in losses(weights).values())


def check_counts(algorithm):
  """No metric counts more than the examples: clients would be rejected."""
  result = algorithm.step(networks(), full_batch(algorithm))
  counts = {name: float(count) for name, (_, count) in result.metrics.items()}
  assert max(counts.values()) <= 4.0, counts


def check_weight(make, is_alone=True):
  """The weight of the loss scales its gradient and no other's.

  Args:
    make: A weight -> the algorithm.
    is_alone: Whether the weight 0 leaves no gradient.
  """
  none, once, thrice = (gradient(make(w)) for w in (0.0, 1.0, 3.0))
  np.testing.assert_allclose(thrice - none, 3 * (once - none), rtol=1e-4)
  assert np.abs(once - none).max() > 1e-3
  if is_alone:
    np.testing.assert_array_equal(none, np.zeros_like(none))


def check_xla(algorithm):
  """XLA computes the same step."""
  both = [
    tf.function(
      lambda b: algorithm.step(nets, b).gradients[0], jit_compile=compiled
    )(full_batch(algorithm))
    for nets in (networks(),)
    for compiled in (True, False)
  ]
  np.testing.assert_allclose(*both, atol=1e-5)


def probs(k, x):
  return special.softmax(np.outer(x, k), axis=-1)


def log_probs(k, x):
  return special.log_softmax(np.outer(x, k), axis=-1)
