"""UDA at clients, with FedAvg or FedProx.

Xie et al., "Unsupervised Data Augmentation for Consistency Training", NeurIPS
2020.

In a round:
1.  The server broadcasts the model.
2.  For each batch, a client predicts the weak views with its current weights.
    Examples are kept if the largest probability exceeds a threshold. The loss
    is the KL divergence of the predictions for strong views from the sharpened
    predictions for weak views, summed over the kept examples and divided by the
    size of the batch. With labels at the clients, the cross-entropy of a
    labelled batch is added.
3.  The server averages. With labels at the server, it then trains on them.

With `tsa`, training on labels, at clients and at the server, skips the examples
whose label the network already predicts with a probability above a threshold
(training signal annealing, TSA). The threshold rises to 1 over the rounds.

Choices, since the paper is not federated: The threshold rises with the rounds
and, within a round, with the steps. Before round 1 no example is skipped. The
default is no TSA, as in the CIFAR-10 scripts of UDA's authors. The UDA baseline
of FedMatch's authors has the schedule `exp`. There is no moving average of the
weights.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tff_fssl import metrics as metrics_lib
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.semisup import annealing
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import sharpening
from tff_fssl.semisup import thresholds

_NO_TSA = 'none'


@dataclasses.dataclass(frozen=True)
class Uda(base.Algorithm):
  """UDA with annealed labels at clients, with FedAvg or FedProx."""

  name = 'uda'
  paper = 'Xie et al., NeurIPS 2020'
  unlabeled_views = base.WEAK_AND_STRONG
  tiny = {'confidence_threshold': 0.3, 'tsa': 'exp', 'tsa_rounds': 2}
  metrics: ClassVar[tuple[metrics_lib.Metric, ...]] = (
    metrics_lib.client_metric(
      'loss_soft_pseudo_label',
      'KL divergence of predictions for strong views from sharpened predictions'
      ' for weak views, mean over the kept examples.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(metrics_lib.LOSS_AT_CLIENTS, 'soft ones'),
      figure='loss',
    ),
    metrics_lib.client_metric(
      'tsa_ratio',
      'With labels at the clients: the share of labelled examples that training'
      ' signal annealing keeps.',
      metrics_lib.SHARE,
    ),
    metrics_lib.Metric(
      'finalizer/server_tsa_ratio',
      'The same at the server. `server_loss_labeled` and'
      ' `server_labeled_accuracy` are over all of its examples.',
      metrics_lib.SHARE,
    ),
  )

  confidence_threshold: float = hparam(
    0.8,
    "An example is used if its largest probability exceeds this (UDA's CIFAR-10"
    ' scripts).',
    minimum=0,
    maximum=1,
  )
  temperature: float = hparam(
    0.4,
    "T, the divisor of the logits that become targets (UDA's CIFAR-10"
    ' scripts).',
    minimum=1e-6,
    maximum=1e6,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'The weight of the consistency loss relative to the loss on labels (UDA).',
    minimum=0,
  )
  tsa: str = hparam(
    _NO_TSA,
    'Training signal annealing: how the threshold rises to 1 above which a'
    " label counts as learnt and is skipped (FedMatch's baseline: exp). none:"
    " all labels are used (UDA's CIFAR-10 scripts).",
    choices=(_NO_TSA, *annealing.TSA_SCHEDULES),
  )
  tsa_rounds: int = hparam(
    800,
    'Rounds over which that threshold rises.',
    minimum=1,
    maximum=10**7,
    when=lambda uda: uda.tsa != _NO_TSA,
  )

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes the consistency loss (UDA, section 3.2).

    It is (1/B) sum_b 1[max q_b > beta] KL(softmax(z_b / T) || f(strong_b)),
    where z_b are the logits of the weak view and q_b = softmax(z_b), both
    without gradient.

    Args:
      networks: The client's networks.
      batch: The batch.

    Returns:
      The loss and its metrics.
    """
    examples = batch.unlabeled
    logits = examples.logits(networks.model, 'weak')
    probs = tf.nn.softmax(logits)
    # The mask sees probabilities before sharpening.
    mask = thresholds.strict_mask(probs, self.confidence_threshold)
    kept = tf.cast(mask, tf.float32) * examples.weights
    targets = sharpening.sharpened_softmax(logits, self.temperature)
    strong = examples.logits(networks.model, 'strong')
    divergences = losses.kl_divergence(targets, strong)
    metrics = diagnostics.pseudo_label_metrics(
      thresholds.pseudo_labels(probs),
      examples.labels,
      kept,
      weights=examples.weights,
    )
    # The metric is a mean over kept examples, the loss over the whole batch.
    metrics['loss_soft_pseudo_label'] = base.Mean(
      tf.reduce_sum(kept * divergences), tf.reduce_sum(kept)
    )
    loss = losses.masked_mean(kept * divergences, examples.weights)
    return self.unlabeled_loss_weight * loss, metrics

  def labeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes the cross-entropy of labels not yet learnt (section 3.3)."""
    # The same method serves clients and server.
    if self.tsa == _NO_TSA:
      return super().labeled_loss(networks, batch)
    examples = batch.labeled
    logits = examples.logits(networks.model, 'weak')
    threshold = annealing.tsa_threshold(
      batch.time.progress(self.tsa_rounds), self.tsa, logits.shape[-1]
    )
    # Server pre-training, before round 1, uses all labels.
    threshold = tf.where(batch.time.round_num >= 1, threshold, 1.0)
    loss, kept = annealing.tsa_cross_entropy(
      examples.labels, logits, threshold, examples.weights
    )
    # Metrics cover all examples, skipped ones included.
    _, metrics = base.cross_entropy_loss(logits, examples)
    metrics['tsa_ratio'] = base.Mean(tf.reduce_sum(kept), examples.size)
    return loss, metrics
