"""Local training as a `tff.learning.templates.ClientWorkProcess`."""

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import training


def read_examples(examples: Any) -> algorithm_lib.Examples:
  """`OrderedDict(x, y)` as `Examples`."""
  return algorithm_lib.Examples(examples['x'], examples['y'])


def read_one(dataset: tf.data.Dataset) -> Any:
  """The one element of a data set; its spec with 0 examples if it is empty."""
  blank = tf.nest.map_structure(
    lambda s: tf.zeros([d or 0 for d in s.shape], s.dtype),
    dataset.element_spec,
  )
  return dataset.reduce(blank, lambda _, element: element)


def data_type(element_spec: Any) -> tff.SequenceType:
  """The type of a client's data from `data.clients.element_spec`'s result."""
  return tff.SequenceType(tff.types.tensorflow_to_type(element_spec))


def num_bytes(tff_type: tff.Type) -> int:
  """The size of a value of `tff_type`, whose tensors have fixed shapes."""
  specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(tff_type))
  return sum(s.shape.num_elements() * s.dtype.size for s in specs)


def build_client_work(
  weights_type: tff.Type,
  element_spec: Any,
  make_training: Callable[[], training.LocalTraining],
  *,
  learning_rate_fn: Callable[[tf.Tensor], tf.Tensor],
  weigh_by_examples: bool,
  track_non_trainable: bool,
  first_round: int,
) -> tuple[tff.learning.templates.ClientWorkProcess, int]:
  """Builds the client work.

  Its `next` is `<int32@SERVER, W@CLIENTS, D*@CLIENTS> ->
  <int32@SERVER, ClientResult(update, weight)@CLIENTS, metrics@SERVER>`; its
  state is the number of the round. Before round 1 clients do nothing.

  A client weighs what its algorithm says, else 1 or the number of examples it
  processed; one that trained on nothing, or whose update is not finite, weighs
  0, and the latter's metrics count for nothing but `num_non_finite_clients`.

  Args:
    weights_type: The type W of an `adapter.Weights`.
    element_spec: Of the one element of a client's data.
    make_training: Called where variables may be made.
    learning_rate_fn: Round number -> learning rate.
    weigh_by_examples: The weight where the algorithm does not say.
    track_non_trainable: Whether the change of non-trainable weights is part of
      the update.
    first_round: The number of the first round.

  Returns:
    The process, and the bytes that a client sends in a round.
  """

  @tff.tensorflow.computation(weights_type, data_type(element_spec), tf.int32)
  def work(weights, dataset, round_num):
    local = make_training()

    @tf.function
    def run(weights, dataset, round_num):
      data = read_one(dataset)
      result = local.run(
        weights,
        read_examples(data['labeled']),
        read_examples(data['unlabeled']),
        learning_rate=learning_rate_fn(round_num),
        seed=data['seed'],
        enabled=round_num >= 1,
      )
      weight = result.weight
      if weight is None:
        weight = result.num_examples if weigh_by_examples else tf.constant(1.0)
      has_data = tf.size(data['labeled']['y']) + tf.size(data['unlabeled']['y'])
      counts = tf.logical_and(round_num >= 1, has_data > 0)
      if result.weight is None:
        counts = tf.logical_and(counts, result.num_examples > 0.0)
      finite = tf.logical_and(result.is_finite, tf.math.is_finite(weight))
      weight = tf.where(tf.logical_and(counts, finite), weight, 0.0)
      update = result.update
      if track_non_trainable:
        update += tuple(
          before - after
          for before, after in zip(
            weights.non_trainable, result.non_trainable, strict=True
          )
        )
      reports = tf.logical_and(counts, finite)
      some = tf.cast(reports, tf.float32)
      sums = collections.OrderedDict(
        num_clients=tf.constant(1),
        num_non_finite_clients=tf.cast(tf.logical_not(finite), tf.int32),
        num_reports=some,
        num_examples=tf.where(reports, result.num_examples, 0.0),
        weight=weight,
        weight_log_weight=tf.math.xlogy(weight, weight),
        ratios=collections.OrderedDict(
          (name, tf.stack([tf.where(reports, v, 0.0) for v in pair]))
          for name, pair in sorted(result.ratios.items())
        ),
        ranges=collections.OrderedDict(
          (name, tf.where(reports, v, 0.0))
          for name, v in sorted(result.ranges.items())
        ),
      )
      ranged = collections.OrderedDict(
        sorted(result.ranges.items()), aggregation_weight=weight
      )
      return (
        tff.learning.templates.ClientResult(update, weight),
        sums,
        _masked(ranged, reports, float('inf')),
        _masked(ranged, reports, float('-inf')),
      )

    return run(weights, dataset, round_num)

  result_type, sums_type, range_type, _ = work.type_signature.result
  # Minima and maxima are the same values, sent once.
  bytes_up = sum(map(num_bytes, (result_type, sums_type, range_type)))

  @tff.tensorflow.computation(sums_type, range_type, range_type)
  def finalize(sums, minima, maxima):
    some = sums['num_reports'] > 0.0
    nan = tf.constant(float('nan'))
    train = collections.OrderedDict(
      num_clients=sums['num_clients'],
      num_non_finite_clients=sums['num_non_finite_clients'],
      num_examples=sums['num_examples'],
    )
    for name, pair in sums['ratios'].items():
      train[name] = pair[0] / pair[1]  # NaN for nothing, inf for no wrong one.
    for name, total in sums['ranges'].items():
      train[f'{name}_min'] = tf.where(some, minima[name], nan)
      train[f'{name}_mean'] = total / sums['num_reports']
      train[f'{name}_max'] = tf.where(some, maxima[name], nan)
    total = sums['weight']
    train['aggregation_weight_min'] = minima['aggregation_weight'] / total
    train['aggregation_weight_max'] = maxima['aggregation_weight'] / total
    # Of the shares w/S, in nats: log S - (sum w log w) / S.
    train['aggregation_weight_entropy'] = (
      tf.math.log(total) - sums['weight_log_weight'] / total
    )
    for suffix in ('min', 'max', 'entropy'):
      name = f'aggregation_weight_{suffix}'
      train[name] = tf.where(total > 0.0, train[name], nan)
    return collections.OrderedDict(train=train)

  @tff.tensorflow.computation(tf.int32)
  def count_up(round_num):
    return round_num + 1

  @tff.federated_computation
  def init_fn():
    return tff.federated_value(first_round, tff.SERVER)

  @tff.federated_computation(
    init_fn.type_signature.result,
    tff.FederatedType(weights_type, tff.CLIENTS),
    tff.FederatedType(data_type(element_spec), tff.CLIENTS),
  )
  def next_fn(round_num, weights, dataset):
    round_at_clients = tff.federated_broadcast(round_num)
    result, sums, minima, maxima = tff.federated_map(
      work, (weights, dataset, round_at_clients)
    )
    metrics = tff.federated_map(
      finalize,
      (
        tff.federated_sum(sums),
        tff.federated_min(minima),
        tff.federated_max(maxima),
      ),
    )
    return tff.templates.MeasuredProcessOutput(
      tff.federated_map(count_up, round_num), result, metrics
    )

  process = tff.learning.templates.ClientWorkProcess(init_fn, next_fn)
  return process, bytes_up


def _masked(values, keep, otherwise):
  """Values, or `otherwise` from clients that do not report."""
  return tf.nest.map_structure(lambda v: tf.where(keep, v, otherwise), values)
