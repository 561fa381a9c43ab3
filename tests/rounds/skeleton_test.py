"""The skeleton carries algorithms with sets, signals, a table, two steps."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_task
import two_sets

from tff_fssl import hparams as hparams_lib
from tff_fssl.algorithms import adapter
from tff_fssl.algorithms import fixmatch
from tff_fssl.data import clients
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.models import evaluate
from tff_fssl.models import server_model
from tff_fssl.rounds import assemble
from tff_fssl.rounds import client_data
from tff_fssl.rounds import parts as parts_lib
from tff_fssl.rounds import round_hparams


@functools.cache
def _switching(**kwargs):
  return _build(two_sets.switching(**kwargs))


@functools.cache
def _helping():
  return _build(two_sets.helping(), scenario='labels_at_clients')


def _build(parts, norm='none', scenario='labels_at_server', **kwargs):
  x, y = tiny_task.examples(9, 7)
  at_server = scenario == 'labels_at_server'
  return assemble.build_process(
    lambda: tiny_task.model_fn(norm),
    parts,
    views=tiny_task.VIEWS,
    element_spec=clients.element_spec(tiny_task.IMAGE_SHAPE),
    server_data_fn=clients.build_server_data_fn(x, y) if at_server else None,
    hparams=round_hparams.RoundHparams(
      scenario=scenario,
      client_epochs=1,
      client_batch_size=5,
      server_epochs=1,
      num_pretraining_rounds=0,
      **kwargs,
    ),
    seed=5,
  )


def _run(process, num_rounds=3, ids=(1, 4, 6), labeled=0, change=None):
  outputs, state = [], process.initialize()
  for round_num in range(1, num_rounds + 1):
    cohort = []
    for index, client_id in enumerate(ids):
      element = tiny_task.client(index, round_num, labeled=labeled)
      if process.num_clients:
        element['client_id'] = np.int32(client_id)
      if change is not None:
        element = change(index, element)
      cohort.append(tiny_task.dataset(element))
    output = process.next(state, cohort)
    state = output.state
    outputs.append(output)
  return outputs


def _weights(output):
  return output.state.global_model_weights.trainable


def _fixmatch():
  return adapter.to_parts(fixmatch.FixMatch(confidence_threshold=0.35))


class TestSwitching:
  """A teacher set, sent by mode; signals; an EMA after each step."""

  def test_forced_to_the_student_it_is_fedprox_fixmatch(self):
    ours = _run(
      _build(two_sets.switching(mode='student'), proximal_strength=0.1)
    )
    plain = _run(_build(_fixmatch(), proximal_strength=0.1))
    for a, b in zip(_weights(ours[-1]), _weights(plain[-1]), strict=True):
      np.testing.assert_array_equal(a, b)

  def test_both_decays_change_the_teacher(self):
    """Its labels change more rarely than its predictions."""
    divergences = {
      float(
        _run(_build(two_sets.switching(mode='teacher', **kwargs)), 2)[
          -1
        ].metrics['client_work']['train']['teacher_divergence']
      )
      for kwargs in ({}, {'local_decay': 0.1}, {'decay': 0.1})
    }
    assert len(divergences) == 3

  def test_the_teacher_is_the_average_of_the_students(self):
    process = _switching(mode='teacher')
    teacher = [t.copy() for t in process.initialize().global_model_weights[0]]
    for output in _run(process):
      model = output.state.global_model_weights
      teacher = [0.9 * t + 0.1 * s for t, s in zip(teacher, model.trainable)]
      for a, b in zip(teacher, model.sets['teacher'].trainable, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)

  def test_mode_and_bytes_follow_from_round_to_round(self):
    process = _switching()
    one = 4 * sum(
      int(np.size(w))
      for w in tf.nest.flatten(
        process.initialize().global_model_weights.weights
      )
    )
    modes, down = [], []
    for output in _run(process, 4):
      modes.append(float(output.state.global_model_weights.control['mode']))
      figures = output.metrics['communication']
      down.append(int(figures['bytes_down_teacher']))
      assert figures['bytes_down_model'] == one
      assert figures['bytes_down_per_client'] == one + down[-1] + 8
      assert figures['bytes_down'] == (
        figures['bytes_down_per_client']
        * output.metrics['client_work']['train']['num_clients']
      )
      assert figures['percent_of_model_down'] == pytest.approx(
        100 * figures['bytes_down_per_client'] / one
      )
    assert modes == [0.0, 1.0, 0.0, 1.0]
    assert down == [one, 0, one, 0]
    train = output.metrics['client_work']['train']
    assert 0 <= train['student_divergence'] <= np.log(3)
    assert np.isnan(train['teacher_divergence'])
    assert 'signals' not in output.metrics['client_work']

  def test_a_signal_out_of_range_rejects_the_client(self):
    def lie(index, element):
      if index == 1:
        element['unlabeled']['x'][:] = 255
      return element

    parts = two_sets.switching()
    finish = parts.local.finish

    def lying(networks, data, views, ratios):
      finished = finish(networks, data, views, ratios)
      bright = tf.reduce_all(tf.equal(data.unlabeled.x, 255))
      signals = dict(finished.signals)
      signals['student'] = tf.where(bright, 99.0, signals['student'])
      return finished._replace(signals=signals)

    liar = parts_lib.Parts(
      parts.local._replace(finish=lying), server=parts.server
    )
    train = _run(_build(liar), 1, change=lie)[0].metrics['client_work']['train']
    assert train['num_rejected_clients'] == 1

  def test_the_teacher_is_evaluated_as_well(self):
    process = _switching(mode='teacher')
    model = _run(process)[-1].state.global_model_weights
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
    x, y = tiny_task.examples(9, 7)
    with pytest.raises(UsageError, match='also send values'):
      assemble.build_process(
        tiny_task_model,
        two_sets.switching(),
        views=tiny_task.VIEWS,
        element_spec=clients.element_spec(tiny_task.IMAGE_SHAPE),
        server_data_fn=clients.build_server_data_fn(x, y),
        hparams=round_hparams.RoundHparams(),
        seed=5,
        model_aggregator=private,
      )


def tiny_task_model():
  return tiny_task.model_fn('none')


class TestHelping:
  """A table of rows by client; two steps on a batch; an own prediction."""

  def test_both_sets_learn_and_rows_arrive(self):
    process = _helping()
    start = process.initialize()
    outputs = _run(process, labeled=4)
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
    output = _run(_helping(), 1, ids=ids, labeled=4)[0]
    assert output.metrics['exchange']['num_rows'] == rows
    assert output.metrics['exchange']['num_disputed_rows'] == disputed
    train = output.metrics['client_work']['train']
    assert train['num_rejected_clients'] == rejected
    assert np.all(np.isfinite(output.state.distributor['table']))

  def test_prediction_of_its_own(self):
    process = _helping()
    model = _run(process, 1, labeled=4)[-1].state.global_model_weights
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


def test_clients_have_ids_only_where_they_are_needed():
  spec = clients.element_spec(tiny_task.IMAGE_SHAPE)
  assert 'client_id' not in client_data.with_ids(spec, 0)
  assert client_data.with_ids(spec, 3)['client_id'].dtype == tf.int32
  assert isinstance(client_data.with_ids(spec, 3), collections.OrderedDict)


@pytest.mark.parametrize(
  'norm', [pytest.param('none', marks=pytest.mark.slow), 'bn']
)
def test_the_moving_average_of_rounds(norm):
  process = _build(_fixmatch(), norm=norm, average_decay=0.5)
  plain = _run(_build(_fixmatch(), norm=norm))
  average = None
  for output, other in zip(_run(process), plain, strict=True):
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


class TestNames:
  """A name that nothing has is an error when the process is built."""

  @staticmethod
  def _changed_local(**changes):
    parts = two_sets.switching()
    return dataclasses.replace(parts, local=parts.local._replace(**changes))

  @staticmethod
  def _changed_server(**changes):
    parts = two_sets.switching()
    return dataclasses.replace(parts, server=parts.server._replace(**changes))

  def _check(self, parts, *words):
    with pytest.raises(hparams_lib.UsageError) as error:
      _build(parts)
    for word in words:
      assert word in str(error.value)

  def test_of_a_set(self):
    peers = {'teacher': algorithm_lib.Peer(starts_from='techer')}
    self._check(
      self._changed_local(peers=peers),
      "peer 'teacher': starts_from='techer'",
      'weights that the server sends: model, teacher',
      "did you mean 'teacher'",
    )

  def test_of_a_set_that_is_kept_but_never_sent(self):
    parts = self._changed_server(sends=lambda model: {})
    self._check(parts, "starts_from='teacher'", 'the server sends: model')

  def test_of_a_set_in_the_servers_training(self):
    peers = {'target': algorithm_lib.Peer('techer')}
    training = objective.SUPERVISED._replace(peers=peers)
    self._check(
      dataclasses.replace(two_sets.switching(), server_training=training),
      'weights that the server keeps: model, teacher',
    )

  def test_of_the_broadcast_model(self):
    peer = algorithm_lib.Peer(starts_from=algorithm_lib.MODEL)
    assert peer == algorithm_lib.Peer()
    first, second = (
      _run(_build(self._changed_local(peers={'teacher': p})), 1)[0]
      for p in (peer, algorithm_lib.Peer('teacher'))
    )
    # In the first round, the teacher is the model.
    for a, b in zip(_weights(first), _weights(second)):
      np.testing.assert_array_equal(a, b)

  def test_of_streams_and_views(self):
    stream = algorithm_lib.Stream({'weak': 'weak', 'strong': 'storng'})
    self._check(
      self._changed_local(streams={'unlabeled': stream}),
      "view 'strong'='storng'",
      'plain, weak, strong',
    )
    streams = dict(two_sets.switching().local.streams)
    streams['more'] = algorithm_lib.Stream({}, partner_of='unlabelled')
    self._check(
      self._changed_local(streams=streams),
      "partner_of='unlabelled'",
      'streams: unlabeled',
    )

  @pytest.mark.parametrize('field', ['statistics_of', 'statistics_if_sent'])
  def test_of_statistics(self, field):
    parts = self._changed_server(**{field: ('techer',)})
    self._check(parts, f"{field}='techer'", 'teacher')

  def test_of_what_is_sent(self):
    parts = self._changed_server(sends=lambda model: {'techer': True})
    self._check(parts, "sends='techer'", 'sets of the model: teacher')

  def test_of_what_is_evaluated(self):
    prediction = server_model.Prediction(
      also={'teacher': server_model.set_prediction('techer')}
    )
    parts = dataclasses.replace(two_sets.switching(), prediction=prediction)
    self._check(parts, "set 'techer'", 'teacher')

  def test_of_signals(self):
    signals = dict(two_sets.switching().local.signals)
    del signals['student']
    self._check(
      self._changed_local(signals=signals),
      'signals has student, teacher',
      'declares teacher',
    )

  def test_of_rows(self):
    parts = two_sets.helping()
    exchange = parts.exchange._replace(
      row_specs={'embeding': tf.TensorSpec([3], tf.float32)}
    )
    parts = dataclasses.replace(parts, exchange=exchange)
    with pytest.raises(hparams_lib.UsageError, match='row has embedding'):
      _build(parts, scenario='labels_at_clients')

  def test_of_what_steps_return_and_read(self):
    """In the graph's code: the error also shows the algorithm's own line."""
    parts = two_sets.switching()
    plain = parts.local.steps[0]

    def of_peers(networks, batch):
      result = plain(networks, batch)
      return result._replace(of_peers={'teacher': result.gradients})

    def read(networks, batch):
      return plain(networks, batch._replace(parts={'u': batch.parts['un']}))

    for step, words in (
      (of_peers, ("of_peers='teacher'", 'trained peers: none')),
      (read, ("'un': there is no such name", 'unlabeled')),
    ):
      changed = self._changed_local(steps=(step,))
      with pytest.raises(Exception) as error:
        _build(changed)
      for word in words:
        assert word in str(error.value)
