"""Hyper-parameters of `fixmatch`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl.hparams import hparam


@dataclasses.dataclass(frozen=True)
class FixMatchHparams:
  """Hyper-parameters of FixMatch at clients."""

  confidence_threshold: float = hparam(
    0.95,
    'A pseudo-label is used if its probability is at least this (FixMatch,'
    ' table 4).',
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'lambda_u, the weight of the loss on pseudo-labels relative to the loss on'
    ' labels (FixMatch, table 4).',
    minimum=0,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'fixmatch.')
