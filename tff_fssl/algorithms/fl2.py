"""(FL)^2: Overcoming Few Labels in Federated Semi-Supervised Learning.

Lee, Le, Shin and Lee, NeurIPS 2024. There, the labels are at the server.

In a round:
1.  The server broadcasts weights W and batch norm statistics.
2.  A client makes pseudo-labels for all its examples, from the weak view at W.
    Its learning status tau is their mean confidence. Its thresholds tau(c)
    scale tau by how often each class is predicted (CAT, eq. 6-9). Examples that
    reach the threshold of their class are kept.
3.  For each batch of kept examples, from the strong view, a client computes
    L_a, their mean cross-entropy; L_p, the same over those that also reach the
    fixed threshold; eps, an ascent step on L_p (eq. 12); and L_cs = KL(Q(W) ||
    Q(W + eps)) over the same examples as L_p, with its gradient taken at
    W + eps (SACR, eq. 13). It adds the gradients of w_a L_a at W and of
    w_cs L_cs, clips the sum and makes a step of SGD.
4.  The server averages with weights (1 - tau) (LSAA, eq. 14) and with momentum,
    then trains on its labels.
5.  Static batch norm gathers statistics.

One forward pass at W serves L_a, L_p and Q, so that a step costs eight
forward-equivalents, where the authors' code spends eleven. It costs six if all
kept examples of a batch reach the fixed threshold (always, without CAT), since
L_p is then L_a, and three if none does, since eps and L_cs are then 0.

With labels at the clients, which the paper does not have, the cross-entropy of
a labelled batch is added to the loss; the rest of a round is the same.

Deviations from the authors' code: the momenta of the optimizers start at 0 each
round (theirs persist across rounds, and are stale at clients). Statistics are
pooled over cohort and server (theirs: over all clients). After pre-training
they come only from the server, since no client has taken part. Deviations from
the paper: server pre-training and gradient clipping, as in the authors' code.
`RoundHparams` and `Fl2Hparams` document which of these choices are flags.
"""

from __future__ import annotations

from typing import TypeAlias

from tff_fssl.algorithms import fl2_hparams
from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import inference
from tff_fssl.local import objective
from tff_fssl.models import adapter
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import sharpness
from tff_fssl.semisup import thresholds

Fl2Hparams = fl2_hparams.Fl2Hparams
Networks: TypeAlias = algorithm_lib.Networks
Batch: TypeAlias = algorithm_lib.Batch
# The second loss for each `consistency`. Cross-entropy at W + eps is not a
# consistency loss, hence the other name.
_SECOND_LOSS = {'sacr': ['consistency'], 'sam': ['perturbed'], 'none': []}


def build_prepare(
  hparams: Fl2Hparams, batch_size: int
) -> algorithm_lib.Prepare:
  """Builds `prepare`: thresholds, pseudo-labels and weight (steps 2 and 4)."""

  def prepare(
    networks: Networks, data: algorithm_lib.ClientData, views: augment.Views
  ) -> algorithm_lib.Prepared:
    probs = inference.weak_probs(networks.local, data, views, batch_size)
    fixed = hparams.confidence_threshold
    tau, of_class = thresholds.adaptive_thresholds(probs)
    if not hparams.adaptive_threshold:
      of_class = tf.fill(tf.shape(of_class), fixed)
    labels, kept, confident = thresholds.select(probs, of_class, fixed)
    prepared = algorithm_lib.Prepared(
      tf.range(tf.size(labels)),
      constants={'of_class': of_class},
      ranges=diagnostics.of_thresholds(tau, of_class, hparams.class_thresholds),
    )
    if not hparams.per_step:
      prepared = prepared._replace(
        selected=tf.cast(tf.where(kept)[:, 0], tf.int32),
        of_example={'labels': labels, 'confident': confident},
        ratios=diagnostics.kept_and_confident(
          labels, data.unlabeled.y, kept, confident
        ),
      )
    if hparams.learning_status_aggregation:
      prepared = prepared._replace(weight=tf.maximum(1.0 - tau, 0.0))
    return prepared

  return prepare


def _targets(
  hparams: Fl2Hparams, network: adapter.Network, batch: Batch
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, dict[str, algorithm_lib.Ratio]]:
  """(labels, kept, confident, metrics) of a batch."""
  part = batch.parts[objective.UNLABELED]
  if not hparams.per_step:
    confident = part.of_example['confident']
    return part.of_example['labels'], tf.ones_like(confident), confident, {}
  probs = tf.nn.softmax(objective.training_logits(network, part, 'weak'))
  labels, kept, confident = thresholds.select(
    probs, batch.constants['of_class'], hparams.confidence_threshold
  )
  ratios = diagnostics.kept_and_confident(
    labels, part.labels, kept, confident, part.weights
  )
  return labels, kept, confident, ratios


def step_ratios(hparams: Fl2Hparams) -> tuple[str, ...]:
  """The names of the metrics that a step returns."""
  kinds = ('loss', 'gradient_norm') if hparams.gradient_norms else ('loss',)
  terms = ['pseudo_label', *_SECOND_LOSS[hparams.consistency]]
  names = tuple(f'{kind}_{term}' for kind in kinds for term in terms)
  return names + (diagnostics.KEPT_AND_CONFIDENT if hparams.per_step else ())


def build_step(hparams: Fl2Hparams) -> algorithm_lib.Step:
  """Builds `step`: the gradient of w_a L_a + w_cs L_cs (step 3)."""

  def step(networks: Networks, batch: Batch) -> algorithm_lib.StepResult:
    network, part = networks.local, batch.parts[objective.UNLABELED]
    variables, images = network.trainable_variables, part.views['strong']
    labels, kept, confident, ratios = _targets(hparams, network, batch)
    mask = {
      'confident': confident,
      'all': kept,
      'correct': tf.logical_and(kept, tf.equal(labels, part.labels)),
    }[hparams.consistency_on]
    mask, kept = (tf.cast(m, tf.float32) * part.weights for m in (mask, kept))

    with tf.GradientTape(persistent=True) as tape:
      logits = network.logits(images, training=True, weights=part.weights)
      entropies = losses.cross_entropy(labels, logits)
      loss_a = losses.masked_mean(entropies, kept)
      loss_p = losses.masked_mean(entropies, mask)
    gradients_a = network.gradients(tape, loss_a)
    gradients = [hparams.pseudo_label_loss_weight * g for g in gradients_a]
    gradients_p = lambda: network.gradients(tape, loss_p)
    # Where all kept examples are in the mask, L_p is L_a.
    same = tf.reduce_all(tf.equal(mask, kept))

    def loss_at_perturbed() -> tf.Tensor:
      perturbed = network.logits(images, training=True, weights=part.weights)
      if hparams.consistency == 'sam':
        return losses.masked_mean(losses.cross_entropy(labels, perturbed), mask)
      return losses.masked_consistency(
        tf.nn.softmax(logits), perturbed, mask, hparams.temperature
      )

    # For each loss: (mean, number of examples, weighted gradient).
    terms = {'pseudo_label': (loss_a, tf.reduce_sum(kept), gradients)}
    if hparams.consistency != 'none':
      loss_cs, gradients_cs = tf.cond(
        tf.reduce_any(mask > 0.0),
        lambda: sharpness.loss_and_gradients_at_ascent(
          network,
          tf.cond(same, lambda: gradients_a, gradients_p),
          loss_at_perturbed,
          rho=hparams.rho,
          eta=hparams.asam_eta,
          adaptive=hparams.ascent == 'asam',
        ),
        lambda: (tf.constant(0.0), tuple(map(tf.zeros_like, variables))),
      )
      gradients_cs = [hparams.consistency_weight * g for g in gradients_cs]
      gradients = [a + c for a, c in zip(gradients, gradients_cs)]
      # L_cs is a mean over the whole batch; unconfident examples contribute 0.
      (name,) = _SECOND_LOSS[hparams.consistency]
      size = tf.reduce_sum(mask) if name == 'perturbed' else tf.size(labels)
      terms[name] = loss_cs, size, gradients_cs
    for name, (loss, size, of_loss) in terms.items():
      ratios[f'loss_{name}'] = algorithm_lib.mean_metric(loss, size)
      if hparams.gradient_norms:
        norm = tf.linalg.global_norm(of_loss)
        ratios[f'gradient_norm_{name}'] = algorithm_lib.ratio(norm, 1.0)
    return algorithm_lib.StepResult(gradients, ratios)

  return step


def build_local_algorithm(
  hparams: Fl2Hparams, round_hparams: round_hparams_lib.RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: steps 2 and 3."""
  views = ('weak', 'strong') if hparams.per_step else ('strong',)
  local = algorithm_lib.LocalAlgorithm(
    prepare=build_prepare(hparams, round_hparams.statistics_batch_size),
    steps=(build_step(hparams),),
    step_ratios=step_ratios(hparams),
    streams={objective.UNLABELED: algorithm_lib.Stream({v: v for v in views})},
    weighs=hparams.learning_status_aggregation,
  )
  if not round_hparams.labels_at_clients:
    return local
  return objective.plus(local, objective.supervised())
