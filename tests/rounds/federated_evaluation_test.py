"""Federated evaluation as a learning process."""

import asyncio
import collections
import datetime

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_task

from tff_fssl import runtime
from tff_fssl.data import clients
from tff_fssl.hparams import UsageError
from tff_fssl.models import evaluate
from tff_fssl.models import server_model
from tff_fssl.rounds import federated_evaluation
from tff_fssl.rounds import process as process_lib
from tff_fssl.rounds import sampling

_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'
# One of each kind of prediction: plain; with a second way; by what the exchange
# keeps; of clients' own models.
_KINDS = {
  ('fl2', _SERVER),
  ('protofssl', _CLIENTS),
}


def _random(structure, seed=1):
  """Other weights, and a table, than those of the start."""
  rng = np.random.default_rng(seed)

  def changed(value):
    value = np.asarray(value)
    if value.dtype != np.float32:
      return value
    return (value + 0.3 * np.abs(rng.normal(size=value.shape))).astype('f')

  return tf.nest.map_structure(changed, structure)


def _examples(client_id):
  """A client's; every fifth has none."""
  return tiny_task.examples(0 if client_id == 4 else 5 + client_id, client_id)


def _data_source(process, **population):
  return sampling.build_data_source(
    process,
    lambda _, client_id: (_examples(client_id), None),
    seed=0,
    **({'num_clients': 8, 'clients_per_round': 8} | population),
  )


def _build(name, process, whole, **settings):
  return federated_evaluation.build_evaluation_process(
    tiny_task.network_fn(name),
    whole,
    views=tiny_task.VIEWS,
    element_spec=clients.element_spec(tiny_task.IMAGE_SHAPE),
    num_classes=tiny_task.NUM_CLASSES,
    prediction=process.prediction,
    num_clients=process.num_clients,
    **settings,
  )


def _state_of(name, scenario):
  """(process, model, table) of a training process; weights are random."""
  process = tiny_task.build(name, scenario)
  state = process.initialize()
  table = state.distributor['table'] if len(state.distributor) else ()
  model = _random(state.global_model_weights)
  return process, model, _random(table)


def _expected(name, prediction, model, table):
  """By client with examples and way to predict: its accuracy and loss."""
  model = server_model.ServerModel(*model)
  evaluate_fn = evaluate.build_evaluate_fn(
    tiny_task.network_fn(name),
    tiny_task.VIEWS,
    prediction=prediction._replace(member=None),
  )
  results = {}
  for client_id in range(8):
    x, y = _examples(client_id)
    if not len(x):
      continue
    if prediction.member is not None:
      tensors = tf.nest.map_structure(tf.constant, (model, table))
      weights = prediction.member(*tensors, tf.constant(client_id))
      of_client = server_model.ServerModel(*weights)
      results[client_id] = evaluate_fn(of_client, x, y)
    else:
      results[client_id] = evaluate_fn(model, x, y)
  return results


@pytest.mark.parametrize(
  'name, scenario',
  [
    pytest.param(*kind, marks=() if kind in _KINDS else pytest.mark.slow)
    for kind in tiny_task.scenarios()
  ],
)
def test_clients_predict_as_the_process_says(name, scenario):
  process, model, table = _state_of(name, scenario)
  whole = federated_evaluation.whole_model(process.prediction, model, table)
  evaluation = _build(name, process, whole)
  state = evaluation.set_model_weights(evaluation.initialize(), whole)
  cohort = _data_source(evaluation).cohort(0, 1)
  metrics = evaluation.next(state, cohort).metrics['client_work']['eval']
  found = metrics['current_round_metrics']
  expected = _expected(name, process.prediction, model, table)
  assert found['num_clients'] == 8
  assert found['num_clients_with_examples'] == len(expected) == 7
  assert found['num_rejected_clients'] == 0
  sizes = [len(_examples(client_id)[1]) for client_id in expected]
  assert found['num_examples'] == sum(sizes)
  for way in ('', *process.prediction.also):
    prefix, of_way = (f'{way}/', found[way]) if way else ('', found)
    for figure in ('accuracy', 'loss'):
      values = [of[f'{prefix}{figure}'] for of in expected.values()]
      assert of_way[figure] == pytest.approx(
        np.average(values, weights=sizes), rel=1e-4
      )
    values = [of[f'{prefix}accuracy'] for of in expected.values()]
    assert of_way['accuracy_mean'] == pytest.approx(np.mean(values), abs=1e-6)


def test_the_kinds_are_those_of_the_registry():
  assert set(tiny_task.scenarios()) >= _KINDS


@pytest.fixture(scope='module')
def plain():
  """(training, model, evaluation, state with the model)."""
  process, model, _ = _state_of('fl2', _SERVER)
  whole = federated_evaluation.whole_model(process.prediction, model)
  evaluation = _build('fl2', process, whole)
  state = evaluation.set_model_weights(evaluation.initialize(), whole)
  return process, whole, evaluation, state


def _figures(output, which='current_round_metrics'):
  return output.metrics['client_work']['eval'][which]


def test_rounds_add_up(plain):
  _, whole, evaluation, start = plain
  source = _data_source(evaluation)
  at_once = evaluation.next(start, source.cohort(0, 1))
  state = start
  for ids in ([0, 7, 3], [1, 2, 4, 5, 6]):
    output = evaluation.next(state, source.chosen(1, dict.fromkeys(ids, 0)))
    state = output.state
    assert _figures(output)['num_clients'] == len(ids)
  totals = _figures(output, 'total_rounds_metrics')
  assert (
    totals == _figures(at_once) == _figures(at_once, 'total_rounds_metrics')
  )
  kept = evaluation.get_model_weights(state)
  tf.nest.map_structure(np.testing.assert_array_equal, kept, whole)


def test_runtimes_agree(plain):
  _, _, evaluation, state = plain
  cohort = list(_data_source(evaluation).cohort(0, 1))
  expected = _figures(evaluation.next(state, cohort))
  with runtime.build_context(runtime.Settings('tff_worker')) as context:
    with tff.framework.get_context_stack().install(context):
      found = _figures(evaluation.next(state, cohort))
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, abs=1e-4), name


def test_clients_with_unusable_data_are_rejected(plain):
  _, _, evaluation, state = plain

  def load(_, client_id):
    if client_id == 0:
      raise OSError('unreadable')
    x, y = _examples(client_id)
    return ((x, y + 3) if client_id == 1 else (x, y)), None

  failed = sampling.FailedClients()
  source = sampling.build_data_source(
    evaluation,
    load,
    seed=0,
    num_clients=8,
    clients_per_round=8,
    on_failure=failed.add,
  )
  cohort = list(source.cohort(0, 1))
  element = tiny_task.client(0, labeled=6, unlabeled=0)
  element['labeled']['y'] += 3  # Past the source's check.
  cohort.append(tiny_task.dataset(element))
  found = _figures(evaluation.next(state, cohort))
  assert [client_id for client_id, _ in failed.take(1)] == [0, 1]
  assert (found['num_clients'], found['num_rejected_clients']) == (9, 3)
  assert found['num_clients_with_examples'] == 5
  assert np.isfinite(found['loss'])


def test_a_model_that_is_not_finite_gives_no_figures(plain):
  _, whole, evaluation, state = plain
  broken = tf.nest.map_structure(lambda v: v * v.dtype.type(1), whole)
  broken['model'].trainable[-1][0] = np.nan
  state = evaluation.set_model_weights(state, broken)
  cohort = list(_data_source(evaluation).cohort(0, 1))
  found = _figures(evaluation.next(state, cohort))
  # Who has no examples has no loss.
  assert (found['num_clients'], found['num_rejected_clients']) == (8, 7)
  assert np.isnan(found['accuracy']) and np.isnan(found['accuracy_mean'])


def test_secure_sums_give_the_same(plain):
  process, whole, evaluation, state = plain
  cohort = list(_data_source(evaluation).cohort(0, 1))
  expected = _figures(evaluation.next(state, cohort))
  secure = _build('fl2', process, whole, secure_sum=True)
  settings = runtime.Settings(simulate_secure_aggregation=True)
  context = runtime.build_context(settings)
  with tff.framework.get_context_stack().install(context):
    state = secure.set_model_weights(secure.initialize(), whole)
    assert _figures(secure.next(state, cohort)) == expected
  # Nothing of a client leaves but by a secure sum.
  form = process_lib.get_map_reduce_form(secure)
  plainly = form.work.type_signature.result[0]
  assert not tff.structure.flatten(plainly)


def test_it_compiles_to_map_reduce_form(plain):
  _, whole, evaluation, state = plain
  form = process_lib.get_map_reduce_form(evaluation)
  compiled = tff.backends.mapreduce.get_computation_for_map_reduce_form(form)
  cohort = list(_data_source(evaluation).cohort(0, 1))
  expected = _figures(evaluation.next(state, cohort))
  settings = runtime.Settings(simulate_secure_aggregation=True)
  with tff.framework.get_context_stack().install(
    runtime.build_context(settings)
  ):
    _, metrics = compiled(state, cohort)
  found = metrics['client_work']['eval']['current_round_metrics']
  assert dict(found) == dict(expected)


class _Released(tff.program.ReleaseManager):
  """Remembers what is released."""

  def __init__(self):
    self.by_key = {}

  async def release(self, value, key):
    self.by_key[key] = await tff.program.materialize_value(value)


def test_tffs_evaluation_manager(plain, tmp_path):
  process, whole, _, state = plain
  expected = _figures(plain[2].next(state, _data_source(plain[2]).cohort(0, 1)))
  evaluation = federated_evaluation.build_weights_evaluation(
    process,
    tiny_task.network_fn('fl2'),
    views=tiny_task.VIEWS,
    element_spec=clients.element_spec(tiny_task.IMAGE_SHAPE),
  )
  of_rounds, of_all = _Released(), _Released()

  def state_manager(name):
    return tff.program.FileProgramStateManager(str(tmp_path / name))

  async def run():
    manager = tff.learning.programs.EvaluationManager(
      _data_source(evaluation),
      of_all,
      state_manager,
      lambda name: (evaluation, of_rounds),
      cohort_size=8,
      duration=datetime.timedelta(seconds=0),
    )
    model = server_model.ServerModel(*whole['model'])
    weights = tff.learning.models.ModelWeights(
      tuple(model.trainable), tuple(model.non_trainable)
    )
    await manager.start_evaluation(3, 0, weights)
    await manager.wait_for_evaluations_to_finish()

  context = tff.program.NativeFederatedContext(runtime.build_async_context())
  with tff.framework.get_context_stack().install(context):
    asyncio.run(run())
  # Its keys are TFF's.
  for manager in (of_rounds, of_all):
    assert list(manager.by_key) == [3]
    assert manager.by_key[3]['model_metrics'].keys() == expected.keys()
    # The model has statistics of batch norm, as one from outside.
    assert manager.by_key[3]['model_metrics']['num_examples'] == 59


def test_weights_alone_are_not_enough_for_all():
  process = tiny_task.build('protofssl', _CLIENTS)
  with pytest.raises(UsageError, match='whole_model'):
    federated_evaluation.build_weights_evaluation(
      process,
      tiny_task.network_fn('protofssl'),
      views=tiny_task.VIEWS,
      element_spec=clients.element_spec(tiny_task.IMAGE_SHAPE),
    )


def test_mappings_may_have_any_order():
  one = {'b': np.ones(2, np.float32), 'a': np.zeros(3, np.float32)}
  model = server_model.ServerModel((), (), np.float32(1), one, {})
  whole = federated_evaluation.whole_model(server_model.Prediction(), model)
  assert list(whole['model'].sets) == ['a', 'b']
  assert isinstance(whole['model'].sets, collections.OrderedDict)
