"""SAGE: local pseudo-labels, corrected by those of the global model.

Liu et al., "Mind the Gap: Confidence Discrepancy Can Guide Federated
Semi-Supervised Learning Across Pseudo-Mismatch", CVPR 2025 (arXiv 2503.13227).
The full paper was not available. Details are from the authors' code.

In a round:
1.  The server broadcasts the model. A client trains a copy, L, and keeps
    another one, G, unchanged.
2.  For each batch, L predicts labelled, weak and strong views in one forward
    pass in training mode. G predicts the weak views as in evaluation. For an
    example, c_l and c_g are the largest probabilities of the two networks, and
    y_l and y_g their classes.
3.  Where c_l reaches the threshold, the target is lambda y_l + (1 - lambda)
    y_g. lambda falls with the discrepancy |c_l - c_g|: it is 1/2 where that is
    `half_discrepancy`. Elsewhere the target is y_g alone. An example is kept if
    c_l or c_g reaches the threshold.
4.  The loss is the KL divergence of predictions for strong views from the
    targets, summed over the kept examples and divided by the size of the whole
    batch, plus the cross-entropy of the labelled batch.
5.  The server averages. Only the model is sent.

docs/algorithms/sage.md lists the differences of paper and authors' code, and
the choices made here. Labels at the server are our addition. Clients then lack
the cross-entropy, and the server trains on its labels after averaging.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

from tff_fssl import metrics as metrics_lib
from tff_fssl.client import joint_pass
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

_GLOBAL = 'global'
# The authors' constants against zeros in discrepancies and in logarithms.
_LEAST, _TINY = 1e-6, 1e-10


@dataclasses.dataclass(frozen=True)
class Sage(base.Algorithm):
  """SAGE: local pseudo-labels, corrected by those of the global model."""

  name = 'sage'
  paper = 'Liu et al., CVPR 2025'
  unlabeled_views = base.WEAK_AND_STRONG
  norm = 'bn'
  round_defaults = {
    'client_epochs': 10,
    'client_batch_size': 256,
    'client_labeled_batch_size': 128,
    'client_learning_rate': 0.1,
    'nesterov': False,
    'weight_decay': 0.0001,
    'max_gradient_norm': 0.0,
    'server_optimizer_momentum': 0.0,
  }
  tiny = {'confidence_threshold': 0.35}
  metrics = (
    metrics_lib.client_metric(
      'loss_corrected_label',
      'KL divergence of predictions for strong views from the corrected'
      ' pseudo-labels, mean over the kept examples.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(metrics_lib.LOSS_AT_CLIENTS, 'corrected'),
      figure='loss',
    ),
    metrics_lib.client_metric(
      'local_share',
      "lambda, the local label's share of the target, mean over the examples"
      ' with a confident local prediction.',
      metrics_lib.SHARE,
      curve=metrics_lib.Curve('Share of the local label'),
      figure='local',
    ),
  )

  confidence_threshold: float = hparam(
    0.95,
    'tau, the minimum probability of a pseudo-label, local or global (value:'
    " the authors' code).",
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'lambda_u, the weight of the loss on pseudo-labels relative to the loss on'
    " labels (value: the authors' code).",
    minimum=0,
  )
  half_discrepancy: float = hparam(
    0.05,
    'The difference of the two confidences at which local and global label'
    " count equally; kappa is ln 2 divided by it (value: the authors' code).",
    minimum=1e-6,
    maximum=1e6,
    when=lambda sage: sage.fixed_share < 0,
  )
  fixed_share: float = hparam(
    -1.0,
    "An ablation: the local label's share of the target, whatever the"
    ' discrepancy is. -1: the discrepancy decides.',
    minimum=-1,
    maximum=1,
  )

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Declares the copy of the received model, which is not trained."""
    return {_GLOBAL: base.AuxiliaryNetwork()}

  def step(self, networks: base.Networks, batch: base.Batch) -> base.StepResult:
    """Differentiates the joint loss of labelled and unlabelled examples."""
    return base.minimize(self._loss, networks, batch)

  def _loss(self, networks: base.Networks, batch: base.Batch) -> base.Loss:
    """Computes the loss of a batch (steps 2 to 4)."""
    examples = batch.unlabeled
    weak, strong, *labeled = joint_pass.logits(networks.model, batch)
    # As in evaluation, by the statistics that came with the model.
    received = networks[_GLOBAL].inference_logits(examples.views['weak'])
    targets, kept, metrics = self._targets(
      tf.nn.softmax(weak), tf.nn.softmax(received), examples
    )
    divergences = _divergence(targets, tf.nn.softmax(strong))
    # The metric is a mean over kept examples, the loss over the whole batch.
    metrics['loss_corrected_label'] = base.Mean(
      tf.reduce_sum(kept * divergences), tf.reduce_sum(kept)
    )
    loss = losses.masked_mean(kept * divergences, examples.weights)
    loss *= self.unlabeled_loss_weight
    if labeled:
      entropy, more = base.cross_entropy_loss(labeled[0], batch.labeled)
      loss, metrics = loss + entropy, {**metrics, **more}
    return loss, metrics

  def _targets(
    self, local: tf.Tensor, received: tf.Tensor, examples: base.BatchExamples
  ) -> tuple[tf.Tensor, tf.Tensor, base.Metrics]:
    """Computes targets from the predictions of both models (step 3).

    Args:
      local: float32 [B, C], the probabilities of weak views by L.
      received: float32 [B, C], the probabilities of weak views by G.
      examples: The unlabelled examples.

    Returns:
      (targets float32 [B, C] without gradient, weights of the used ones float32
      [B], metrics).
    """
    is_sure = thresholds.fixed_mask(local, self.confidence_threshold)
    is_kept = is_sure | thresholds.fixed_mask(
      received, self.confidence_threshold
    )
    # Without local confidence, the global label is the whole target.
    share = tf.where(is_sure, self._local_share(local, received), 0.0)
    own, other = (
      tf.one_hot(tf.argmax(probs, -1), probs.shape[-1])
      for probs in (local, received)
    )
    targets = share[:, None] * own + (1.0 - share[:, None]) * other
    sure = tf.cast(is_sure, tf.float32) * examples.weights
    kept = tf.cast(is_kept, tf.float32) * examples.weights
    metrics = diagnostics.pseudo_label_metrics(
      thresholds.pseudo_labels(targets),
      examples.labels,
      kept,
      weights=examples.weights,
    )
    metrics['local_share'] = base.Mean(
      tf.reduce_sum(sure * share), tf.reduce_sum(sure)
    )
    return tf.stop_gradient(targets), kept, metrics

  def _local_share(self, local: tf.Tensor, received: tf.Tensor) -> tf.Tensor:
    """Computes lambda of each example: float32 [B], in [0, 1]."""
    if self.fixed_share >= 0:
      return tf.fill(tf.shape(local)[:1], self.fixed_share)
    difference = tf.reduce_max(local, -1) - tf.reduce_max(received, -1)
    discrepancy = tf.clip_by_value(tf.abs(difference) + _LEAST, _LEAST, 1.0)
    # exp(-kappa d) is 1/2 at d = half_discrepancy.
    kappa = math.log(2) / self.half_discrepancy
    return tf.clip_by_value(tf.exp(-kappa * discrepancy), _LEAST, 1.0)


def _divergence(targets: tf.Tensor, probs: tf.Tensor) -> tf.Tensor:
  """Computes KL(targets || probs) of each example as the authors' code does."""
  targets, probs = targets + _TINY, probs + _TINY
  return tf.reduce_sum(
    targets * (tf.math.log(targets) - tf.math.log(probs)), -1
  )
