"""(FL)^2: Overcoming Few Labels in Federated Semi-Supervised Learning.

Lee, Le, Shin and Lee, NeurIPS 2024. There, the labels are at the server.

In a round:
1.  The server broadcasts weights W and batch norm statistics.
2.  A client predicts the weak view of each of its examples at W. Its learning
    status tau is the mean confidence. Its thresholds tau(c) scale tau by the
    frequency of each predicted class (CAT, eq. 7-9). It keeps the examples that
    reach the threshold of their class.
3.  For each batch of kept examples, from the strong view, a client computes
    *   L_a, their mean cross-entropy,
    *   L_p, the same over the examples that also reach the fixed threshold,
    *   eps, an ascent step on L_p (eq. 12),
    *   L_cs = KL(Q(W) || Q(W + eps)) over the same examples as L_p, with its
        gradient taken at W + eps (SACR, eq. 13).
    It descends along the gradients of w_a L_a at W and of w_cs L_cs (eq. 14).
4.  The server averages with weights (1 - tau) (LSAA, eq. 15) and with momentum,
    then trains on its labels.
5.  Static batch norm gathers statistics.

One forward pass at W serves L_a, L_p and Q, so that a step costs eight
forward-equivalents. The authors' code spends eleven. A step costs six if all
kept examples of a batch reach the fixed threshold, since L_p is then L_a. This
is always so without CAT. A step costs three if no example reaches it, since eps
and L_cs are then 0.

With labels at the clients, which the paper does not have, the cross-entropy of
a labelled batch is added to the loss.

Deviations from the authors' code: The momenta of the optimizers start at 0 each
round. The authors' momenta persist across rounds, and are stale at clients.
Statistics are pooled over cohort and server. The authors pool over all clients.
After pre-training, statistics come only from the server here, since no client
has taken part. Deviations from the paper: server pre-training and gradient
clipping, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses

from tff_fssl import metrics as metrics_lib
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import sharpness
from tff_fssl.semisup import thresholds

# Values of --fl2.consistency and --fl2.pseudo_labels.
SACR, SAM, NONE = 'sacr', 'sam', 'none'
PER_ROUND, PER_STEP = 'per_round', 'per_step'
# eta of ASAM, added to |w|, as in the authors' code.
_ASAM_ETA = 0.01


_METRICS = (
  metrics_lib.client_metric(
    'loss_consistency',
    "(FL)^2's L_cs, eq. 13: the Kullback-Leibler divergence between predictions"
    ' at W and at W + eps, mean over the examples that are trained on. Examples'
    ' below the fixed threshold count as 0.',
    metrics_lib.NATS,
    metrics_lib.LOWER,
    curve=metrics_lib.Curve(
      metrics_lib.LOSS_AT_CLIENTS, 'consistency', metrics_lib.DOTTED
    ),
  ),
  metrics_lib.client_metric(
    'loss_perturbed',
    'With `--fl2.consistency=sam`: cross-entropy at W + eps, mean over the'
    ' examples that it is taken over.',
    metrics_lib.NATS,
    metrics_lib.LOWER,
    curve=metrics_lib.Curve(
      metrics_lib.LOSS_AT_CLIENTS, 'at W + eps', metrics_lib.DOTTED
    ),
  ),
  metrics_lib.client_metric(
    'gradient_norm_{pseudo_label,consistency,perturbed}',
    'With `--fl2.diagnostics`: the norm of the gradient of one weighted loss'
    ' before clipping, mean over steps.',
    'norm',
  ),
  metrics_lib.client_metric(
    'high_confidence_ratio',
    'Share of pseudo-labels that are kept and reach'
    ' `--fl2.confidence_threshold`.',
    metrics_lib.SHARE,
    curve=metrics_lib.Curve(
      metrics_lib.PSEUDO_LABELS, 'confident', metrics_lib.DASHED
    ),
    compared='confident rate',
  ),
  metrics_lib.client_metric(
    'high_confidence_accuracy',
    'Accuracy of these pseudo-labels.',
    metrics_lib.SHARE,
    metrics_lib.HIGHER,
    curve=metrics_lib.Curve(
      metrics_lib.PSEUDO_LABEL_ACCURACY, 'confident', metrics_lib.DASHED
    ),
    compared='confident accuracy',
  ),
  metrics_lib.client_metric(
    'high_confidence_{correct_ratio,wrong_ratio}',
    'Share of pseudo-labels that are confident and correct, or wrong.',
    metrics_lib.SHARE,
  ),
  metrics_lib.client_metric(
    'high_confidence_correct_to_wrong',
    'Correct to wrong ones, among confident pseudo-labels.',
    'ratio',
    metrics_lib.HIGHER,
  ),
  metrics_lib.client_range(
    'learning_status',
    "tau, (FL)^2, eq. 7: a client's mean confidence in its pseudo-labels.",
    curve=metrics_lib.Curve('Learning status'),
  ),
  metrics_lib.client_range(
    'lowest_class_threshold',
    "A client's lowest threshold of a class, tau(c), eq. 9. The highest is tau."
    ' With `--fl2.adaptive_threshold=false` all are'
    ' `--fl2.confidence_threshold`.',
    curve=metrics_lib.Curve("Lowest of a client's class thresholds"),
  ),
  metrics_lib.client_range(
    'mean_class_threshold',
    "A client's mean threshold over classes.",
    curve=metrics_lib.Curve("Mean of a client's class thresholds"),
  ),
  metrics_lib.client_range(
    'class_threshold_...',
    'With `--fl2.diagnostics`: the threshold of the class with the number'
    ' `...`.',
    curve=metrics_lib.Curve('Class thresholds'),
  ),
)


@dataclasses.dataclass(frozen=True)
class Fl2(base.Algorithm):
  """(FL)^2: adaptive thresholds, sharpness-aware consistency, LSAA.

  Three hyper-parameters switch the rows of the paper's table 2:
  `adaptive_threshold`, `consistency` and `learning_status_aggregation`.
  """

  name = 'fl2'
  paper = 'Lee et al., NeurIPS 2024'
  capabilities = base.Capabilities(
    extra_uploads=('learning status (in the weight)',),
    without_own_weights='learning_status_aggregation=false',
  )
  metrics = _METRICS

  adaptive_threshold: bool = hparam(
    True,
    'CAT: a pseudo-label is kept if it reaches the threshold of its class,'
    ' which adapts to the client; if false, if it reaches'
    ' confidence_threshold.',
  )
  consistency: str = hparam(
    SACR,
    'The term added to the loss on pseudo-labels. sacr: consistency between'
    ' weights W and W + eps (paper, eq. 13); none: no term; sam: the'
    ' cross-entropy of the pseudo-labels at W + eps (SAM, figure 4).',
    choices=(SACR, NONE, SAM),
  )
  consistency_on: str = hparam(
    'confident',
    'The kept examples that the consistency term uses. confident: those that'
    ' reach confidence_threshold; all; correct: those whose pseudo-label equals'
    ' the hidden label (figure 4; a diagnostic that no deployment can run).',
    choices=('confident', 'all', 'correct'),
    when=lambda fl2: fl2.has_term,
  )
  learning_status_aggregation: bool = hparam(
    True,
    'LSAA: the weight of an update is 1 - tau, where tau is the learning status'
    ' of the client; if false, client_weighting decides.',
  )
  confidence_threshold: float = hparam(
    0.95, 'tau_f, the fixed threshold (paper, table 4).', minimum=0, maximum=1
  )
  pseudo_label_loss_weight: float = hparam(
    1.0, 'w_a, the weight of the loss on pseudo-labels (table 4).', minimum=0
  )
  consistency_weight: float = hparam(
    1.0,
    'w_cs, the weight of the consistency term (table 4).',
    minimum=0,
    when=lambda fl2: fl2.has_term,
  )
  rho: float = hparam(
    0.1,
    'Radius of the perturbation eps: 0.1 for CIFAR-10 and SVHN, 1.0 for'
    ' CIFAR-100 (table 4; the text of appendix C says 0.5).',
    minimum=0,
    when=lambda fl2: fl2.has_term,
  )
  ascent: str = hparam(
    'asam',
    'Whether eps scales with the weights. asam: it does (paper text and code);'
    ' sam: it does not (eq. 12).',
    choices=('asam', 'sam'),
    when=lambda fl2: fl2.has_term and fl2.rho,
  )
  pseudo_labels: str = hparam(
    PER_ROUND,
    'When pseudo-labels are made. per_round: once, with the broadcast weights;'
    " batches then hold only kept examples (the authors' code). per_step: for"
    ' each batch of all examples, with the current weights (algorithm 1, line'
    ' 13). In both cases thresholds are computed once a round.',
    choices=(PER_ROUND, PER_STEP),
  )
  diagnostics: bool = hparam(
    False,
    'Whether to report the mean gradient norms of the two losses, weighted as'
    ' in their sum and before clipping, as gradient_norm_pseudo_label and'
    ' gradient_norm_consistency (with sam, gradient_norm_perturbed), and with'
    ' adaptive_threshold the threshold of each class as class_threshold_0,'
    ' class_threshold_1, ...: mean, minimum and maximum over clients.',
  )

  @property
  def has_term(self) -> bool:
    """Tells whether the loss has a second term."""
    return self.consistency != NONE

  def unlabeled_stream(self) -> base.Stream:
    """Draws weak views only if each step makes its pseudo-labels."""
    if self.pseudo_labels == PER_STEP:
      return base.Stream(base.WEAK_AND_STRONG)
    return base.Stream({'strong': 'strong'})

  @property
  def sets_weights(self) -> bool:
    """Tells whether the learning status sets an update's weight (LSAA)."""
    return self.learning_status_aggregation

  def prepare(self, client: base.Client) -> base.Prepared:
    """Computes thresholds, pseudo-labels and the weight (steps 2 and 4)."""
    probs = client.predict(self.round.statistics_batch_size)
    # tau is reported and weighs the update even if thresholds are fixed.
    tau, limits = thresholds.adaptive_thresholds(probs)
    if not self.adaptive_threshold:
      limits = tf.fill(tf.shape(limits), self.confidence_threshold)
    prepared = base.Prepared(
      values={'limits': limits}, ranges=self._ranges(tau, limits)
    )
    if self.learning_status_aggregation:
      # Rounding may take a mean of probabilities above 1.
      prepared = prepared._replace(weight=tf.maximum(1.0 - tau, 0.0))
    if self.pseudo_labels == PER_STEP:
      return prepared
    labels, kept, confident = thresholds.select(
      probs, limits, self.confidence_threshold
    )
    return prepared._replace(
      selected=tf.cast(tf.where(kept)[:, 0], tf.int32),
      per_example={'labels': labels, 'confident': confident},
      metrics=diagnostics.kept_and_confident(
        labels, client.unlabeled.y, kept, confident
      ),
    )

  def unlabeled_step(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.StepResult:
    """Computes the gradient of w_a L_a + w_cs L_cs (step 3)."""
    model, examples = networks.model, batch.unlabeled
    labels, kept, confident, metrics = self._pseudo_labels(networks, batch)
    mask = {
      'confident': confident,
      'all': kept,
      'correct': tf.logical_and(kept, tf.equal(labels, examples.labels)),
    }[self.consistency_on]
    # Fillers count in no term.
    mask, kept = (
      tf.cast(m, tf.float32) * examples.weights for m in (mask, kept)
    )
    # Persistent: L_a and L_p are differentiated one after the other.
    with tf.GradientTape(persistent=True) as tape:
      logits = examples.logits(model, 'strong')
      entropies = losses.cross_entropy(labels, logits)
      loss_a = losses.masked_mean(entropies, kept)
      loss_p = losses.masked_mean(entropies, mask)
    gradients_a = model.gradients(tape, loss_a)
    gradients = [self.pseudo_label_loss_weight * g for g in gradients_a]
    # Of each loss: the mean, the number of examples, the weighted gradient.
    terms = {'pseudo_label': (loss_a, tf.reduce_sum(kept), gradients)}
    if self.consistency != NONE:
      # If all kept examples are in the mask, L_p is L_a. A function, so that
      # the backward pass is made only if some example is in the mask.
      gradients_p = lambda: tf.cond(
        tf.reduce_all(tf.equal(mask, kept)),
        lambda: gradients_a,
        lambda: model.gradients(tape, loss_p),
      )
      loss_cs, gradients_cs = self._perturbed_loss(
        networks, batch, gradients_p, labels, logits, mask
      )
      gradients_cs = [self.consistency_weight * g for g in gradients_cs]
      gradients = [a + c for a, c in zip(gradients, gradients_cs, strict=True)]
      # L_cs is a mean over the whole batch. Unconfident examples contribute 0.
      # Cross-entropy at W + eps is not a consistency loss, hence another name.
      if self.consistency == SAM:
        terms['perturbed'] = loss_cs, tf.reduce_sum(mask), gradients_cs
      else:
        terms['consistency'] = loss_cs, examples.size, gradients_cs
    for name, (loss, size, weighted) in terms.items():
      metrics[f'loss_{name}'] = base.Mean.weighted(loss, size)
      if self.diagnostics:
        norm = tf.linalg.global_norm(weighted)
        metrics[f'gradient_norm_{name}'] = base.Mean.ratio(norm, 1.0)
    return base.StepResult(gradients, metrics)

  def _pseudo_labels(
    self, networks: base.Networks, batch: base.Batch
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, base.Metrics]:
    """Returns (labels, kept, confident, metrics) of a batch."""
    examples = batch.unlabeled
    if self.pseudo_labels == PER_ROUND:
      # The batch holds kept examples only. `prepare` has reported metrics.
      confident = examples.per_example['confident']
      return (
        examples.per_example['labels'],
        tf.ones_like(confident),
        confident,
        {},
      )
    probs = tf.nn.softmax(examples.logits(networks.model, 'weak'))
    labels, kept, confident = thresholds.select(
      probs, batch.values['limits'], self.confidence_threshold
    )
    metrics = diagnostics.kept_and_confident(
      labels, examples.labels, kept, confident, examples.weights
    )
    return labels, kept, confident, metrics

  def _perturbed_loss(
    self,
    networks: base.Networks,
    batch: base.Batch,
    gradients_p: Callable[[], list[tf.Tensor]],
    labels: tf.Tensor,
    logits: tf.Tensor,
    mask: tf.Tensor,
  ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
    """Computes L_cs and its gradient at W + eps (eq. 12 and 13).

    Args:
      networks: The client's networks, at W.
      batch: The batch.
      gradients_p: Computes the gradients of L_p at W.
      labels: int32 [B], pseudo-labels.
      logits: float32 [B, C], of strong views at W.
      mask: float32 [B], the examples that count.

    Returns:
      (the loss, its gradients), all 0 if no example counts.
    """
    model = networks.model

    def loss_fn() -> tf.Tensor:
      perturbed = batch.unlabeled.logits(model, 'strong')
      if self.consistency == SAM:
        return losses.masked_mean(losses.cross_entropy(labels, perturbed), mask)
      return losses.masked_consistency(tf.nn.softmax(logits), perturbed, mask)

    # Saves the passes of L_p and L_cs if no example counts.
    result: tuple[tf.Tensor, Sequence[tf.Tensor]] = tf.cond(
      tf.reduce_any(mask > 0.0),
      lambda: sharpness.loss_and_gradients_at_ascent(
        model,
        gradients_p(),
        loss_fn,
        rho=self.rho,
        eta=_ASAM_ETA,
        adaptive=self.ascent == 'asam',
      ),
      lambda: (
        tf.constant(0.0),
        tuple(map(tf.zeros_like, model.trainable_variables)),
      ),
    )
    return result

  def _ranges(self, tau: tf.Tensor, limits: tf.Tensor) -> dict[str, tf.Tensor]:
    """Reports the learning status and thresholds, each in [0, 1]."""
    is_shown = self.diagnostics and self.adaptive_threshold
    each = tf.unstack(limits) if is_shown else []
    return {
      'learning_status': tau,
      'lowest_class_threshold': tf.reduce_min(limits),
      'mean_class_threshold': tf.reduce_mean(limits),
      **{f'class_threshold_{c}': limit for c, limit in enumerate(each)},
    }
