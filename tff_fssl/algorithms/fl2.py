"""(FL)^2: Overcoming Few Labels in Federated Semi-Supervised Learning.

Lee, Le, Shin and Lee, NeurIPS 2024. Labels at the server.

The round:
1.  The server broadcasts weights W and batch norm statistics.
2.  A client makes pseudo-labels of all its examples, weak view, at W; its
    learning status tau is their mean confidence, its thresholds tau(c) scale it
    by how much each class is predicted (CAT, eq. 6-9). Examples that reach
    theirs are kept.
3.  For each batch of kept examples, strong view: L_a, their mean cross-entropy;
    L_p, the same over those that also reach the fixed threshold; eps, an ascent
    step on L_p (eq. 12); L_cs = KL(Q(W) || Q(W + eps)) over the latter, its
    gradient taken at W + eps (SACR, eq. 13). The gradient of w_a L_a at W plus
    that of w_cs L_cs, clipped; SGD.
4.  The server averages with weights (1 - tau) (LSAA, eq. 14), with momentum,
    and trains on its labels.
5.  Static batch norm gathers statistics.

One forward pass at W serves L_a, L_p and Q: eight forward-equivalents a step,
where the authors' code spends eleven; three where no example of a batch reaches
the fixed threshold, since eps and L_cs are then 0.

Deviations from the authors' code: optimizers' momenta start at 0 each round
(theirs outlive it, stale at clients); statistics are pooled over cohort and
server. From the paper: server pre-training and gradient clipping, as in their
code; `RoundHparams` and `Fl2Hparams` say which readings are flags.
"""

from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import hparams as hparams_lib
from tff_fssl.algorithms import assemble
from tff_fssl.algorithms import fl2_hparams
from tff_fssl.algorithms import round_hparams as round_hparams_lib
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import inference
from tff_fssl.models import adapter
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import sharpness
from tff_fssl.semisup import thresholds

Fl2Hparams = fl2_hparams.Fl2Hparams
_RATIOS = (*diagnostics.names(), *diagnostics.names('high_confidence'))


def keep(
    hparams: Fl2Hparams, probs: tf.Tensor, of_class: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """(kept, kept and confident), both bool [N], of probs float32 [N, C]."""
  confident = thresholds.fixed_mask(probs, hparams.confidence_threshold)
  if not hparams.adaptive_threshold:
    return confident, confident
  kept = thresholds.class_mask(probs, of_class)
  return kept, tf.logical_and(kept, confident)


def _diagnose(labels, hidden, kept, confident):
  return {
      **diagnostics.pseudo_label_ratios(labels, hidden, kept),
      **diagnostics.pseudo_label_ratios(
          labels, hidden, confident, 'high_confidence'
      ),
  }


def build_prepare(hparams: Fl2Hparams, batch_size: int) -> Any:
  """Thresholds and pseudo-labels of the round."""

  def prepare(network, weights, unlabeled, views, seed):
    probs = tf.nn.softmax(
        inference.weak_logits(
            network, weights, unlabeled.x, views, seed, batch_size
        )
    )
    adaptive = thresholds.adaptive_thresholds(probs)
    kept, confident = keep(hparams, probs, adaptive.of_class)
    labels = thresholds.pseudo_labels(probs)
    prepared = algorithm_lib.Prepared(
        tf.range(tf.size(labels)),
        constants={'of_class': adaptive.of_class},
        ranges={'threshold': adaptive.learning_status},
    )
    if hparams.pseudo_labels == 'per_round':
      prepared = prepared._replace(
          selected=tf.cast(tf.where(kept)[:, 0], tf.int32),
          of_example={'labels': labels, 'confident': confident},
          ratios=_diagnose(labels, unlabeled.y, kept, confident),
      )
    if hparams.learning_status_aggregation:
      status = tf.clip_by_value(adaptive.learning_status, 0.0, 1.0)
      prepared = prepared._replace(weight=1.0 - status)
    return prepared

  return prepare


def build_step(hparams: Fl2Hparams) -> Any:
  """The gradient of w_a L_a + w_cs L_cs, as the module says."""

  def step(network, batch):
    variables = network.trainable_variables
    images, ratios = batch.views['strong'], {}
    if hparams.pseudo_labels == 'per_round':
      labels, confident = batch.of_example['labels'], batch.of_example['confident']
      kept = tf.ones_like(confident)
    else:
      probs = tf.nn.softmax(network.logits(batch.views['weak'], training=True))
      labels = thresholds.pseudo_labels(probs)
      kept, confident = keep(hparams, probs, batch.constants['of_class'])
      ratios = _diagnose(labels, batch.hidden_labels, kept, confident)
    mask = {
        'confident': confident,
        'all': kept,
        'correct': tf.logical_and(kept, tf.equal(labels, batch.hidden_labels)),
    }[hparams.consistency_on]
    mask, kept = tf.cast(mask, tf.float32), tf.cast(kept, tf.float32)

    with tf.GradientTape(persistent=True) as tape:
      logits = network.logits(images, training=True)
      entropies = losses.cross_entropy(labels, logits)
      loss_a = losses.masked_mean(entropies, kept)
      loss_p = losses.masked_mean(entropies, mask)

    gradients = [
        hparams.pseudo_label_loss_weight * g
        for g in tape.gradient(loss_a, variables)
    ]

    def at_perturbed():
      """The loss at W + eps, and its gradient there."""
      eps = sharpness.perturbation(
          variables,
          tape.gradient(loss_p, variables),
          rho=hparams.rho,
          eta=hparams.asam_eta,
          scaled=[
              hparams.ascent == 'asam' and sharpness.is_scaled(v)
              for v in variables
          ],
      )
      with network.perturbed(eps), tf.GradientTape() as perturbed_tape:
        perturbed = network.logits(images, training=True)
        if hparams.consistency == 'sacr':
          loss = losses.masked_consistency(
              tf.nn.softmax(logits), perturbed, mask, hparams.temperature
          )
        else:
          entropies = losses.cross_entropy(labels, perturbed)
          loss = losses.masked_mean(entropies, mask)
      return loss, perturbed_tape.gradient(loss, variables)

    loss_cs = tf.constant(0.0)
    if hparams.consistency != 'none':
      loss_cs, gradients_cs = tf.cond(
          tf.reduce_any(mask > 0.0),
          at_perturbed,
          lambda: (tf.constant(0.0), tuple(tf.zeros_like(v) for v in variables)),
      )
      gradients = [
          a + hparams.consistency_weight * c
          for a, c in zip(gradients, gradients_cs)
      ]
    size = tf.size(labels)
    ratios['loss_unlabeled'] = algorithm_lib.mean_metric(loss_a, size)
    ratios['loss_consistency'] = algorithm_lib.mean_metric(loss_cs, size)
    return algorithm_lib.StepResult(gradients, ratios)

  return step


def build_fl2(
    model_fn: adapter.ModelFn,
    *,
    hparams: Fl2Hparams,
    round_hparams: round_hparams_lib.RoundHparams,
    **parts: Any,
) -> tff.learning.templates.LearningProcess:
  """Builds the process; `parts` are `assemble.build_process`'s."""
  if round_hparams.scenario != round_hparams_lib.LABELS_AT_SERVER:
    raise hparams_lib.UsageError(
        f'(FL)^2 is defined for labels at the server, not for scenario='
        f'{round_hparams.scenario}; fixmatch and supervised have both'
    )
  local_algorithm = algorithm_lib.LocalAlgorithm(
      prepare=build_prepare(hparams, round_hparams.statistics_batch_size),
      step=build_step(hparams),
      step_ratios=('loss_unlabeled', 'loss_consistency')
      + (_RATIOS if hparams.pseudo_labels == 'per_step' else ()),
      views=('strong',)
      if hparams.pseudo_labels == 'per_round'
      else ('weak', 'strong'),
  )
  return assemble.build_process(
      model_fn, local_algorithm, hparams=round_hparams, **parts
  )
