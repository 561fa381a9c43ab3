"""TFF's own computations under its C++ runtime and under ours, compared.

    python tests/runtime/tff_suite.py [--only SUBSTRING]

The package on the index has no tests, so this restates what they execute: the
intrinsics over types, numbers of clients and structures, TensorFlow's control
flow and resources, `tff.aggregators`, `tff.analytics` and `tff.learning`. Each
case runs under TFF's worker and under ours, with one client at a time and with
three. (`tff_source.py` runs the tests themselves, where a checkout is at hand.)

Prints a table: passed (the same result, or the error that is meant), refused
(by ours alone, with `NotImplementedError`), more (TFF's worker does not run it,
ours does), wrong; no case is what neither runs, a mistake in this file.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
import itertools
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

# pylint: disable=wrong-import-position
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import runtime

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


def _values(type_spec, index):
  """The value of a client, a function of its number."""
  if isinstance(type_spec, tff.StructType):
    elements = [
      (name, _values(t, index + i))
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
    values = [_values(t, i) for i in range(count)]
    double = _map_type(lambda x: 2 * x, t)
    floats = (
      all(
        np.issubdtype(leaf.dtype.type, np.floating)
        for leaf in tff.structure.flatten(t)
      )
      if isinstance(t, tff.StructType)
      else np.issubdtype(t.dtype.type, np.floating)
    )
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
    if floats:
      fns['mean'] = tff.federated_mean
      fns['difference'] = lambda x: tff.federated_map(
        tff.tensorflow.computation(
          lambda a, b: tf.nest.map_structure(tf.subtract, a, b), (t, t)
        ),
        (x, tff.federated_broadcast(tff.federated_mean(x))),
      )
    for fn_name, fn in fns.items():
      yield (
        'intrinsics',
        f'{fn_name} of {name}, {count}',
        lambda fn=fn, t=t, values=values: _fed(fn, _clients(t))(values),
      )
    if floats:
      weights = [1.0 + i for i in range(count)]
      yield (
        'intrinsics',
        f'weighted mean of {name}, {count}',
        lambda t=t, values=values, weights=weights: _fed(
          tff.federated_mean, _clients(t), _clients(np.float32)
        )(values, weights),
      )
    value = values[0]
    yield (
      'intrinsics',
      f'broadcast and apply of {name}, {count}',
      lambda t=t, v=value, double=double, count=count: _fed(
        lambda x, y: (
          tff.federated_map(double, x),
          tff.federated_broadcast(x),
          tff.federated_sum(y),
        ),
        _server(t),
        _clients(np.int32),
      )(v, [1] * count),
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


def _process(process, rounds, *args):
  """The outputs of rounds of a process, state by state."""
  state, outputs = process.initialize(), []
  for _ in range(rounds):
    output = process.next(state, *args)
    state = output.state
    outputs.append(output)
  return outputs


def _aggregators() -> Iterator[Case]:
  agg = tff.aggregators
  unweighted = {
    'sum': agg.SumFactory,
    'mean': agg.UnweightedMeanFactory,
    'clipped sum': lambda: agg.clipping_factory(1.5, agg.SumFactory()),
    'zeroed sum': lambda: agg.zeroing_factory(6.0, agg.SumFactory()),
    'concatenated': lambda: agg.concat_factory(agg.SumFactory()),
    'secure': lambda: agg.SecureSumFactory(50.0, -50.0),
    'encoded': lambda: agg.EncodedSumFactory.quantize_above_threshold(8, 20000),
    'hadamard': lambda: agg.HadamardTransformFactory(agg.SumFactory()),
    'fourier': lambda: agg.DiscreteFourierTransformFactory(agg.SumFactory()),
    'adaptive clipping': lambda: tff.learning.robust_aggregator(weighted=False),
    'adaptive secure': lambda: tff.learning.secure_aggregator(weighted=False),
    'secure mean': lambda: agg.UnweightedMeanFactory(
      value_sum_factory=agg.SecureSumFactory(50.0, -50.0)
    ),
  }
  weighted = {
    'weighted mean': agg.MeanFactory,
    'robust': tff.learning.robust_aggregator,
    'plain robust': lambda: tff.learning.robust_aggregator(
      zeroing=False, clipping=False
    ),
    'secure robust': tff.learning.secure_aggregator,
    'zero weights': lambda: agg.MeanFactory(no_nan_division=True),
  }
  types = {
    'scalar': tff.TensorType(np.float32),
    'vector': tff.TensorType(np.float32, [5]),
    'two': tff.to_type(
      (tff.TensorType(np.float32, [2, 2]), tff.TensorType(np.float32))
    ),
    'names': tff.to_type(
      _OD(b=tff.TensorType(np.float32, [3]), a=tff.TensorType(np.float32))
    ),
  }
  for (t_name, t), count in itertools.product(types.items(), (1, 3)):
    values = [_values(t, i) for i in range(count)]
    for name, build in unweighted.items():
      if name in ('hadamard', 'fourier'):
        continue  # Random rotations of their own seeds: compared below.
      yield (
        'aggregators',
        f'{name} of {t_name}, {count}',
        lambda build=build, t=t, values=values: _process(
          build().create(t), 2, values
        ),
      )
    for name, build in weighted.items():
      weights = [
        0.0 if name == 'zero weights' else 1.0 + i for i in range(count)
      ]
      yield (
        'aggregators',
        f'{name} of {t_name}, {count}',
        lambda build=build, t=t, values=values, weights=weights: _process(
          build().create(t, tff.TensorType(np.float32)), 2, values, weights
        ),
      )
    for name in ('hadamard', 'fourier'):
      yield (
        'aggregators',
        f'{name} of {t_name}, {count}',
        lambda build=unweighted[name], t=t, values=values: [
          np.round(x, 2)
          for x in tf.nest.flatten(
            _process(build().create(t), 1, values)[0].result
          )
        ],
      )


_SPEC = _OD(
  x=tf.TensorSpec([None, 4], tf.float32), y=tf.TensorSpec([None, 1], tf.int32)
)


def _examples(client, batch=4):
  rng = np.random.default_rng(client)
  x = rng.normal(size=(6 + client, 4)).astype(np.float32)
  y = (x.sum(1, keepdims=True) > 0).astype(np.int32)
  return tf.data.Dataset.from_tensor_slices(_OD(x=x, y=y)).batch(batch)


def _keras_model():
  init = tf.keras.initializers.GlorotUniform(seed=1)
  return tff.learning.models.from_keras_model(
    tf.keras.Sequential(
      [
        tf.keras.layers.InputLayer((4,)),
        tf.keras.layers.Dense(3, 'relu', kernel_initializer=init),
        tf.keras.layers.Dense(2, kernel_initializer=init),
      ]
    ),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
    input_spec=_SPEC,
  )


def _learning() -> Iterator[Case]:
  learning = tff.learning
  alg, opt = learning.algorithms, learning.optimizers
  loops = {
    'iterator': learning.LoopImplementation.DATASET_ITERATOR,
    'reduce': learning.LoopImplementation.DATASET_REDUCE,
  }
  sgd = lambda: opt.build_sgdm(0.1, 0.9)
  optimizers = {
    'sgd': lambda: opt.build_sgdm(0.1),
    'momentum': sgd,
    'adam': lambda: opt.build_adam(0.01),
    'adamw': lambda: opt.build_adamw(0.01),
    'adagrad': lambda: opt.build_adagrad(0.1),
    'rmsprop': lambda: opt.build_rmsprop(0.01),
    'yogi': lambda: opt.build_yogi(0.01),
    'adafactor': lambda: opt.build_adafactor(learning_rate=0.1),
  }
  processes = {}
  for name, build in optimizers.items():
    for loop_name, loop in loops.items():
      processes[f'fed_avg, {name}, {loop_name}'] = (
        lambda build=build, loop=loop: alg.build_weighted_fed_avg(
          _keras_model,
          client_optimizer_fn=build(),
          server_optimizer_fn=opt.build_sgdm(1.0),
          loop_implementation=loop,
        )
      )
    processes[f'server {name}'] = lambda build=build: (
      alg.build_unweighted_fed_avg(
        _keras_model,
        client_optimizer_fn=opt.build_sgdm(0.1),
        server_optimizer_fn=build(),
      )
    )
  processes.update(
    {
      'fed_prox': lambda: alg.build_weighted_fed_prox(
        _keras_model, proximal_strength=0.5, client_optimizer_fn=sgd()
      ),
      'unweighted fed_prox': lambda: alg.build_unweighted_fed_prox(
        _keras_model, proximal_strength=0.5, client_optimizer_fn=sgd()
      ),
      'fed_sgd': lambda: alg.build_fed_sgd(
        _keras_model, server_optimizer_fn=sgd()
      ),
      'mime_lite': lambda: alg.build_weighted_mime_lite(
        _keras_model, base_optimizer=sgd()
      ),
      'unweighted mime_lite': lambda: alg.build_unweighted_mime_lite(
        _keras_model, base_optimizer=sgd()
      ),
      'mime_lite with a schedule': lambda: (
        alg.build_mime_lite_with_optimizer_schedule(
          _keras_model, lambda r: 0.1 / tf.cast(r + 1, tf.float32), sgd()
        )
      ),
      'fed_avg with a schedule': lambda: (
        alg.build_weighted_fed_avg_with_optimizer_schedule(
          _keras_model,
          client_learning_rate_fn=lambda r: 0.1 / tf.cast(r + 1, tf.float32),
          client_optimizer_fn=lambda rate: opt.build_sgdm(rate),
        )
      ),
      'fed_eval': lambda: alg.build_fed_eval(_keras_model),
    }
  )
  for name in ('robust', 'secure', 'compression'):
    processes[f'fed_avg, {name}'] = lambda name=name: (
      alg.build_weighted_fed_avg(
        _keras_model,
        client_optimizer_fn=sgd(),
        model_aggregator=getattr(learning, f'{name}_aggregator')(),
      )
    )
  # Compiled once; the number of clients differs.
  for name, build in processes.items():
    cache: list[Any] = []

    def run(count, build=build, cache=cache):
      if not cache:
        cache.append(build())
      cohort = [_examples(i) for i in range(count)]
      return _process(cache[0], 2, cohort)

    for count in (1, 3):
      yield (
        'learning',
        f'{name}, {count}',
        lambda run=run, count=count: run(count),
      )


def _rest() -> Iterator[Case]:
  words = [['a', 'b', 'a'], ['b', 'c'], ['a', 'd', 'd', 'd']]
  texts = [tf.data.Dataset.from_tensor_slices(w).batch(2) for w in words]
  iblt = tff.analytics.heavy_hitters.iblt
  for seed, unique in itertools.product((0, 1), (False, True)):
    kwargs = {'capacity': 20, 'string_max_bytes': 4, 'batch_size': 2}
    kwargs |= {'seed': seed, 'multi_contribution': not unique}
    yield (
      'analytics',
      f'heavy hitters {kwargs}',
      lambda kwargs=kwargs: _hitters(
        iblt.build_iblt_computation(**kwargs)(texts)
      ),
    )
  values = [[1.0, 2.0], [5.0], [9.0, 9.5, 0.0]]
  datasets = [tf.data.Dataset.from_tensor_slices(np.float32(v)) for v in values]
  for mechanism in ('no-noise', 'central-gaussian'):
    yield (
      'analytics',
      f'hierarchical histogram, {mechanism}',
      lambda mechanism=mechanism: (
        _process(
          tff.analytics.build_hierarchical_histogram_process(
            0.0,
            10.0,
            4,
            clip_mechanism='distinct',
            dp_mechanism=mechanism,
            max_records_per_user=3,
          ),
          1,
          datasets,
        )[0].result.flat_values
      ),
    )
  distinct = (
    tff.analytics.count_distinct.create_federated_hyperloglog_computation
  )
  for secure in (False, True):
    yield (
      'analytics',
      f'count distinct, {secure}',
      lambda secure=secure: distinct(use_secagg=secure)(
        [tf.data.Dataset.from_tensor_slices(w) for w in words]
      ),
    )
  points = [
    tf.data.Dataset.from_tensor_slices(
      np.random.default_rng(i).normal(size=(6, 2)).astype(np.float32)
    )
    for i in range(3)
  ]
  for count in (1, 3):
    yield (
      'analytics',
      f'k-means, {count}',
      lambda count=count: _process(
        tff.learning.algorithms.build_fed_kmeans(
          num_clusters=2,
          data_shape=(2,),
          random_seed=(1, 2),
        ),
        2,
        points[:count],
      ),
    )
  personalize = lambda: (
    lambda model, train, test, context=None: _OD(
      examples=train.reduce(0, lambda n, b: n + tf.shape(b['x'])[0]),
      loss=test.reduce(
        0.0, lambda s, b: s + model.forward_pass(b, training=False).loss
      ),
    )
  )
  yield (
    'analytics',
    'personalization',
    lambda: tff.learning.algorithms.build_personalization_eval_computation(
      _keras_model,
      _OD(one=personalize),
      baseline_evaluate_fn=lambda model, data: _OD(
        n=data.reduce(0, lambda n, b: n + tf.shape(b['x'])[0])
      ),
      max_num_clients=9,
    )(
      tff.learning.models.ModelWeights.from_model(_keras_model()),
      [
        _OD(train_data=_examples(i), test_data=_examples(i + 3)) for i in (1, 2)
      ],
    ),
  )
  preprocess = tff.tensorflow.computation(
    lambda ds: ds.unbatch().shuffle(9, seed=4).batch(2),
    tff.SequenceType(tff.types.tensorflow_to_type(_SPEC)),
  )
  for rounds in (1, 2):
    yield (
      'analytics',
      f'composed preprocessing, {rounds}',
      lambda rounds=rounds: _process(
        tff.simulation.compose_dataset_computation_with_learning_process(
          preprocess,
          tff.learning.algorithms.build_weighted_fed_avg(
            _keras_model,
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
          ),
        ),
        rounds,
        [_examples(i) for i in range(3)],
      ),
    )


def _hitters(result):
  """Words and counts, in an order."""
  words = [word.decode() for word in result.heavy_hitters]
  counts = np.asarray(result.heavy_hitters_counts).tolist()
  return sorted(zip(words, counts))


def cases() -> list[Case]:
  """All cases."""
  groups = (
    _intrinsics,
    _values_and_selects,
    _sequences,
    _tensorflow,
    _aggregators,
    _learning,
    _rest,
  )
  return [case for group in groups for case in group()]


def _plain(value: Any) -> Any:
  """A result in lists and arrays."""
  if isinstance(value, tf.data.Dataset):
    return [_plain(element) for element in value]
  if isinstance(value, tf.Tensor):
    return value.numpy()
  if hasattr(value, '_asdict'):
    value = value._asdict()
  if hasattr(value, '__attrs_attrs__'):
    value = {a.name: getattr(value, a.name) for a in value.__attrs_attrs__}
  if isinstance(value, dict):
    return [[name, _plain(v)] for name, v in value.items()]
  if isinstance(value, tff.structure.Struct):
    return [[n, _plain(v)] for n, v in tff.structure.iter_elements(value)]
  if isinstance(value, (list, tuple)):
    return [_plain(element) for element in value]
  return value


def _differ(a: Any, b: Any) -> str:
  """'' if two results agree, to rounding."""
  if isinstance(a, list) or isinstance(b, list):
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
      return f'{a!r} is not {b!r}'
    return next(filter(None, map(_differ, a, b)), '')
  x, y = np.asarray(a), np.asarray(b)
  if x.dtype.kind in 'fc' and y.dtype == x.dtype and x.shape == y.shape:
    same = np.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
  else:
    same = x.dtype == y.dtype and np.array_equal(x, y)
  return '' if same else f'{a!r} is not {b!r}'


def _outcome(context: Any, run: Callable[[], Any]) -> tuple[str, Any]:
  with tff.framework.get_context_stack().install(context):
    try:
      return 'result', _plain(run())
    except Exception as error:  # pylint: disable=broad-except
      return 'error', error


def compare(case: Case, theirs: Any, ours: Any) -> tuple[str, str]:
  """('passed', 'refused' or 'wrong', and why)."""
  kind, expected = _outcome(theirs, case[2])
  results = [_outcome(context, case[2]) for context in ours]
  for found_kind, found in results:
    if found_kind == 'error' and kind == 'result':
      refused = isinstance(found, NotImplementedError)
      return 'refused' if refused else 'wrong', repr(found)[:500]
    if kind == 'result':
      why = _differ(found, expected)
      if why:
        return 'wrong', why[:500]
  if kind == 'error':
    both = [k for k, _ in results if k == 'error']
    if len(both) < len(results):
      return 'more', repr(expected)[:200]
    why = '' if 'fails' in case[1] else f'refused by both: {expected!r}'[:300]
    return 'passed' if not why else 'no case', why
  return 'passed', ''


def main(argv: list[str] | None = None) -> int:
  """Runs the cases, prints the table; 1 if a result is wrong."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--only', default='', help='part of a group or name')
  args = parser.parse_args(argv)
  ours = [
    runtime.build_context(client_threads=n, simulate_secure_aggregation=True)
    for n in (1, 3)
  ]
  table: dict[str, collections.Counter] = {}
  with runtime.build_context(
    'tff_worker', simulate_secure_aggregation=True
  ) as theirs:
    for case in cases():
      group, name, _ = case
      if args.only not in f'{group}: {name}':
        continue
      outcome, why = compare(case, theirs, ours)
      table.setdefault(group, collections.Counter())[outcome] += 1
      if why:
        print(f'{outcome}: {group}: {name}: {why}', flush=True)
  outcomes = ('passed', 'refused', 'more', 'wrong', 'no case')
  print(f'{"":22}' + ''.join(f' {outcome:>8}' for outcome in outcomes))
  total: collections.Counter = collections.Counter()
  for group, counts in [*table.items(), ('all', total)]:
    row = ''.join(f' {counts[k]:8}' for k in outcomes)
    print(f'{group:22}{row}', flush=True)
    total.update(counts)
  return int(total['wrong'] + total['no case'] > 0)


if __name__ == '__main__':
  sys.exit(main())
