"""FedCoPL's quota: as many pseudo-labels of each class, for any algorithm.

Guo et al., "Cooperative Pseudo Labeling for Unsupervised Federated
Classification", ICCV 2025. Details are from the authors' code:
github.com/krumpguo/FedCoPL, methods/main_UL.py. Only the quota is here, as
`--pseudo_label_quota`, which `apply` adds to an algorithm. In a round:
1.  The server broadcasts T, how many examples clients predicted as each of the
    C classes in the last round that had clients. In the first one it is 0.
2.  A client predicts those unlabelled examples that the algorithm selects, by
    the model that it received. It counts n(c) predictions of class c.
3.  With M = ceil(sum T / C), the quota, it trains on its ceil(n(c) M / T(c))
    most confident examples of each class, and on all where T(c) <= M.
4.  It sends n. The server keeps the sum over clients as the new T.

Deviations from the authors' code:
*   T is theirs of the same clients in the same round, which takes a second
    upload. Ours is of the last round's clients. The kept share of a class is
    min(1, M / T(c)) at every client. It is a rate, so it carries over to other
    clients and to cohorts of other sizes.
*   Where T(c) = 0, their clients keep up to a fixed number, which grows with
    the rounds. Ours keep all.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import functools
from typing import Any

from tff_fssl.client import batches
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import names
from tff_fssl.lazy import tf
from tff_fssl.models.weights import Weights

# The field of the server's memory: T, float32 [C].
_TOTALS = 'quota_totals'
# The upload: n, float32 [C].
_COUNTS = 'quota_counts'


def check(algorithm: base.Algorithm) -> None:
  """Raises `UsageError` if an algorithm is to have a quota that cannot be."""
  if not algorithm.round.pseudo_label_quota:
    return
  reason = algorithm.capabilities.without_quota
  if not batches.trains_on(algorithm.streams(), labeled=False):
    reason = 'its clients train on no unlabelled examples'
  elif algorithm.alone:
    reason = 'its clients train alone, and nobody sums what they predict'
  elif algorithm.head_stays or algorithm.prediction() is not None:
    reason = 'the model that its clients receive predicts no classes'
  if reason:
    raise UsageError(
      f'--pseudo_label_quota=true: does not fit --algorithm={algorithm.name}:'
      f' {reason}; omit it'
    )


def apply(algorithm: base.Algorithm) -> base.Algorithm:
  """Adds the quota to an algorithm whose round has it.

  Args:
    algorithm: The algorithm.

  Returns:
    An algorithm with the same hyper-parameters, or the same one without quota.

  Raises:
    UsageError: If the quota does not fit the algorithm.
  """
  check(algorithm)
  if not algorithm.round.pseudo_label_quota:
    return algorithm
  inner = type(algorithm)
  with_quota = type(f'{inner.__name__}WithQuota', (_WithQuota, inner), {})
  quoted: base.Algorithm = object.__new__(with_quota)
  vars(quoted).update(vars(algorithm))
  return quoted


class _WithQuota(base.Algorithm):
  """The quota, in front of an algorithm in the order of base classes.

  `super()` is the algorithm.
  """

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts with totals of 0."""
    state = super().initial_state(weights, setup)
    totals = tf.zeros([setup.num_classes])
    return state._replace(memory=_join(state.memory, totals))

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts the totals (step 1)."""
    state = state._replace(memory=_split(state.memory)[0])
    own = {_TOTALS: base.Broadcast()}
    return names.join('broadcasts', super().broadcasts(state), own)

  def uploads(self, setup: base.Setup) -> Mapping[str, base.Upload]:
    """Declares a client's counts (step 4)."""
    spec = tf.TensorSpec([setup.num_classes])
    most = float(self.round.most_client_examples)
    own = {_COUNTS: base.Upload(0.0, most, spec=spec)}
    return names.join('uploads', super().uploads(setup), own)

  def is_possible(self, uploads: base.Tensors) -> tf.Tensor:
    """Tells whether a client can have as many examples."""
    most = float(self.round.most_client_examples)
    return super().is_possible(uploads) & (
      tf.reduce_sum(uploads[_COUNTS]) <= most
    )

  def prepare(self, client: base.Client) -> base.Prepared:
    """Keeps the quota of what the algorithm selects (steps 2 and 3)."""
    prepared = super().prepare(client)
    probs = client.predict(self.round.statistics_batch_size)
    selected = prepared.selected
    if selected is None:
      selected = tf.range(tf.shape(probs)[0])
    probs = tf.gather(probs, selected)
    kept = most_certain(probs, client.received[_TOTALS])
    own = {_COUNTS: count(probs)}
    return prepared._replace(
      selected=tf.boolean_mask(selected, kept),
      values=names.join('values', prepared.values, own),
    )

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Sends the counts, too (step 4)."""
    output = super().finish(client, metrics)
    own = {_COUNTS: client.values[_COUNTS]}
    return output._replace(uploads=names.join('uploads', output.uploads, own))

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Sums the counts, if a client has sent some (step 4)."""
    memory, totals = _split(state.memory)
    # The mean times the number is a whole number again.
    sums = tf.round(aggregate[_COUNTS] * aggregate.num_reports)
    totals = tf.where(aggregate.num_reports > 0.0, sums, totals)
    state = super().update(state._replace(memory=memory), aggregate, server)
    return state._replace(memory=_join(state.memory, totals))

  def after_round(self, memory: Any, round_num: tf.Tensor) -> Any:
    """Lets the algorithm change its own memory."""
    own, totals = _split(memory)
    return _join(super().after_round(own, round_num), totals)


def _join(memory: Any, totals: tf.Tensor) -> Any:
  """Adds the totals to an algorithm's memory, as the last field."""
  own: Any = type(memory)
  return _memory_class(own)(*memory, totals)


def _split(memory: Any) -> tuple[Any, tf.Tensor]:
  """Takes a memory of `_join` apart."""
  *own, totals = memory
  return type(memory).make_own(own), totals


@functools.cache
def _memory_class(own: Any) -> Any:
  """Makes the class of a memory with the totals, of the class without."""
  fields = (*getattr(own, '_fields', ()), _TOTALS)
  # As Any, since mypy wants the names of fields written out.
  make_class: Any = collections.namedtuple
  made = make_class('_Memory', fields)
  # An algorithm without memory has an empty tuple.
  made.make_own = getattr(own, '_make', tuple)
  return made


def count(probs: tf.Tensor) -> tf.Tensor:
  """Counts the predictions of each class.

  Args:
    probs: float32 [N, C].

  Returns:
    float32 [C]. Predictions that are not finite are of no class.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.rounds import quota
    >>> print(quota.count(tf.constant([[0.9, 0.1], [0.6, 0.4]])).numpy())
    [2. 0.]
  """
  return tf.reduce_sum(_one_hot(probs, tf.float32), axis=0)


def most_certain(probs: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
  """Selects a client's quota of each predicted class.

  Args:
    probs: float32 [N, C].
    totals: T, float32 [C], the predictions of each class at all clients.

  Returns:
    bool [N]. Of equally confident predictions the first count. Predictions that
    are not finite are kept, so that the update tells of them.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.rounds import quota
    >>> probs = tf.constant([[0.8, 0.2], [0.9, 0.1], [0.7, 0.3], [0.4, 0.6]])
    >>> totals = tf.constant([6.0, 2.0])  # 4 of 6 are the quota.
    >>> print(quota.most_certain(probs, totals).numpy())
    [ True  True False  True]
  """
  # In float64, whole numbers and the quotient of a whole one are exact.
  totals = tf.cast(totals, tf.float64)
  of_class = tf.cast(count(probs), tf.float64)
  most = tf.math.ceil(tf.reduce_sum(totals) / probs.shape[-1])
  quota = tf.math.ceil(tf.math.divide_no_nan(of_class * most, totals))
  quota = tf.cast(tf.where(totals > most, quota, of_class), tf.int32)
  confidences = tf.reduce_max(probs, axis=-1)
  # Sorting needs an order.
  confidences = tf.where(tf.math.is_finite(confidences), confidences, 0.0)
  order = tf.argsort(confidences, direction='DESCENDING', stable=True)
  predicted = tf.gather(_one_hot(probs, tf.int32), order)
  # The rank within the class from 1 on, and 0 for an example of no class.
  ranks = tf.reduce_sum(predicted * tf.cumsum(predicted, axis=0), axis=-1)
  kept = ranks <= tf.reduce_sum(predicted * quota, axis=-1)
  return tf.scatter_nd(order[:, None], kept, tf.shape(order))


def _one_hot(probs: tf.Tensor, dtype: Any) -> tf.Tensor:
  """Makes [N, C], 1 for the predicted class, 0 where that is not finite."""
  finite = tf.reduce_all(tf.math.is_finite(probs), axis=-1)
  labels = tf.where(finite, tf.argmax(probs, -1, tf.int32), -1)
  return tf.one_hot(labels, probs.shape[-1], dtype=dtype)
