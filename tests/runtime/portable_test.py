import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.runtime import portable
from tff_fssl.runtime import program
from tff_fssl.runtime import values

_SEQUENCE = tff.SequenceType(np.int32)


@tff.tensorflow.computation(_SEQUENCE, np.int32)
def _scaled_total(data, factor):
  return factor * data.reduce(0, lambda a, b: a + b)


@tff.federated_computation(
  tff.FederatedType(_SEQUENCE, tff.CLIENTS),
  tff.FederatedType(np.int32, tff.SERVER),
)
def _totals(data, factor):
  pairs = tff.federated_zip((data, tff.federated_broadcast(factor)))
  return tff.federated_sum(tff.federated_map(_scaled_total, pairs))


class _Recipe:
  """Makes a client's data from its number."""


class _Cohort(list):
  recipe = _Recipe()

  def arguments_of(self, index):
    return (index, 'round 1')


def _argument(cohort):
  compiled = program.compile_program(_totals)
  argument = values.Argument(
    (cohort, 3), compiled.parameter_type, compiled.parameter, compiled.readers
  )
  return compiled, argument


def _read(argument, index, wanted):
  made, _ = argument.client(index, wanted)
  data = {
    tuple(tf.data.experimental.from_variant(v, tf.TensorSpec([], tf.int32))
          .as_numpy_iterator())
    for v in made.values()
  }  # fmt: skip
  assert len(data) == 1
  return data.pop()


def test_tensors_and_datasets_survive():
  leaf = tff.TensorType(np.float32, [2])
  sent = portable.encode(tf.constant([1.5, 2.5]))
  assert isinstance(sent, np.ndarray)
  assert portable.decode(sent, leaf).numpy().tolist() == [1.5, 2.5]
  variant = tf.data.experimental.to_variant(tf.data.Dataset.range(3))
  sent = portable.encode(variant)
  assert isinstance(sent, bytes)
  back = portable.decode(sent, tff.SequenceType(np.int64))
  read = tf.data.experimental.from_variant(back, tf.TensorSpec([], tf.int64))
  assert list(read.as_numpy_iterator()) == [0, 1, 2]


def test_values_of_the_server_that_clients_need():
  compiled, argument = _argument([[1, 2]])
  (phase,) = compiled.phases
  factor = compiled.parameter[1]
  assert factor in portable.sent_slots(phase)
  sent = portable.encode_server(phase, argument.server)
  back = portable.decode_server(phase, sent)
  # The zeros of accumulators are not known before the first stage.
  assert back[factor].numpy() == 3 and back.keys() == {factor}


def test_values_of_clients():
  compiled, argument = _argument([[1, 2], [3], []])
  wanted = compiled.phases[0].reads
  sent = [portable.encode_client(argument, i, wanted, []) for i in range(3)]
  back = portable.decode_clients(compiled, sent, [])
  assert [_read(back, i, wanted) for i in range(3)] == [(1, 2), (3,), ()]
  assert portable.encode_client(argument, 0, frozenset(), []) == [None]


def test_a_recipe_travels_once():
  cohort = _Cohort([None, None])
  compiled, argument = _argument(cohort)
  wanted, known = compiled.phases[0].reads, []
  sent = [portable.encode_client(argument, i, wanted, known) for i in range(2)]
  assert known == [cohort.recipe]
  assert sent[1] == [portable.Made(0, (1, 'round 1'))]
  back = portable.decode_clients(
    compiled, sent, [lambda index, name: [index, len(name)]]
  )
  assert _read(back, 1, wanted) == (1, 7)


def test_values_that_phases_kept():
  a, b = object(), object()
  kept = {a: [tf.constant(n) for n in (5, 6, 7)]}
  assert portable.encode_kept([a, b], kept, range(1, 3)) == [[6, 7], None]
  compiled, _ = _argument([[1]])
  assert portable.kept_slots(compiled) == ()
