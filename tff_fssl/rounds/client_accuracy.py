"""Accuracy over clients: checked reports, their sums, and metrics of these."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import functools
from typing import Any

from tff_fssl.lazy import tf, tff

# Quantiles of clients' accuracies are exact to half of 1 / RESOLUTION.
RESOLUTION = 200
PERCENTILES = (10, 20, 30, 40, 50, 60, 70, 80, 90)
# A larger loss of an example, in nats, counts as this.
MAX_LOSS = 1e3
# The name of the main prediction rule among the others.
MAIN = 'model'
# The whole numbers for an accuracy of 1, and for a nat.
_ONE = 10**9
_NAT = 10**4
# Relative tolerance for losses, which are sums in float32.
_TOLERANCE = 1e-3

_ByName = collections.OrderedDict[str, Any]


def build_screen(
  report_type: tff.Type, max_client_examples: int
) -> tff.Computation:
  """Builds the check of one client's report, before anything is summed.

  A client is rejected as a whole, and counted, if its data could not be used or
  its report is impossible: more examples than `max_client_examples`, more
  correct ones of a class than examples, negative numbers, a loss that is not
  finite or out of range. All other figures are computed here from the accepted
  counts. `guarded.GuardedFactory` describes the protection of such a check, and
  where it runs.

  Args:
    report_type: The type of a report.
    max_client_examples: The most examples of an honest client.

  Returns:
    `report -> sums`, all int64 and not negative.
  """
  most = max_client_examples

  @tff.tensorflow.computation(report_type)
  def screen(report: Mapping[str, Any]) -> _ByName:
    counts = report['num_examples']
    # One by one, so that a sum of huge counts cannot wrap around.
    in_range = tf.reduce_all(tf.logical_and(counts >= 0, counts <= most))
    total = tf.reduce_sum(tf.where(in_range, counts, 0))
    max_loss = MAX_LOSS * tf.cast(total, tf.float32) * (1 + _TOLERANCE)
    checks = [report['usable'], in_range, total <= most]
    for of_way in report['ways'].values():
      correct, loss = of_way['correct'], of_way['loss']
      checks += [
        tf.reduce_all(tf.logical_and(correct >= 0, correct <= counts)),
        tf.logical_and(loss >= -_TOLERANCE, loss <= max_loss),
      ]
    accepted = tf.reduce_all(checks)
    keep = functools.partial(_kept, accepted)
    has_examples = tf.logical_and(accepted, total > 0)
    sums = collections.OrderedDict(
      # Counted here, not by the client, which could claim any number.
      num_clients=tf.constant(1, tf.int64),
      num_clients_with_examples=_whole(has_examples),
      num_rejected_clients=_whole(tf.logical_not(accepted)),
      num_examples=keep(counts),
      ways=collections.OrderedDict(),
    )
    for name, of_way in report['ways'].items():
      correct, loss = keep(of_way['correct']), keep(of_way['loss'])
      accuracy = tf.math.divide_no_nan(
        tf.cast(tf.reduce_sum(correct), tf.float64),
        tf.cast(keep(total), tf.float64),
      )
      loss = tf.clip_by_value(tf.cast(loss, tf.float64), 0.0, MAX_LOSS * most)
      # -1 adds nothing to the histogram: `one_hot` of it is 0 everywhere.
      place = tf.where(has_examples, _whole(accuracy * RESOLUTION), -1)
      sums['ways'][name] = collections.OrderedDict(
        correct=correct,
        loss=_whole(loss * _NAT),
        accuracy=_whole(accuracy * _ONE),
        accuracy_squared=_whole(accuracy**2 * _ONE),
        clients_by_accuracy=tf.one_hot(place, RESOLUTION + 1, dtype=tf.int64),
      )
    return sums

  return screen


def _kept(accepted: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
  """Replaces the values of a rejected client, which may be NaN, by zeros."""
  return tf.where(accepted, value, tf.zeros_like(value))


def _whole(value: tf.Tensor) -> tf.Tensor:
  """Converts a float, by rounding, or a bool to int64."""
  if value.dtype.is_floating:
    value = tf.round(value)
  return tf.cast(value, tf.int64)


def limits(sums_type: tff.Type, max_client_examples: int) -> _ByName:
  """Returns the maximum of each sum that one client can contribute."""
  most = max_client_examples
  of_way = collections.OrderedDict(
    correct=most,
    loss=int(MAX_LOSS * _NAT) * most,
    accuracy=_ONE,
    accuracy_squared=_ONE,
    clients_by_accuracy=1,
  )
  return collections.OrderedDict(
    num_clients=1,
    num_clients_with_examples=1,
    num_rejected_clients=1,
    num_examples=most,
    ways=collections.OrderedDict(
      (name, of_way) for name in tff.structure.name_list(sums_type['ways'])
    ),
  )


def finalize(sums: Mapping[str, Any]) -> _ByName:
  """Computes metrics from sums.

  Args:
    sums: Sums of the results of `build_screen` over clients.

  Returns:
    int64 scalars, and float64 scalars, which are NaN without examples. By name:

    *   num_clients: The clients that took part.
    *   num_clients_with_examples: Participants with examples.
    *   num_rejected_clients: Rejected participants.
    *   num_examples: All examples.
    *   accuracy, loss: Means over examples, the loss in nats.
    *   accuracy_mean: The mean over clients with examples.
    *   accuracy_deviation: The standard deviation over these clients (divided
        by their number).
    *   accuracy_worst_decile: The mean of the least tenth of their accuracies,
        rounded up to whole clients.
    *   accuracy_percentile_10 to _90: The least accuracy that so many percent
        of them do not exceed.
    *   recall_mean: The mean, over classes with examples, of the share of a
        class's examples that is classified correctly.

    Accuracies of single clients are rounded to 1 / `RESOLUTION` for the worst
    decile and percentiles. The last entries, by the names of `Prediction.also`,
    are the same figures of other prediction rules.
  """
  counts = sums['num_examples']
  metrics = collections.OrderedDict(
    num_clients=sums['num_clients'],
    num_clients_with_examples=sums['num_clients_with_examples'],
    num_rejected_clients=sums['num_rejected_clients'],
    num_examples=tf.reduce_sum(counts),
  )
  num_clients = sums['num_clients_with_examples']
  for name, of_way in sums['ways'].items():
    of_examples = _over_examples(of_way, counts)
    figures = of_examples | _over_clients(of_way, num_clients)
    if name == MAIN:
      metrics |= figures
    else:
      metrics[name] = figures
  return metrics


def _over_examples(of_way: Mapping[str, Any], counts: tf.Tensor) -> _ByName:
  """Computes figures in which each example, or each class, counts equally."""
  correct = of_way['correct']
  loss = tf.cast(of_way['loss'], tf.float64) / _NAT
  total = tf.cast(tf.reduce_sum(counts), tf.float64)
  return collections.OrderedDict(
    accuracy=tf.reduce_sum(correct) / tf.reduce_sum(counts),
    loss=loss / total,
    recall_mean=tf.reduce_sum(
      tf.math.divide_no_nan(
        tf.cast(correct, tf.float64), tf.cast(counts, tf.float64)
      )
    )
    / tf.cast(tf.math.count_nonzero(counts), tf.float64),
  )


def _over_clients(of_way: Mapping[str, Any], num: tf.Tensor) -> _ByName:
  """Computes figures in which each of `num` clients counts equally."""
  clients = of_way['clients_by_accuracy']
  mean = of_way['accuracy'] / num / _ONE
  variance = of_way['accuracy_squared'] / num / _ONE - mean**2
  up_to = tf.cumsum(clients)
  # The histogram is ascending: the worst clients fill it from the start.
  num_worst = (num + 9) // 10
  worst = tf.clip_by_value(num_worst - (up_to - clients), 0, clients)
  places = tf.range(RESOLUTION + 1, dtype=tf.int64)
  nan = tf.constant(float('nan'), tf.float64)
  figures = collections.OrderedDict(
    accuracy_mean=mean,
    # Rounding can make the variance slightly negative.
    accuracy_deviation=tf.sqrt(tf.maximum(variance, 0.0)),
    accuracy_worst_decile=tf.reduce_sum(worst * places)
    / num_worst
    / RESOLUTION,
  )
  for percent in PERCENTILES:
    rank = (num * percent + 99) // 100
    place = tf.math.count_nonzero(up_to < rank)
    figures[f'accuracy_percentile_{percent}'] = tf.where(
      num > 0, place / RESOLUTION, nan
    )
  return figures
