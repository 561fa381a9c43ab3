"""Hyper-parameters of `semifl`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam

METRICS = (
  metrics.of_clients(
    'loss_mixed',
    "Cross-entropy of mixed images (each a share of a kept example's weak view,"
    " the rest its partner's) with both pseudo-labels, in the same shares, mean"
    ' over kept examples.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'mixed', metrics.DOTTED),
  ),
)


@dataclasses.dataclass(frozen=True)
class SemiFlHparams:
  """Hyper-parameters of SemiFL."""

  confidence_threshold: float = hparam(
    0.95,
    'A pseudo-label joins the fix set if its probability is at least this'
    " (value: the authors' code).",
    minimum=0,
    maximum=1,
  )
  mixup: bool = hparam(
    True,
    'Whether to add the loss on mixed examples; if false, the client step is'
    " that of (FL)^2's FixMatch baseline.",
  )
  mixup_concentration: float = hparam(
    0.75,
    'a of Beta(a, a), from which the share of mixup is drawn (value: the'
    " authors' code).",
    minimum=0,
    maximum=1e6,
    when=lambda semifl: semifl.mixup,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'semifl.')
