"""Hyper-parameters of `uda`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam
from tff_fssl.semisup import names

METRICS = (
  metrics.of_clients(
    'loss_soft_pseudo_label',
    'The Kullback-Leibler divergence from sharpened predictions for weak views'
    ' to predictions for strong views, mean over the examples that are kept.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'soft ones'),
    figure='loss',
  ),
  metrics.of_clients(
    'tsa_ratio',
    'With labels at the clients: labelled examples that training signal'
    ' annealing leaves in, among all.',
    metrics.SHARE,
  ),
  metrics.Metric(
    'finalizer/server_tsa_ratio',
    'With labels at the server: the same there. `server_loss_labeled` and'
    ' `server_labeled_accuracy` are over all.',
    metrics.SHARE,
  ),
)


@dataclasses.dataclass(frozen=True)
class UdaHparams:
  """Hyper-parameters of UDA at clients."""

  confidence_threshold: float = hparam(
    0.8,
    "An example is used if its largest probability exceeds this (value: UDA's"
    ' CIFAR-10 scripts).',
    minimum=0,
    maximum=1,
  )
  temperature: float = hparam(
    0.4,
    "T, the divisor of the logits that become targets (value: UDA's CIFAR-10"
    ' scripts).',
    minimum=1e-6,
    maximum=1e6,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'The weight of the consistency loss relative to the loss on labels (UDA).',
    minimum=0,
  )
  tsa: str = hparam(
    names.EXP,
    'Training signal annealing: how the threshold above which a label counts as'
    " learned, and is left out, rises to 1 (FedMatch's baseline: exp). none:"
    ' all labels are used.',
    choices=('none', *names.TSA_SCHEDULES),
  )
  tsa_rounds: int = hparam(
    800,
    'Rounds over which that threshold rises.',
    minimum=1,
    maximum=10**7,
    when=lambda uda: uda.tsa in names.TSA_SCHEDULES,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'uda.')
