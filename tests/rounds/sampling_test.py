import asyncio
import copy
import gc

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow_federated as tff
import tiny_task

from tests.program import fakes
from tff_fssl.data import clients
from tff_fssl.hparams import UsageError
from tff_fssl.rounds import participation
from tff_fssl.rounds import sampling


def test_cohorts_are_a_function_of_seed_and_round():
  first = sampling.sample_cohort(1, 2, 50, 10)
  assert first == sampling.sample_cohort(1, 2, 50, 10)
  assert first != sampling.sample_cohort(1, 3, 50, 10)
  assert first != sampling.sample_cohort(2, 2, 50, 10)
  # Written down: old runs must repeat.
  assert sampling.sample_cohort(0, 1, 100, 5) == [8, 45, 51, 87, 97]


def test_cohorts_are_without_replacement_and_uniform():
  counts = np.zeros(20)
  for round_num in range(1, 401):
    cohort = sampling.sample_cohort(7, round_num, 20, 5)
    assert len(set(cohort)) == 5 and cohort == sorted(cohort)
    counts[cohort] += 1
  # 100 expected each, standard deviation 8.7.
  assert counts.min() > 65 and counts.max() < 135
  assert sampling.sample_cohort(0, 1, 3, 3) == [0, 1, 2]


def test_slots_are_the_positions_in_a_random_order():
  counts = np.zeros([9, 5])
  for round_num in range(1, 901):
    slots = sampling.draw_slots(7, round_num, 9, 5)
    assert sorted(slots) == sampling.sample_cohort(7, round_num, 9, 5)
    assert sorted(slots.values()) == list(range(5))
    for client_id, slot in slots.items():
      counts[client_id, slot] += 1
  # 100 expected each, standard deviation 9.4: no id prefers a slot.
  assert counts.min() > 60 and counts.max() < 140


def test_slots_reach_clients_that_need_them():
  process = tiny_task.build(
    'fedrgd', norm='none', num_pretraining_rounds=0, stragglers=True
  )
  source = tiny_task.data_source(process, 'labels_at_server')
  iterator = source.iterator()
  iterator.select()
  for round_num in (1, 2, 3):
    elements = [d.get_single_element() for d in iterator.select(4)]
    slots = sampling.draw_slots(3, round_num, 8, 4)
    assert [int(e['slot']) for e in elements] == [
      slots[client_id] for client_id in sorted(slots)
    ]


def test_clients_are_made_when_they_are_called():
  calls = []
  source = sampling.CohortDataSource(
    fakes.data_source().federated_type,
    lambda *call: calls.append(call),
    seed=0,
    num_clients=9,
    clients_per_round=2,
    first_round=0,
  )
  iterator = source.iterator()
  assert iterator.select() == []  # Round 0: pre-training.
  cohort = iterator.select()
  assert calls == []
  assert len(cohort) == 2 and isinstance(cohort[1:], sampling.Cohort)
  assert calls == []
  cohort[1]  # pylint: disable=pointless-statement
  slots = sampling.draw_slots(0, 1, 9, 2)
  assert calls == [(1, max(slots), slots[max(slots)])]
  assert list(cohort) == [None, None] and len(calls) == 3
  assert len(iterator.select(5)) == 5


def test_an_iterator_survives_as_bytes():
  source = fakes.data_source()
  iterator = source.iterator()
  for _ in range(3):
    iterator.select()
  buffer = iterator.to_bytes()
  assert len(buffer) == 16
  restored = type(source.iterator()).from_bytes(buffer)
  assert (
    restored == copy.deepcopy(iterator) == iterator and restored.federated_type
  )
  for mine, other in zip(restored.select(), iterator.select()):
    np.testing.assert_array_equal(mine, other)


def test_mistakes():
  with pytest.raises(ValueError, match='clients_per_round=9'):
    fakes.data_source(clients_per_round=9)
  iterator = fakes.data_source().iterator()
  iterator.seed = 4
  with pytest.raises(ValueError, match='has seed 4, but the source has seed 3'):
    iterator.from_bytes(iterator.to_bytes())
  with pytest.raises(ValueError, match='k=6'):
    fakes.data_source(first_round=1).iterator().select(6)


def test_nobody_is_drawn_where_clients_do_not_train():
  source = sampling.CohortDataSource(
    fakes.data_source().federated_type,
    lambda *_: None,
    seed=0,
    num_clients=2,
    clients_per_round=2,
    trains_clients=False,
  )
  assert source.iterator().select() == []


def test_source_of_a_process_makes_elements_with_fresh_seeds():
  process = tiny_task.build('fl2')
  x, _ = tiny_task.examples(3, 0)
  source = sampling.build_data_source(
    process,
    lambda round_num, client_id: (None, (x[: client_id + round_num], None)),
    seed=5,
    num_clients=2,
    clients_per_round=2,
  )
  iterator = source.iterator()
  assert source.federated_type == process.next.type_signature.parameter[1]
  assert not iterator.select()  # The process pre-trains first.
  seeds = set()
  for round_num in (1, 2):
    for client_id, dataset in enumerate(iterator.select()):
      (element,) = dataset.as_numpy_iterator()
      assert len(element['unlabeled']['x']) == client_id + round_num
      assert not len(element['labeled']['x'])
      wanted = clients.client_seed(5, round_num, client_id)
      np.testing.assert_array_equal(element['seed'], wanted)
      seeds.add(tuple(wanted))
  assert len(seeds) == 4


_X, _Y = tiny_task.examples(4, 0)


def _fail(error):
  def load(client_id):
    raise error

  return load


_GOOD = ((_X, _Y), (_X, None))
# What `load_client` may do wrong, and a part of the reason.
_BAD = {
  'no file': (_fail(FileNotFoundError('x.npy')), 'FileNotFoundError: x.npy'),
  'assertion': (_fail(AssertionError('a\n b')), 'AssertionError: a b'),
  'stop': (_fail(StopIteration()), 'StopIteration'),
  'memory': (_fail(MemoryError()), 'MemoryError'),
  'nothing': (lambda _: None, 'TypeError'),
  'nothing in it': (lambda _: (None, None), 'neither labelled nor'),
  'too much': (lambda _: (*_GOOD, None), 'ValueError'),
  'text': (lambda _: 'ab', 'Error'),
  'no images': (lambda _: ((None, _Y), None), 'images (uint8'),
  'floats': (lambda _: ((_X / 255, _Y), None), 'images (uint8'),
  'other images': (lambda _: ((_X[:, 1:], _Y), None), 'must be uint8'),
  'two kinds': (lambda _: ((_X, _Y), (_X[:, 1:], None)), 'must have one shape'),
  'flat': (lambda _: ((_X.reshape(4, -1), _Y), None), 'images (uint8'),
  'too few labels': (lambda _: ((_X, _Y[:3]), None), 'labels of 4 images'),
  'one hot': (lambda _: ((_X, np.eye(4, dtype=int)), None), 'labels of 4'),
  'fractions': (lambda _: ((_X, _Y + 0.5), None), 'must be integers'),
  'no number': (lambda _: ((_X, _Y * np.nan), None), 'must be integers'),
  'names': (lambda _: ((_X, list('abcd')), None), 'must be integers'),
  'no class': (lambda _: ((_X, _Y + 3), None), 'allowed are 0 to 2'),
  'unknown': (lambda _: ((_X, _Y * 0 - 1), None), 'allowed are 0 to 2'),
  'hidden no class': (lambda _: (None, (_X, _Y + 3)), 'allowed are -1 to 2'),
  'below unknown': (lambda _: (None, (_X, _Y * 0 - 2)), 'allowed are -1 to 2'),
  'wide': (lambda _: ((_X, _Y.astype(int) + 2**32), None), 'range of int32'),
  'wider': (lambda _: ((_X, [2**70] * 4), None), 'must be integers'),
}


def _source(load_client, told, **population):
  return sampling.build_data_source(
    tiny_task.build('fl2'),
    lambda _, client_id: load_client(client_id),
    seed=5,
    on_failure=lambda *failure: told.append(failure),
    **{'num_clients': 2, 'clients_per_round': 2, **population},
  )


@pytest.mark.parametrize('name', list(_BAD))
def test_data_that_cannot_be_used_are_replaced_and_told_once(name):
  load, reason = _BAD[name]
  told = []
  source = _source(lambda i: load(i) if i else _GOOD, told)
  for round_num in (1, 2):
    for _ in range(2):  # Two phases of a round.
      good, bad = source.cohort(5, round_num)
      (element,) = bad.as_numpy_iterator()
      assert element['unlabeled']['y'].tolist() == [-2]
      assert not len(element['labeled']['y'])
      assert len(next(good.as_numpy_iterator())['labeled']['y']) == 4
  assert [(r, c) for r, c, _ in told] == [(1, 1), (2, 1)]
  assert reason in told[0][2] and '\n' not in told[0][2]


@hypothesis.given(
  st.sampled_from(['int8', 'uint8', 'int16', 'int64', 'uint64']),
  st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_labels_of_any_integers_are_taken(dtype, labels):
  told = []
  load = lambda _: ((_X, np.array(labels, dtype)), (_X, labels))
  for dataset in _source(load, told).cohort(5, 1):
    (element,) = dataset.as_numpy_iterator()
    for kind in ('labeled', 'unlabeled'):
      assert element[kind]['y'].dtype == np.int32
      assert element[kind]['y'].tolist() == labels
  assert not told


def test_what_is_told_may_end_the_round():
  class TooBadError(Exception):
    pass

  def refuse(*_):
    raise TooBadError()

  source = sampling.build_data_source(
    tiny_task.build('fl2'),
    lambda *_: None,
    seed=5,
    on_failure=refuse,
    num_clients=1,
    clients_per_round=1,
  )
  with pytest.raises(TooBadError):
    list(source.cohort(5, 1))


def test_failed_clients_of_a_round():
  failed = sampling.FailedClients()
  failed.add(1, 7, 'old')
  failed.add(2, 9, 'a')
  failed.add(2, 3, 'b')
  assert failed.take(2) == [(3, 'b'), (9, 'a')]
  assert failed.take(2) == []


class _Released(tff.program.ReleaseManager):
  def __init__(self):
    self.values = []

  async def release(self, value, key=None):
    self.values.append(await tff.program.materialize_value(value))


def test_runs_under_tffs_own_context_and_train_model(tmp_path):
  process, told = tiny_task.build('fl2'), []
  load = lambda i: None if i == 1 else (None, (_X[: i + 1], None))
  source = _source(load, told, num_clients=3, clients_per_round=3)
  context = tff.backends.native.create_async_local_cpp_execution_context()
  metrics = _Released()

  async def main():
    await tff.learning.programs.train_model(
      train_process=process,
      train_data_source=source,
      train_per_round_clients=3,
      train_total_rounds=3,
      program_state_manager=tff.program.FileProgramStateManager(str(tmp_path)),
      model_output_manager=_Released(),
      train_metrics_manager=metrics,
      evaluation_manager=None,
      evaluation_periodicity=100,
    )

  stack = tff.framework.get_context_stack()
  with stack.install(tff.program.NativeFederatedContext(context)):
    asyncio.run(main())
  del context
  gc.collect()  # Ends the worker.
  trained = [m['model_metrics'] for m in metrics.values]
  # The process pre-trains first.
  assert [m['num_clients'] for m in trained] == [0, 3, 3]
  assert [m['num_rejected_clients'] for m in trained] == [0, 1, 1]
  assert [(r, c) for r, c, _ in told] == [(1, 1), (2, 1)]


_LOSSY = sampling.ParticipationHparams(
  dropout_probability=0.4,
  straggler_probability=0.5,
  straggler_least_share=0.2,
  overselect=0.5,
)


def test_all_see_the_participants():
  source = sampling.CohortDataSource(
    fakes.data_source().federated_type,
    lambda round_num, client_id, slot: (client_id, slot),
    seed=3,
    num_clients=20,
    clients_per_round=4,
    first_round=0,
    participation=_LOSSY,
    min_clients=3,
  )
  iterator, kept, empty = source.iterator(), {0: []}, []
  assert iterator.select() == []
  # Before round 1 nobody is drawn, but the columns are there.
  assert set(source.counts(3, 0).values()) == {0}
  for round_num in range(1, 30):
    drawn = participation.draw(
      _LOSSY,
      None,
      seed=3,
      round_num=round_num,
      num_clients=20,
      clients_per_round=4,
    )
    # The numbers are those that reported, even if they were too few.
    assert source.counts(3, round_num) == drawn.counts()
    wanted = sorted(drawn.slots.items()) if len(drawn.slots) >= 3 else []
    cohort = list(iterator.select())
    assert cohort == wanted
    assert source.client_ids(3, round_num) == [i for i, _ in wanted]
    kept[round_num] = cohort
    empty.append(not wanted)
    if round_num == 12:  # A run that goes on from here.
      resumed = type(source.iterator()).from_bytes(iterator.to_bytes())
  assert any(empty) and not all(empty)
  assert [list(resumed.select()) for _ in range(17)] == [
    kept[r] for r in range(13, 30)
  ]


def test_nothing_is_counted_where_all_take_part():
  assert fakes.data_source().counts(3, 1) == {}


def test_more_clients_than_there_are():
  with pytest.raises(UsageError, match='--overselect=0.5: 6 clients would'):
    sampling.CohortDataSource(
      fakes.data_source().federated_type,
      lambda *_: None,
      seed=3,
      num_clients=5,
      clients_per_round=4,
      participation=_LOSSY,
    )


def test_stragglers_are_told_their_share():
  process = tiny_task.build(
    'fedrgd', norm='none', num_pretraining_rounds=0, stragglers=True
  )
  source = tiny_task.data_source(
    process,
    'labels_at_server',
    clients_per_round=5,
    participation=_LOSSY,
  )
  stragglers = 0
  for round_num in range(1, 8):
    for client_id, dataset in zip(
      source.client_ids(3, round_num), source.cohort(3, round_num), strict=True
    ):
      share = float(dataset.get_single_element()['share'])
      wanted = participation.share_of_steps(_LOSSY, 3, round_num, client_id)
      assert share == np.float32(wanted)
      stragglers += share < 1
  assert 0 < stragglers < 30
  # Without stragglers, all make all of their steps.
  whole = tiny_task.data_source(process, 'labels_at_server').cohort(3, 1)
  assert [float(d.get_single_element()['share']) for d in whole] == [1.0, 1.0]


def test_a_process_that_does_not_know_stragglers():
  with pytest.raises(UsageError, match='stragglers=True'):
    _source(None, [], participation=_LOSSY)
