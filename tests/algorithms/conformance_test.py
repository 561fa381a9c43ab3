"""What every registry entry keeps to, whatever the algorithm."""

import asyncio
import collections
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow_federated as tff
import tiny_task

from tff_fssl import metrics as metrics_lib
from tff_fssl import runtime
from tff_fssl.algorithms import registry
from tff_fssl.interface import base
from tff_fssl.program import catalogue
from tff_fssl.program import console
from tff_fssl.program import training_types

_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'
_LABELS = {'loss_labeled', 'labeled_accuracy', 'loss_mixed_labeled'}

# The scope has all tests of a process run one after another.
pytestmark = pytest.mark.parametrize(
  'name, scenario', tiny_task.scenarios(), scope='module'
)


class _Run(NamedTuple):
  """A process and its first two rounds with clients.

  Attributes:
    process: The process.
    states: The states before and after each.
    metrics: The metrics of each.
  """

  process: Any
  states: list
  metrics: list


def _next(process, state, elements):
  return process.next(state, [tiny_task.dataset(e, process) for e in elements])


@functools.lru_cache(maxsize=1)
def _run(name, scenario):
  """All tests of an algorithm in a scenario start from this run."""
  process = tiny_task.build(name, scenario)
  run = _Run(process, [process.initialize()], [])
  if int(run.states[0].client_work) < 1:
    run.states[0] = process.next(run.states[0], []).state
  for round_num in (1, 2):
    output = _next(
      process, run.states[-1], tiny_task.cohort(scenario, round_num=round_num)
    )
    run.states.append(output.state)
    run.metrics.append(output.metrics)
  return run


def _assert_same(first, second, atol=0.0):
  for a, b in zip(tiny_task.flat(first), tiny_task.flat(second), strict=True):
    np.testing.assert_allclose(a, b, atol=atol, rtol=1e-7 if atol else 0)


def _are_finite(state):
  return all(np.all(np.isfinite(w)) for w in tiny_task.flat(state))


def _trains_clients(name, scenario):
  return scenario in registry.REGISTRY[name].trains_clients


def test_two_rounds(name, scenario):
  process, (*_, state), metrics = _run(name, scenario)
  initial = tiny_task.flat(process.initialize())
  final = tiny_task.flat(state)
  assert _are_finite(state)
  assert any(np.any(a != b) for a, b in zip(initial, final, strict=True))
  train = metrics[-1]['client_work']['train']
  assert train['num_clients'] == 3
  assert train['num_non_finite_clients'] == 0
  if _trains_clients(name, scenario):
    assert train['num_examples'] > 0
    assert 0 < train['aggregation_weight_min'] <= 1 / 3 + 1e-6
    assert train['aggregation_weight_entropy'] == pytest.approx(
      np.log(3), abs=0.1
    )
  assert state.client_work == 3
  assert state.finalizer['round_num'] == 3


def test_type_signatures(name, scenario):
  process = tiny_task.build(name, scenario)
  assert isinstance(process, tff.learning.templates.LearningProcess)
  parameter = process.next.type_signature.parameter
  assert len(parameter) == 2
  assert isinstance(parameter[1].member, tff.SequenceType)
  weights = process.get_model_weights.type_signature.result
  assert weights.python_container is tff.learning.models.ModelWeights


def test_its_own_metrics_are_columns(name, scenario):
  entry = registry.REGISTRY[name]
  own = set(metrics_lib.index_columns(entry.metrics))
  actual = set(tiny_task.metric_columns(tiny_task.build(name, scenario)))
  of_server = {column for column in own if column.startswith('finalizer/')}
  if scenario == base.LABELS_AT_SERVER:
    assert of_server <= actual
  # Some of (FL)^2's need other flags; see metrics_test.py.
  if name != 'fl2' and scenario == entry.scenarios[-1]:
    assert own - of_server <= actual
  others = {
    column
    for other in registry.REGISTRY.values()
    for column in metrics_lib.index_columns(other.metrics)
  }
  assert not actual & (others - own)


def test_every_loss_of_clients_is_shown(name, scenario):
  actual = tiny_task.metric_columns(tiny_task.build(name, scenario))
  columns = [c for c in actual if c.startswith('client_work/train/loss_')]
  dashes = {
    line.column: line.dashes
    for panel in metrics_lib.panels(catalogue.all_metrics())
    for line in panel.lines
  }
  # Curves of one run in one panel can be told apart.
  assert len({dashes[column] for column in columns}) == len(columns)
  report = training_types.RoundReport(
    1, dict.fromkeys(columns, 0.5), {}, {}, False
  )
  shown = console.figures(report)
  of_labels = [column for column in columns if 'labeled' in column]
  assert ('label loss 0.500' in shown) == bool(of_labels)
  assert ('loss 0.500' in shown) == (len(columns) > len(of_labels))


def test_get_and_set_model_weights(name, scenario):
  process, (state, *_), _ = _run(name, scenario)
  weights = process.get_model_weights(state)
  model = tiny_task.network_fn(name)()
  weights.assign_weights_to(model)
  doubled = tff.learning.models.ModelWeights(
    tuple(2 * w for w in weights.trainable), tuple(weights.non_trainable)
  )
  state = process.set_model_weights(state, doubled)
  np.testing.assert_array_equal(
    process.get_model_weights(state).trainable[0], 2 * weights.trainable[0]
  )


def test_hidden_labels_change_nothing(name, scenario):
  process, (_, before, expected), _ = _run(name, scenario)
  elements = tiny_task.cohort(scenario, round_num=2)
  for element in elements:
    element['unlabeled']['y'] = np.roll(element['unlabeled']['y'], 1)
  _assert_same(_next(process, before, elements).state, expected)


def test_order_of_clients_does_not_matter(name, scenario):
  process, (_, before, expected), _ = _run(name, scenario)
  elements = tiny_task.cohort(scenario, round_num=2)[::-1]
  _assert_same(_next(process, before, elements).state, expected, atol=2e-5)


def test_empty_client_and_client_without_a_class(name, scenario):
  process, (_, before, _), _ = _run(name, scenario)
  elements = tiny_task.cohort(scenario, round_num=2)
  for part in ('labeled', 'unlabeled'):
    keep = elements[1][part]['y'] != 0
    elements[1][part] = collections.OrderedDict(
      (k, v[keep]) for k, v in elements[1][part].items()
    )
  without, _ = _next(process, before, elements)
  elements.append(tiny_task.client(9, 2, unlabeled=0))
  with_empty, metrics = _next(process, before, elements)
  assert metrics['client_work']['train']['num_clients'] == 4
  _assert_same(with_empty, without, atol=1e-6)


def test_a_round_without_clients(name, scenario):
  process, (_, before, _), _ = _run(name, scenario)
  after, metrics = process.next(before, [])
  assert metrics['client_work']['train']['num_clients'] == 0
  assert _are_finite(after)
  elements = tiny_task.cohort(scenario, round_num=3)
  assert _are_finite(_next(process, after, elements).state)


def test_a_round_in_which_one_client_has_labels(name, scenario):
  """And one in which none has; some_labels_test.py looks at a client."""
  if scenario != _CLIENTS or not _trains_clients(name, _SERVER):
    pytest.skip('Clients without labels have nothing to learn from.')
  process, (state, *_), _ = _run(name, scenario)
  with_labels, *others = tiny_task.cohort(scenario)
  for element in others:
    element['labeled'] = tiny_task.client(0)['labeled']
  for elements in ([with_labels, *others], others):
    state, metrics = _next(process, state, elements)
    train = metrics['client_work']['train']
    assert train['num_clients'] == len(elements)
    assert train['num_rejected_clients'] == 0
    assert train['num_non_finite_clients'] == 0
    assert metrics['finalizer']['update_skipped'] == 0
    assert _are_finite(state)
    losses = [train[metric] for metric in _LABELS & set(train)]
    assert losses
    assert np.all(np.isfinite(losses)) == (len(elements) == 3)


def test_constant_and_saturated_images_and_less_than_a_batch(name, scenario):
  process, (_, state, _), _ = _run(name, scenario)
  elements = tiny_task.cohort(scenario, round_num=2)
  few = 2 if elements[0]['labeled']['y'].size else 0
  elements.append(tiny_task.client(3, 2, unlabeled=2, labeled=few))
  for part in ('labeled', 'unlabeled'):
    for element, level in zip(elements, (0, 255)):
      element[part]['x'] = np.full_like(element[part]['x'], level)
    # Whole images of one level, each of its own.
    of_part = elements[2][part]
    levels = np.linspace(0, 255, len(of_part['x'])).astype(np.uint8)
    of_part['x'] = of_part['x'] * 0 + levels[:, None, None, None]
  state, metrics = _next(process, state, elements)
  assert _are_finite(state)
  train = metrics['client_work']['train']
  assert train['num_clients'] == 4
  assert train['num_non_finite_clients'] == train['num_rejected_clients'] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  'settings', [{'client_epochs': 3}, {'client_epochs': 1, 'client_steps': 30}]
)
def test_no_honest_client_is_rejected(name, scenario, settings):
  """Whatever their steps, clients report counts within the bounds."""
  if not _trains_clients(name, scenario):
    pytest.skip('Its clients do not train.')
  # As many as the largest client has.
  process = tiny_task.build(name, scenario, max_client_examples=16, **settings)
  state = process.initialize()
  if int(state.client_work) < 1:
    state = process.next(state, []).state
  _, metrics = _next(process, state, tiny_task.cohort(scenario))
  train = metrics['client_work']['train']
  assert train['num_clients'] == 3
  assert train['num_rejected_clients'] == train['num_non_finite_clients'] == 0


def _spoilt(scenario, index):
  """A client whose images make its losses NaN."""
  element = tiny_task.cohort(scenario, index + 1, 2)[index]
  for part in ('labeled', 'unlabeled'):
    element[part]['x'] = np.full_like(element[part]['x'], tiny_task.SPOILT)
  return element


def test_client_that_yields_nan_is_left_out_and_counted(name, scenario):
  if not _trains_clients(name, scenario):
    pytest.skip('Its clients do not train.')
  process, (_, before, _), _ = _run(name, scenario)
  if name == 'fl2':
    # With batch norm, it may keep no pseudo-label, and so not train.
    process = tiny_task.build(name, scenario, norm='none')
    before = process.next(process.initialize(), []).state
  good, bad = tiny_task.cohort(scenario, 2, 2), _spoilt(scenario, 2)
  without, _ = _next(process, before, good)
  state, metrics = _next(process, before, [*good, bad])
  if scenario == registry.REGISTRY[name].trains_clients[0]:
    # Repeated outside TFF, it is the only one of the cohort that fails.
    found = [
      process.find_non_finite(before, tiny_task.dataset(element, process), 2)
      for element in (*good, bad, *good)
    ]
    assert [f is None for f in found] == [True, True, False, True, True]
    # Something that it reports, before the first step (0) or in it (1).
    step, tensor, *_ = found[2]
    assert step in (0, 1)
    reported = f'{tensor}_min' if step == 0 else tensor
    assert reported in metrics['client_work']['train']
  assert metrics['client_work']['train']['num_non_finite_clients'] == 1
  _assert_same(state, without, atol=1e-6)
  # A round in which all are bad leaves the state, but for the counters.
  after, metrics = _next(process, state, [_spoilt(scenario, 0)])
  assert metrics['client_work']['train']['num_non_finite_clients'] == 1
  assert after.client_work == state.client_work + 1
  assert after.finalizer['round_num'] == state.finalizer['round_num'] + 1
  _assert_same(after, state)


def test_capabilities_are_what_was_compiled(name, scenario):
  algorithm = registry.REGISTRY[name]
  process, (state, *_), (metrics, _) = _run(name, scenario)
  model = state.global_model_weights
  *trainable, kernel, bias = model.trainable
  if not algorithm.hparams.head_stays:
    trainable += [kernel, bias]
  model_bytes = sum(
    np.asarray(w).nbytes
    for w in (*trainable, *model.non_trainable, model.statistics_count)
  )
  assert algorithm.keeps_client_state(
    algorithm.hparams(**algorithm.tiny_hparams)
  ) == bool(process.num_clients)
  communication = metrics['communication']
  if algorithm.is_alone:
    assert set(communication.values()) == {0}
    assert process.local_model is None
    return
  # Beside the number of the round.
  values = state.global_model_weights.control.values()
  control = sum(np.ndim(value) == 0 for value in values)
  assert communication['bytes_down_scalars'] == 4 + 4 * control
  statistics = communication['bytes_down_statistics']
  sent = communication['bytes_down_per_client'] - statistics - 4 - 4 * control
  sent -= communication.get('bytes_down_exchange', 0)
  # The first round sends all.
  assert sent % model_bytes == 0
  most = sent / model_bytes
  # Static batch norm is a phase more, of the sets that the next round sends.
  assert statistics % model_bytes == 0
  assert 1 <= statistics / model_bytes <= process.num_phases - 1 <= most
  update = algorithm.weight_sets_up * sum(
    np.asarray(w).nbytes for w in trainable
  )
  assert update < communication['bytes_up_per_client'] < update + 1000


def test_train_model_resumed_with_threads_is_rounds_by_hand(
  name, scenario, tmp_path
):
  """Bit for bit, whatever runs the rounds, when, and in how many threads."""
  process = tiny_task.build(name, scenario)

  def train(num_rounds):
    states = tff.program.MemoryReleaseManager()
    asyncio.run(
      tff.learning.programs.train_model(
        train_process=process,
        train_data_source=tiny_task.data_source(process, scenario),
        train_per_round_clients=2,
        train_total_rounds=num_rounds,
        program_state_manager=tff.program.FileProgramStateManager(tmp_path),
        model_output_manager=states,
        train_metrics_manager=tff.program.CSVFileReleaseManager(
          tmp_path / 'metrics.csv', key_fieldname='round_num'
        ),
        evaluation_manager=None,
        evaluation_periodicity=1,
      )
    )
    *_, state = states.values().values()
    return tiny_task.flat(state)

  context = tff.program.NativeFederatedContext(
    runtime.build_async_context(runtime.Settings(client_threads=3))
  )
  previous = tff.framework.get_context_stack().current
  tff.framework.set_default_context(context)
  try:
    early = train(2)
    resumed = train(4)
  finally:
    tff.framework.set_default_context(previous)
  cohorts = tiny_task.data_source(process, scenario).iterator()
  state = process.initialize()
  for _ in range(4):
    state = process.next(state, cohorts.select(2)).state
  for a, b in zip(resumed, tiny_task.flat(state), strict=True):
    np.testing.assert_array_equal(a, b)
  assert any(np.any(a != b) for a, b in zip(early, resumed))
