"""The check of a client's upload, before anything is summed."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

from tff_fssl.aggregators import guarded
from tff_fssl.client import batches
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import groups as groups_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.rounds import messages

# A greater sum of a metric, per example, is absurd.
_MAX_METRIC = 1e6
# Rounding may take shares and thresholds this far outside [0, 1].
_TOLERANCE = 1e-3

# Name -> value, or a further level of names.
_ByName = collections.OrderedDict[str, Any]


class Bounds(NamedTuple):
  """Bounds on an honest client's upload.

  Attributes:
    weights: The weights that its update may have.
    num_examples: The most examples that it can train on in a round.
    num_counted: The most examples that one of its metrics can count.
    uploads: Name of an upload -> its least and its greatest value.
    networks: Names of the auxiliary networks that it uploads.
    exchange: The exchange, whose rows are checked.
    groups: The groups, whose places are checked.
  """

  weights: guarded.AllowedWeights
  num_examples: float
  num_counted: float
  uploads: Mapping[str, tuple[float, float]] = {}
  networks: Sequence[str] = ()
  exchange: exchange_lib.Exchange | None = None
  groups: groups_lib.Groups | None = None


def build_bounds(
  algorithm: base.Algorithm,
  exchange: exchange_lib.Exchange | None,
  num_classes: int,
  groups: groups_lib.Groups | None = None,
) -> Bounds:
  """Computes bounds on an upload by a client of `max_client_examples`."""
  hparams, streams = algorithm.round, algorithm.streams()
  used = [batches.trains_on(streams, labeled=kind) for kind in (False, True)]
  sizes = hparams.client_batch_sizes(used[0])
  has_episodes = batches.draws_episodes(streams)
  if has_episodes:
    # An episode may have all labelled examples of a client.
    sizes = (sizes[0], hparams.most_client_examples)
  batch_sizes = [size for size, is_used in zip(sizes, used) if is_used]
  # The other streams repeat until the longest stream of batches ends.
  steps = hparams.client_epochs * max(
    math.ceil(hparams.most_client_examples / b) for b in batch_sizes
  )
  most = float((hparams.client_steps or steps) * sum(batch_sizes))
  # Before the first step, an algorithm may count all examples of a client, of
  # which the steps see a part.
  counted = max(most, float(hparams.most_client_examples * len(batch_sizes)))
  if not algorithm.sets_weights and hparams.client_weighting == 'examples':
    allowed = guarded.AllowedWeights(counted if has_episodes else most)
  else:
    allowed = guarded.AllowedWeights(
      1.0, all_or_nothing=not algorithm.sets_weights
    )
  uploads = {
    name: upload.limits(num_classes)
    for name, upload in algorithm.uploads().items()
  }
  networks = [n for n, net in algorithm.networks().items() if net.uploaded]
  return Bounds(
    weights=allowed,
    num_examples=most,
    num_counted=counted,
    uploads=uploads,
    networks=networks,
    exchange=exchange,
    groups=groups,
  )


def build_screen(
  result_type: tff.Type, report_type: tff.Type, bounds: Bounds
) -> tff.Computation:
  """Builds the check of one client's upload, before anything is summed.

  A client is rejected as a whole if its update is not finite, its weight is not
  allowed, or its report is impossible: counts outside [0, the most it can have
  processed], thresholds outside [0, 1], metrics that are absurd or not finite,
  a group that does not exist. Its report is ignored, and `num_rejected_clients`
  counts it. Its weight becomes NaN, so that `guarded.GuardedFactory` rejects
  its update. The docstring of that class describes the protection of such a
  check, and where it runs.

  Args:
    result_type: The type of a `ClientResult`.
    report_type: The type of the client's report, as `build_client_work` makes
      it.
    bounds: Bounds on an honest client's upload.

  Returns:
    `<result, report> -> <result, <sums, minima, maxima>>`: the values to be
    summed over clients, and those whose minimum and maximum are taken.

  Raises:
    UsageError: If clients upload other names than the algorithm declares.
  """
  _check_names(result_type, report_type, bounds)

  @tff.tensorflow.computation(result_type, report_type)
  def screen(
    result: tff.learning.templates.ClientResult, report: Mapping[str, Any]
  ) -> tuple[tff.learning.templates.ClientResult, tuple[_ByName, ...]]:
    update, row = _split(result, bounds.exchange)
    checks = checks_of(result, report, bounds)
    accepted = tf.reduce_all([c.is_possible for c in checks.values()])
    reports = tf.logical_and(accepted, report['reports'])
    weight = tf.where(accepted, result.update_weight, 0.0)
    sums = collections.OrderedDict(
      num_clients=tf.constant(1),
      # A rejected client counts once, as rejected.
      num_non_finite_clients=tf.cast(
        tf.logical_and(accepted, tf.logical_not(report['is_finite'])), tf.int32
      ),
      num_rejected_clients=tf.cast(tf.logical_not(accepted), tf.int32),
      num_reports=tf.cast(reports, tf.float32),
      num_examples=masked(report['num_examples'], reports, 0.0),
      weight=weight,
      # Unlike a product, `xlogy` is 0 for weight 0.
      weight_log_weight=tf.math.xlogy(weight, weight),
      ratios=masked(report['ratios'], reports, 0.0),
      ranges=masked(report['ranges'], reports, 0.0),
      uploads=masked(report['uploads'], reports, 0.0),
    )
    ranged = collections.OrderedDict(
      report['ranges'], aggregation_weight=weight
    )
    nan = tf.constant(float('nan'))
    sent: Any = update
    if _has_rows(bounds.exchange):
      valid = tf.logical_and(row['is_valid'], accepted)
      row = collections.OrderedDict(row, is_valid=valid)
      sent = collections.OrderedDict(update=update, row=row)
    result = tff.learning.templates.ClientResult(
      sent, tf.where(accepted, result.update_weight, nan)
    )
    return result, (
      sums,
      # Infinity is neutral for a minimum, as 0 is for a sum.
      masked(ranged, reports, float('inf')),
      masked(ranged, reports, float('-inf')),
    )

  return screen


def _check_names(
  result_type: tff.Type, report_type: tff.Type, bounds: Bounds
) -> None:
  """Checks that clients upload the names that the algorithm declares.

  An undeclared upload would have no bounds.
  """
  names_of = tff.structure.name_list
  pairs = [('uploads', names_of(report_type.uploads), bounds.uploads)]
  exchange = bounds.exchange
  if exchange is not None:
    if exchange.in_sum:
      others = (channels.MODEL, channels.PLACE, *bounds.networks)
      sent = [n for n in names_of(result_type.update) if n not in others]
    else:
      sent = names_of(result_type.update.row['values'])
    pairs.append(('row', sent, exchange.row_specs))
  for field, sent, declared in pairs:
    if set(sent) != set(declared):
      raise UsageError(
        f'finish: {field} has {", ".join(sent) or "nothing"}; the algorithm'
        f' declares {", ".join(sorted(declared)) or "nothing"}'
      )


class Check(NamedTuple):
  """A check of a part of a client's upload.

  Attributes:
    value: float32 scalar, what is checked.
    is_possible: bool scalar, whether an honest client can have sent it.
    allowed: What an honest client can send, in words.
  """

  value: tf.Tensor
  is_possible: tf.Tensor
  allowed: str


def checks_of(
  result: tff.learning.templates.ClientResult,
  report: Mapping[str, Any],
  bounds: Bounds,
) -> dict[str, Check]:
  """Checks each part of a client's upload: name of the part -> check."""
  update, row = _split(result, bounds.exchange)
  weight, most = result.update_weight, bounds.num_counted
  checks = {
    'weight and update': Check(
      weight,
      guarded.is_acceptable(update, weight, bounds.weights),
      f'0 or up to {bounds.weights.maximum:g}, for numbers up to'
      f' {guarded.MAX_ENTRY:g}',
    ),
    'num_examples': _within(report['num_examples'], 0.0, bounds.num_examples),
  }
  for name, pair in report['ratios'].items():
    checks[f'count of the metric {name}'] = _within(pair[1], 0.0, most)
    limit = _MAX_METRIC * most
    checks[f'total of the metric {name}'] = _within(pair[0], -limit, limit)
  for name, value in report['ranges'].items():
    checks[name] = _within(value, -_TOLERANCE, 1.0 + _TOLERANCE)
  for name, limits in bounds.uploads.items():
    # A client that does not report sends 0, which may be outside the limits.
    checks[f'upload {name}'] = _unless(
      _within(report['uploads'][name], *limits),
      tf.logical_not(report['reports']),
    )
  if bounds.groups is not None:
    place = update[channels.PLACE]
    possible = groups_lib.is_possible(bounds.groups, place)
    checks['group'] = Check(place[0], possible, 'those that there are')
  if bounds.exchange is not None and row is not None:
    possible = messages.is_possible_row(bounds.exchange, row)
    valid = row['is_valid']
    check = Check(tf.cast(valid, tf.float32), possible, 'see its `is_possible`')
    # An invalid row is not kept, so its contents do not matter.
    checks['row for the exchange'] = _unless(check, tf.logical_not(valid))
  return checks


def _within(value: tf.Tensor, low: float, high: float) -> Check:
  """Checks that a float scalar is in [low, high]. NaN is not."""
  possible = tf.logical_and(value >= low, value <= high)
  return Check(value, possible, f'{low:g} to {high:g}')


def _unless(check: Check, excused: tf.Tensor) -> Check:
  """Lets a check pass if it does not matter."""
  return check._replace(is_possible=tf.logical_or(check.is_possible, excused))


def _has_rows(exchange: exchange_lib.Exchange | None) -> bool:
  """Tells whether clients send rows beside their updates."""
  return exchange is not None and not exchange.in_sum


def _split(
  result: tff.learning.templates.ClientResult,
  exchange: exchange_lib.Exchange | None,
) -> tuple[Mapping[str, Any], Any]:
  """Splits an upload into (update by channel, the exchange's row or None)."""
  update = result.update
  if exchange is None:
    return update, None
  if not exchange.in_sum:
    return update['update'], update['row']
  # Values `in_sum` have no id and no mark. They count by the client's weight.
  values = {name: update[name] for name in exchange.row_specs}
  return update, {'is_valid': result.update_weight > 0.0, 'values': values}


def masked(values: Any, keep: tf.Tensor, otherwise: float) -> Any:
  """Replaces `values` by `otherwise` for a client that does not report."""
  return tf.nest.map_structure(lambda v: tf.where(keep, v, otherwise), values)
