"""Hyper-parameters of (FL)^2. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl.hparams import hparam

# What only concerns the second loss term has no effect without it.
_TERM = {'consistency': ('sacr', 'sam')}


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
    needs=_TERM,
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
    needs=_TERM,
  )
  rho: float = hparam(
    0.1,
    'Radius of the perturbation eps: 0.1 for CIFAR-10 and SVHN, 1.0 for'
    ' CIFAR-100 (table 4; the text of appendix C says 0.5).',
    minimum=0,
    needs=_TERM,
  )
  ascent: str = hparam(
    'asam',
    'Whether eps scales with the weights. asam: it does (paper text and code);'
    ' sam: it does not (eq. 12).',
    choices=('asam', 'sam'),
    needs=_TERM,
  )
  asam_eta: float = hparam(
    0.01,
    "eta of ASAM, added to |w| (value: the authors' code).",
    minimum=0,
    needs={**_TERM, 'ascent': ('asam',)},
  )
  temperature: float = hparam(
    1.0,
    'Divisor of the perturbed logits in the consistency term (value: the'
    " authors' code).",
    minimum=0,
    exclusive_minimum=True,
    needs={'consistency': ('sacr',)},
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

  def __post_init__(self) -> None:
    hparams.validate(self, 'fl2.')

  def without_effect(self) -> dict[str, str]:
    """Fields that change nothing, beyond what their `needs` say."""
    if self.rho:
      return {}
    return dict.fromkeys(('ascent', 'asam_eta'), f'--fl2.rho={self.rho}')

  @property
  def per_step(self) -> bool:
    """Whether each step makes its pseudo-labels; else they hold for a round."""
    return self.pseudo_labels == 'per_step'
