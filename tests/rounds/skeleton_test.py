"""The skeleton carries algorithms with sets, uploads, a table, two steps."""

import collections
import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tiny_task
import two_sets

from tff_fssl.algorithms import fixmatch
from tff_fssl.data import clients
from tff_fssl.interface import base
from tff_fssl.models import evaluate
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import client_data


@functools.cache
def _switching(**kwargs):
  return two_sets.build(two_sets.Switching(**kwargs))


@functools.cache
def _helping():
  return two_sets.build(two_sets.Helping())


def _weights(output):
  return output.state.global_model_weights.trainable


def _fixmatch():
  return fixmatch.FixMatch(confidence_threshold=0.35)


class TestSwitching:
  """A teacher set, sent by mode; uploads; an EMA after each step."""

  def test_a_signal_out_of_range_rejects_the_client(self):
    def lie(index, element):
      if index == 1:
        element['unlabeled']['x'][:] = 255
      return element

    @dataclasses.dataclass(frozen=True)
    class Liar(two_sets.Switching):
      def finish(self, client, metrics):
        output = super().finish(client, metrics)
        bright = tf.reduce_all(tf.equal(client.unlabeled.x, 255))
        student = tf.where(bright, 99.0, output.uploads['student'])
        return output._replace(uploads={**output.uploads, 'student': student})

    output = two_sets.run(two_sets.build(Liar()), 1, change=lie)[0]
    train = output.metrics['client_work']['train']
    assert train['num_rejected_clients'] == 1

  def test_the_teacher_is_evaluated_as_well(self):
    process = _switching(mode='teacher')
    model = two_sets.run(process)[-1].state.global_model_weights
    x, y = tiny_task.examples(40, 3)
    evaluate_fn = evaluate.build_evaluate_fn(
      tiny_task_model, tiny_task.VIEWS, prediction=process.prediction
    )
    result = evaluate_fn(model, x, y)
    assert list(result) == [
      'accuracy',
      'loss',
      'teacher/accuracy',
      'teacher/loss',
    ]
    assert result['teacher/loss'] != result['loss']
    alone = evaluate.build_evaluate_fn(tiny_task_model, tiny_task.VIEWS)
    teacher = model.sets['teacher']
    assert alone(teacher, x, y)['loss'] == result['teacher/loss']

  def test_private_sums_refuse_signals(self):
    from tff_fssl.aggregators import factory
    from tff_fssl.aggregators import hparams as aggregator_hparams
    from tff_fssl.hparams import UsageError

    private = factory.build_aggregator(
      aggregator_hparams.AggregatorHparams(aggregator='dp', dp_delta=0.01),
      clients_per_round=3,
      population=8,
    )
    with pytest.raises(UsageError, match='also send values'):
      two_sets.build(two_sets.Switching(), aggregator=private)


def tiny_task_model():
  return tiny_task.model_fn('none')


class TestHelping:
  """A table of rows by client; two steps on a batch; an own prediction."""

  def test_both_sets_learn_and_rows_arrive(self):
    process = _helping()
    start = process.initialize()
    outputs = two_sets.run(process, labeled=4)
    model = outputs[-1].state.global_model_weights
    for set_of in (lambda m: m.trainable, lambda m: m.sets['psi'].trainable):
      assert any(
        np.any(a != b)
        for a, b in zip(set_of(model), set_of(start.global_model_weights))
      )
    table = outputs[-1].state.distributor['table']
    uniform = np.full([3], 1 / 3, np.float32)
    for client_id in range(8):
      changed = bool(np.any(table[client_id] != uniform))
      assert changed == (client_id in (1, 4, 6))
    metrics = outputs[-1].metrics
    assert metrics['exchange']['num_rows'] == 3
    assert metrics['exchange']['num_disputed_rows'] == 0
    figures = metrics['communication']
    assert figures['bytes_down_exchange'] == 3 * 4  # Its helper, not the table.
    assert figures['bytes_up_psi'] == 4 * sum(map(np.size, model.trainable))

  @pytest.mark.parametrize(
    'ids, rows, disputed, rejected',
    [
      ((1, 1, 6), 1, 2, 0),
      ((2, 2, 2), 0, 3, 0),
      ((8, 4, 6), 2, 0, 1),
      ((-1, 4, 2**31 - 1), 1, 0, 2),
    ],
  )
  def test_false_ids(self, ids, rows, disputed, rejected):
    output = two_sets.run(_helping(), 1, ids=ids, labeled=4)[0]
    assert output.metrics['exchange']['num_rows'] == rows
    assert output.metrics['exchange']['num_disputed_rows'] == disputed
    train = output.metrics['client_work']['train']
    assert train['num_rejected_clients'] == rejected
    assert np.all(np.isfinite(output.state.distributor['table']))

  def test_prediction_of_its_own(self):
    process = _helping()
    model = two_sets.run(process, 1, labeled=4)[-1].state.global_model_weights
    x, y = tiny_task.examples(40, 3)
    own = evaluate.build_evaluate_fn(
      tiny_task_model, tiny_task.VIEWS, prediction=process.prediction
    )(model, x, y)
    summed = [
      a + b for a, b in zip(model.trainable, model.sets['psi'].trainable)
    ]
    expected = evaluate.build_evaluate_fn(tiny_task_model, tiny_task.VIEWS)(
      model._replace(trainable=tuple(summed)), x, y
    )
    assert own == expected


class _Seen(NamedTuple):
  psi: Weights
  report: tf.Tensor
  summed: tf.Tensor
  rows: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _Sending(two_sets.Helping):
  """Sends its number of labels in all ways, besides the row of the table."""

  def initial_state(self, weights, setup):
    state = super().initial_state(weights, setup)
    zero = tf.constant(0.0)
    memory = _Seen(state.memory.psi, zero, tf.zeros([2]), zero)
    return state._replace(memory=memory)

  def uploads(self, setup):
    pair = tf.TensorSpec([2])
    return {
      'report': base.Upload(0.0, 9.0),
      'summed': base.Upload(0.0, 9.0, base.SUM, pair),
      'rows': base.Upload(0.0, 9.0, base.ROWS, pair),
    }

  def is_possible(self, uploads):
    return tf.reduce_all(tf.equal(uploads['summed'], uploads['rows']))

  def finish(self, client, metrics):
    output = super().finish(client, metrics)
    num = tf.cast(tf.size(client.labeled.y), tf.float32)
    # Lies of clients with 7 labels or more.
    summed = tf.where(tf.equal(num, 7.0), 8.0, num) * tf.ones([2])
    rows = tf.where(tf.equal(num, 8.0), float('nan'), num) * tf.ones([2])
    own = {'report': num, 'summed': summed, 'rows': rows}
    return output._replace(uploads={**output.uploads, **own})

  def update(self, state, aggregate, server):
    state = super().update(state, aggregate, server)
    return state.remember(
      report=aggregate['report'],
      summed=aggregate['summed'],
      rows=tf.reduce_max(aggregate['rows']),
    )


def test_uploads_of_every_kind_beside_a_table():
  process = two_sets.build(_Sending())

  def run(*num_labels):
    cohort = []
    for client_id, num in enumerate(num_labels):
      element = tiny_task.client(client_id, labeled=num)
      element['client_id'] = np.int32(client_id)
      cohort.append(tiny_task.dataset(element))
    return process.next(process.initialize(), cohort)

  # One that is impossible, and one that is not finite.
  for output, num_rejected in ((run(2, 4), 0), (run(2, 7, 4, 8, 12), 3)):
    train = output.metrics['client_work']['train']
    assert train['num_rejected_clients'] == num_rejected
    assert output.metrics['exchange']['num_rows'] == 2
    model = output.state.global_model_weights
    assert model.sets['report'] == 3.0 and model.sets['rows'] == 4.0
    np.testing.assert_allclose(model.sets['summed'], [3.0, 3.0])


def test_clients_have_ids_only_where_they_are_needed():
  spec = clients.element_spec(tiny_task.IMAGE_SHAPE)
  assert 'client_id' not in client_data.add_ids(spec, 0)
  assert client_data.add_ids(spec, 3)['client_id'].dtype == tf.int32
  assert isinstance(client_data.add_ids(spec, 3), collections.OrderedDict)


@pytest.mark.parametrize(
  'norm', [pytest.param('none', marks=pytest.mark.slow), 'bn']
)
def test_the_moving_average_of_rounds(norm):
  process = two_sets.build(_fixmatch(), norm=norm, average_decay=0.5)
  plain = two_sets.run(two_sets.build(_fixmatch(), norm=norm))
  average = None
  for output, other in zip(two_sets.run(process), plain, strict=True):
    model = output.state.global_model_weights
    for a, b in zip(model.trainable, _weights(other), strict=True):
      np.testing.assert_array_equal(a, b)
    if average is None:
      average = [w.copy() for w in process.initialize().global_model_weights[0]]
    average = [0.5 * a + 0.5 * b for a, b in zip(average, model.trainable)]
    for a, b in zip(average, model.sets['average'].trainable, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)
    if norm == 'bn':  # It has statistics of its own.
      own, other_set = model.non_trainable[0], model.sets['average']
      assert np.any(own != other_set.non_trainable[0])
