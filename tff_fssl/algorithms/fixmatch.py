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

Deviations: batch norm sees weak, strong and labelled views as separate batches
(FixMatch interleaves them on its accelerators). There is no moving average of
the weights.
"""

from __future__ import annotations

import dataclasses

from tff_fssl.algorithms import base
from tff_fssl.hparams import hparam
from tff_fssl.lazy import tf
from tff_fssl.semisup import pseudo_labels


@dataclasses.dataclass(frozen=True)
class FixMatch(base.Algorithm):
  """FixMatch at clients, with FedAvg or FedProx."""

  name = 'fixmatch'
  paper = 'Sohn et al., NeurIPS 2020'
  # Clients draw unlabelled examples because these views are declared.
  unlabeled_views = base.WEAK_AND_STRONG
  compute = base.Compute(
    base.Passes(2, 1),
    authors=base.Passes(2, 2),
    note=(
      "The authors' code (google-research) differentiates one pass over all"
      ' views, the weak ones included, whose gradients are 0.'
    ),
  )

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

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes the cross-entropy of strong views with pseudo-labels (eq. 4)."""
    examples = batch.unlabeled
    # No gradient flows through pseudo-labels.
    probs = tf.nn.softmax(examples.logits(networks.model, 'weak'))
    logits = examples.logits(networks.model, 'strong')
    loss, metrics = pseudo_labels.loss(
      probs,
      logits,
      examples.labels,
      examples.weights,
      self.confidence_threshold,
    )
    return self.unlabeled_loss_weight * loss, metrics
