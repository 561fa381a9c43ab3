"""Local training as a `tff.learning.templates.ClientWorkProcess`.

Types are in TFF's notation: `D*@CLIENTS` is a data set of elements of type D at
each client, `W@SERVER` one value of type W at the server.
"""

import collections
from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.aggregators import guarded
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import non_finite
from tff_fssl.local import training
from tff_fssl.models import adapter

FindNonFinite = Callable[
  [adapter.Weights, tf.data.Dataset, int], non_finite.NonFinite | None
]
# A metric's sum above this, per example, is absurd.
_MAX_METRIC = 1e6
# By kind of examples, the least label.
_LABELS = (('labeled', 0), ('unlabeled', -1))
# Rounding may take shares and thresholds this far outside [0, 1].
_TOLERANCE = 1e-3


class Bounds(NamedTuple):
  """Bounds on what an honest client can send.

  Attributes:
    weights: The weights that its update may have.
    num_examples: The most examples that it can process in a round.
  """

  weights: guarded.AllowedWeights
  num_examples: float


def read_examples(examples: Any) -> algorithm_lib.Examples:
  """`OrderedDict(x, y)` as `Examples`."""
  return algorithm_lib.Examples(examples['x'], examples['y'])


def read_one(dataset: tf.data.Dataset) -> Any:
  """The one element of a data set; one with 0 examples if it is empty."""
  blank = tf.nest.map_structure(
    lambda s: tf.zeros([d or 0 for d in s.shape], s.dtype),
    dataset.element_spec,
  )
  # `reduce` would instantiate its function at each call: 8 ms per client.
  blanks = tf.data.Dataset.from_tensors(blank)
  return dataset.concatenate(blanks).take(1).get_single_element()


def read_client(
  dataset: tf.data.Dataset, num_classes: int
) -> tuple[Any, tf.Tensor]:
  """A client's element, and whether it can be trained on.

  Clients' data are not trusted: a label outside the range of classes would be
  an error on a CPU, and give NaN on a GPU.

  Args:
    dataset: A data set of one element, as `data.clients.make_example` makes it.
    num_classes: Labels must be in [0, num_classes); labels of unlabelled
      examples may also be -1.

  Returns:
    (element, whether it is usable: bool scalar). If it is not, the element has
    no examples.
  """
  data = read_one(dataset)
  checks = []
  for kind, lowest in _LABELS:
    x, y = data[kind]['x'], data[kind]['y']
    checks += [
      tf.equal(tf.shape(x)[0], tf.shape(y)[0]),
      tf.reduce_all(tf.logical_and(y >= lowest, y < num_classes)),
    ]
  usable = tf.reduce_all(checks)
  keep = lambda t: t[: tf.where(usable, tf.shape(t)[0], 0)]
  kept = {k: tf.nest.map_structure(keep, data[k]) for k, _ in _LABELS}
  return {**data, **kept}, usable


def data_type(element_spec: Any) -> tff.SequenceType:
  """The type of a client's data from `data.clients.element_spec`'s result."""
  return tff.SequenceType(tff.types.tensorflow_to_type(element_spec))


def num_bytes(tff_type: tff.Type) -> int:
  """The size in bytes of a value whose tensors have fixed shapes."""
  specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(tff_type))
  return sum(s.shape.num_elements() * s.dtype.size for s in specs)


def _train(
  local: training.LocalTraining,
  weights: adapter.Weights,
  data: Any,
  round_num: tf.Tensor,
  learning_rate_fn: Callable[[tf.Tensor], tf.Tensor],
  watch: non_finite.Watch | None = None,
) -> tuple[training.LocalResult, tf.Tensor]:
  """A client's round: (result, whether its update and weight are finite)."""
  result = local.run(
    weights,
    read_examples(data['labeled']),
    read_examples(data['unlabeled']),
    learning_rate=learning_rate_fn(round_num),
    seed=data['seed'],
    round_num=round_num,
    enabled=round_num >= 1,
    watch=watch,
  )
  finite = result.is_finite
  if result.weight is not None:
    finite = tf.logical_and(finite, tf.math.is_finite(result.weight))
  return result, finite


def build_find_non_finite(
  make_training: Callable[[], training.LocalTraining],
  learning_rate_fn: Callable[[tf.Tensor], tf.Tensor],
  num_classes: int,
) -> FindNonFinite:
  """Builds a function that repeats a client's round to see where it fails.

  It runs outside TFF.

  Args:
    make_training: As for `build_client_work`; called when first needed.
    learning_rate_fn: As for `build_client_work`.
    num_classes: As for `build_client_work`.

  Returns:
    `(weights, dataset, round number) -> NonFinite`, or None if the client's
    update and weight are finite.
  """

  @functools.cache
  def build():
    local, watch = make_training(), non_finite.Watch()

    @tf.function(reduce_retracing=True)
    def run(weights, data, round_num):
      watch.reset()
      _, finite = _train(
        local, weights, data, round_num, learning_rate_fn, watch
      )
      return finite

    return run, watch

  def find(weights, dataset, round_num):
    run, watch = build()
    weights = tf.nest.map_structure(tf.convert_to_tensor, weights)
    data, _ = read_client(dataset, num_classes)
    finite = run(weights, data, tf.constant(round_num))
    return None if finite else watch.found()

  return find


def build_client_work(
  weights_type: tff.Type,
  element_spec: Any,
  make_training: Callable[[], training.LocalTraining],
  *,
  learning_rate_fn: Callable[[tf.Tensor], tf.Tensor],
  weigh_by_examples: bool,
  track_non_trainable: bool,
  first_round: int,
  bounds: Bounds,
  num_classes: int,
  release_metrics: bool = True,
) -> tuple[tff.learning.templates.ClientWorkProcess, int]:
  """Builds the client work.

  Its `next` is `<int32@SERVER, W@CLIENTS, D*@CLIENTS> ->
  <int32@SERVER, ClientResult(update, weight)@CLIENTS, metrics@SERVER>`; its
  state is the round number. Before round 1 clients do nothing.

  The algorithm sets a client's weight; if it sets none, the weight is 1 or the
  number of examples that the client processed. A client that trained on nothing
  has weight 0. A client whose update is not finite has weight 0, too, and is
  left out of all metrics except `num_non_finite_clients`; if no metrics are
  released, its weight is NaN, so that the aggregator counts it. A client whose
  data cannot be trained on is rejected.

  Clients are not trusted: `build_screen` checks what they send.

  Args:
    weights_type: The type W of an `adapter.Weights`.
    element_spec: The spec of the one element that a client's data set has.
    make_training: Called where variables may be made.
    learning_rate_fn: Round number -> learning rate.
    weigh_by_examples: Whether weights are numbers of examples, if the algorithm
      sets none.
    track_non_trainable: Whether the change of non-trainable weights is part of
      the update.
    first_round: The number of the first round.
    bounds: Bounds on what an honest client can send.
    num_classes: The width of the model's output; see `read_client`.
    release_metrics: If false, clients send nothing but update and weight, to
      the aggregator, and the only metric is the number of clients.

  Returns:
    The process, and the bytes that a client sends in a round.
  """

  @tff.tensorflow.computation(weights_type, data_type(element_spec), tf.int32)
  def work(weights, dataset, round_num):
    local = make_training()

    @tf.function
    def run(weights, dataset, round_num):
      data, usable = read_client(dataset, num_classes)
      result, finite = _train(local, weights, data, round_num, learning_rate_fn)
      weight = result.weight
      if weight is None:
        weight = result.num_examples if weigh_by_examples else tf.constant(1.0)
      has_data = tf.size(data['labeled']['y']) + tf.size(data['unlabeled']['y'])
      # Clients that kept no pseudo-labels still report.
      reports = tf.logical_and(
        tf.logical_and(round_num >= 1, has_data > 0), finite
      )
      counts = reports
      if result.weight is None:
        counts = tf.logical_and(counts, result.num_examples > 0.0)
      weight = tf.where(counts, weight, 0.0)
      # A weight of NaN gets the client rejected. Without a report it also
      # marks clients whose training failed.
      valid = usable if release_metrics else tf.logical_and(usable, finite)
      weight = tf.where(valid, weight, float('nan'))
      update = result.update
      if track_non_trainable:
        update += tuple(
          before - after
          for before, after in zip(
            weights.non_trainable, result.non_trainable, strict=True
          )
          if before.dtype.is_floating  # Training never changes counters.
        )
      report = collections.OrderedDict(
        is_finite=finite,
        reports=reports,
        num_examples=result.num_examples,
        ratios=collections.OrderedDict(
          (name, tf.stack(pair)) for name, pair in sorted(result.ratios.items())
        ),
        ranges=collections.OrderedDict(sorted(result.ranges.items())),
      )
      for name in ('num_examples', 'ratios', 'ranges'):
        report[name] = _masked(report[name], reports, 0.0)
      return tff.learning.templates.ClientResult(update, weight), report

    return run(weights, dataset, round_num)

  result_type, report_type = work.type_signature.result
  screen = build_screen(result_type, report_type, bounds)
  sums_type, range_type, _ = screen.type_signature.result[1]
  bytes_up = num_bytes(result_type)
  if release_metrics:
    bytes_up += num_bytes(report_type)

  @tff.tensorflow.computation(sums_type, range_type, range_type)
  def finalize(sums, minima, maxima):
    some = sums['num_reports'] > 0.0
    nan = tf.constant(float('nan'))
    train = collections.OrderedDict(
      num_clients=sums['num_clients'],
      num_non_finite_clients=sums['num_non_finite_clients'],
      num_rejected_clients=sums['num_rejected_clients'],
      num_examples=sums['num_examples'],
    )
    for name, pair in sums['ratios'].items():
      train[name] = pair[0] / pair[1]  # 0/0 is NaN; correct / 0 wrong is inf.
    for name, total in sums['ranges'].items():
      train[f'{name}_min'] = tf.where(some, minima[name], nan)
      train[f'{name}_mean'] = total / sums['num_reports']
      train[f'{name}_max'] = tf.where(some, maxima[name], nan)
    total = sums['weight']
    train['aggregation_weight_min'] = minima['aggregation_weight'] / total
    train['aggregation_weight_max'] = maxima['aggregation_weight'] / total
    # Entropy of the shares w/S, in nats: log S - (sum w log w) / S.
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
    result, report = tff.federated_map(
      work, (weights, dataset, round_at_clients)
    )
    if release_metrics:
      result, (sums, minima, maxima) = tff.federated_map(
        screen, (result, report)
      )
      metrics = tff.federated_map(
        finalize,
        (
          tff.federated_sum(sums),
          tff.federated_min(minima),
          tff.federated_max(maxima),
        ),
      )
    else:
      one = tff.federated_value(1, tff.CLIENTS)
      metrics = tff.federated_zip(
        collections.OrderedDict(
          train=collections.OrderedDict(num_clients=tff.federated_sum(one))
        )
      )
    return tff.templates.MeasuredProcessOutput(
      tff.federated_map(count_up, round_num), result, metrics
    )

  process = tff.learning.templates.ClientWorkProcess(init_fn, next_fn)
  return process, bytes_up


def build_screen(
  result_type: tff.Type, report_type: tff.Type, bounds: Bounds
) -> tff.Computation:
  """Builds the check of what one client sent, before anything is summed.

  A client is rejected as a whole if its update is not finite, its weight is not
  allowed, or its report is impossible: counts outside [0, the most it can have
  processed], thresholds outside [0, 1], metrics that are absurd or not finite.
  A rejected client is left out of all metrics except `num_rejected_clients`,
  and its weight becomes NaN, so that `guarded.GuardedFactory` rejects its
  update. The docstring of that class says what such a check protects against,
  and where it runs.

  Args:
    result_type: The type of a `ClientResult`.
    report_type: The type of the client's report, as `build_client_work` makes
      it.
    bounds: Bounds on what an honest client can send.

  Returns:
    `<result, report> -> <result, <sums, minima, maxima>>`: the values to be
    summed over clients, and those to take the minimum and the maximum of.
  """

  @tff.tensorflow.computation(result_type, report_type)
  def screen(result, report):
    most = bounds.num_examples
    ratios, ranges = report['ratios'], report['ranges']
    accepted = tf.reduce_all(
      [
        guarded.is_acceptable(
          result.update, result.update_weight, bounds.weights
        ),
        _within(report['num_examples'], 0.0, most),
        *(_within(p[1], 0.0, most) for p in ratios.values()),
        *(
          _within(tf.abs(p[0]), 0.0, _MAX_METRIC * most)
          for p in ratios.values()
        ),
        *(_within(v, -_TOLERANCE, 1.0 + _TOLERANCE) for v in ranges.values()),
      ]
    )
    reports = tf.logical_and(accepted, report['reports'])
    weight = tf.where(accepted, result.update_weight, 0.0)
    as_count = lambda condition: tf.cast(condition, tf.int32)
    sums = collections.OrderedDict(
      num_clients=tf.constant(1),
      num_non_finite_clients=as_count(
        tf.logical_and(accepted, tf.logical_not(report['is_finite']))
      ),
      num_rejected_clients=as_count(tf.logical_not(accepted)),
      num_reports=tf.cast(reports, tf.float32),
      num_examples=_masked(report['num_examples'], reports, 0.0),
      weight=weight,
      weight_log_weight=tf.math.xlogy(weight, weight),
      ratios=_masked(ratios, reports, 0.0),
      ranges=_masked(ranges, reports, 0.0),
    )
    ranged = collections.OrderedDict(ranges, aggregation_weight=weight)
    nan = tf.constant(float('nan'))
    result = tff.learning.templates.ClientResult(
      result.update, tf.where(accepted, result.update_weight, nan)
    )
    return result, (
      sums,
      _masked(ranged, reports, float('inf')),
      _masked(ranged, reports, float('-inf')),
    )

  return screen


def _within(value, low, high):
  """Whether a float scalar is in [low, high]; NaN is not."""
  return tf.logical_and(value >= low, value <= high)


def _masked(values, keep, otherwise):
  """`values`, or `otherwise` for a client that does not report."""
  return tf.nest.map_structure(lambda v: tf.where(keep, v, otherwise), values)
