"""Every intrinsic and type, in process and in TFF's worker."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

_INTS = tff.FederatedType(np.int32, tff.CLIENTS)
_FLOATS = tff.FederatedType(np.float32, tff.CLIENTS)
_SERVER_INT = tff.FederatedType(np.int32, tff.SERVER)
_SEQUENCE = tff.SequenceType(np.int32)
_PAIR = tff.StructType([('b', np.int32), ('a', np.float32)])
_CASES = {}


def _case(*args, expected, fails_in_worker=False):
  """Registers a function that builds a computation, and what it returns."""

  def register(build):
    name = build.__name__.strip('_')
    _CASES[name] = (build, args, expected, fails_in_worker)
    return build

  return register


@tff.tensorflow.computation(np.int32)
def _double(x):
  return 2 * x


@tff.tensorflow.computation(np.int32, np.int32)
def _add(x, y):
  return x + y


@tff.tensorflow.computation
def _ten():
  return tf.constant(10)


@_case(expected=b'hello')
def _hello():
  @tff.federated_computation
  def comp():
    return tff.to_value('hello', tff.TensorType(np.str_))

  return comp


@_case([1.0, 2.0, 6.0], expected=3.0)
def _federated_mean():
  @tff.federated_computation(_FLOATS)
  def comp(x):
    return tff.federated_mean(x)

  return comp


@_case([1.0, 5.0], [3.0, 1.0], expected=2.0)
def _federated_weighted_mean():
  @tff.federated_computation(_FLOATS, _FLOATS)
  def comp(x, w):
    return tff.federated_mean(x, w)

  return comp


@_case([1, 2, 3, 4], expected=b'4:20')
def _federated_aggregate():
  zero = tff.tensorflow.computation(lambda: (0, 0))
  accumulate = tff.tensorflow.computation(
    lambda a, x: (a[0] + 1, a[1] + x), (zero.type_signature.result, np.int32)
  )
  merge = tff.tensorflow.computation(
    lambda a, b: (a[0] + b[0], a[1] + b[1]),
    (zero.type_signature.result, zero.type_signature.result),
  )
  report = tff.tensorflow.computation(
    lambda a: tf.strings.format('{}:{}', (a[0], a[1])),
    zero.type_signature.result,
  )

  @tff.federated_computation(_INTS)
  def comp(x):
    mapped = tff.federated_map(_double, x)
    return tff.federated_aggregate(mapped, zero(), accumulate, merge, report)

  return comp


@_case(3, [1, 2], expected=[4, 5])
def _federated_broadcast_and_zip():
  @tff.federated_computation(_SERVER_INT, _INTS)
  def comp(x, y):
    zipped = tff.federated_zip((tff.federated_broadcast(x), y))
    return tff.federated_map(_add, zipped)

  return comp


@_case(3, 4, expected=collections.OrderedDict(b=3, a=4))
def _federated_zip_at_server():
  @tff.federated_computation(_SERVER_INT, _SERVER_INT)
  def comp(x, y):
    return tff.federated_zip(collections.OrderedDict(b=x, a=y))

  return comp


@_case([1, 2], expected=(7, [7, 14]))
def _federated_value():
  @tff.federated_computation(_INTS)
  def comp(x):
    seven = tff.federated_value(7, tff.CLIENTS)
    product = tff.tensorflow.computation(lambda a, b: a * b)
    return (
      tff.federated_value(7, tff.SERVER),
      tff.federated_map(product, (x, seven)),
    )

  return comp


@_case([1, 2], expected=(10, 20))
def _federated_eval():
  @tff.federated_computation(_INTS)
  def comp(x):
    tens = tff.federated_eval(_ten, tff.CLIENTS)
    summed = tff.federated_sum(tens)
    del x
    return tff.federated_eval(_ten, tff.SERVER), summed

  return comp


@_case([[0, 2], [1, 1]], [10, 20, 30], expected=[41, 42])
def _federated_select():
  state_type = tff.TensorType(np.int32, [3])
  select = tff.tensorflow.computation(
    lambda state, key: tf.gather(state, key), (state_type, np.int32)
  )
  total = tff.tensorflow.computation(
    lambda ds: ds.reduce(1, lambda a, x: a + x), _SEQUENCE
  )

  @tff.federated_computation(
    tff.FederatedType(tff.TensorType(np.int32, [2]), tff.CLIENTS),
    tff.FederatedType(state_type, tff.SERVER),
  )
  def comp(keys, state):
    max_key = tff.federated_value(3, tff.SERVER)
    slices = tff.federated_select(keys, max_key, state, select)
    totals = tff.federated_map(total, slices)
    first = tff.tensorflow.computation(
      lambda t, k: t + k[0], (np.int32, tff.TensorType(np.int32, [2]))
    )
    return tff.federated_map(first, (totals, keys))

  return comp


@_case([1, 2, 3], expected=7)
def _sequence_reduce():
  @tff.federated_computation(_SEQUENCE)
  def comp(x):
    return tff.sequence_reduce(x, 1, _add)

  return comp


@_case([(1, 0.5), (2, 1.5)], expected=(3, 2.0), fails_in_worker=True)
def _sequence_sum():
  @tff.federated_computation(tff.SequenceType((np.int32, np.float32)))
  def comp(x):
    return tff.sequence_sum(x)

  return comp


@_case([[1, 2], [], [3]], expected=[6, 0, 6], fails_in_worker=True)
def _sequence_map_at_clients():
  @tff.federated_computation(tff.FederatedType(_SEQUENCE, tff.CLIENTS))
  def comp(x):
    @tff.federated_computation(_SEQUENCE)
    def local(ds):
      return tff.sequence_sum(tff.sequence_map(_double, ds))

    return tff.federated_map(local, x)

  return comp


@_case(
  [collections.OrderedDict(b=1, a=0.5), collections.OrderedDict(b=2, a=0.25)],
  expected=collections.OrderedDict(b=3, a=0.75),
  fails_in_worker=True,
)
def _sequence_reduce_keeps_the_order_of_names():
  add = tff.tensorflow.computation(
    lambda s, e: collections.OrderedDict(b=s['b'] + e['b'], a=s['a'] + e['a']),
    (_PAIR, _PAIR),
  )
  zero = tff.tensorflow.computation(lambda: collections.OrderedDict(b=0, a=0.0))

  @tff.federated_computation(tff.SequenceType(_PAIR))
  def comp(x):
    return tff.sequence_reduce(x, zero(), add)

  return comp


@_case([1, 2], expected=[5, 9])
def _lambda_as_mapped_function():
  @tff.federated_computation(np.int32)
  def local(x):
    return _add(_double(_double(x)), tff.tensorflow.computation(lambda: 1)())

  @tff.federated_computation(_INTS)
  def comp(x):
    return tff.federated_map(local, x)

  return comp


@_case(5, [1, 2], expected=([6, 7], 5))
def _all_equal_parameter():
  all_equal = tff.FederatedType(np.int32, tff.CLIENTS, all_equal=True)

  @tff.federated_computation(all_equal, _INTS)
  def comp(x, y):
    return tff.federated_map(_add, (x, y)), x

  return comp


@_case(5, expected=(5, []), fails_in_worker=True)
def _all_equal_parameter_without_clients():
  all_equal = tff.FederatedType(np.int32, tff.CLIENTS, all_equal=True)

  @tff.federated_computation(all_equal)
  def comp(x):
    return x, tff.federated_map(_double, x)

  return comp


@_case(['a', 'bc'], expected=[b'a!', b'bc!'])
def _strings():
  shout = tff.tensorflow.computation(lambda s: s + '!', np.str_)

  @tff.federated_computation(tff.FederatedType(np.str_, tff.CLIENTS))
  def comp(x):
    return tff.federated_map(shout, x)

  return comp


@_case(['b', 'z'], expected=[1, -1])
def _static_hash_table():
  @tff.tensorflow.computation(np.str_)
  def look_up(key):
    table = tf.lookup.StaticHashTable(
      tf.lookup.KeyValueTensorInitializer(['a', 'b'], [0, 1]), -1
    )
    return table.lookup(key)

  @tff.federated_computation(tff.FederatedType(np.str_, tff.CLIENTS))
  def comp(x):
    return tff.federated_map(look_up, x)

  return comp


@_case([['a', 'b', 'a'], ['b']], expected=[2, 0])
def _mutable_hash_table():
  @tff.tensorflow.computation(tff.SequenceType(np.str_))
  def count_a(ds):
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int32, 0)

    @tf.function
    def count():
      for word in ds:
        table.insert(word, table.lookup(word) + 1)
      return table.lookup(tf.constant('a'))

    return count()

  @tff.federated_computation(
    tff.FederatedType(tff.SequenceType(np.str_), tff.CLIENTS)
  )
  def comp(x):
    return tff.federated_map(count_a, x)

  return comp


@_case((), expected=())
def _empty_struct():
  return tff.tensorflow.computation(lambda x: x, tff.StructType([]))


@_case(1, (2.0, [3]), expected=(1, (2.0, [3])))
def _identity():
  @tff.tensorflow.computation(
    np.int32, (np.float32, tff.TensorType(np.int32, [None]))
  )
  def comp(x, y):
    return x, y

  return comp


@_case(1, 2, expected=2)
def _unused_parameter():
  @tff.tensorflow.computation(np.int32, np.int32)
  def comp(x, y):
    del x
    return y

  return comp


@_case([[1, 2], [3]], expected=[[1, 2], [3]])
def _identity_of_clients():
  @tff.federated_computation(tff.FederatedType(_SEQUENCE, tff.CLIENTS))
  def comp(x):
    return x

  return comp


@_case(4, expected=[0, 1, 2, 3])
def _sequence_as_result():
  return tff.tensorflow.computation(
    lambda n: tf.data.Dataset.range(4).map(
      lambda i: tf.cast(i, tf.int32) + n - 4
    ),
    np.int32,
  )


def _plain(value):
  """A value with its datasets as lists."""
  if isinstance(value, tf.data.Dataset):
    return [element.numpy() for element in value]
  if isinstance(value, list):
    return [_plain(element) for element in value]
  return value


def _check(actual, expected):
  actual = _plain(actual)
  if isinstance(expected, (list, tuple)):
    assert len(actual) == len(expected)
    assert not isinstance(expected, tuple) or isinstance(actual, tuple)
    for a, e in zip(actual, expected, strict=True):
      _check(a, e)
  elif isinstance(expected, dict):
    assert list(actual.items()) == list(expected.items())
    assert isinstance(actual, type(expected))
  else:
    assert actual == expected


@pytest.mark.parametrize('name', list(_CASES))
def test_in_process(name, in_process, call):
  build, args, expected, _ = _CASES[name]
  _check(call(in_process, build(), *args), expected)


@pytest.mark.parametrize('name', [n for n, c in _CASES.items() if not c[3]])
def test_tff_worker(name, worker, call):
  build, args, expected, _ = _CASES[name]
  _check(call(worker, build(), *args), expected)
