"""SemiFL: alternate training with global pseudo-labels. Labels at the server.

Diao, Ding and Tarokh, "SemiFL: Semi-Supervised Federated Learning for Unlabeled
Clients with Alternate Training", NeurIPS 2022. Details are from the authors'
code.

In a round:
1.  The server broadcasts weights and batch norm statistics.
2.  A client predicts one weak view of each of its examples with the received
    weights. Examples with a probability that reaches the threshold are its fix
    set. A client with an empty fix set sends no update.
3.  For each batch of the fix set, each example gets a partner, drawn anew from
    all of the client's examples (the mix set, which includes unconfident
    ones). The loss is the cross-entropy of the strong view, plus lam CE(mixed,
    label) + (1 - lam) CE(mixed, partner's label) with mixed = lam weak + (1 -
    lam) partner's weak. One lam ~ Beta(a, a) is drawn for the batch.
4.  The server averages, with momentum, then trains on its labels.
5.  Static batch norm gathers statistics.

Deviations from the authors' code:
*   Momenta of the optimizers start at 0 each round. The authors' momenta
    persist.
*   Statistics are gathered once a round, after step 4, over cohort and server.
    The authors gather them before and after, over all clients.
*   Views are those of `--augmentation`, for SVHN, too. The authors apply two of
    15 operations, each with a probability of 0.2 to 0.8 and at a fixed size, so
    that a strong view may be black or covered by a gray square. They only crop
    SVHN.
*   Inputs are normalized as for all algorithms here. The authors use constants
    of their own.
"""

from __future__ import annotations

import dataclasses

from tff_fssl import metrics as metrics_lib
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import mixup
from tff_fssl.semisup import thresholds

_MIX = 'mix'


@dataclasses.dataclass(frozen=True)
class SemiFl(base.Algorithm):
  """SemiFL: global pseudo-labels, mixup, alternate training."""

  name = 'semifl'
  paper = 'Diao et al., NeurIPS 2022'
  scenarios = (base.LABELS_AT_SERVER,)
  capabilities = base.Capabilities(
    without_mixing='mixup_concentration=0',
  )
  round_defaults = {
    'client_batch_size': 10,
    'learning_rate_schedule': 'cosine',
    'num_pretraining_rounds': 0,
  }
  tiny = {'confidence_threshold': 0.3}
  metrics = (
    metrics_lib.client_metric(
      'loss_mixed',
      "Cross-entropy of mixed images (each a share of a kept example's weak"
      " view, the rest its partner's) with both pseudo-labels, in the same"
      ' shares, mean over kept examples.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(
        metrics_lib.LOSS_AT_CLIENTS, 'mixed', metrics_lib.DOTTED
      ),
    ),
  )

  confidence_threshold: float = hparam(
    0.95,
    'Minimum probability of a pseudo-label in the fix set (value: the'
    " authors' code).",
    minimum=0,
    maximum=1,
  )
  mixup_concentration: float = hparam(
    0.75,
    'a of Beta(a, a), from which the share of mixup is drawn (value: the'
    " authors' code). 0: no loss on mixed examples, so that the client step is"
    " that of (FL)^2's FixMatch baseline.",
    minimum=0,
    maximum=1e6,
  )

  def streams(self) -> dict[str, base.Stream]:
    """Pairs each example of the fix set with one of the mix set."""
    if not self.mixup_concentration:
      return {base.UNLABELED: base.Stream({'strong': 'strong'})}
    return {
      base.UNLABELED: base.Stream({'strong': 'strong', 'weak': 'weak'}),
      # Partners come from all examples, not from the fix set alone.
      _MIX: base.Stream(base.WEAK, partner_of=base.UNLABELED),
    }

  def prepare(self, client: base.Client) -> base.Prepared:
    """Computes pseudo-labels by the global model, and the fix set (step 2)."""
    probs = client.predict(self.round.statistics_batch_size)
    labels = thresholds.pseudo_labels(probs)
    kept = thresholds.fixed_mask(probs, self.confidence_threshold)
    # An example with NaN is kept, so that the update becomes NaN and the client
    # is counted. Otherwise it would be dropped silently.
    kept |= tf.reduce_any(tf.math.is_nan(probs), axis=-1)
    return base.Prepared(
      selected=tf.cast(tf.where(kept)[:, 0], tf.int32),
      per_example={'labels': labels},
      metrics=diagnostics.pseudo_label_metrics(
        labels, client.unlabeled.y, kept
      ),
    )

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Adds the losses of the fix set and of mixed examples (step 3)."""
    loss, metrics = self._fix_loss(networks, batch)
    if self.mixup_concentration:
      mix_loss, mix_metrics = self._mix_loss(networks, batch)
      loss, metrics = loss + mix_loss, {**metrics, **mix_metrics}
    return loss, metrics

  def _fix_loss(self, networks: base.Networks, batch: base.Batch) -> base.Loss:
    """Computes the cross-entropy of strong views with pseudo-labels."""
    fix = batch.unlabeled
    logits = networks.model.logits(fix.views['strong'], training=True)
    entropies = losses.cross_entropy(fix.per_example['labels'], logits)
    loss = losses.masked_mean(entropies, fix.weights)
    return loss, {'loss_pseudo_label': base.Mean.weighted(loss, fix.size)}

  def _mix_loss(self, networks: base.Networks, batch: base.Batch) -> base.Loss:
    """Computes the cross-entropy of mixed weak views with both labels."""
    fix, mix = batch.unlabeled, batch.streams[_MIX]
    # One share for the whole batch.
    share = mixup.draw_shares([], self.mixup_concentration, batch.seed)
    images = mixup.mix(share, fix.views['weak'], mix.views['weak'])
    loss = mixup.mixed_cross_entropy(
      networks.model.logits(images, training=True),
      fix.per_example['labels'],
      mix.per_example['labels'],
      share,
      fix.weights,
    )
    return loss, {'loss_mixed': base.Mean.weighted(loss, fix.size)}
