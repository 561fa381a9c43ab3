"""Hyper-parameters of (FL)^2. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam

_CONFIDENT = 'confident'
METRICS = (
  metrics.of_clients(
    'loss_consistency',
    "(FL)^2's L_cs, eq. 13: the Kullback-Leibler divergence between predictions"
    ' at W and at W + eps, mean over the examples that are trained on; those'
    ' that do not reach the fixed threshold count as 0.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'consistency', metrics.DOTTED),
  ),
  metrics.of_clients(
    'loss_perturbed',
    'With `--fl2.consistency=sam`: cross-entropy at W + eps, mean over the'
    ' examples that it is taken over.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'at W + eps', metrics.DOTTED),
  ),
  metrics.of_clients(
    'gradient_norm_pseudo_label',
    'With `--fl2.gradient_norms`: the gradient of the weighted loss on'
    ' pseudo-labels, before clipping, mean over steps.',
    'norm',
  ),
  metrics.of_clients(
    'gradient_norm_consistency',
    'The same of the weighted consistency loss.',
    'norm',
  ),
  metrics.of_clients(
    'gradient_norm_perturbed',
    'The same of the weighted loss at W + eps.',
    'norm',
  ),
  metrics.of_clients(
    'high_confidence_ratio',
    'Kept pseudo-labels that reach `--fl2.confidence_threshold`, among all'
    ' pseudo-labels.',
    metrics.SHARE,
    curve=metrics.Curve(metrics.PSEUDO_LABELS, _CONFIDENT, metrics.DASHED),
    compared=_CONFIDENT,
  ),
  metrics.of_clients(
    'high_confidence_accuracy',
    'Those that are right, among those that reach it.',
    metrics.SHARE,
    metrics.HIGHER,
    curve=metrics.Curve(
      metrics.PSEUDO_LABEL_ACCURACY, _CONFIDENT, metrics.DASHED
    ),
    compared='right among them',
  ),
  metrics.of_clients(
    'high_confidence_correct_ratio',
    'Those that are right, among all pseudo-labels.',
    metrics.SHARE,
    metrics.HIGHER,
  ),
  metrics.of_clients(
    'high_confidence_wrong_ratio',
    'Those that are wrong, among all pseudo-labels.',
    metrics.SHARE,
    metrics.LOWER,
  ),
  metrics.of_clients(
    'high_confidence_correct_to_wrong',
    'Right ones to wrong ones, among those that reach it.',
    'ratio',
    metrics.HIGHER,
  ),
  metrics.range_of_clients(
    'learning_status',
    "tau, (FL)^2, eq. 7: a client's mean confidence in its pseudo-labels; over"
    " the round's clients.",
    curve=metrics.Curve('Learning status'),
  ),
  metrics.range_of_clients(
    'lowest_class_threshold',
    "A client's lowest threshold of a class, tau(c), eq. 9, over clients. The"
    ' highest is tau. With `--fl2.adaptive_threshold=false` all are'
    ' `--fl2.confidence_threshold`.',
    curve=metrics.Curve("Lowest of a client's thresholds of classes"),
  ),
  metrics.range_of_clients(
    'mean_class_threshold',
    "A client's mean threshold over classes, over clients.",
    curve=metrics.Curve("Mean of a client's thresholds of classes"),
  ),
  metrics.range_of_clients(
    'class_threshold_...',
    'With `--fl2.class_thresholds`: the threshold of the class with the number'
    ' `...`, over clients.',
    curve=metrics.Curve('Thresholds of classes'),
  ),
)


@dataclasses.dataclass(frozen=True)
class Fl2Hparams:
  """Hyper-parameters of (FL)^2; three of them switch the rows of table 2."""

  adaptive_threshold: bool = hparam(
    True,
    "CAT: a pseudo-label is kept if it reaches its class's threshold, which"
    ' adapts to the client; if false, if it reaches confidence_threshold.',
  )
  consistency: str = hparam(
    'sacr',
    'The term added to the loss on pseudo-labels. sacr: consistency between'
    ' weights W and W + eps (paper, eq. 13); none: no term; sam: the'
    ' cross-entropy of the pseudo-labels at W + eps (SAM, figure 4).',
    choices=('sacr', 'none', 'sam'),
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
  asam_eta: float = hparam(
    0.01,
    "eta of ASAM, added to |w| (value: the authors' code).",
    minimum=0,
    when=lambda fl2: fl2.has_term and fl2.rho and fl2.ascent == 'asam',
  )
  temperature: float = hparam(
    1.0,
    'Divisor of the perturbed logits in the consistency term (value: the'
    " authors' code).",
    minimum=0,
    exclusive_minimum=True,
    when=lambda fl2: fl2.consistency == 'sacr',
  )
  pseudo_labels: str = hparam(
    'per_round',
    'When pseudo-labels are made. per_round: once, with the broadcast weights;'
    " batches then hold only kept examples (the authors' code). per_step: for"
    ' each batch of all examples, with the current weights (algorithm 1, line'
    ' 13). In both cases thresholds are computed once a round.',
    choices=('per_round', 'per_step'),
  )

  gradient_norms: bool = hparam(
    False,
    'Whether to report the mean gradient norms of the two losses, weighted as'
    ' in their sum and before clipping, as gradient_norm_pseudo_label and'
    ' gradient_norm_consistency (with sam, gradient_norm_perturbed).',
  )
  class_thresholds: bool = hparam(
    False,
    'Whether to report the threshold of each class as class_threshold_0,'
    ' class_threshold_1, ...: mean, minimum and maximum over clients.',
    when=lambda fl2: fl2.adaptive_threshold,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'fl2.')

  @property
  def has_term(self) -> bool:
    """Whether there is a second loss term."""
    return self.consistency != 'none'

  @property
  def per_step(self) -> bool:
    """Whether each step makes its pseudo-labels; else they hold for a round."""
    return self.pseudo_labels == 'per_step'
