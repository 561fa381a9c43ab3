"""The interface of an algorithm: FedAvg, and the types of its methods."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.models.weights import Weights

_WEIGHTS = Weights((tf.constant([3.0, 4.0]),), (), tf.constant(1.0))


def _examples(labels, weights):
  labels = tf.constant(labels, tf.int32)
  return base.BatchExamples({}, labels, tf.constant(weights))


def test_fillers_count_in_no_loss_and_no_metric():
  logits = tf.constant([[2.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
  loss, metrics = base.cross_entropy_loss(
    logits, _examples([0, 0, 1], [1.0, 1.0, 0.0])
  )
  alone, _ = base.cross_entropy_loss(logits[:2], _examples([0, 0], [1.0, 1.0]))
  assert float(loss) == pytest.approx(float(alone))
  assert tuple(map(float, metrics['labeled_accuracy'])) == (1.0, 2.0)
  assert float(metrics['loss_labeled'].total) == pytest.approx(2 * float(loss))


def test_results_of_two_halves_add_up():
  first = base.StepResult([tf.constant([1.0])], {'a': base.Mean.ratio(1, 2)})
  second = base.StepResult([tf.constant([5.0])], {'b': base.Mean.ratio(3, 4)})
  both = base.add_results(first, second)
  assert float(both.gradients[0][0]) == 6.0
  assert list(both.metrics) == ['a', 'b']


def test_a_network_moves_unless_its_change_is_not_finite():
  def moved(change):
    changes = {'teacher': (tf.constant(change),)}
    aggregate = base.Aggregate((), changes, tf.constant(1.0), None)
    return aggregate.move('teacher', _WEIGHTS).trainable[0].numpy().tolist()

  assert moved([1.0, -1.0]) == [2.0, 5.0]
  assert moved([1.0, np.nan]) == [3.0, 4.0]
  assert moved([np.inf, 0.0]) == [3.0, 4.0]


class _Memory(NamedTuple):
  a: int
  b: int


def test_remembering_replaces_fields():
  state = base.ServerState(_WEIGHTS, _Memory(1, 2)).remember(b=3)
  assert state.memory == (1, 3)


def test_progress():
  def progress(round_num, step, num_steps, num_rounds):
    time = base.StepTime(*tf.constant([round_num, step, num_steps]))
    return float(time.progress(num_rounds))

  assert progress(1, 0, 5, 10) == 0.0
  np.testing.assert_allclose(progress(3, 1, 4, 10), 0.225)
  assert progress(11, 0, 5, 10) == progress(99, 3, 5, 10) == 1.0
  assert progress(-3, 0, 5, 10) == progress(0, 4, 5, 10) == 0.0
  assert progress(2, 0, 0, 10) == np.float32(0.1)


@dataclasses.dataclass(frozen=True)
class _Picky(base.Algorithm):
  name = 'picky'
  round_defaults = {'client_epochs': 7}

  share: float = hparam(0.5, 'A share.', minimum=0, maximum=1)

  def check(self):
    if self.share == 0.25:
      raise UsageError('not a quarter')


def test_hyper_parameters_are_checked_and_rounds_are_the_papers():
  assert _Picky().round.client_epochs == 7
  with pytest.raises(UsageError, match='picky.share'):
    _Picky(share=2.0)
  with pytest.raises(UsageError, match='not a quarter'):
    _Picky(share=0.25)


def test_streams_follow_from_where_the_labels_are():
  at_server = _Picky()
  # Clients that do not train still need the type of a batch.
  assert list(at_server.streams()) == [base.LABELED]

  @dataclasses.dataclass(frozen=True)
  class Both(_Picky):
    unlabeled_views = base.WEAK

  rounds = dataclasses.replace(Both().round, scenario=base.LABELS_AT_CLIENTS)
  assert list(Both().streams()) == [base.UNLABELED]
  assert list(Both(round=rounds).streams()) == [base.UNLABELED, base.LABELED]
