"""FixMatch at clients, with FedAvg or FedProx.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency
and Confidence", NeurIPS 2020.

In a round:
1.  The server broadcasts the model.
2.  For each batch, a client predicts the weak views with its current weights.
    Predictions whose probability reaches the threshold become pseudo-labels.
    The loss is the cross-entropy of the strong views with these, summed over
    the kept examples and divided by the size of the whole batch. With labels at
    the clients, the cross-entropy of a labelled batch is added.
3.  The server averages. With labels at the server, it then trains on them.

With `pseudo_labels_by=received`, the model as the client received it predicts
the weak views, in evaluation mode (global pseudo-labels, GPL, in SAGE's and
ProxyFL's tables; the default is their LPL).

Deviations: batch norm sees weak, strong and labelled views as separate batches,
unless `joint_batch` is set (FixMatch interleaves them on its accelerators).
There is no moving average of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from tff_fssl.client import joint_pass
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.semisup import pseudo_labels

_LOCAL, _RECEIVED = 'local', 'received'


@dataclasses.dataclass(frozen=True)
class FixMatch(base.Algorithm):
  """FixMatch at clients, with FedAvg or FedProx."""

  name = 'fixmatch'
  paper = 'Sohn et al., NeurIPS 2020'
  # Clients draw unlabelled examples because these views are declared.
  unlabeled_views = base.WEAK_AND_STRONG

  confidence_threshold: float = hparam(
    0.95,
    'Minimum probability of a pseudo-label (FixMatch, table 4).',
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'lambda_u, the weight of the loss on pseudo-labels relative to the loss on'
    ' labels (FixMatch, table 4).',
    minimum=0,
  )

  pseudo_labels_by: str = hparam(
    _LOCAL,
    "The model that predicts weak views. local: the client's current one (LPL);"
    ' received: the one that it received, in evaluation mode (GPL).',
    choices=(_LOCAL, _RECEIVED),
  )
  joint_batch: bool = hparam(
    False,
    'Predict weak, strong and labelled views in one pass, so that batch norm'
    ' sees them together.',
  )

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Declares the copy of the received model, if it makes pseudo-labels."""
    is_needed = self.pseudo_labels_by == _RECEIVED
    return {_RECEIVED: base.AuxiliaryNetwork()} if is_needed else {}

  def step(self, networks: base.Networks, batch: base.Batch) -> base.StepResult:
    """Differentiates both losses, or the joint one."""
    if self.joint_batch and base.UNLABELED in batch.streams:
      return base.minimize(self._joint_loss, networks, batch)
    return super().step(networks, batch)

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes the cross-entropy of strong views with pseudo-labels (eq. 4)."""
    examples = batch.unlabeled
    if self.pseudo_labels_by == _RECEIVED:
      weak = networks[_RECEIVED].inference_logits(examples.views['weak'])
    else:
      weak = examples.logits(networks.model, 'weak')
    return self._loss(weak, examples.logits(networks.model, 'strong'), examples)

  def _joint_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes the loss of a batch whose views are predicted in one pass."""
    weak, strong, *labeled = joint_pass.logits(networks.model, batch)
    examples = batch.unlabeled
    if self.pseudo_labels_by == _RECEIVED:
      weak = networks[_RECEIVED].inference_logits(examples.views['weak'])
    loss, metrics = self._loss(weak, strong, examples)
    if labeled:
      entropy, more = base.cross_entropy_loss(labeled[0], batch.labeled)
      loss, metrics = loss + entropy, {**metrics, **more}
    return loss, metrics

  def _loss(
    self, weak: tf.Tensor, strong: tf.Tensor, examples: base.BatchExamples
  ) -> base.Loss:
    """Computes the weighted loss of strong views, from logits of both views."""
    # No gradient flows through pseudo-labels.
    loss, metrics = pseudo_labels.loss(
      tf.nn.softmax(weak),
      strong,
      examples.labels,
      examples.weights,
      self.confidence_threshold,
    )
    return self.unlabeled_loss_weight * loss, metrics
