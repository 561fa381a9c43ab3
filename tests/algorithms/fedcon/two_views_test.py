"""FedCon's steps against their formulas in NumPy."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf
import tiny_steps
import tiny_task

from tff_fssl.algorithms import fedcon
from tff_fssl.algorithms.fedcon import two_views
from tff_fssl.interface import base
from tff_fssl.models import adapter


def _network(seed):
  return adapter.Network(
    functools.partial(tiny_task.model_fn, 'none'), seed=seed
  )


def _projector(local, hidden_size=8):
  model_fn = two_views.build_projector(hidden_size)
  return adapter.Network(functools.partial(model_fn, local), seed=7)


def _batch(name, round_num=50):
  x, y = tiny_task.examples(8, 3)
  images = tf.cast(x, tf.float32) / 255.0
  views = {'first': images, 'second': tf.reverse(images, [1]) ** 2}
  weights = tf.constant([1.0] * 7 + [0.0])  # A filler.
  examples = base.BatchExamples(views, tf.constant(y), weights)
  time = base.StepTime(*tf.constant([round_num, 0, 10]))
  return base.Batch({name: examples}, {}, time, tf.constant([0, 0]))


def _check_gradients(variables, gradients, loss_fn):
  """Central differences of the largest entry in each variable."""
  for variable, gradient in zip(variables, gradients, strict=True):
    value, step = variable.numpy(), 2e-3
    index = np.unravel_index(np.argmax(np.abs(gradient)), value.shape)
    sides = []
    for sign in (1.0, -1.0):
      moved = value.copy()
      moved[index] += sign * step
      variable.assign(moved)
      sides.append(loss_fn())
    variable.assign(value)
    difference = (sides[0] - sides[1]) / (2 * step)
    assert gradient.numpy()[index] == pytest.approx(difference, abs=2e-3)


def test_the_projector_normalizes_with_pytorchs_epsilon():
  """A hidden unit of 0.01 and -0.01: variance 1e-4, 0.01 / sqrt(1.1e-4)."""
  local = types.SimpleNamespace(feature_size=1)
  projector = two_views.build_projector(1)(local)
  one, zero = np.ones([1, 1]), np.zeros([1])
  projector.get_layer('hidden').set_weights([one, zero])
  projector.get_layer('prediction').set_weights([one, zero])
  output = projector(np.float32([[0.01], [-0.01]]), training=True)
  np.testing.assert_allclose(output, [[0.953463], [0.0]], atol=1e-6)


class TestClientStep:
  def _step(self):
    local, target = _network(1), _network(2)
    descents = tiny_steps.Descents()
    networks = base.Networks(
      local, {'target': target, 'projector': _projector(local)}, descents
    )
    batch = _batch(base.UNLABELED)
    result = fedcon.FedCon().step(networks, batch)
    assert set(descents) == {'projector'}
    return networks, batch, result

  def test_gradients(self):
    networks, batch, result = self._step()
    local, target = networks.model, networks['target']
    projector = networks['projector']
    views = batch.unlabeled.views
    targets = {k: target.features(v, training=True) for k, v in views.items()}

    def mlp(features):
      """The projector, written out; its batch norm sees the filler, too."""
      w1, b1, gamma, beta, w2, b2 = (
        np.float64(v.numpy()) for v in projector.trainable_variables
      )
      hidden = features @ w1 + b1
      hidden = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)
      return np.maximum(hidden * gamma + beta, 0.0) @ w2 + b2

    def loss():
      total = 0.0
      for own, other in (('first', 'second'), ('second', 'first')):
        features = local.features(views[own], training=True).numpy()
        p, t = mlp(np.float64(features)), targets[other].numpy()
        norms = np.linalg.norm(p, axis=-1) * np.linalg.norm(t, axis=-1)
        total -= 0.5 * np.mean((np.sum(p * t, -1) / norms)[:7])
      return total

    value, count = result.metrics['loss_similarity']
    assert count == 7
    assert float(value) / 7 == pytest.approx(loss(), abs=1e-5)
    _check_gradients(local.trainable_variables, result.gradients, loss)
    _check_gradients(
      projector.trainable_variables, networks.descend['projector'], loss
    )

  def test_what_is_alive_and_what_is_frozen(self):
    networks, _, result = self._step()
    local = networks.model
    assert local.head == (1, 2)
    for i, gradient in enumerate(result.gradients):
      assert np.any(gradient.numpy()) == (i not in local.head)
    # A bias before batch norm has none.
    alive = [np.abs(g).max() > 1e-5 for g in networks.descend['projector']]
    assert alive == [True, False, True, True, True, True]

  @pytest.mark.parametrize('decay', [0.9, 1.0])
  def test_the_target_follows_after_each_batch(self, decay):
    algorithm = fedcon.FedCon(target_decay=decay)
    local, target = _network(1), _network(2)
    before = [v.numpy() for v in target.trainable_variables]
    networks = base.Networks(local, {'target': target})
    algorithm.after_step(networks, _batch(base.UNLABELED))
    for new, old, own in zip(
      target.trainable_variables, before, local.trainable_variables
    ):
      if decay == 1.0:  # To the bit.
        np.testing.assert_array_equal(new, old)
      np.testing.assert_allclose(
        new, decay * old + (1 - decay) * own, atol=1e-6
      )


class TestServerStep:
  def _step(self, **own):
    networks = base.Networks(_network(1), {'target': _network(2)})
    trainer = fedcon.FedCon(**own).server_trainer()
    batch = _batch(base.LABELED)
    return networks, batch, trainer.labeled_step(networks, batch)

  @pytest.mark.parametrize('target', ['ema', 'online'])
  def test_gradients(self, target):
    networks, batch, result = self._step(server_target=target)
    local, examples = networks.model, batch.labeled
    labeler = networks['target'] if target == 'ema' else local
    log_softmax = lambda z: np.float64(tf.nn.log_softmax(z).numpy())
    targets = {
      k: log_softmax(labeler.logits(v, training=True))
      for k, v in examples.views.items()
    }

    def loss():
      total = 0.0
      for own, other in (('first', 'second'), ('second', 'first')):
        log_probs = log_softmax(
          local.logits(examples.views[own], training=True)
        )
        entropy = -log_probs[np.arange(8), examples.labels.numpy()]
        p = targets[other]
        kl = np.sum(np.exp(p) * (p - log_probs), -1)
        total += 0.5 * np.mean(entropy[:7]) + 0.286505 * 0.5 * np.mean(kl[:7])
      return total

    labeled = result.metrics['loss_labeled'][0] / 7
    consistency = result.metrics['loss_consistency'][0] / 7
    value = float(labeled + 0.286505 * consistency)
    assert value == pytest.approx(loss(), abs=1e-5)
    assert consistency > 1e-6
    _check_gradients(local.trainable_variables, result.gradients, loss)
