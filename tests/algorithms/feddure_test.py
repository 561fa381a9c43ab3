"""FedDure: worked examples DU1 to DU3 of its specification, limits, rounds."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tiny_local
import tiny_norms
import tiny_rounds
import tiny_steps
import tiny_task

from tff_fssl.algorithms import feddure
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights
from tff_fssl.program import config

_CLIENTS = tiny_rounds.CLIENTS
_RATE = 0.0006
_T = [[0.8, -0.2, 0.1], [-0.3, 0.5, 0.4]]
_S = [[0.2, 0.1, -0.4], [0.3, -0.6, 0.5]]
_LABELED, _LABELS = [[1, 0], [0, 1], [1, -1]], [0, 2, 0]
_WEAK = [[1, 0.5], [2.5, -1], [-1, 1.5], [-2, 3]]
_STRONG = [[1.2, 0.2], [1.5, -1.5], [-0.5, 1], [-1, 2]]
_WARM = {'warmup_steps': 10, 'student_wait_steps': 2}
_RELEASED = {'signal': 'released', 'after_warmup': 'cosine', **_WARM}


def _make(**values):
  steps = values.pop('client_steps', 10)
  return feddure.FedDure(
    **values, round=RoundHparams(scenario=_CLIENTS, client_steps=steps)
  )


def _linear(kernel):
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([2]), tf.keras.layers.Dense(3, use_bias=False)]
    )
  )
  network.assign(_weights(kernel))
  return network


def _weights(kernel):
  return Weights((tf.constant(kernel, tf.float32),), (), tf.constant(1.0))


class _Pair:
  """The two networks of a client, and their optimizers."""

  def __init__(self, teacher=_T, student=_S, make=optimizer.Adam):
    self._optimizer = make()
    model, other = _linear(teacher), _linear(student)
    self._networks = {base.MODEL: model, 'student': other}
    self._slots = {
      name: self._optimizer.initialize(network)
      for name, network in self._networks.items()
    }
    self.networks = base.Networks(model, {'student': other}, self._descend)
    self.gradients = self.factor = None

  def _descend(self, name, gradients, factor):
    if name == base.MODEL:
      self.gradients, self.factor = gradients, factor
    self._optimizer.apply(
      self._networks[name], self._slots[name], gradients, _RATE * factor
    )

  def step(self, algorithm, batch):
    return algorithm.step(self.networks, batch)

  @property
  def kernels(self):
    return [
      np.array(n.trainable_variables[0])
      for n in (self.networks.model, self.networks['student'])
    ]


def _batch(step, num_steps=10, of_labels=None, of_others=None):
  return tiny_steps.batch(
    base.StepTime(*tf.constant([1, step, num_steps])),
    unlabeled=tiny_steps.examples(
      weights=of_others, weak=_WEAK, strong=_STRONG
    ),
    labeled=tiny_steps.examples(
      labels=_LABELS, weights=of_labels, weak=_LABELED
    ),
  )


class TestExamples:
  """DU1 to DU3, with the released sign and warm-up."""

  def test_du1_a_joint_step(self):
    pair = _Pair()
    result = pair.step(_make(**_RELEASED), _batch(7))
    means = tiny_steps.means(result.metrics)
    np.testing.assert_allclose(means['loss_labeled'], 0.641365, atol=1e-6)
    assert means['pseudo_label_ratio'] == 0.5
    # A mean over the kept ones; L_uda is one over all.
    np.testing.assert_allclose(
      means['loss_own_prediction'] / 2, 0.277180, atol=1e-6
    )
    np.testing.assert_allclose(means['student_gain'], 9.501022e-5, atol=2e-7)
    np.testing.assert_allclose(
      pair.gradients[0],
      [[-0.284825, 0.148370, 0.136456], [0.204570, 0.026050, -0.230619]],
      atol=1e-6,
    )
    np.testing.assert_allclose(
      pair.kernels[0],
      [[0.800420, -0.200420, 0.099580], [-0.300420, 0.499580, 0.400420]],
      atol=1e-6,
    )
    np.testing.assert_allclose(pair.factor, 0.7, atol=1e-6)

  def test_du1_losses(self):
    """Each term alone, and the two losses of the student."""
    batch, networks = _batch(7), _Pair().networks
    examples = batch.unlabeled
    weak, strong, of_labels = (
      n @ tf.constant(_T, tf.float32)
      for n in (
        examples.views['weak'],
        examples.views['strong'],
        batch.labeled.views['weak'],
      )
    )
    probs = tf.nn.softmax(weak)
    np.testing.assert_array_equal(tf.argmax(probs, -1), [0, 0, 1, 1])
    algorithm = _make(**_RELEASED)
    loss, _ = algorithm._loss(probs, strong, of_labels, batch, tf.constant(2))
    np.testing.assert_allclose(loss, 0.641365 + 1.2 * 0.277180, atol=1e-6)
    before = feddure._loss_on_labels(networks['student'], batch)
    np.testing.assert_allclose(before, 0.988436, atol=1e-6)
    gain, _ = algorithm._train_student(
      networks, batch, tf.constant([0, 0, 1, 1]), tf.constant(2)
    )
    after = feddure._loss_on_labels(networks['student'], batch)
    np.testing.assert_allclose(after, 0.988341, atol=1e-6)
    np.testing.assert_array_equal(gain, before - after)
    meta = algorithm._signal(gain) * feddure._own_class_loss(strong, examples)
    np.testing.assert_allclose(meta, -4.813784e-5, atol=1e-7)
    np.testing.assert_allclose(loss + meta, 0.973933, atol=1e-6)

  def test_du2_and_du3_a_round(self):
    algorithm, pair = _make(**_RELEASED), _Pair()
    gains = []
    for step in range(10):
      result = pair.step(algorithm, _batch(step))
      gains.append(float(result.metrics['student_gain'].total) / 3)
      if step == 4:
        np.testing.assert_allclose(
          pair.kernels,
          [[[0.8006, -0.2006, 0.0994], [-0.3006, 0.4994, 0.4006]], _S],
          atol=1e-6,
        )
        assert float(result.metrics['student_gain'].count) == 0
        assert float(result.metrics['pseudo_label_ratio'].count) == 0
    np.testing.assert_allclose(
      gains, [0] * 7 + [0.000095, 0.000142, 0.000190], atol=1e-6
    )
    np.testing.assert_allclose(
      pair.kernels,
      [
        [[0.802722, -0.202747, 0.097316], [-0.302738, 0.497667, 0.402670]],
        [[0.200450, 0.099550, -0.399550], [0.299550, -0.599550, 0.499550]],
      ],
      atol=1e-6,
    )

  @pytest.mark.parametrize('jit_compile', [False, True])
  def test_du3_by_the_loop_of_all_algorithms(self, jit_compile):
    rows = lambda x, y: base.Examples(
      tf.constant(np.hstack([x, y]), tf.float32),
      tf.constant(_LABELS if x is _LABELED else [-1] * 4),
    )
    views = augment.Views(
      lambda x: x[:, :2], lambda x, seed: x[:, :2], lambda x, seed: x[:, 2:]
    )
    model, student = _linear(_T), _linear(_S)
    local = training.LocalTraining(
      model,
      _make(**_RELEASED),
      views,
      training.LoopConfig(
        1, 4, 3, optimizer.Adam(), num_steps=10, jit_compile=jit_compile
      ),
      {'student': student},
      {'student': lambda: _weights(_S)},
    )
    result = tf.function(
      lambda: local.run(
        _weights(_T),
        rows(_LABELED, _LABELED),
        rows(_WEAK, _STRONG),
        learning_rate=tf.constant(_RATE),
        seed=tf.constant([3, 4]),
      )
    )()
    np.testing.assert_allclose(
      _T - result.update[0],
      [[0.802722, -0.202747, 0.097316], [-0.302738, 0.497667, 0.402670]],
      atol=1e-6,
    )
    np.testing.assert_allclose(
      student.trainable_variables[0],
      [[0.200450, 0.099550, -0.399550], [0.299550, -0.599550, 0.499550]],
      atol=1e-6,
    )
    assert result.auxiliary == {}
    gain = tiny_steps.means(result.metrics)['student_gain']
    np.testing.assert_allclose(gain, 0.000427 / 5, atol=1e-6)


class TestRates:
  """The factors of both learning rates."""

  def _factors(self, algorithm, steps, wait=0, num_steps=10):
    time = base.StepTime(*tf.constant([1, 0, num_steps]))
    return [
      float(algorithm._rate_factor(tf.constant(k), time, wait)) for k in steps
    ]

  def test_cifar10_released(self):
    algorithm = _make(**_RELEASED)
    np.testing.assert_allclose(
      self._factors(algorithm, range(10)), np.arange(10) / 10
    )
    np.testing.assert_allclose(
      self._factors(algorithm, range(5), wait=2),
      [0, 0, 2 / 12, 3 / 12, 4 / 12],
      rtol=1e-6,
    )

  def test_cinic10_released(self):
    """The warm-up outlasts the joint steps, whose rates then alternate."""
    algorithm = _make(
      client_steps=110,
      finetuning_steps=100,
      after_warmup='cosine',
      warmup_steps=100,
    )
    np.testing.assert_allclose(
      self._factors(algorithm, range(98, 104), num_steps=110),
      [0.98, 0.99, 1, 0, 1, 0],
      atol=1e-6,
    )
    np.testing.assert_allclose(
      self._factors(algorithm, range(10), num_steps=110),
      np.arange(10) / 100,
      atol=1e-7,
    )

  def test_constant_rates_and_a_long_cosine(self):
    assert self._factors(_make(), range(10)) == [1.0] * 10
    factors = self._factors(_make(student_wait_steps=2), range(4), wait=2)
    assert factors == [0, 0, 1, 1]
    algorithm = _make(client_steps=15, warmup_steps=2, after_warmup='cosine')
    np.testing.assert_allclose(
      self._factors(algorithm, [0, 1, 2, 6, 10], num_steps=15),
      [0, 0.5, 1, 0.5, 0],
      atol=1e-6,
    )


class TestSteps:
  """Signs, views and fillers."""

  def _gradient(self, step=7, **values):
    batch = values.pop('batch', None)
    pair = _Pair()
    result = pair.step(_make(**values), batch or _batch(step))
    return np.array(pair.gradients[0]), result.metrics, pair

  def test_the_signs_are_opposite(self):
    none, theory, released, twice = (
      self._gradient(**own)[0]
      for own in (
        {'signal_weight': 0.0},
        {},
        {'signal': 'released'},
        {'signal_weight': 2.0},
      )
    )
    assert np.abs(theory - none).max() > 1e-5
    np.testing.assert_allclose(theory - none, none - released, atol=1e-7)
    np.testing.assert_allclose(twice - none, 2 * (theory - none), atol=1e-7)

  def test_the_gain_is_the_product_of_gradients(self):
    """To first order, where the student makes a small step of SGD."""
    pair, batch = _Pair(make=optimizer.Sgd), _batch(5)
    student = pair.networks['student']
    labels = tf.constant([0, 0, 1, 1])
    gradients = []
    for examples, y in ((batch.labeled, _LABELS), (batch.unlabeled, labels)):
      with tf.GradientTape() as tape:
        logits = examples.logits(student, 'weak')
        loss = tf.reduce_mean(
          tf.keras.losses.sparse_categorical_crossentropy(
            tf.constant(y), logits, True
          )
        )
      gradients.append(student.gradients(tape, loss)[0])
    result = pair.step(_make(), batch)
    gain = tiny_steps.means(result.metrics)['student_gain']
    product = float(tf.reduce_sum(gradients[0] * gradients[1]))
    np.testing.assert_allclose(gain, _RATE * product, rtol=2e-3)
    assert product > 0.1

  def test_the_student_learns_from_the_view_that_it_is_told(self):
    kernels = [
      self._gradient(student_view=view)[2].kernels[1]
      for view in ('weak', 'strong')
    ]
    losses = [
      tiny_steps.means(self._gradient(student_view=view)[1])['loss_student']
      for view in ('weak', 'strong')
    ]
    assert losses[0] != losses[1]
    assert not np.array_equal(kernels[0], _S)
    logits = np.array(_STRONG) @ np.array(_S)
    picked = logits[np.arange(4), [0, 0, 1, 1]]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - picked)
    np.testing.assert_allclose(losses[1], expected, rtol=1e-5)

  def test_without_labels_the_student_has_no_gain(self):
    batch = _batch(7, of_labels=[0.0] * 3)
    gradient, metrics, _ = self._gradient(batch=batch)
    plain, *_ = self._gradient(batch=batch, signal_weight=0.0)
    np.testing.assert_array_equal(gradient, plain)
    assert np.abs(gradient).max() > 1e-3
    for name in ('student_gain', 'loss_labeled'):
      assert float(metrics[name].total) == float(metrics[name].count) == 0

  def test_without_unlabelled_examples_only_labels_count(self):
    batch = _batch(7, of_others=[0.0] * 4)
    gradient, metrics, pair = self._gradient(batch=batch)
    expected, *_ = self._gradient(step=0)
    np.testing.assert_allclose(gradient, expected, atol=1e-7)
    np.testing.assert_array_equal(pair.kernels[1], np.float32(_S))
    assert float(metrics['loss_student'].count) == 0
    assert float(metrics['student_gain'].total) == 0

  def test_fillers_do_not_count(self):
    weights = [1.0, 0, 1, 0]
    gradient, metrics, pair = self._gradient(batch=_batch(7, of_others=weights))
    rows = [0, 2]
    few = _batch(7)
    views = {
      name: tf.gather(x, rows) for name, x in few.unlabeled.views.items()
    }
    part = few.unlabeled._replace(
      views=views, labels=tf.constant([-1] * 2), weights=tf.ones([2])
    )
    few = few._replace(streams={**few.streams, 'unlabeled': part})
    expected, same, other = self._gradient(batch=few)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    np.testing.assert_allclose(pair.kernels, other.kernels, atol=1e-6)
    assert tiny_steps.means(metrics) == pytest.approx(
      tiny_steps.means(same), abs=1e-6
    )

  def test_moving_averages_of_the_student_are_its_own(self):
    teacher, student = (
      tiny_norms.network(track_moving_averages=True) for _ in range(2)
    )
    networks = base.Networks(teacher, {'student': student}, lambda *_: None)
    batch = tiny_norms.views([1.0])
    batch = batch._replace(time=base.StepTime(*tf.constant([1, 7, 10])))
    _make().step(networks, batch)
    # Teacher: one batch of 1, 2, 4, 8 and 16. Student: labels, weak, labels.
    np.testing.assert_allclose(
      teacher.non_trainable_variables[0], [0.1 * 6.2], rtol=1e-6
    )
    expected = 0.9 * (0.9 * 1.6 + 0.1 * 1.5) + 0.1 * 16
    np.testing.assert_allclose(
      student.non_trainable_variables[0], [expected], rtol=1e-6
    )


def _train(name, element, sizes=(5, 3), make=optimizer.Sgd, **own):
  """What a client has after two epochs."""
  config = training.LoopConfig(2, *sizes, make())
  return tiny_local.train(name, _CLIENTS, element, config, **own)[1]


class TestClient:
  """Reductions, and what a client reports."""

  def test_without_the_student_it_is_uda(self):
    """Without sharpening and annealing; the loss differs by a constant."""
    element = tiny_task.client(0, labeled=4)
    own = {'confidence_threshold': 0.35, 'unlabeled_loss_weight': 2.0}
    no_student = {
      'finetuning_steps': 0,
      'rampup_steps': 1,
      'signal_weight': 0.0,
    }
    ours = _train('feddure', element, **own, **no_student)
    theirs = _train('uda', element, **own, temperature=1.0, tsa='none')
    tiny_rounds.assert_same(ours.update, theirs.update, atol=1e-6)
    ours, theirs = (tiny_steps.means(r.metrics) for r in (ours, theirs))
    assert 0 < ours['pseudo_label_ratio'] == theirs['pseudo_label_ratio']
    assert 'student_gain' not in ours

  def test_without_joint_steps_it_is_fedavg_on_labels(self):
    element = tiny_task.client(0, labeled=9, unlabeled=4)
    ours = _train('feddure', element, (5, 5), finetuning_steps=50)
    theirs = _train('supervised', element, (5, 5))
    tiny_rounds.assert_same(ours.update, theirs.update, atol=1e-6)
    assert ours.metrics['student_gain'].count == 0

  def test_the_student_changes_the_teacher_and_is_reported(self):
    element = tiny_task.client(0, labeled=4)
    with_it, without = (
      _train('feddure', element, make=optimizer.Adam, signal_weight=weight)
      for weight in (100.0, 0.0)
    )
    assert tiny_rounds.differ(with_it.update, without.update)
    means = tiny_steps.means(with_it.metrics)
    assert abs(means['student_gain']) > 1e-6
    assert means['loss_student'] > 0
    assert 0 < means['pseudo_label_ratio'] <= 1


_GIVEN = ['--algorithm=feddure', '--scenario=labels_at_clients']
_GIVEN += ['--dataset=digits', '--num_clients=10', '--num_labels=20']


def test_rounds_without_a_joint_step_are_refused():
  with pytest.raises(UsageError, match='below --client_steps=10'):
    _make(finetuning_steps=10).streams()
  _make(client_steps=0, finetuning_steps=10).streams()
  given = [*_GIVEN, '--feddure.finetuning_steps=100']
  config.parse_config([*given, '--client_steps=110'])


def test_flags_of_the_student_have_no_effect_without_it():
  given = [*_GIVEN, '--feddure.signal_weight=0']
  config.parse_config(given)
  with pytest.raises(UsageError, match='has no effect'):
    config.parse_config([*given, '--feddure.student_view=strong'])


def test_defaults_are_the_authors():
  round_hparams = feddure.FedDure().round
  assert round_hparams.client_optimizer == 'adam'
  assert round_hparams.client_steps == 10
  assert dataclasses.replace(round_hparams, momentum=0.0).weight_decay == 0
