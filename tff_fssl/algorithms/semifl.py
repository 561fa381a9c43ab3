"""SemiFL: alternate training with global pseudo-labels. Labels at the server.

Diao, Ding and Tarokh, "SemiFL: Semi-Supervised Federated Learning for Unlabeled
Clients with Alternate Training", NeurIPS 2022; details from the authors' code.

In a round:
1.  The server broadcasts weights and batch norm statistics.
2.  A client makes pseudo-labels for all its examples, from one weak view, with
    the weights it received. Those whose probability reaches the threshold are
    its fix set. A client without any sends no update.
3.  For each batch of the fix set, each example gets a partner, drawn anew from
    all of the client's examples (the mix set: with their pseudo-labels, also
    unconfident ones). The loss is the cross-entropy of the strong view, plus
    lam CE(mixed, label) + (1 - lam) CE(mixed, partner's label), where mixed =
    lam weak + (1 - lam) partner's weak, and one lam ~ Beta(a, a) is drawn for
    the batch. The optimizer is SGD with gradients clipped to norm 1.
4.  The server averages, with momentum, then trains on its labels.
5.  Static batch norm gathers statistics.

Deviations from the authors' code: momenta of the optimizers start at 0 each
round (theirs persist). Statistics are gathered once a round, after step 4, over
cohort and server (theirs: before and after, over all clients). Views are those
of `--augmentation`, for SVHN, too. Theirs apply two of 15 operations, each with
a probability of 0.2 to 0.8 and at a fixed size, so that a strong view may be
black or covered by a gray square; SVHN is cropped only. Inputs are normalized
as those of all algorithms here; theirs by constants of their own.
"""

from __future__ import annotations

from tff_fssl.algorithms import semifl_hparams
from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import inference
from tff_fssl.local import objective
from tff_fssl.models import adapter
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import mixup
from tff_fssl.semisup import thresholds

_FIX, _MIX = objective.UNLABELED, 'mix'


def build_local_algorithm(
  hparams: semifl_hparams.SemiFlHparams,
  round_hparams: round_hparams_lib.RoundHparams,
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: steps 2 and 3."""

  def prepare(
    networks: algorithm_lib.Networks,
    data: algorithm_lib.ClientData,
    views: augment.Views,
  ) -> algorithm_lib.Prepared:
    probs = inference.weak_probs(
      networks.local, data, views, round_hparams.statistics_batch_size
    )
    labels = thresholds.pseudo_labels(probs)
    kept = thresholds.fixed_mask(probs, hparams.confidence_threshold)
    # Trained on, predictions that are NaN make the update NaN, which is
    # counted; left out, they would only make the fix set smaller.
    kept |= tf.reduce_any(tf.math.is_nan(probs), axis=-1)
    return algorithm_lib.Prepared(
      tf.cast(tf.where(kept)[:, 0], tf.int32),
      of_example={'labels': labels},
      ratios=diagnostics.pseudo_label_ratios(labels, data.unlabeled.y, kept),
    )

  def fix_loss(
    network: adapter.Network, batch: algorithm_lib.Batch
  ) -> objective.Loss:
    fix = batch.parts[_FIX]
    logits = network.logits(fix.views['strong'], training=True)
    entropies = losses.cross_entropy(fix.of_example['labels'], logits)
    loss = losses.masked_mean(entropies, fix.weights)
    size = tf.reduce_sum(fix.weights)
    return loss, {'loss_pseudo_label': algorithm_lib.mean_metric(loss, size)}

  def mix_loss(
    network: adapter.Network, batch: algorithm_lib.Batch
  ) -> objective.Loss:
    fix, mix = batch.parts[_FIX], batch.parts[_MIX]
    share = mixup.draw_shares([], hparams.mixup_concentration, batch.seed)
    images = mixup.mix(share, fix.views['weak'], mix.views['weak'])
    loss = mixup.mixed_cross_entropy(
      network.logits(images, training=True),
      fix.of_example['labels'],
      mix.of_example['labels'],
      share,
      fix.weights,
    )
    size = tf.reduce_sum(fix.weights)
    return loss, {'loss_mixed': algorithm_lib.mean_metric(loss, size)}

  terms = [
    objective.Term(
      fix_loss,
      ('loss_pseudo_label',),
      {_FIX: algorithm_lib.Stream({'strong': 'strong'})},
    )
  ]
  if hparams.mixup:
    weak = {'weak': 'weak'}
    streams = {
      _FIX: algorithm_lib.Stream(weak),
      _MIX: algorithm_lib.Stream(weak, partner_of=_FIX),
    }
    terms.append(objective.Term(mix_loss, ('loss_mixed',), streams))
  return objective.minimize(*terms)._replace(prepare=prepare)
