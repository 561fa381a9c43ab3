"""Builds aggregators from hyper-parameters."""

from __future__ import annotations

from typing import Any, TypeAlias

from tff_fssl import hparams as hparams_lib
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.aggregators import privacy
from tff_fssl.aggregators import robust
from tff_fssl.lazy import tf, tff

AggregatorHparams = aggregator_hparams.AggregatorHparams
_aggregators = tff.aggregators
Factory: TypeAlias = tff.aggregators.WeightedAggregationFactory
# The largest weight of a client with `client_weighting=examples`, if a secure
# sum of weights needs a bound: an honest client may process more examples.
MAX_EXAMPLES_WEIGHT = 2.0**20 - 1
# Smaller weights above 0 are raised to this, since secure sums round to fixed
# steps, in which they would be lost.
_LEAST_WEIGHT = 1e-3
_no_noise = _aggregators.PrivateQuantileEstimationProcess.no_noise


def build_aggregator(
  hparams: AggregatorHparams,
  *,
  max_weight: float = 1.0,
  clients_per_round: int | None = None,
  population: int | None = None,
) -> Factory:
  """Builds the `aggregator` of `process.build_process`.

  `mean` and `compression` are TFF's, except that `compression` rounds to the
  nearest step instead of at random, so that runs repeat. `secure` is
  `tff.learning.secure_aggregator` with other bounds on the sum of weights.
  TFF's bounds, a million in steps of 0.0002, are for numbers of examples.

  Args:
    hparams: The name of the aggregator and its hyper-parameters.
    max_weight: The largest weight of a client (`secure`). Larger weights are
      lowered to it. It is 1, or with `client_weighting=examples` the most
      examples that a client can process, or `MAX_EXAMPLES_WEIGHT`.
    clients_per_round: The cohort's size (`dp`).
    population: The number of clients from which cohorts are drawn (`dp`).

  Returns:
    The factory.

  Raises:
    UsageError: If sizes are missing or do not fit the hyper-parameters.

  Examples:
    >>> import numpy as np
    >>> import tensorflow_federated as tff
    >>> import tff_fssl as fssl
    >>> update, weight = (
    ...   tff.TensorType(np.float32, shape) for shape in ([2], [])
    ... )
    >>> updates = np.float32([[1, 2], [2, 1], [2, 3], [3, 2], [90, -90]])
    >>> for name in ('mean', 'robust'):  # The last client lies.
    ...   factory = fssl.build_aggregator(
    ...     fssl.AggregatorHparams(aggregator=name)
    ...   )
    ...   process = factory.create(update, weight)
    ...   output = process.next(process.initialize(), list(updates), [1.0] * 5)
    ...   print(name, output.result.round(2))
    mean [ 19.6 -16.4]
    robust [1.22 1.52]
  """
  builder = aggregator_hparams.AGGREGATORS[hparams.aggregator].builder
  return hparams_lib.import_function(builder)(
    hparams,
    max_weight=max_weight,
    clients_per_round=clients_per_round,
    population=population,
  )


def build_mean(hparams: AggregatorHparams, **sizes: Any) -> Factory:
  """Builds TFF's weighted mean."""
  del hparams, sizes
  return _aggregators.MeanFactory()


def build_robust(
  hparams: AggregatorHparams, *, clients_per_round: int | None, **sizes: Any
) -> Factory:
  """Builds a mean that a minority of liars moves little: see `robust`."""
  del sizes
  aggregator_hparams.check_majority(clients_per_round)
  return robust.RobustMeanFactory(
    clipping=hparams.aggregator_limits,
    zeroing_multiple=10.0 if hparams.aggregator_limits else 0.0,
  )


def build_compression(hparams: AggregatorHparams, **sizes: Any) -> Factory:
  """Builds TFF's compression, without randomness."""
  del sizes
  return tff.learning.compression_aggregator(
    # Rounds to the nearest step, so that runs repeat.
    stochastic=False,
    clipping=hparams.aggregator_limits,
    zeroing=hparams.aggregator_limits,
  )


def build_private(
  hparams: AggregatorHparams,
  *,
  clients_per_round: int | None,
  population: int | None,
  **sizes: Any,
) -> Factory:
  """Builds the differentially private mean: see `privacy`."""
  del sizes
  if clients_per_round is None or population is None:
    raise hparams_lib.UsageError(
      f'--aggregator={hparams.aggregator}: needs clients_per_round and'
      ' population, from which epsilon follows'
    )
  return privacy.PrivateMeanFactory(
    noise_multiplier=hparams.dp_noise_multiplier,
    clipping_norm=hparams.dp_clipping_norm,
    delta=hparams.dp_delta,
    clients_per_round=clients_per_round,
    population=population,
  )


def build_secure(
  hparams: AggregatorHparams, *, max_weight: float, **sizes: Any
) -> Factory:
  """Builds `tff.learning.secure_aggregator` for weights in [0, max_weight]."""
  del sizes
  # All numbers here are those of `tff.learning.secure_aggregator`.
  bound = _no_noise(50.0, 0.95, 1.0, multiplier=2.0, secure_estimation=True)
  factory = _aggregators.MeanFactory(
    value_sum_factory=_aggregators.SecureSumFactory(bound),
    weight_sum_factory=_aggregators.SecureSumFactory(
      upper_bound_threshold=float(max_weight), lower_bound_threshold=0.0
    ),
  )
  if hparams.aggregator_limits:
    factory = _aggregators.clipping_factory(
      _no_noise(1.0, 0.8, 0.2, secure_estimation=True),
      factory,
      clipped_count_sum_factory=_aggregators.SecureSumFactory(1, 0),
    )
    norm = _no_noise(
      10.0, 0.98, 2.303, multiplier=2.0, increment=1.0, secure_estimation=True
    )
    factory = _aggregators.zeroing_factory(
      norm,
      factory,
      zeroed_count_sum_factory=_aggregators.SecureSumFactory(1, 0),
    )
  return WeightRangeFactory(factory, _LEAST_WEIGHT, max_weight)


class WeightRangeFactory(tff.aggregators.WeightedAggregationFactory):
  """An aggregator that brings weights above 0 into a range, but keeps 0.

  A secure sum of weights would clip larger weights by itself, but the sum of
  updates would still contain the products with the larger weights.
  """

  def __init__(
    self,
    inner: tff.aggregators.WeightedAggregationFactory,
    min_weight: float,
    max_weight: float,
  ):
    """Initializes the factory, which aggregates with `inner`."""
    self._inner = inner
    self._min_weight, self._max_weight = min_weight, max_weight

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <S@SERVER, V@CLIENTS, W@CLIENTS> -> V@SERVER."""
    inner = self._inner.create(value_type, weight_type)

    @tff.tensorflow.computation(weight_type)
    def limit(weight):
      least = tf.cast(self._min_weight, weight.dtype)
      most = tf.cast(self._max_weight, weight.dtype)
      limited = tf.minimum(tf.maximum(weight, least), most)
      return tf.where(weight > 0, limited, weight)

    @tff.federated_computation(
      inner.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      return inner.next(state, value, tff.federated_map(limit, weight))

    return tff.templates.AggregationProcess(inner.initialize, next_fn)
