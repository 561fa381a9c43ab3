import numpy as np
import tensorflow_federated as tff

from tff_fssl.runtime import program

_CLIENTS = tff.FederatedType(np.int32, tff.CLIENTS)


@tff.tensorflow.computation(np.int32, np.int32)
def _add(x, y):
  return x + y


@tff.tensorflow.computation(np.int32)
def _double(x):
  return 2 * x


@tff.federated_computation(_CLIENTS)
def _sum(values):
  return tff.federated_sum(tff.federated_map(_double, values))


@tff.federated_computation(_CLIENTS)
def _two_phases(values):
  doubled = tff.federated_map(_double, values)
  total = tff.federated_broadcast(tff.federated_sum(doubled))
  shifted = tff.federated_map(_add, tff.federated_zip((doubled, total)))
  return tff.federated_sum(shifted), doubled


def test_a_sum_is_one_phase_between_two_stages():
  compiled = program.compile_program(_sum)
  (phase,) = compiled.phases
  assert len(compiled.stages) == 2 and phase.merge is None
  assert not phase.kept and len(phase.final) == 1
  assert phase.reads >= set(phase.work.inputs)
  assert compiled.parameter in phase.reads


def test_values_that_later_phases_or_the_result_need_are_kept():
  compiled = program.compile_program(_two_phases)
  first, second = compiled.phases
  (doubled,) = first.kept
  assert doubled in compiled.result and doubled in second.reads
  assert not second.kept


def test_operations_that_no_result_needs_are_dropped():
  @tff.federated_computation(_CLIENTS)
  def wasteful(values):
    tff.federated_sum(tff.federated_map(_double, values))
    return values

  compiled = program.compile_program(wasteful)
  assert not compiled.phases and compiled.result == (compiled.parameter,)


def test_groups_are_merged_by_one_function():
  (phase,) = program.compile_program(_sum, merges=True).phases
  assert set(phase.merge.left) == set(phase.merge.right) == set(phase.initial)


def test_loops_by_reduce_are_named():
  @tff.tensorflow.computation(tff.SequenceType(np.int32))
  def total(data):
    return data.reduce(0, lambda a, b: a + b)

  @tff.federated_computation(
    tff.FederatedType(tff.SequenceType(np.int32), tff.CLIENTS)
  )
  def totals(data):
    return tff.federated_sum(tff.federated_map(total, data))

  assert program.compile_program(totals).reduce_loops == ('federated_map_1',)
  assert program.compile_program(_sum).reduce_loops == ()
