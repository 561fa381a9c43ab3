import copy

import numpy as np
import pytest
import tiny_task

from tests.program import fakes
from tff_fssl.data import clients
from tff_fssl.program import sampling


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


def test_clients_are_made_when_they_are_called():
  calls = []
  source = sampling.CohortDataSource(
    fakes.data_source().federated_type,
    lambda round_num, client_id: calls.append((round_num, client_id)),
    seed=0,
    num_clients=9,
    clients_per_round=2,
    first_round=0,
  )
  iterator = source.iterator()
  assert iterator.select() == []  # Round 0: pre-training.
  cohort = iterator.select()
  assert calls == []
  cohort[1]()
  assert calls == [(1, sampling.sample_cohort(0, 1, 9, 2)[1])]
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
    np.testing.assert_array_equal(mine(), other())


def test_mistakes():
  with pytest.raises(ValueError, match='clients_per_round=9'):
    fakes.data_source(clients_per_round=9)
  iterator = fakes.data_source().iterator()
  iterator.seed = 4
  with pytest.raises(ValueError, match='is of seed 4, the source of 3'):
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
    lambda client_id: (None, (x[: client_id + 1], None)),
    seed=5,
    num_clients=2,
    clients_per_round=2,
  )
  iterator = source.iterator()
  assert source.federated_type == process.next.type_signature.parameter[1]
  seeds = set()
  for round_num in (1, 2):
    for client_id, make in enumerate(iterator.select()):
      (element,) = make().as_numpy_iterator()
      assert len(element['unlabeled']['x']) == client_id + 1
      assert not len(element['labeled']['x'])
      wanted = clients.client_seed(5, round_num, client_id)
      np.testing.assert_array_equal(element['seed'], wanted)
      seeds.add(tuple(wanted))
  assert len(seeds) == 4
