"""Hyper-parameters of `fedcon`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam

METRICS = (
  metrics.of_clients(
    'loss_similarity',
    'D, minus the cosine between the prediction from one view and the target of'
    ' the other one, mean over both directions: from 1 to -1.',
    better=metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'similarity'),
    figure='loss',
  ),
  metrics.of_clients(
    'feature_deviation',
    'Standard deviation of features over the examples of a batch, after these'
    ' were scaled to length 1, times the square root of their number: 1 if they'
    ' point everywhere, 0 if the backbone has collapsed.',
    better=metrics.HIGHER,
    curve=metrics.Curve('Spread of features'),
    figure='spread',
  ),
  metrics.Metric(
    'finalizer/server_loss_consistency',
    'Divergence of the online predictions from those of the target for the'
    ' other view, on labelled examples, before it is weighted.',
    metrics.NATS,
    metrics.LOWER,
  ),
)

# Values of flags.
NONE, TABLE = 'none', 'table'
EMA, ONLINE = 'ema', 'online'


@dataclasses.dataclass(frozen=True)
class FedConHparams:
  """Hyper-parameters of FedCon."""

  hidden_size: int = hparam(
    512,
    "Width of the projector's hidden layer. The authors' code has 12,288, which"
    ' makes 100.7 million weights of it for their network for CIFAR-10, 89'
    ' times the backbone.',
    minimum=1,
    maximum=2**16,
  )
  client_state: str = hparam(
    NONE,
    'What a client keeps from round to round. none: nothing; its target starts'
    ' as the backbone that it receives, its projector from initial weights that'
    ' all clients share. table: target and projector, by its identity, as the'
    ' paper has it.',
    choices=(NONE, TABLE),
  )
  target_decay: float = hparam(
    0.999,
    "The share of the old target in a client's moving average, a batch (value:"
    " the authors' code).",
    minimum=0,
    maximum=1,
  )
  server_consistency_weight: float = hparam(
    1.0,
    "The weight of the consistency of two views in the server's loss, after the"
    " ramp (value: the authors' code).",
    minimum=0,
  )
  ramp_rounds: int = hparam(
    100,
    'Rounds over which that weight rises, as exp(-5 (1 - t)^2), t from 0 to 1;'
    " 0: it does not rise (value: the authors' code).",
    minimum=0,
    maximum=10**7,
  )
  server_target: str = hparam(
    EMA,
    "Which network's predictions are the target of that consistency. ema: the"
    ' moving average of the trained one; online: the trained one itself'
    " (the authors' code, in which the moving average is never used).",
    choices=(EMA, ONLINE),
  )

  server_target_decay: float = hparam(
    0.9996,
    "tau, the least share of the old target in the server's moving average, a"
    ' batch. It rises to 1 by round 20, falls to this again by round 40, and'
    " so on (the authors' code, where the average has no effect). With few"
    ' batches a round, the default leaves the target near the initial weights.',
    minimum=0,
    maximum=1,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, 'fedcon.')

  @property
  def keeps_state(self) -> bool:
    """Whether clients keep networks of their own."""
    return self.client_state == TABLE
