import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import lowering
from tff_fssl.runtime import operations

_CLIENTS = tff.FederatedType(np.int32, tff.CLIENTS)


@tff.tensorflow.computation(np.int32, np.int32)
def _add(x, y):
  return x + y


@tff.federated_computation(tff.FederatedType(np.int32, tff.SERVER), _CLIENTS)
def _shifted_sum(shift, values):
  pairs = tff.federated_zip((tff.federated_broadcast(shift), values))
  return tff.federated_sum(tff.federated_map(_add, pairs))


def test_moving_a_value_is_no_operation():
  lowered = lowering.lower(_shifted_sum)
  shift, values = lowered.parameter
  assert (shift.clients, values.clients) == (False, True)
  work = [i for i in lowered.items if getattr(i, 'clients', False)]
  assert [step.label for step in work] == ['federated_map_1']
  assert work[0].inputs == (shift, values)
  (aggregate,) = (
    i for i in lowered.items if isinstance(i, operations.Aggregate)
  )
  assert aggregate.values == work[0].outputs and aggregate.merge is None


def test_merges_are_lowered_on_request():
  lowered = lowering.lower(_shifted_sum, merges=True)
  (aggregate,) = (
    i for i in lowered.items if isinstance(i, operations.Aggregate)
  )
  assert len(aggregate.merge.merged) == len(aggregate.accumulator)


def test_each_reader_of_a_sequence_has_its_own_slot():
  @tff.tensorflow.computation(tff.SequenceType(np.int32))
  def total(data):
    return data.reduce(0, lambda a, b: a + b)

  @tff.federated_computation(
    tff.FederatedType(tff.SequenceType(np.int32), tff.CLIENTS)
  )
  def twice(data):
    return (
      tff.federated_sum(tff.federated_map(total, data)),
      tff.federated_max(tff.federated_map(total, data)),
    )

  lowered = lowering.lower(twice)
  (readers,) = lowered.readers.values()
  assert len(set(readers)) == len(readers) >= 1
  assert lowered.parameter not in readers


def test_secure_sums_are_refused_unless_they_are_simulated():
  @tff.federated_computation(_CLIENTS)
  def secure(values):
    return tff.federated_secure_sum(values, max_input=9)

  with pytest.raises(NotImplementedError, match='federated_secure_sum'):
    lowering.lower(secure)
  assert lowering.lower(secure, simulate_secure_aggregation=True).items


def test_a_constant_has_no_parameter():
  @tff.tensorflow.computation
  def five():
    return tf.constant(5)

  lowered = lowering.lower(five)
  assert lowered.parameter == () and len(lowered.result) == 1
