"""Tells from metrics whether training still works."""

import collections
from collections.abc import Mapping
from typing import Any

from tff_fssl import metrics as metrics_lib

NON_FINITE = f'{metrics_lib.CLIENTS}/num_non_finite_clients'
SERVER_NON_FINITE = 'finalizer/server_non_finite'
# An update is suspicious if it is this many times larger than others, or than
# the model's weights.
_FAR = 10.0


def is_bad_round(metrics: Mapping[str, Any]) -> bool:
  """Returns whether a round had updates, but no usable one.

  Args:
    metrics: The round's metrics, as in train.csv.

  Returns:
    True if clients took part, and every update was rejected or not finite, or
    the aggregate was not finite. Without clients, True if the server's own
    training was not finite. A round is not bad if every client has weight 0,
    since it is empty or sure of all its pseudo-labels, or if too few have a
    weight for a robust aggregator.
  """
  num_clients = int(metrics.get(f'{metrics_lib.CLIENTS}/num_clients', 0))
  if not num_clients:
    return bool(metrics.get(SERVER_NON_FINITE, 0))
  # The aggregation counts clients that `client_work` has rejected again: a
  # maximum, not a sum.
  rejected = int(metrics.get('aggregator/num_rejected_clients', 0))
  num_failed = max(
    int(metrics.get(NON_FINITE, 0))
    + int(metrics.get(f'{metrics_lib.CLIENTS}/num_rejected_clients', 0)),
    rejected,
  )
  if num_failed >= num_clients:
    return True
  if metrics.get('aggregator/inner/too_few_clients', 0):
    return False
  # Private aggregators do not report how many clients had a weight above 0.
  weighed = int(metrics.get('aggregator/num_weighted_clients', 1))
  return weighed > 0 and bool(metrics.get('finalizer/update_skipped', 0))


class UpdateWatch:
  """Notices an update that is far larger than those of previous rounds."""

  def __init__(self):
    self._recent: collections.deque[float] = collections.deque(maxlen=10)

  def warning(self, metrics: Mapping[str, Any]) -> str | None:
    """Describes a suspicious update.

    Args:
      metrics: Metrics of the next round, as in train.csv.

    Returns:
      A sentence if the update's norm is more than 10 times the largest norm of
      the last 3 to 10 rounds, or more than 10 times the norm of the model's
      weights. None for other updates.
    """
    norm = float(metrics.get('finalizer/update_norm', 0.0))
    if not norm:
      return None
    recent, weights = self._recent, metrics.get('finalizer/weights_norm')
    compared = None
    if len(recent) >= 3 and norm > _FAR * max(recent):
      compared = norm / max(recent), 'the largest of the previous rounds'
    elif weights is not None and norm > _FAR * float(weights):
      compared = (
        norm / max(float(weights), 1e-30),
        "that of the model's weights",
      )
    # Suspicious ones as well: a new level is reported once, not for ever.
    recent.append(norm)
    if compared is None:
      return None
    return (
      f"the update's norm is {norm:.3g}, {compared[0]:.3g} times"
      f' {compared[1]}; it may have destroyed the model, and a client may have'
      ' lied. --aggregator=robust bounds what a client can do'
    )
