"""The check of a client's upload, before anything is summed.

A weight of NaN is a message: it marks a client that is to be rejected. Such a
mark crosses two borders at which nothing but update and weight travels.

*   A client whose data cannot be used `mark`s its own weight. If the process is
    confidential, so does one whose training failed.
*   `build_screen` rejects marked clients, since NaN is no allowed weight, and
    marks all others that it rejects.
*   `guarded.GuardedFactory`, the aggregator's own check, rejects marked clients
    for the same reason. It stands alone where uploads are confidential, and
    where a server cannot see that `build_screen` ran.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import math
from typing import Any, NamedTuple

from tff_fssl.aggregators import guarded
from tff_fssl.client import batches
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import groups as groups_lib
from tff_fssl.interface import names
from tff_fssl.lazy import tf, tff
from tff_fssl.rounds import messages
from tff_fssl.rounds import plan as plan_lib

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
  """

  weights: guarded.AllowedWeights
  num_examples: float
  num_counted: float


def build_bounds(algorithm: base.Algorithm) -> Bounds:
  """Computes bounds on what a client of `max_client_examples` sends."""
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
  return Bounds(allowed, num_examples=most, num_counted=counted)


def mark(weight: tf.Tensor, is_valid: tf.Tensor) -> tf.Tensor:
  """Returns the weight, or NaN for a client that is to be rejected.

  Args:
    weight: float32 scalar.
    is_valid: bool scalar.
  """
  return tf.where(is_valid, weight, float('nan'))


def check_and_sum(
  plan: plan_lib.Plan, result: tff.Value, report: tff.Value
) -> tuple[tff.Value, tff.Value]:
  """Checks clients' uploads and sums their reports, in a round.

  Args:
    plan: The plan.
    result: The `ClientResult`s, at clients.
    report: The reports, at clients.

  Returns:
    (the checked results@CLIENTS, OrderedDict(train, uploads, num_reports)
    @SERVER). `uploads` are the means of uploads, for the server's step only. Of
    a confidential process, nothing is checked here, and clients are counted.
  """
  if plan.is_confidential:
    return result, _number_of_clients()
  screen = build_screen(
    plan, result.type_signature.member, report.type_signature.member
  )
  result, (sums, minima, maxima) = tff.federated_map(screen, (result, report))
  of_screen = screen.type_signature.result[1]
  finalize = _build_finalize(of_screen[0], of_screen[1])
  totals = (
    tff.federated_sum(sums),
    tff.federated_min(minima),
    tff.federated_max(maxima),
  )
  return result, tff.federated_map(finalize, totals)


def build_screen(
  plan: plan_lib.Plan, result_type: tff.Type, report_type: tff.Type
) -> tff.Computation:
  """Builds the check of one client's upload, before anything is summed.

  A client is rejected as a whole if its update is not finite, its weight is not
  allowed, or its report is impossible: counts outside [0, the most it can have
  processed], thresholds outside [0, 1], metrics that are absurd or not finite,
  a group that does not exist. Its report is ignored, `num_rejected_clients`
  counts it, and it is `mark`ed. The docstring of `guarded.GuardedFactory`
  describes the protection of such a check, and where it runs.

  Args:
    plan: The plan.
    result_type: The type of a `ClientResult`.
    report_type: The type of the client's report, as `client_work.build_work`
      makes it.

  Returns:
    `<result, report> -> <result, <sums, minima, maxima>>`: the values to be
    summed over clients, and those whose minimum and maximum are taken.
  """

  @tff.tensorflow.computation(result_type, report_type)
  def screen(
    result: tff.learning.templates.ClientResult, report: Mapping[str, Any]
  ) -> tuple[tff.learning.templates.ClientResult, tuple[_ByName, ...]]:
    checks = checks_of(plan, result, report)
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
    sent, row = messages.split(result.update)
    if row is not None:
      valid = tf.logical_and(row['is_valid'], accepted)
      row = collections.OrderedDict(row, is_valid=valid)
      sent = collections.OrderedDict(update=sent, row=row)
    result = tff.learning.templates.ClientResult(
      sent, mark(result.update_weight, accepted)
    )
    return result, (
      sums,
      # Infinity is neutral for a minimum, as 0 is for a sum.
      masked(ranged, reports, float('inf')),
      masked(ranged, reports, float('-inf')),
    )

  return screen


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
  plan: plan_lib.Plan,
  result: tff.learning.templates.ClientResult,
  report: Mapping[str, Any],
) -> dict[str, Check]:
  """Checks each part of a client's upload: name of the part -> check."""
  bounds = build_bounds(plan.algorithm)
  update, row = messages.split(result.update)
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
  found = {**update, **report['uploads']}
  counts = tf.logical_or(report['reports'], weight > 0.0)
  if row is not None:
    found |= row['values']
    counts = tf.logical_or(counts, row['is_valid'])
  uploads = {name: found[name] for name in plan.uploads}
  for name, check in checks_of_uploads(plan, uploads).items():
    # Uploads that count nowhere are 0, which may be impossible.
    checks[name] = _unless(check, tf.logical_not(counts))
  if plan.groups is not None:
    place = update[channels.PLACE]
    possible = groups_lib.is_possible(plan.groups, place)
    checks['group'] = Check(place[0], possible, 'those that there are')
  if row is not None:
    possible = messages.is_possible_row(plan.exchange, row)
    valid = row['is_valid']
    check = Check(tf.cast(valid, tf.float32), possible, 'see `is_possible_row`')
    # An invalid row is not kept, so its contents do not matter.
    checks['row'] = _unless(check, tf.logical_not(valid))
  return checks


def checks_of_uploads(
  plan: plan_lib.Plan, uploads: Mapping[str, tf.Tensor]
) -> dict[str, Check]:
  """Checks a client's uploads, each alone and all together."""
  if not uploads:
    return {}
  checks = {
    f'upload {name}': _within(value, upload.low, upload.high)
    for name, upload in plan.uploads.items()
    if (value := uploads[name]).dtype.is_floating
  }
  possible = plan.algorithm.is_possible(uploads)
  return checks | {
    'uploads': Check(
      tf.cast(possible, tf.float32), possible, "see the algorithm's is_possible"
    )
  }


def _within(value: tf.Tensor, low: float, high: float) -> Check:
  """Checks that all of a float tensor is in [low, high]. NaN is not."""
  possible = tf.reduce_all(tf.logical_and(value >= low, value <= high))
  lowest, highest = tf.reduce_min(value), tf.reduce_max(value)
  shown = tf.where(lowest < low, lowest, highest)
  return Check(shown, possible, f'{low:g} to {high:g}')


def _unless(check: Check, excused: tf.Tensor) -> Check:
  """Lets a check pass if it does not matter."""
  return check._replace(is_possible=tf.logical_or(check.is_possible, excused))


def masked(values: Any, keep: tf.Tensor, otherwise: float) -> Any:
  """Replaces `values` by `otherwise` for a client that does not report."""
  return tf.nest.map_structure(lambda v: tf.where(keep, v, otherwise), values)


def _number_of_clients() -> tff.Value:
  """Counts clients: the only metric of a confidential aggregator."""
  one = tff.federated_value(1, tff.CLIENTS)
  # The server must not learn which clients failed: all count as reports.
  report = tff.federated_value(1.0, tff.CLIENTS)
  return tff.federated_zip(
    collections.OrderedDict(
      train=collections.OrderedDict(num_clients=tff.federated_sum(one)),
      uploads=tff.federated_value(collections.OrderedDict(), tff.SERVER),
      num_reports=tff.federated_sum(report),
    )
  )


def _build_finalize(
  sums_type: tff.Type, range_type: tff.Type
) -> tff.Computation:
  """Builds the computation of metrics from sums over clients."""

  @tff.tensorflow.computation(sums_type, range_type, range_type)
  def finalize(
    sums: Mapping[str, Any],
    minima: Mapping[str, tf.Tensor],
    maxima: Mapping[str, tf.Tensor],
  ) -> collections.OrderedDict[str, Any]:
    some = sums['num_reports'] > 0.0
    nan = tf.constant(float('nan'))
    train = collections.OrderedDict(
      num_clients=sums['num_clients'],
      num_non_finite_clients=sums['num_non_finite_clients'],
      num_rejected_clients=sums['num_rejected_clients'],
      num_examples=sums['num_examples'],
    )
    # 0/0 is NaN, correct / 0 wrong inf.
    ratios = {name: pair[0] / pair[1] for name, pair in sums['ratios'].items()}
    ranges = collections.OrderedDict[str, tf.Tensor]()
    for name, total in sums['ranges'].items():
      ranges[f'{name}_min'] = tf.where(some, minima[name], nan)
      ranges[f'{name}_mean'] = total / sums['num_reports']
      ranges[f'{name}_max'] = tf.where(some, maxima[name], nan)
    total = sums['weight']
    weights = {
      'min': minima['aggregation_weight'] / total,
      'max': maxima['aggregation_weight'] / total,
      # Entropy of the shares w/S, in nats: log S - (sum w log w) / S.
      'entropy': tf.math.log(total) - sums['weight_log_weight'] / total,
    }
    weights = {
      f'aggregation_weight_{suffix}': tf.where(total > 0.0, value, nan)
      for suffix, value in weights.items()
    }
    joined = names.join('metrics', train, ratios, ranges, weights)
    train = collections.OrderedDict(joined)
    uploads = collections.OrderedDict(
      (name, tf.math.divide_no_nan(value, sums['num_reports']))
      for name, value in sums['uploads'].items()
    )
    return collections.OrderedDict(
      train=train, uploads=uploads, num_reports=sums['num_reports']
    )

  return finalize
