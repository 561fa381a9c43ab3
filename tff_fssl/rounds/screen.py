"""Checks of what a client sent, before anything is summed."""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.aggregators import guarded
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.rounds import exchange as exchange_lib

# A metric's sum above this, per example, is absurd.
_MAX_METRIC = 1e6
# Rounding may take shares and thresholds this far outside [0, 1].
_TOLERANCE = 1e-3


class Bounds(NamedTuple):
  """Bounds on what an honest client can send.

  Attributes:
    weights: The weights that its update may have.
    num_examples: The most examples that it can process in a round.
    signals: Name -> the range of a signal.
    exchange: The exchange, whose rows are checked.
  """

  weights: guarded.AllowedWeights
  num_examples: float
  signals: Mapping[str, algorithm_lib.Signal] = {}
  exchange: exchange_lib.Exchange | None = None


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
    update, row = _split(result.update, bounds.exchange)
    accepted = tf.reduce_all(
      [
        guarded.is_acceptable(update, result.update_weight, bounds.weights),
        _within(report['num_examples'], 0.0, most),
        *(_within(p[1], 0.0, most) for p in ratios.values()),
        *(
          _within(tf.abs(p[0]), 0.0, _MAX_METRIC * most)
          for p in ratios.values()
        ),
        *(_within(v, -_TOLERANCE, 1.0 + _TOLERANCE) for v in ranges.values()),
        *(
          tf.logical_or(
            _within(report['signals'][name], signal.low, signal.high),
            # A client that does not report sends 0.
            tf.logical_not(report['reports']),
          )
          for name, signal in bounds.signals.items()
        ),
        *([] if row is None else [_row_fits(bounds.exchange, row)]),
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
      num_examples=masked(report['num_examples'], reports, 0.0),
      weight=weight,
      weight_log_weight=tf.math.xlogy(weight, weight),
      ratios=masked(ratios, reports, 0.0),
      ranges=masked(ranges, reports, 0.0),
      signals=masked(report['signals'], reports, 0.0),
    )
    ranged = collections.OrderedDict(ranges, aggregation_weight=weight)
    nan = tf.constant(float('nan'))
    if row is not None:
      valid = tf.logical_and(row['is_valid'], accepted)
      row = collections.OrderedDict(row, is_valid=valid)
      update = collections.OrderedDict(update=update, row=row)
    result = tff.learning.templates.ClientResult(
      update, tf.where(accepted, result.update_weight, nan)
    )
    return result, (
      sums,
      masked(ranged, reports, float('inf')),
      masked(ranged, reports, float('-inf')),
    )

  return screen


def _split(update, exchange):
  """(the update alone, the row for the exchange or None)."""
  if exchange is None:
    return update, None
  return update['update'], update['row']


def _row_fits(exchange, row):
  """Whether a row may be kept, or is none."""
  return tf.logical_or(
    exchange_lib.is_possible_row(exchange, row), tf.logical_not(row['is_valid'])
  )


def _within(value, low, high):
  """Whether a float scalar is in [low, high]; NaN is not."""
  return tf.logical_and(value >= low, value <= high)


def masked(values: Any, keep: tf.Tensor, otherwise: float) -> Any:
  """`values`, or `otherwise` for a client that does not report."""
  return tf.nest.map_structure(lambda v: tf.where(keep, v, otherwise), values)
