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
from tff_fssl.algorithms import base
from tff_fssl.algorithms import fixmatch
from tff_fssl.data import clients
from tff_fssl.models import evaluate
from tff_fssl.rounds import client_data
from tff_fssl.rounds import process as process_lib
from tff_fssl.rounds import round_hparams


@functools.cache
def _switching(**kwargs):
  return _build(two_sets.Switching(**kwargs))


@functools.cache
def _helping():
  return _build(two_sets.Helping())


def _build(algorithm, norm='none', aggregator=None, **kwargs):
  x, y = tiny_task.examples(9, 7)
  scenario = algorithm.scenarios[0]
  at_server = scenario == 'labels_at_server'
  rounds = round_hparams.RoundHparams(
    scenario=scenario,
    client_epochs=1,
    client_batch_size=5,
    server_epochs=1,
    num_pretraining_rounds=0,
    **kwargs,
  )
  return process_lib.build_process(
    lambda: tiny_task.model_fn(norm),
    dataclasses.replace(algorithm, round=rounds),
    process_lib.DataSpec(
      clients.element_spec(tiny_task.IMAGE_SHAPE),
      tiny_task.VIEWS,
      clients.build_server_data_fn(x, y) if at_server else None,
      num_clients=8,
    ),
    seed=5,
    aggregator=aggregator,
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
  return fixmatch.FixMatch(confidence_threshold=0.35)


class TestSwitching:
  """A teacher set, sent by mode; signals; an EMA after each step."""

  def test_forced_to_the_student_it_is_fedprox_fixmatch(self):
    ours = _run(
      _build(two_sets.Switching(mode='student'), proximal_strength=0.1)
    )
    plain = _run(_build(_fixmatch(), proximal_strength=0.1))
    for a, b in zip(_weights(ours[-1]), _weights(plain[-1]), strict=True):
      np.testing.assert_array_equal(a, b)

  def test_both_decays_change_the_teacher(self):
    """Its labels change more rarely than its predictions."""
    divergences = {
      float(
        _run(_build(two_sets.Switching(mode='teacher', **kwargs)), 2)[
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

    @dataclasses.dataclass(frozen=True)
    class Liar(two_sets.Switching):
      def finish(self, client, metrics):
        output = super().finish(client, metrics)
        bright = tf.reduce_all(tf.equal(client.unlabeled.x, 255))
        student = tf.where(bright, 99.0, output.uploads['student'])
        return output._replace(uploads={**output.uploads, 'student': student})

    output = _run(_build(Liar()), 1, change=lie)[0]
    train = output.metrics['client_work']['train']
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
    with pytest.raises(UsageError, match='also send values'):
      _build(two_sets.Switching(), aggregator=private)


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
  assert 'client_id' not in client_data.add_ids(spec, 0)
  assert client_data.add_ids(spec, 3)['client_id'].dtype == tf.int32
  assert isinstance(client_data.add_ids(spec, 3), collections.OrderedDict)


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
  def _changed(base_class=two_sets.Switching, **methods):
    return dataclasses.dataclass(frozen=True)(
      type('Changed', (base_class,), methods)
    )()

  def _check(self, algorithm, *words):
    with pytest.raises(Exception) as error:
      _build(algorithm)
    for word in words:
      assert word in str(error.value)
    return error.value

  def test_of_a_network(self):
    networks = {'teacher': base.AuxiliaryNetwork('techer')}
    error = self._check(
      self._changed(networks=lambda self: networks),
      "networks, 'teacher': starts_from='techer'",
      'weights that the server sends: teacher',
      "did you mean 'teacher'",
    )
    assert isinstance(error, hparams_lib.UsageError)

  def test_of_a_network_that_is_kept_but_never_sent(self):
    mode = lambda self, state: {'mode': base.Broadcast(state.memory.mode)}
    self._check(
      self._changed(broadcasts=mode),
      "starts_from='teacher'",
      'the server sends: none',
    )

  def test_of_a_network_in_the_servers_training(self):
    @dataclasses.dataclass(frozen=True)
    class Trainer(base.Algorithm):
      def networks(self):
        return {'techer': base.AuxiliaryNetwork()}

    self._check(
      self._changed(server_trainer=lambda self: Trainer()),
      "server_trainer: networks='techer'",
      'weights that the server keeps: teacher',
    )

  def test_of_the_model(self):
    first, second = (
      _run(_build(self._changed(networks=lambda self: {'teacher': n})), 1)[0]
      for n in (base.AuxiliaryNetwork(), base.AuxiliaryNetwork('teacher'))
    )
    # In the first round, the teacher is the model.
    for a, b in zip(_weights(first), _weights(second)):
      np.testing.assert_array_equal(a, b)

  def test_of_streams_and_views(self):
    stream = base.Stream({'weak': 'weak', 'strong': 'storng'})
    self._check(
      self._changed(streams=lambda self: {'unlabeled': stream}),
      "view 'strong'='storng'",
      'plain, weak, strong',
    )
    streams = two_sets.Switching().streams()
    streams['more'] = base.Stream({}, partner_of='unlabelled')
    self._check(
      self._changed(streams=lambda self: streams),
      "partner_of='unlabelled'",
      'streams: unlabeled',
    )

  def test_of_a_broadcast(self):
    def broadcasts(self, state):
      sent = two_sets.Switching.broadcasts(self, state)
      return {**sent, 'techer': base.Broadcast(state.memory.teacher)}

    self._check(
      self._changed(broadcasts=broadcasts), "broadcasts='techer'", 'teacher'
    )

  def test_of_uploads(self):
    upload = base.Upload(0.0, 1.0)
    self._check(
      self._changed(uploads=lambda self: {'teacher': upload, 'stud': upload}),
      'signals has teacher',
      'declares stud, teacher',
    )

  def test_of_rows(self):
    def build(self, population):
      exchange = two_sets.Helping.build_exchange(self, population)
      return exchange._replace(
        row_specs={'embeding': tf.TensorSpec([3], tf.float32)}
      )

    error = self._check(
      self._changed(two_sets.Helping, build_exchange=build),
      'row has embedding',
    )
    assert isinstance(error, hparams_lib.UsageError)

  def test_of_what_steps_return_and_read(self):
    """In the graph's code: the error also shows the algorithm's own line."""
    plain = two_sets.Switching.step

    def auxiliary(self, networks, batch):
      result = plain(self, networks, batch)
      return result._replace(auxiliary={'teacher': result.gradients})

    def read(self, networks, batch):
      return plain(self, networks, batch._replace(streams=batch.streams['un']))

    self._check(
      self._changed(step=auxiliary),
      "auxiliary='teacher'",
      'trained auxiliary networks: none',
    )
    self._check(
      self._changed(step=read), "'un': there is no such name", 'unlabeled'
    )
