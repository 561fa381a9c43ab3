"""(FL)^2's local training against a NumPy float64 reference.

The model has two parameters, logits (k x + b, 0), so that gradients are written
down by hand. One batch holds all examples, so that their order is irrelevant.
"""

import handmade
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms import fl2
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

_X = np.array([-2.0, -0.7, 0.1, 0.4, 1.5, 3.0])
_KEPT = np.array([1, 0, 1, 1, 1, 1], bool)
_CONFIDENT = np.array([1, 0, 0, 0, 1, 1], bool)
_LABELS = np.array([1, 1, 0, 1, 0, 0])
_K, _B = 0.8, -0.3
_STEPS, _RATE = 3, 0.2


def _model() -> tf.keras.Model:
  inputs = tf.keras.Input([1])
  first = tf.keras.layers.Dense(1)(inputs)
  ops = tf.keras.ops
  logits = ops.concatenate([first, ops.zeros_like(first)], -1)
  return tf.keras.Model(inputs, logits)


def _probs(parameters, x):
  """softmax((k x + b, 0)), [N, 2]."""
  first = 1 / (1 + np.exp(-(parameters[0] * x + parameters[1])))
  return np.stack([first, 1 - first], -1)


def _pull_back(by_first_logit, x):
  """A gradient by the first logit, [N], as one by (k, b)."""
  return np.array([np.sum(by_first_logit * x), np.sum(by_first_logit)])


def _reference(hparams, norm_bound, momentum, nesterov, decay):
  """Parameters after `_STEPS`, and the last step's losses."""
  x, labels = _X[_KEPT], _LABELS[_KEPT]
  mask = _CONFIDENT[_KEPT].astype(float)
  one_hot = np.eye(2)[labels]
  parameters, velocity = np.array([_K, _B]), np.zeros(2)
  for _ in range(_STEPS):
    probs = _probs(parameters, x)
    error = (probs - one_hot)[:, 0]
    gradient_a = _pull_back(error / len(x), x)
    gradient_p = _pull_back(error * mask / mask.sum(), x)
    scale = np.array([abs(parameters[0]) + 0.01, 1.0])
    if hparams.ascent == 'sam':
      scale = np.ones(2)
    norm = np.linalg.norm(scale * gradient_p) + 1e-16
    eps = hparams.rho * scale**2 * gradient_p / norm
    # KL(sg Q || softmax(z*)): by z*, softmax - Q.
    by_logit = (_probs(parameters + eps, x) - probs)[:, 0] * mask / len(x)
    gradient = hparams.pseudo_label_loss_weight * gradient_a
    if hparams.consistency == 'sacr':
      gradient = gradient + hparams.consistency_weight * _pull_back(by_logit, x)
    elif hparams.consistency == 'sam':
      error = (_probs(parameters + eps, x) - one_hot)[:, 0]
      gradient = gradient + hparams.consistency_weight * _pull_back(
        error * mask / mask.sum(), x
      )
    if norm_bound:
      gradient = gradient / max(np.linalg.norm(gradient) / norm_bound, 1.0)
    gradient = gradient + decay * parameters
    velocity = momentum * velocity + gradient
    parameters = parameters - _RATE * (
      gradient + momentum * velocity if nesterov else velocity
    )
  return parameters


@pytest.mark.parametrize(
  'change, norm_bound',
  [
    ({}, 0.0),
    ({}, 0.1),
    ({'consistency': 'none'}, 0.1),
    ({'consistency': 'sam'}, 0.1),
    ({'rho': 0.7}, 0.0),
    ({'ascent': 'sam', 'rho': 0.7}, 0.0),
    ({'pseudo_label_loss_weight': 0.0, 'rho': 1.0}, 0.1),
    ({'consistency_weight': 3.0, 'rho': 0.5}, 0.0),
  ],
)
def test_local_training(change, norm_bound):
  momentum, nesterov = 0.9, True
  hparams = fl2.Fl2(**change)
  network = adapter.Network(_model)
  views = augment.Views(*3 * [lambda x, seed=None: x])
  decay = 0.01

  def prepare(_):
    return base.Prepared(
      tf.constant(np.flatnonzero(_KEPT), tf.int32),
      per_example={
        'labels': tf.constant(_LABELS, tf.int32),
        'confident': tf.constant(_CONFIDENT),
      },
    )

  local = training.LocalTraining(
    network,
    handmade.algorithm(
      step=hparams.step,
      prepare=prepare,
      streams=lambda: {base.UNLABELED: handmade.stream('strong')},
    ),
    views,
    training.LoopConfig(
      num_epochs=_STEPS,
      batch_size=100,
      labeled_batch_size=1,
      optimizer=optimizer.Sgd(momentum, nesterov, decay, norm_bound),
    ),
  )
  start = Weights(
    (tf.constant([[_K]]), tf.constant([_B])), (), tf.constant(1.0)
  )
  images = tf.constant(_X[:, None], tf.float32)
  result = tf.function(local.run)(
    start,
    base.Examples(images[:0], tf.zeros([0], tf.int32)),
    base.Examples(images, tf.fill([len(_X)], -1)),
    learning_rate=tf.constant(_RATE),
    seed=tf.constant([0, 0]),
  )
  after = np.array([_K, _B]) - np.concatenate(
    [np.ravel(u) for u in result.update]
  )
  expected = _reference(hparams, norm_bound, momentum, nesterov, decay)
  np.testing.assert_allclose(after, expected, rtol=2e-6, atol=2e-7)


def test_the_reference_tells_its_terms_apart():
  """The reference is not blind: its terms matter at these numbers."""
  first = _reference(fl2.Fl2(rho=0.5), 0.0, 0.9, True, 0.01)
  for change in (
    {'consistency': 'none'},
    {'ascent': 'sam', 'rho': 0.5},
    {'rho': 0.6},
  ):
    other = fl2.Fl2(**{'rho': 0.5, **change})
    assert np.abs(_reference(other, 0.0, 0.9, True, 0.01) - first).max() > 1e-4
