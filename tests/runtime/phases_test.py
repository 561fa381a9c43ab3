import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import phases
from tff_fssl.runtime import program

_WORKERS = phases.Workers(['/device:CPU:0'], 1, lambda: None)


@tff.tensorflow.computation(np.float32)
def _half(x):
  return x / 2.0


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def _sum_of_halves(values):
  halves = tff.federated_map(_half, values)
  return tff.federated_sum(halves), halves


def _run(values, indices=None, **kwargs):
  compiled = program.compile_program(_sum_of_halves, merges=True)
  (phase,) = compiled.phases
  server = {}
  for slot, value in zip(
    compiled.stages[0].outputs,
    compiled.stages[0]([], device='/device:CPU:0'),
  ):
    server[slot] = value

  def make_client(index, wanted):
    assert compiled.parameter in wanted
    return {compiled.parameter: tf.constant(values[index], tf.float32)}, None

  totals, kept, seconds = phases.run_clients(
    phase,
    server,
    make_client,
    range(len(values)) if indices is None else indices,
    {},
    _WORKERS,
    **kwargs,
  )
  assert seconds >= 0
  (total,), (halves,) = totals.values(), kept.values()
  return total.numpy(), [half.numpy() for half in halves]


@pytest.mark.parametrize('group_size', [0, 1, 2, 5])
def test_clients_are_accumulated_in_order(group_size):
  total, halves = _run([2, 4, 6], group_size=group_size)
  assert total == 6 and halves == [1, 2, 3]


def test_some_clients_of_a_cohort():
  assert _run([2, 4, 6, 8], range(1, 3)) == (5, [2, 3])


@pytest.mark.parametrize('group_size', [0, 2])
def test_no_clients(group_size):
  assert _run([], group_size=group_size) == (0, [])


def test_groups_are_rounded_one_by_one():
  # In float32, 2**24 + 1 is 2**24: the order of additions shows.
  values = [2**25, 2, 2, 2]
  assert _run(values)[0] == 2**24
  assert _run(values, group_size=2)[0] == 2**24 + 2


def test_a_check_stops_the_phase():
  compiled = program.compile_program(_sum_of_halves)

  def check():
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    phases.run_clients(
      compiled.phases[0],
      dict.fromkeys(compiled.phases[0].initial.values(), tf.constant(0.0)),
      lambda index, wanted: ({}, None),
      range(1),
      {},
      phases.Workers(['/device:CPU:0'], 1, check),
    )
