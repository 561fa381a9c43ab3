"""Hyper-parameters of `mixmatch`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam

METRICS = (
  metrics.of_clients(
    'loss_guess',
    'Squared error between mixed guesses and predictions for mixed views, mean'
    " over the unlabelled examples' views and over classes, before its weight"
    ' and ramp.',
    '',
    metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'guesses'),
    figure='loss',
  ),
  metrics.of_clients(
    'loss_mixed_labeled',
    'With labels at the clients: cross-entropy of mixed labels with predictions'
    ' for mixed images, mean over the labelled examples.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve(
      metrics.LOSS_AT_CLIENTS, 'mixed labelled', metrics.DASHED
    ),
    figure='label loss',
  ),
)


@dataclasses.dataclass(frozen=True)
class MixMatchHparams:
  """Hyper-parameters of MixMatch at clients."""

  num_views: int = hparam(
    2,
    'A, the number of weak views from which labels are guessed (MixMatch,'
    ' section 4.1).',
    minimum=1,
    maximum=100,
  )
  temperature: float = hparam(
    0.5,
    'T of sharpening (MixMatch, section 4.1).',
    minimum=1e-6,
    maximum=1e6,
  )
  mixup_concentration: float = hparam(
    0.75,
    'alpha of Beta(alpha, alpha), from which shares of mixup are drawn'
    ' (MixMatch, section 4.1); 0: no mixing.',
    minimum=0,
    maximum=1e6,
  )
  unlabeled_loss_weight: float = hparam(
    75.0,
    'lambda_u, the weight of the squared error after the ramp (MixMatch,'
    ' section 4.2.1, for CIFAR-10).',
    minimum=0,
  )
  ramp_rounds: int = hparam(
    13,
    'Rounds over which that weight rises linearly from 0; 0: no ramp. The'
    " authors' ramp is 1/64 of training, here of 800 rounds.",
    minimum=0,
    maximum=10**7,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'mixmatch.')
