"""MixMatch's loss: worked examples, the ramp, limits."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_steps

from tff_fssl.algorithms import mixmatch
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams

_AT_CLIENTS = RoundHparams(scenario='labels_at_clients')


def _make(weight=1.0, **settings):
  return mixmatch.MixMatch(
    unlabeled_loss_weight=weight, **{'ramp_rounds': 0, **settings}
  )


def _loss(algorithm, batch, networks=tiny_steps.IDENTITY):
  return algorithm._loss(networks, batch)


def test_i7_without_mixing():
  """The guess of I7, and its squared error."""
  views = np.log([[[0.5, 0.3, 0.2]], [[0.7, 0.2, 0.1]]])
  examples = tiny_steps.examples(weak_0=views[0], weak_1=views[1])
  loss, _ = _loss(
    _make(75.0, mixup_concentration=0.0), tiny_steps.batch(unlabeled=examples)
  )
  guess = np.array([0.808989, 0.140449, 0.050562])
  expected = np.mean((np.exp(views[:, 0]) - guess) ** 2)
  np.testing.assert_allclose(loss, 75 * expected, rtol=1e-5)


class _Other(tiny_steps.Identity):
  """A network with another prediction in the second pass."""

  def __init__(self):
    self._passes = 0

  def logits(self, images, *, training, weights=None):
    self._passes += 1
    return images * self._passes


@pytest.mark.parametrize(
  'round_num, share', [(1, 0.0), (2, 0.25), (3, 0.5), (5, 1.0), (9, 1.0)]
)
def test_i7_ramp(round_num, share):
  algorithm = _make(
    75.0, num_views=1, temperature=1.0, mixup_concentration=0.0, ramp_rounds=4
  )
  examples = tiny_steps.examples(weak_0=[[1.0, 0.0]])
  time = base.StepTime(*tf.constant([round_num, 0, 4]))
  loss, metrics = _loss(
    algorithm,
    tiny_steps.batch(time, unlabeled=examples),
    base.Networks(_Other(), {}),
  )
  guess = tiny_steps.means(metrics)['loss_guess']
  assert guess > 0.01
  np.testing.assert_allclose(loss, 75 * share * guess, rtol=1e-5)


def _reference(k):
  x, weights = tiny_steps.X, tiny_steps.WEIGHTS
  mean = sum(tiny_steps.probs(tiny_steps.K, x[f'weak_{i}']) for i in (0, 1)) / 2
  guess = mean**2 / np.sum(mean**2, -1, keepdims=True)
  errors = [
    np.mean((tiny_steps.probs(k, x[f'weak_{i}']) - guess) ** 2, -1)
    for i in (0, 1)
  ]
  logs = tiny_steps.log_probs(k, x['weak'])
  labeled = -logs[np.arange(4), tiny_steps.LABELS]
  entropy = np.sum(weights * labeled) / weights.sum()
  error = sum(np.sum(weights * e) for e in errors) / (2 * weights.sum())
  # Round 3, step 2 of 4: half of a ramp of 5 rounds.
  return entropy + 1.5 * 0.5 * error


def test_step_against_finite_differences():
  algorithm = _make(
    1.5, mixup_concentration=0.0, ramp_rounds=5, round=_AT_CLIENTS
  )
  tiny_steps.check_gradient(algorithm, _reference)


@pytest.mark.parametrize('labels', [False, True])
def test_the_weight_scales_the_gradient(labels):
  settings = {'round': _AT_CLIENTS} if labels else {}
  tiny_steps.check_weight(lambda w: _make(w, **settings), is_alone=not labels)


@pytest.mark.parametrize('labels', [False, True])
def test_no_metric_counts_more_than_the_examples(labels):
  settings = {'round': _AT_CLIENTS} if labels else {}
  tiny_steps.check_counts(_make(**settings))
  tiny_steps.check_xla(_make(**settings))


def test_with_one_view_and_no_mixing_it_is_mean_squared_self_training():
  """alpha to 0, A = 1, T = 1: the target is the prediction: no gradient."""
  algorithm = _make(9.0, num_views=1, temperature=1.0, mixup_concentration=0.0)
  np.testing.assert_allclose(
    tiny_steps.gradient(algorithm), np.zeros(2), atol=1e-7
  )


def test_fillers_change_nothing():
  """Beside blank fillers, the loss is that of the others, or 0."""
  algorithm = _make(round=_AT_CLIENTS)

  def run(weights):
    streams = {
      name: tiny_steps.examples(
        labels=tiny_steps.LABELS,
        weights=weights,
        **{
          v: np.where(np.array(weights) > 0, tiny_steps.X[v], 1e3)[:, None]
          * tiny_steps.K
          for v in stream.views
        },
      )
      for name, stream in algorithm.streams().items()
    }
    loss, metrics = _loss(algorithm, tiny_steps.batch(**streams))
    return float(loss), [(float(a), float(b)) for a, b in metrics.values()]

  loss, pairs = run([0.0] * 4)
  assert loss == 0.0 and set(pairs) == {(0.0, 0.0)}
  assert np.isfinite(run([1.0, 0.0, 1.0, 0.0])[0])
  assert run([1.0, 0.0, 0.0, 0.0])[0] < 50.0
