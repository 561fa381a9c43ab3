"""TFF's language: intrinsics, values, sequences and TensorFlow, as cases."""

import collections
from collections.abc import Callable, Iterator
import itertools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

# (group, name, what is run: it calls computations, and returns their results).
Case = tuple[str, str, Callable[[], Any]]
_OD = collections.OrderedDict
_NUMBERS = (np.int32, np.int64, np.float32, np.float64)


def _clients(member):
  return tff.FederatedType(member, tff.CLIENTS)


def _server(member):
  return tff.FederatedType(member, tff.SERVER)


def _fed(fn, *types):
  return tff.federated_computation(fn, *types)


def value_of(type_spec, index):
  """The value of a client, a function of its number."""
  if isinstance(type_spec, tff.StructType):
    elements = [
      (name, value_of(t, index + i))
      for i, (name, t) in enumerate(tff.structure.iter_elements(type_spec))
    ]
    if all(name for name, _ in elements):
      return _OD(elements)
    return tuple(value for _, value in elements)
  rng = np.random.default_rng(index)
  shape = tuple(size or 3 for size in type_spec.shape)
  value = rng.integers(0, 50, shape) / 4
  return np.asarray(value).astype(type_spec.dtype.type)[()]


_TYPES = {
  **{d.__name__: tff.TensorType(d) for d in _NUMBERS},
  'vector': tff.TensorType(np.float32, [3]),
  'matrix': tff.TensorType(np.int32, [2, 2]),
  'pair': tff.to_type((np.int32, np.float32)),
  'names': tff.to_type(_OD(b=np.float32, a=(np.int64, np.float32))),
}


def _map_type(fn, type_spec):
  """A TensorFlow function of each tensor of a type, as a computation."""
  return tff.tensorflow.computation(
    lambda x: tf.nest.map_structure(fn, x), type_spec
  )


def _sum_by_aggregate(type_spec):
  zero = tff.tensorflow.computation(
    lambda: tf.nest.map_structure(
      lambda s: tf.zeros(s.shape, s.dtype),
      tff.types.type_to_tf_tensor_specs(type_spec),
    )
  )
  add = tff.tensorflow.computation(
    lambda a, b: tf.nest.map_structure(tf.add, a, b), (type_spec, type_spec)
  )
  report = _map_type(lambda t: 2 * t, type_spec)
  return lambda x: tff.federated_aggregate(x, zero(), add, add, report)


def _intrinsics() -> Iterator[Case]:
  for (name, t), count in itertools.product(_TYPES.items(), (1, 2, 5)):
    yield from _intrinsics_of(name, t, count)


def _intrinsics_of(name: str, t: tff.Type, count: int) -> Iterator[Case]:
  """Cases of a number of clients with values of a type."""
  values = [value_of(t, i) for i in range(count)]
  weights = [1.0 + i for i in range(count)]
  double = _map_type(lambda x: 2 * x, t)
  fns = {
    'sum': tff.federated_sum,
    'min': tff.federated_min,
    'max': tff.federated_max,
    'aggregate': _sum_by_aggregate(t),
    'map': lambda x: tff.federated_map(double, x),
    'map twice': lambda x: tff.federated_map(
      double, tff.federated_map(double, x)
    ),
    'sum of map': lambda x: tff.federated_sum(tff.federated_map(double, x)),
    'zip': lambda x: tff.federated_zip((x, tff.federated_map(double, x))),
    'identity': lambda x: x,
  }
  leaves = tff.structure.flatten(t) if isinstance(t, tff.StructType) else [t]
  if all(np.issubdtype(leaf.dtype.type, np.floating) for leaf in leaves):
    minus = tff.tensorflow.computation(
      lambda a, b: tf.nest.map_structure(tf.subtract, a, b), (t, t)
    )
    fns['mean'] = lambda x: tff.federated_mean(x)
    fns['difference'] = lambda x: tff.federated_map(
      minus, (x, tff.federated_broadcast(tff.federated_mean(x)))
    )
    yield (
      'intrinsics',
      f'weighted mean of {name}, {count}',
      lambda: _fed(
        lambda x, w: tff.federated_mean(x, w), _clients(t), _clients(np.float32)
      )(values, weights),
    )
  for fn_name, fn in fns.items():
    yield (
      'intrinsics',
      f'{fn_name} of {name}, {count}',
      lambda fn=fn: _fed(fn, _clients(t))(values),
    )
  yield (
    'intrinsics',
    f'broadcast and apply of {name}, {count}',
    lambda: _fed(
      lambda x, y: (
        tff.federated_map(double, x),
        tff.federated_broadcast(x),
        tff.federated_sum(y),
      ),
      _server(t),
      _clients(np.int32),
    )(values[0], [1] * count),
  )


def _values_and_selects() -> Iterator[Case]:
  tens = tff.tensorflow.computation(lambda: tf.constant(10))
  for count in (1, 3):
    ones = [1] * count
    for name, fn in {
      'value at clients': lambda x: (
        tff.federated_sum(x),
        tff.federated_sum(tff.federated_value(7, tff.CLIENTS)),
      ),
      'value at server': lambda x: (
        tff.federated_sum(x),
        tff.federated_value(7, tff.SERVER),
      ),
      'eval at clients': lambda x: (
        tff.federated_sum(x),
        tff.federated_eval(tens, tff.CLIENTS),
      ),
      'eval at server': lambda x: (
        tff.federated_sum(x),
        tff.federated_eval(tens, tff.SERVER),
      ),
      'secure sum': lambda x: tff.federated_secure_sum(x, 100),
      'secure sum of bits': lambda x: tff.federated_secure_sum_bitwidth(x, 8),
      'secure modular sum': lambda x: (
        tff.backends.mapreduce.federated_secure_modular_sum(x, 100)
      ),
    }.items():
      yield (
        'values, secure sums',
        f'{name}, {count}',
        lambda fn=fn, ones=ones: _fed(fn, _clients(np.int32))(ones),
      )
  state = tff.TensorType(np.float32, [4])
  select = tff.tensorflow.computation(
    lambda s, k: tf.gather(s, k), (state, np.int32)
  )
  total = tff.tensorflow.computation(
    lambda ds: ds.reduce(0.0, lambda a, b: 2 * a + b),
    tff.SequenceType(np.float32),
  )

  def selecting(keys, values, secure):
    fn = tff.federated_secure_select if secure else tff.federated_select
    slices = fn(keys, tff.federated_value(4, tff.SERVER), values, select)
    return tff.federated_map(total, slices)

  for secure in (False, True):
    for keys in ([[0, 1]], [[3, 0], [1, 1], [2, 3]]):
      yield (
        'values, secure sums',
        f'{"secure " * secure}select, {len(keys)}',
        lambda keys=keys, secure=secure: _fed(
          lambda k, v: selecting(k, v, secure),
          _clients(tff.TensorType(np.int32, [2])),
          _server(state),
        )(keys, [1.0, 2.0, 4.0, 8.0]),
      )


def _sequences() -> Iterator[Case]:
  number = tff.SequenceType(np.int32)
  add = tff.tensorflow.computation(lambda a, b: 3 * a + b, (np.int32, np.int32))
  reduce = _fed(lambda ds: tff.sequence_reduce(ds, 1, add), number)
  order = tff.tensorflow.computation(
    lambda ds: ds.reduce(0, lambda a, b: (31 * a + b) % 10_007), number
  )
  data = {
    'list': [3, 1, 2],
    'one': [5],
    'none': [],
    'slices': tf.data.Dataset.from_tensor_slices(np.arange(9, dtype=np.int32)),
  }
  numbers = data['slices']
  data.update(
    {
      'shuffled': numbers.shuffle(9, seed=1),
      'shuffled, repeated': numbers.shuffle(9, seed=1).repeat(2),
      'cached': numbers.shuffle(9, seed=1).cache(),
      'filtered': numbers.filter(lambda x: x % 2 > 0),
      'windows': numbers.window(2).flat_map(lambda w: w.take(1)),
      'zipped': tf.data.Dataset.zip((numbers, numbers)).map(lambda a, b: a * b),
      'interleaved': numbers.interleave(
        lambda x: tf.data.Dataset.from_tensors(x).repeat(2)
      ),
      'batched': numbers.batch(4).map(tf.reduce_sum),
    }
  )
  for name, value in data.items():
    yield 'sequences', f'reduce of {name}', lambda v=value: reduce(v)
    yield 'sequences', f'order of {name}', lambda v=value: order(v)
    # Results that shuffle are left out: TFF's, in this process, share the
    # argument's state.
    is_shuffled = 'shuffled' in name or name == 'cached'
    for count in (1, 3):
      yield (
        'sequences',
        f'clients with {name}, {count}',
        lambda v=value, count=count: _fed(
          lambda x: (tff.federated_map(order, x), tff.federated_map(reduce, x)),
          _clients(number),
        )([v] * count),
      )
      yield (
        'sequences',
        f'two phases of {name}, {count}',
        lambda v=value, count=count: _fed(_two_phases(order), _clients(number))(
          [v] * count
        ),
      )
      if not is_shuffled:
        yield (
          'sequences',
          f'identity of {name}, {count}',
          lambda v=value, count=count: _fed(lambda x: x, _clients(number))(
            [v] * count
          ),
        )


def _two_phases(order):
  plus = tff.tensorflow.computation(lambda a, b: a + b, (np.int32, np.int32))

  def fn(x):
    total = tff.federated_sum(tff.federated_map(order, x))
    again = tff.federated_map(order, x)
    return total, tff.federated_map(
      plus, (again, tff.federated_broadcast(total))
    )

  return fn


def _tensorflow() -> Iterator[Case]:
  """Local computations over an int and a vector."""
  table = lambda: tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(4), tf.range(4) * 7), -1
  )

  def variable(n, v):
    total = tf.Variable(tf.zeros_like(v))

    @tf.function
    def run():
      for i in tf.range(n):
        total.assign_add(v * tf.cast(i, tf.float32))
      return total.read_value()

    return run()

  def counted(n, v):
    counts = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, 0)

    @tf.function
    def run():
      for i in tf.range(n):
        counts.insert(i % 2, counts.lookup(i % 2) + 1)
      return counts.lookup(tf.constant([0, 1, 2]))

    del v
    return run()

  def nested(n, v):
    @tf.function
    def inner(x):
      return tf.cond(tf.reduce_sum(x) > 3.0, lambda: x - 1.0, lambda: x * 2.0)

    return tf.while_loop(
      lambda i, _: i < n, lambda i, x: (i + 1, inner(x)), (0, v)
    )[1]

  def gradient(n, v):
    del n
    with tf.GradientTape() as tape:
      tape.watch(v)
      loss = tf.reduce_sum(tf.sin(v) * v)
    return tape.gradient(loss, v)

  def dataset(n, v):
    ds = tf.data.Dataset.range(5).shuffle(5, seed=2).batch(2)
    total = ds.reduce(tf.constant(0, tf.int64), lambda a, b: 7 * a + b[0])
    return total + tf.cast(n, tf.int64), v

  fns = {
    'tuple': lambda n, v: (v, n),
    'names': lambda n, v: _OD(z=n, a=v),
    'nothing': lambda n, v: (),
    'cond': lambda n, v: tf.cond(n > 2, lambda: v, lambda: -v),
    'case': lambda n, v: tf.switch_case(n % 2, [lambda: v, lambda: 2 * v]),
    'while': nested,
    'map_fn': lambda n, v: tf.map_fn(lambda x: x * x, v),
    'scan': lambda n, v: tf.scan(lambda a, x: a + x, v),
    'variable': variable,
    'static table': lambda n, v: table().lookup(n),
    'mutable table': counted,
    'tensor array': lambda n, v: (
      tf.TensorArray(tf.float32, 2).unstack([v, v + 1]).stack()
    ),
    'strings': lambda n, v: tf.strings.join([tf.strings.as_string(n), 'é\0']),
    'split': lambda n, v: tf.strings.length(tf.strings.as_string(v)),
    'ragged': lambda n, v: tf.ragged.range([1, n]).flat_values,
    'sparse': lambda n, v: tf.sparse.to_dense(
      tf.sparse.SparseTensor([[1], [3]], [n, 5], [5])
    ),
    'gradient': gradient,
    'stateless': lambda n, v: tf.random.stateless_normal([3], [n, 1]),
    'stateless int': lambda n, v: tf.random.stateless_uniform(
      [4], [n, 2], 0, 1000, tf.int32
    ),
    'shuffle': lambda n, v: tf.random.experimental.stateless_shuffle(v, [n, 3]),
    'dataset': dataset,
    'linalg': lambda n, v: tf.linalg.inv(
      tf.tensordot(v, v, 0) + 2.0 * tf.eye(3)
    ),
    'fft': lambda n, v: tf.abs(tf.signal.rfft(v)),
    'convolution': lambda n, v: tf.nn.conv1d(
      tf.reshape(v, [1, 3, 1]), tf.ones([2, 1, 1]), 1, 'SAME'
    ),
    'image': lambda n, v: tf.image.resize(tf.reshape(v, [3, 1, 1]), [2, 2]),
    'topk': lambda n, v: tf.math.top_k(v, 2),
    'bool': lambda n, v: v > 1.0,
    'half': lambda n, v: tf.cast(v, tf.float16),
    'complex': lambda n, v: tf.complex(v, v),
    'uint8': lambda n, v: tf.cast(v, tf.uint8),
    'fails': lambda n, v: tf.debugging.check_numerics(v / 0.0 * 0.0, 'bad'),
    'xla': lambda n, v: tf.function(
      lambda x: tf.reduce_sum(x * x), jit_compile=True
    )(v),
    'einsum': lambda n, v: tf.einsum('i,j->ij', v, v),
    'bits': lambda n, v: tf.bitwise.bitwise_xor(n, 5),
  }
  types = (np.int32, tff.TensorType(np.float32, [3]))
  vector = np.array([0.5, 2.0, 1.0], np.float32)
  for name, fn in fns.items():
    make = lambda fn=fn: tff.tensorflow.computation(fn, types)
    yield 'TensorFlow', name, lambda make=make: make()(3, vector)
    for count in (1, 4):
      yield (
        'TensorFlow',
        f'{name} at clients, {count}',
        lambda make=make, count=count: _mapped(make(), types)(
          list(range(1, count + 1)), [vector * i for i in range(count)]
        ),
      )


def _mapped(comp, types):
  return _fed(
    lambda n, v: tff.federated_map(comp, (n, v)), *map(_clients, types)
  )


def cases() -> Iterator[Case]:
  """All cases."""
  for group in (_intrinsics, _values_and_selects, _sequences, _tensorflow):
    yield from group()
