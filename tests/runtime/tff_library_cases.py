"""TFF's libraries: aggregators, learning and analytics, as cases."""

import collections
from collections.abc import Iterator
import itertools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tff_model

from tests.runtime import tff_language_cases

Case = tff_language_cases.Case
_OD = collections.OrderedDict


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
    values = [tff_language_cases.value_of(t, i) for i in range(count)]
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
  return tff_model.KerasModel(
    tf.keras.Sequential(
      [
        tf.keras.layers.InputLayer((4,)),
        tf.keras.layers.Dense(3, 'relu', kernel_initializer=init),
        tf.keras.layers.Dense(2, kernel_initializer=init),
      ]
    ),
    _SPEC,
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
      lambda mechanism=mechanism: _histogram(
        tff.analytics.build_hierarchical_histogram_process(
          0.0,
          10.0,
          4,
          clip_mechanism='distinct',
          dp_mechanism=mechanism,
          max_records_per_user=3,
        ),
        datasets,
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
  count = lambda dataset: dataset.reduce(0, lambda n, _: n + 1)
  personalize = lambda: (
    lambda model, train, test, context=None: _OD(
      train=count(train), test=2 * count(test)
    )
  )
  person = _OD(
    train_data=_examples(1).unbatch(), test_data=_examples(4).unbatch()
  )
  yield (
    'analytics',
    'personalization',
    lambda: tff.learning.algorithms.build_personalization_eval_computation(
      _keras_model,
      _OD(one=personalize),
      baseline_evaluate_fn=lambda model, data: _OD(examples=count(data)),
    )(tff.learning.models.ModelWeights.from_model(_keras_model()), [person]),
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


def _histogram(process, datasets):
  """The leaves of the tree of counts."""
  _, result = process.next(process.initialize(), datasets)
  return [np.asarray(t) for t in tf.nest.flatten(result)]


def _hitters(result):
  """Words and counts, in an order."""
  words = [word.decode() for word in result.heavy_hitters]
  counts = np.asarray(result.heavy_hitters_counts).tolist()
  return sorted(zip(words, counts))


def cases() -> Iterator[Case]:
  """All cases."""
  for group in (_aggregators, _learning, _rest):
    yield from group()
