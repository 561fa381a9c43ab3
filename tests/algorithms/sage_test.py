"""SAGE: worked examples S1 to S3 of its specification, limits, batch norm."""

import numpy as np
import pytest
from scipy import special
import tensorflow as tf
import tiny_local
import tiny_norms
import tiny_rounds
import tiny_steps
import tiny_task

from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import sage
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

_CLIENTS = tiny_rounds.CLIENTS
_AT_CLIENTS = RoundHparams(scenario=_CLIENTS)
_LOCAL = [[0.97, 0.02, 0.01], [0.96, 0.03, 0.01], [0.6, 0.3, 0.1]]
_LOCAL += [[0.5, 0.45, 0.05], [0.02 / (1 + 1e-7), 0.98 / (1 + 1e-7), 1e-7]]
_GLOBAL = [[0.3, 0.6, 0.1], [0.95, 0.03, 0.02], [0.96, 0.03, 0.01]]
_GLOBAL += [[0.4, 0.35, 0.25], [0.97, 0.02, 0.01]]
_STRONG = [[1, 0, -1], [2, 1, 0], [0, 0, 0], [3, 0, 0], [0.5, 0.2, -0.3]]
_UNIFORM = [[1 / 3] * 3] * 5


class _Columns:
  """A network whose logits are some columns of its inputs."""

  def __init__(self, columns):
    self._columns = columns

  def logits(self, images, *, training, weights=None):
    assert training
    return images[:, self._columns]

  def inference_logits(self, images):
    return images[:, self._columns]


_NETWORKS = base.Networks(
  _Columns(slice(0, 3)), {'global': _Columns(slice(3, 6))}
)


def _examples(local=_LOCAL, received=_GLOBAL, strong=_STRONG, **given):
  """Weak views with the logits of both models; strong views with the local."""
  return tiny_steps.examples(
    weak=np.log(np.hstack([local, received])),
    strong=np.hstack([strong, np.zeros_like(strong)]),
    **given,
  )


def _batch(**streams):
  return tiny_steps.batch(**streams)


def _loss(algorithm, examples):
  """The loss, its metrics, its gradient with respect to strong views."""
  with tf.GradientTape() as tape:
    tape.watch(examples.views['strong'])
    loss, metrics = algorithm._loss(_NETWORKS, _batch(unlabeled=examples))
  gradient = tape.gradient(loss, examples.views['strong'])[:, :3]
  return float(loss), tiny_steps.means(metrics), gradient.numpy()


@pytest.mark.parametrize(
  'discrepancy, share',
  [(0.0, 0.999986), (0.01, 0.870538), (0.05, 0.499993), (0.1, 0.249997)]
  + [(0.3, 0.015625)],
)
def test_s1_the_local_label_loses_by_discrepancy(discrepancy, share):
  for sign in (-1, 1):
    low, high = 0.95 - discrepancy, 0.95
    rows = [[low, 1 - low], [high, 1 - high]][::sign]
    local, received = tf.constant(rows, tf.float32)[:, None]
    actual = sage.Sage()._local_share(local, received)
    np.testing.assert_allclose(actual, [share], atol=1e-6)


def test_s2_targets():
  targets, kept, metrics = sage.Sage()._targets(
    tf.constant(_LOCAL), tf.constant(_GLOBAL), _examples(labels=[1] * 5)
  )
  np.testing.assert_allclose(
    targets,
    [
      [0.005921, 0.994079, 0],
      [1, 0, 0],
      [1, 0, 0],
      [1, 0, 0],
      [0.129460, 0.870540, 0],
    ],
    atol=1e-6,
  )
  np.testing.assert_array_equal(kept, [1, 1, 1, 0, 1])
  means = tiny_steps.means(metrics)
  shares = [0.005921, 0.870538, 0.870540]  # The others are not sure.
  np.testing.assert_allclose(means['local_share'], np.mean(shares), atol=1e-6)
  assert means['pseudo_label_ratio'] == pytest.approx(0.8)
  assert means['pseudo_label_accuracy'] == 0.5


def test_s2_divergences():
  targets, _, _ = sage.Sage()._targets(
    tf.constant(_LOCAL), tf.constant(_GLOBAL), _examples()
  )
  probs = special.softmax(np.array(_STRONG, np.float32), -1)
  np.testing.assert_allclose(
    sage._divergence(targets, tf.constant(probs)),
    [1.365413, 0.407606, 1.098612, 0.094923, 0.659771],
    atol=1e-6,
  )


def test_s2_loss_and_gradient():
  loss, means, gradient = _loss(sage.Sage(), _examples())
  np.testing.assert_allclose(loss, 0.706281, atol=1e-6)
  np.testing.assert_allclose(
    means['loss_corrected_label'], 0.706281 * 5 / 4, atol=1e-6
  )
  np.testing.assert_allclose(
    gradient[[0, 4, 3]],
    [
      [0.131864, -0.149870, 0.018006],
      [0.065426, -0.106458, 0.041032],
      [0, 0, 0],
    ],
    atol=1e-6,
  )


def _linear(kernel):
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([2]), tf.keras.layers.Dense(3, use_bias=False)]
    )
  )
  kernel = tf.constant(kernel, tf.float32)
  network.assign(Weights((kernel,), (), tf.constant(1.0)))
  return network


def _s3():
  """The networks and the batch of S3."""
  weak = np.array([[2.0, 0], [0, 2], [1, 1], [-1, 2]])
  networks = base.Networks(
    _linear([[1, -1, 0.5], [0.5, 2, -1]]),
    {'global': _linear([[2, -0.5, 0], [0, 1.5, -2]])},
  )
  return networks, _batch(
    unlabeled=tiny_steps.examples(weak=weak, strong=0.8 * weak + 0.1),
    labeled=tiny_steps.examples(labels=[0, 1], weak=[[1, 0], [0, 1]]),
  )


def _make(**values):
  return sage.Sage(confidence_threshold=0.8, round=_AT_CLIENTS, **values)


def test_s3_a_step():
  networks, batch = _s3()
  (gradient,), metrics, *_ = _make().step(networks, batch)
  means = tiny_steps.means(metrics)
  np.testing.assert_allclose(means['loss_labeled'], 0.398134, atol=1e-6)
  # A mean over the kept ones; L_u is one over all.
  np.testing.assert_allclose(
    means['loss_corrected_label'] * 0.75, 0.114978, atol=1e-6
  )
  assert means['pseudo_label_ratio'] == 0.75
  kernel = networks.model.trainable_variables[0]
  gradient += 1e-4 * kernel  # Weight decay.
  np.testing.assert_allclose(
    gradient,
    [[-0.336852, 0.051804, 0.285098], [0.125245, -0.154708, 0.029613]],
    atol=1e-6,
  )
  np.testing.assert_allclose(
    kernel - 0.1 * gradient,
    [[1.033685, -1.005180, 0.471490], [0.487476, 2.015471, -1.002961]],
    atol=1e-6,
  )


def test_the_weight_scales_the_gradient_of_unlabelled_examples():
  none, once, thrice = (
    np.array(_make(unlabeled_loss_weight=w).step(*_s3()).gradients[0])
    for w in (0.0, 1.0, 3.0)
  )
  np.testing.assert_allclose(thrice - none, 3 * (once - none), atol=1e-6)
  assert np.abs(once - none).max() > 1e-3


def test_xla_computes_the_same_step():
  networks, batch = _s3()
  both = [
    tf.function(
      lambda b: _make().step(networks, b).gradients[0], jit_compile=compiled
    )(batch)
    for compiled in (True, False)
  ]
  np.testing.assert_allclose(*both, atol=1e-6)


def test_fillers_do_not_count():
  weights = [1.0, 0, 1, 0, 1]
  loss, means, gradient = _loss(sage.Sage(), _examples(weights=weights))
  rows = [0, 2, 4]
  few = [np.array(x)[rows] for x in (_LOCAL, _GLOBAL, _STRONG)]
  expected = _loss(sage.Sage(), _examples(*few))
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
  assert means == pytest.approx(expected[1])
  np.testing.assert_allclose(gradient[rows], expected[2], atol=1e-6)
  _, metrics = sage.Sage()._loss(
    _NETWORKS, _batch(unlabeled=_examples(weights=[0.0] * 5))
  )
  assert all(float(x) == 0 for pair in metrics.values() for x in pair)


class TestReductions:
  """To FixMatch, and to fixed shares."""

  def test_an_unsure_global_model_leaves_fixmatch(self):
    """Where any discrepancy is small: the local label alone counts."""
    ours, theirs = sage.Sage(half_discrepancy=1e6), fixmatch.FixMatch()
    examples = _examples(received=_UNIFORM)
    loss, means, gradient = _loss(ours, examples)
    strong = examples.views['strong']
    with tf.GradientTape() as tape:
      tape.watch(strong)
      views = {**examples.views, 'strong': strong}
      expected, metrics = theirs.unlabeled_loss(
        _NETWORKS, _batch(unlabeled=examples._replace(views=views))
      )
    np.testing.assert_allclose(
      gradient, tape.gradient(expected, strong)[:, :3], atol=1e-6
    )
    # The entropy of hard targets is 0.
    np.testing.assert_allclose(loss, expected, atol=1e-5)
    for name, value in tiny_steps.means(metrics).items():
      if name != 'loss_pseudo_label':
        assert means[name] == pytest.approx(value), name

  @pytest.mark.parametrize('share', [0.0, 0.3, 1.0])
  def test_a_fixed_share(self, share):
    targets, kept, metrics = sage.Sage(fixed_share=share)._targets(
      tf.constant(_LOCAL), tf.constant(_GLOBAL), _examples()
    )
    np.testing.assert_allclose(
      targets,
      [[share, 1 - share, 0], *[[1, 0, 0]] * 3, [1 - share, share, 0]],
      atol=1e-6,
    )
    assert np.sum(kept) == 4
    means = tiny_steps.means(metrics)
    np.testing.assert_allclose(means['local_share'], share, rtol=1e-6)

  def test_one_step_is_fixmatchs(self):
    """In the first step of a round, both models are one."""
    ours, theirs = (_train(name, 1) for name in ('sage', 'fixmatch'))
    tiny_rounds.assert_same(ours.update, theirs.update, atol=1e-6)
    assert np.any(ours.update[0])

  def test_more_steps_are_not(self):
    means = tiny_steps.means(_train('sage', 6).metrics)
    assert 0 < means['local_share'] < 0.999986
    assert 0 < means['pseudo_label_ratio'] <= 1
    assert means['loss_corrected_label'] > 0


def _train(name, num_steps):
  """What a client has after so many steps of all of its examples."""
  config = training.LoopConfig(num_steps, 50, 50, optimizer.Sgd())
  element = tiny_task.client(0, labeled=4)
  own = {'confidence_threshold': 0.35}
  return tiny_local.train(name, _CLIENTS, element, config, **own)[1]


def test_the_global_model_evaluates_and_stays():
  networks = base.Networks(
    tiny_norms.network(track_moving_averages=True),
    {'global': tiny_norms.network(track_moving_averages=True)},
  )
  mean, variance = networks['global'].non_trainable_variables
  mean.assign([2.0])
  variance.assign([0.04])
  batch = tiny_norms.views([1.0])
  # Its logits are +-5 for the weak view 1, and 0 for 2: it is sure of one.
  algorithm = sage.Sage(confidence_threshold=0.9, round=_AT_CLIENTS)
  _, metrics, *_ = algorithm.step(networks, batch)
  assert tiny_steps.means(metrics)['pseudo_label_ratio'] == 0.5
  np.testing.assert_array_equal(mean, [2.0])
  np.testing.assert_array_equal(
    networks['global'].trainable_variables[0], [[1.0, -1.0]]
  )
  moved, _ = networks.model.non_trainable_variables
  assert np.all(moved != 0.0)
