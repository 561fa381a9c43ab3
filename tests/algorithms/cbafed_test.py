"""CBAFed: worked examples CB1 to CB4 of its specification, limits, rounds."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_local
import tiny_rounds
import tiny_steps
import tiny_task

from tff_fssl.algorithms import cbafed
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import thresholds

_CLIENTS = tiny_rounds.CLIENTS


def _make(**values):
  settings = {
    name: values.pop(name)
    for name in ('client_epochs', 'client_steps')
    if name in values
  }
  return cbafed.CbaFed(
    **values, round=RoundHparams(scenario=_CLIENTS, **settings)
  )


def _shares(counts):
  return tf.constant(np.divide(counts, np.sum(counts)), tf.float32)


def _thresholds(counts, cap):
  frequencies = cbafed.scaled(_shares(counts))
  return frequencies, cbafed.class_thresholds(frequencies, 0.84, cap)


_CB1 = [1000, 600, 300, 200, 100, 80, 60, 40, 15, 5]
_CB2 = [15, 292, 986, 116, 63, 1285, 1352, 1438, 807, 267]


class TestThresholds:
  """CB1 and CB2."""

  def test_cb1(self):
    frequencies, limits = _thresholds(_CB1, 0.95)
    np.testing.assert_allclose(
      frequencies,
      [0.416667, 0.25, 0.125, 0.083333, 0.041667]
      + [0.033333, 0.025, 0.016667, 0.006250, 0.002083],
      atol=1e-6,
    )
    expected = [0.95, 0.95, 0.830640, 0.788973, 0.747306]
    expected += [0.738973, 0.730640, 0.722306, 0.711890, 0.707723]
    np.testing.assert_allclose(limits, expected, atol=1e-6)
    np.testing.assert_allclose(
      _thresholds(_CB1, 0.9)[1], [0.9, 0.9, *expected[2:]], atol=1e-6
    )

  def test_cb2(self):
    np.testing.assert_allclose(
      _thresholds(_CB2, 0.9)[1],
      [0.755636, 0.797473, 0.9, 0.770891, 0.762886]
      + [0.9, 0.9, 0.9, 0.875256, 0.793697],
      atol=1e-6,
    )

  @pytest.mark.parametrize(
    'counts, rare', [(_CB1, {6, 7, 8, 9}), (_CB2, {0, 3, 4})]
  )
  def test_rare_classes(self, counts, rare):
    """An unsure example is kept if its second class is one of these."""
    # The first class is the one after the second.
    probs = 0.6 * np.roll(np.eye(10), 1, axis=1) + 0.4 * np.eye(10)
    labels, kept, second = _make()._select(
      tf.constant(probs, tf.float32), _shares(counts)
    )
    assert set(np.flatnonzero(kept)) == set(np.flatnonzero(second)) == rare
    assert all(labels[c] == c for c in rare)

  def test_balanced_classes_have_one_threshold(self):
    probs = tf.random.stateless_uniform([500, 4], [1, 2])
    probs = tf.nn.softmax(20.0 * probs)
    labels, kept, second = _make()._select(probs, _shares([1] * 4))
    np.testing.assert_array_equal(labels, thresholds.pseudo_labels(probs))
    np.testing.assert_array_equal(kept, thresholds.strict_mask(probs, 0.94))
    assert not np.any(second) and 0 < np.mean(kept) < 1


_PROBS = [[0.92, 0.05, 0.02, 0.01], [0.70, 0.05, 0.05, 0.20]]
_PROBS += [[0.60, 0.30, 0.08, 0.02], [0.15, 0.80, 0.04, 0.01]]
_PROBS += [[0.05, 0.05, 0.86, 0.04]]


class TestCb3:
  """Thresholds and pseudo-labels of five examples of four classes."""

  _COUNTS = (60, 30, 9, 1)

  def test_thresholds(self):
    frequencies, limits = _thresholds(self._COUNTS, 0.95)
    np.testing.assert_allclose(
      frequencies, [0.24, 0.12, 0.036, 0.004], atol=1e-6
    )
    np.testing.assert_allclose(
      limits, [0.95, 0.854624, 0.770624, 0.738624], atol=1e-6
    )

  def test_pseudo_labels(self):
    probs, shares = tf.constant(_PROBS), _shares(self._COUNTS)
    labels, kept, second = _make()._select(probs, shares)
    np.testing.assert_array_equal(labels, [0, 3, 0, 1, 2])
    np.testing.assert_array_equal(kept, [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(second, [0, 1, 0, 0, 0])
    _, kept, second = _make(second_labels=False)._select(probs, shares)
    np.testing.assert_array_equal(kept, [0, 0, 0, 0, 1])
    assert not np.any(second)

  def test_of_a_failed_prediction_nothing_is_kept(self):
    probs = tf.fill([2, 4], float('nan'))
    _, kept, _ = _make()._select(probs, _shares(self._COUNTS))
    assert not np.any(kept)


def _network():
  network = adapter.Network(
    lambda: tf.keras.Sequential(
      [tf.keras.Input([1]), tf.keras.layers.Dense(2, use_bias=False)]
    )
  )
  network.assign(Weights((tf.zeros([1, 2]),), (), tf.constant(1.0)))
  return network


class _Server(base.Server):
  """Each round adds 1 to the weights."""

  def __init__(self, round_num):
    self.round_num = tf.constant(round_num)

  def apply(self, weights, update):
    return weights._replace(trainable=(weights.trainable[0] + 1.0,))

  def train(self, weights, copy=0):
    return weights


class TestCb4:
  """The residual connection of a weight that grows by 1."""

  def _epochs(self, algorithm, has_labels=True, steps=2):
    networks = base.Networks(_network(), {'residual': _network()})
    (weight,) = networks.model.trainable_variables
    history = []
    for step in range(11 * steps):
      weight.assign_add([[1.0 / steps] * 2])
      time = base.StepTime(*tf.constant([1, step, 11 * steps]))
      values = {'num_epochs': tf.constant(11), 'has_labels': has_labels}
      batch = tiny_steps.batch(time)._replace(
        values={n: tf.convert_to_tensor(v) for n, v in values.items()}
      )
      algorithm.after_step(networks, batch)
      if step % steps == steps - 1:
        history.append(float(weight[0, 0]))
    return history

  def test_without_epochs_there_are_none(self):
    assert list(_make().networks()) == ['residual']
    algorithm = _make(client_steps=7)
    assert not algorithm.networks()
    assert self._epochs(algorithm) == pytest.approx(range(1, 12))

  def test_epochs_of_a_client_with_labels(self):
    np.testing.assert_allclose(
      self._epochs(_make()), [1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 3], atol=1e-6
    )

  @pytest.mark.parametrize(
    'own, has_labels',
    [({}, False), ({'residual_interval': 0}, True)],
  )
  def test_epochs_without_it(self, own, has_labels):
    np.testing.assert_allclose(
      self._epochs(_make(**own), has_labels), range(1, 12), atol=1e-6
    )

  def test_rounds_of_the_server(self):
    """R is the model at the end of the warm-up, here of value 0."""
    algorithm = _make(warmup_rounds=2)
    state = algorithm.initial_state(
      Weights((tf.constant([-2.0]),), (tf.constant([7]),), tf.constant(1.0)),
      base.Setup(num_classes=2),
    )
    counts = {'counts': tf.constant([0.1, 0.3])}
    history = []
    for round_num in range(1, 14):
      state = algorithm.update(
        state,
        base.Aggregate((), counts, tf.constant(1.0), lambda: None),
        _Server(round_num),
      )
      history.append(float(state.weights.trainable[0][0]))
    np.testing.assert_allclose(
      history, [-1, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 5.5], atol=1e-6
    )
    np.testing.assert_allclose(state.memory.shares, [0.25, 0.75])
    # Counters stay.
    np.testing.assert_array_equal(state.weights.non_trainable[0], [7])


def _run(elements, own=(), num_rounds=1, norm='none', **settings):
  own = {'residual_interval': 0, **dict(own)}
  process = tiny_rounds.build('cbafed', _CLIENTS, norm, own, **settings)
  state = process.initialize()
  for _ in range(num_rounds):
    output = process.next(
      state, [tiny_task.dataset(e, process) for e in elements]
    )
    state = output.state
  return output


def _train(name, element, **own):
  """What a client has after two epochs."""
  config = training.LoopConfig(2, 5, 5, optimizer.Sgd())
  return tiny_local.train(name, _CLIENTS, element, config, **own)[1]


def _kept(output):
  return output.state.global_model_weights.control['shares']


_UNEQUAL = [
  tiny_task.client(i, labeled=4 + 5 * i, unlabeled=3 * i) for i in range(3)
]


class TestRounds:
  """Reduction, frequencies, epochs and rates."""

  def test_a_warm_up_is_fedavg_on_labels(self):
    element = tiny_task.client(0, labeled=4)
    ours, theirs = (
      _train(name, element, **own)
      for name, own in (
        ('cbafed', {'warmup_rounds': 10, 'residual_interval': 0}),
        ('supervised', {}),
      )
    )
    tiny_rounds.assert_same(ours.update, theirs.update, atol=1e-6)

  @pytest.mark.parametrize('weigh, decay', [(True, 0.9), (False, 0.0)])
  def test_frequencies_are_those_of_all_clients_together(self, weigh, decay):
    own = {
      'warmup_rounds': 10,
      'weigh_by_examples': weigh,
      'count_decay': decay,
    }
    output = _run(_UNEQUAL, own)
    labels = np.concatenate([e['labeled']['y'] for e in _UNEQUAL])
    shares = np.bincount(labels, minlength=3) / len(labels)
    np.testing.assert_allclose(
      _kept(output), decay / 3 + (1 - decay) * shares, atol=1e-6
    )
    train = output.metrics['client_work']['train']
    np.testing.assert_allclose(
      train['aggregation_weight_max'],
      14 / 27 if weigh else 1 / 3,
      atol=1e-6,
    )

  def test_kept_examples_count_and_weigh(self):
    """All are kept: the clients weigh alike, and each counts 12."""
    elements = [tiny_task.client(0, labeled=12, unlabeled=0)]
    elements += [tiny_task.client(i) for i in (1, 2)]
    output = _run(elements, client_epochs=3)
    train = output.metrics['client_work']['train']
    np.testing.assert_allclose(train['aggregation_weight_max'], 1 / 3)
    assert train['pseudo_label_ratio'] == 1
    # Three epochs of labels, one of pseudo-labels.
    assert train['num_examples'] == 3 * 12 + 2 * 12
    # Neither kind of client is without effect.
    alone = _run(elements[:1], client_epochs=3)
    assert tiny_rounds.differ(
      tiny_rounds.model(output).weights, tiny_rounds.model(alone).weights
    )

  def test_a_client_that_keeps_nothing_weighs_nothing(self):
    elements = [tiny_task.client(0, labeled=4), tiny_task.client(1)]
    own = {'warmup_rounds': 1}
    both, alone = (_run(some, own) for some in (elements, elements[:1]))
    for a, b in zip(
      *(tiny_task.flat(o.state) for o in (both, alone)), strict=True
    ):
      np.testing.assert_allclose(a, b, atol=1e-6)
    only = _run(elements[1:], own)
    assert only.metrics['finalizer']['update_skipped'] == 1
    np.testing.assert_allclose(_kept(only), [1 / 3] * 3)

  def test_the_rate_of_clients_without_labels(self):
    still, moved = (
      _train('cbafed', tiny_task.client(0), **own).update
      for own in ({'unlabeled_rate_factor': 0.0}, {})
    )
    assert not any(np.any(change) for change in still)
    assert any(np.any(change) for change in moved)

  @pytest.mark.slow
  def test_fixed_views_are_those_that_were_labelled(self):
    """Where views are not random, they make no difference."""
    elements = [tiny_task.client(i) for i in range(2)]
    for plain in (True, False):
      first, second = (
        tiny_rounds.model(
          _run(elements, {'fixed_views': fixed}, plain=plain)
        ).trainable
        for fixed in (False, True)
      )
      if plain:
        tiny_rounds.assert_same(first, second, atol=1e-6)
      else:
        assert tiny_rounds.differ(first, second)
    # A client without examples has no views.
    empty = _run([tiny_task.client(3, unlabeled=0)], {'fixed_views': True})
    assert empty.metrics['client_work']['train']['num_rejected_clients'] == 0


def test_more_epochs_on_pseudo_labels_are_refused():
  with pytest.raises(UsageError, match='at most --client_epochs=2'):
    _make(client_epochs=2, unlabeled_epochs=3)
  _make(client_steps=7, client_epochs=1)


class TestTrust:
  """What a client may send, and what protects it."""

  @pytest.mark.parametrize(
    'counts, is_possible',
    [
      ([0.2, 0.3, 0.5], True),
      ([0, 0, 0], True),
      ([0.5, 0.6, 0], False),
      ([-0.1, 0.2, 0], False),
      ([np.nan, 0, 0], False),
    ],
  )
  def test_shares(self, counts, is_possible):
    uploads = {'counts': tf.constant(counts, tf.float32)}
    assert tiny_rounds.is_possible(_make(), uploads) == is_possible
