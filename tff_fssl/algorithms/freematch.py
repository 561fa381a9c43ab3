"""FreeMatch: thresholds that follow the confidence of the model.

Wang et al., "FreeMatch: Self-adaptive Thresholding for Semi-supervised
Learning", ICLR 2023. Details are from the authors' code in USB:
github.com/microsoft/Semi-supervised-learning. The paper is not federated. The
federated form is ours, by sums alone. (FL)^2's adaptive thresholds descend from
FreeMatch's.

The server keeps three averages: the confidence tau, the prediction p, and the
frequencies h of predicted classes. In a round:
1.  The server broadcasts the model and the averages. The threshold of class c
    is tau p(c) / max p.
2.  For each batch, a client predicts the weak views with its current weights.
    Predictions that reach the threshold of their class become pseudo-labels.
    Its loss is FixMatch's, plus `fairness_weight` times the negative
    cross-entropy between p / h and the same ratio of the batch's kept strong
    views, each scaled to sum 1.
3.  It sends the mean confidence, the mean prediction and the frequencies of
    predicted classes of its unlabelled examples at the received weights.
4.  The server averages the models, and moves its averages towards the means
    over clients.

Deviations from the authors' code: averages move once a round, not with each
batch. They start at 1 / C, as in the paper, not at 1.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import frequencies
from tff_fssl.semisup import pseudo_labels
from tff_fssl.semisup import thresholds

# The name of the averages, float32 [2 C + 1]: tau, p, h.
_AVERAGES = 'averages'
# Rounding may take the sum of probabilities this far from 1.
_TOLERANCE = 0.001


class FreeMatchMemory(NamedTuple):
  """The server's averages: tau, p and h, float32 [2 C + 1]."""

  averages: tf.Tensor


@dataclasses.dataclass(frozen=True)
class FreeMatch(base.Algorithm):
  """FreeMatch: self-adaptive thresholds, by averages over rounds."""

  name = 'freematch'
  paper = 'Wang et al., ICLR 2023'
  unlabeled_views = base.WEAK_AND_STRONG
  capabilities = base.Capabilities(
    extra_uploads=('mean prediction', 'frequencies of predicted classes'),
  )
  metrics = (
    metrics_lib.client_metric(
      'loss_fairness',
      "FreeMatch's L_f: negative cross-entropy between the average"
      ' prediction and that of kept strong views, each divided by frequencies,'
      ' mean over steps with a kept example.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(
        metrics_lib.LOSS_AT_CLIENTS, 'fairness', metrics_lib.DOTTED
      ),
    ),
    metrics_lib.client_range(
      'mean_confidence',
      "A client's mean confidence at the received weights, to which"
      " FreeMatch's tau moves.",
      curve=metrics_lib.Curve('Mean confidence of clients'),
    ),
    metrics_lib.client_metric(
      'self_adaptive_threshold',
      "FreeMatch's tau: the highest threshold of a class.",
      metrics_lib.SHARE,
      curve=metrics_lib.Curve('Self-adaptive threshold'),
    ),
  )

  decay: float = hparam(
    0.9,
    'lambda, the share of the old averages in the new ones, a round (value:'
    " ours; the paper's is 0.999, a batch).",
    minimum=0,
    maximum=1,
  )
  fairness_weight: float = hparam(
    0.001,
    "w_f, the weight of the fairness loss (authors' code for CIFAR-10 with 40"
    ' labels).',
    minimum=0,
  )
  unlabeled_loss_weight: float = hparam(
    1.0, 'w_u, the weight of the loss on pseudo-labels.', minimum=0
  )

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts all averages at 1 / C."""
    size = 2 * setup.num_classes + 1
    return base.ServerState(
      weights, FreeMatchMemory(tf.fill([size], 1.0 / setup.num_classes))
    )

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts the averages (step 1)."""
    del state
    return {_AVERAGES: base.Broadcast()}

  def uploads(self, setup: base.Setup) -> Mapping[str, base.Upload]:
    """Declares a client's means, whose sum is enough (step 3)."""
    spec = tf.TensorSpec([2 * setup.num_classes + 1])
    return {_AVERAGES: base.Upload(0.0, math.inf, base.SUM, spec)}

  def is_possible(self, uploads: base.Tensors) -> tf.Tensor:
    """Tells whether these may be means of probabilities and frequencies."""
    totals = [tf.reduce_sum(part) for part in split(uploads[_AVERAGES])]
    return tf.reduce_all(tf.stack(totals) <= 1.0 + _TOLERANCE)

  def prepare(self, client: base.Client) -> base.Prepared:
    """Computes the thresholds, and a client's own means (steps 1 and 3)."""
    tau, prediction, counts = split(client.received[_AVERAGES])
    probs = client.predict(self.round.statistics_batch_size)
    predicted = tf.one_hot(tf.argmax(probs, -1), probs.shape[-1])
    rows = tf.concat(
      [tf.reduce_max(probs, -1, keepdims=True), probs, predicted], axis=1
    )
    # Without examples, it is 0, and moves nothing.
    own = tf.math.divide_no_nan(
      tf.reduce_sum(rows, 0), tf.cast(tf.shape(rows)[0], tf.float32)
    )
    return base.Prepared(
      values={
        'limits': tau * prediction / tf.reduce_max(prediction),
        'expected': frequencies.divide(prediction, counts),
        _AVERAGES: own,
      },
      ranges={'mean_confidence': own[0]},
      metrics={'self_adaptive_threshold': base.Mean.ratio(tau[0], 1.0)},
    )

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes w_u L_u + w_f L_f (step 2)."""
    examples = batch.unlabeled
    probs = tf.nn.softmax(examples.logits(networks.model, 'weak'))
    logits = examples.logits(networks.model, 'strong')
    labels = thresholds.pseudo_labels(probs)
    limits = tf.gather(batch.values['limits'], labels)
    loss, metrics = pseudo_labels.loss(
      probs, logits, examples.labels, examples.weights, limits
    )
    kept = tf.cast(thresholds.fixed_mask(probs, limits), tf.float32)
    fairness, has_kept = fairness_loss(
      logits, kept * examples.weights, batch.values['expected']
    )
    metrics['loss_fairness'] = base.Mean.weighted(fairness, has_kept)
    loss *= self.unlabeled_loss_weight
    return loss + self.fairness_weight * fairness, metrics

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Sends a client's own means (step 3)."""
    del metrics
    return base.ClientOutput(uploads={_AVERAGES: client.values[_AVERAGES]})

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Updates the model, and moves the averages (step 4)."""
    state = super().update(state, aggregate, server)
    old, new = split(state.memory.averages), split(aggregate[_AVERAGES])
    # The sum of predictions is that of the clients' weights.
    rest = tf.maximum(tf.reduce_sum(new[1], keepdims=True) - new[0], 0.0)
    tau = frequencies.follow(
      tf.concat([old[0], 1.0 - old[0]], 0),
      tf.concat([new[0], rest], 0),
      self.decay,
    )[:1]
    prediction, counts = (
      frequencies.follow(old[i], new[i], self.decay) for i in (1, 2)
    )
    return state.remember(averages=tf.concat([tau, prediction, counts], 0))


def split(averages: tf.Tensor) -> list[tf.Tensor]:
  """Splits averages, float32 [2 C + 1], into tau [1], p [C] and h [C]."""
  num_classes = (averages.shape[0] - 1) // 2
  parts: list[tf.Tensor] = tf.split(averages, [1, num_classes, num_classes])
  return parts


def fairness_loss(
  logits: tf.Tensor, kept: tf.Tensor, expected: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes the self-adaptive fairness loss L_f.

  Args:
    logits: float32 [B, C], of strong views.
    kept: float32 [B], 1 for examples with a pseudo-label, else 0.
    expected: float32 [C], p / h, scaled to sum 1.

  Returns:
    (L_f in nats, at most 0; 1 if an example is kept). Both are 0 otherwise.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.algorithms import freematch
    >>> logits = tf.math.log([[0.9, 0.1], [0.4, 0.6]])
    >>> loss, _ = freematch.fairness_loss(logits, tf.ones([2]), [0.5, 0.5])
    >>> print(f'{loss:.4f}')  # Means 0.65, 0.35, of classes that are half each.
    -0.7403
  """
  probs = tf.nn.softmax(logits)
  num = tf.reduce_sum(kept)
  predicted = tf.one_hot(tf.argmax(logits, -1), logits.shape[-1])
  mean, counts = (
    tf.math.divide_no_nan(tf.reduce_sum(kept[:, None] * part, 0), num)
    for part in (probs, predicted)
  )
  log = tf.math.log(frequencies.divide(mean, counts) + 1e-12)
  has_kept = tf.cast(num > 0.0, tf.float32)
  return has_kept * tf.reduce_sum(expected * log), has_kept
