"""Hyper-parameters of (FL)^2. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl.hparams import hparam


@dataclasses.dataclass(frozen=True)
class Fl2Hparams:
  """Hyper-parameters of (FL)^2; table 2's rows are the three switches."""

  adaptive_threshold: bool = hparam(
    True,
    "CAT: pseudo-labels are kept by the client's own, class-wise"
    ' thresholds; without, by confidence_threshold.',
  )
  consistency: str = hparam(
    'sacr',
    'What is added to the loss on pseudo-labels. sacr: consistency'
    ' between weights W and W + eps (paper, eq. 13); none: nothing; sam: their'
    ' cross-entropy at W + eps (SAM, figure 4).',
    choices=('sacr', 'none', 'sam'),
  )
  consistency_on: str = hparam(
    'confident',
    'Which kept examples consistency is for: confident, those'
    ' that pass confidence_threshold; all; or correct, those whose hidden'
    ' label it is (figure 4; a diagnostic that no deployment can run).',
    choices=('confident', 'all', 'correct'),
  )
  learning_status_aggregation: bool = hparam(
    True, 'LSAA: updates weigh 1 - tau; without, as client_weighting says.'
  )
  confidence_threshold: float = hparam(
    0.95, 'tau_f, the fixed threshold (paper, table 4).', minimum=0, maximum=1
  )
  pseudo_label_loss_weight: float = hparam(
    1.0, 'w_a, of the loss on pseudo-labels (table 4).', minimum=0
  )
  consistency_weight: float = hparam(
    1.0, 'w_cs, of the consistency (table 4).', minimum=0
  )
  rho: float = hparam(
    0.1,
    'Radius of the perturbation: 0.1 for CIFAR-10 and SVHN, 1.0 for'
    " CIFAR-100 (table 4; appendix C's text has 0.5).",
    minimum=0,
  )
  ascent: str = hparam(
    'asam',
    'How eps scales with the weights: asam (text and code) or sam (eq. 12).',
    choices=('asam', 'sam'),
  )
  asam_eta: float = hparam(
    0.01, "eta of ASAM, added to |w| (the authors' code).", minimum=0
  )
  temperature: float = hparam(
    1.0,
    "Divides the perturbed logits in the consistency (the authors' code).",
    minimum=0,
    exclusive_minimum=True,
  )
  pseudo_labels: str = hparam(
    'per_round',
    'When they are made. per_round: once, by the broadcast'
    " weights, and batches hold kept examples only (the authors' code);"
    ' per_step: for each batch of all examples, by the weights of that moment'
    " (algorithm 1, line 13); thresholds are the round's in both.",
    choices=('per_round', 'per_step'),
  )

  gradient_norms: bool = hparam(
    False,
    "Whether metrics have the mean norms of the two losses' gradients, weighted"
    ' as in their sum, before it is clipped: gradient_norm_pseudo_label and'
    ' gradient_norm_consistency (with sam, gradient_norm_perturbed).',
  )

  def __post_init__(self):
    hparams.validate(self, 'fl2.')
