"""Hyper-parameters of `fedswitch` and its two baselines. TensorFlow-free."""

import dataclasses
from typing import ClassVar

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam
from tff_fssl.semisup import names

_DIVERGENCE = 'Divergence from uniform'
METRICS = (
  metrics.of_clients(
    'student_divergence',
    "Divergence of the student's mean prediction for a batch from the uniform"
    ' distribution, mean over batches. (The switch compares means over'
    ' clients.)',
    metrics.NATS,
    curve=metrics.Curve(_DIVERGENCE, 'student'),
  ),
  metrics.of_clients(
    'teacher_divergence',
    "The same of the teacher's predictions for weak views; `nan` in rounds in"
    ' which clients do not get the teacher.',
    metrics.NATS,
    curve=metrics.Curve(_DIVERGENCE, 'teacher', metrics.DASHED),
  ),
  metrics.of_clients(
    'labeled_by_teacher',
    'Batches whose pseudo-labels are by the teacher, among all: 1 in a teacher'
    ' round, 0 in a student round.',
    metrics.SHARE,
    curve=metrics.Curve('Labelled by the teacher'),
    figure='by teacher',
  ),
)

# Values of flags.
CLOSEST, FARTHEST, TEACHER, STUDENT = (
  'closest',
  'farthest',
  'teacher',
  'student',
)
HOLD, PROBE, ALWAYS_SEND = 'hold', 'probe', 'always_send'


@dataclasses.dataclass(frozen=True)
class TsServerHparams:
  """Hyper-parameters of TS-Server EMA."""

  _PREFIX: ClassVar[str] = 'ts_server_ema.'

  confidence_threshold: float = hparam(
    0.95,
    'A pseudo-label is used if its probability is at least this (the paper'
    ' tunes it and gives no value; this is FixMatch, table 4).',
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'lambda_u, the weight of the loss on pseudo-labels relative to the loss on'
    ' labels (the paper gives no value; this is FixMatch, table 4).',
    minimum=0,
  )
  ema_decay: float = hparam(
    0.97,
    "alpha, the share of the old teacher in the server's moving average, a"
    ' round. The paper tunes it and gives no value; 0.5^(1 / (0.03 R)) halves'
    ' what is old in 3% of R rounds: 0.89 for 200, 0.97 for 800, 0.9986 for'
    ' 16,000.',
    minimum=0,
    maximum=1,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, self._PREFIX)


_LOCAL_EMA = (
  "The same of the client's moving average, a batch; 1: the teacher stays as"
  ' it was sent. The paper has one alpha for both; at 0.999, five batches would'
  ' move the teacher by half a percent of the way to the student.'
)


@dataclasses.dataclass(frozen=True)
class TsClientHparams(TsServerHparams):
  """Hyper-parameters of TS-Client EMA."""

  _PREFIX: ClassVar[str] = 'ts_client_ema.'

  local_ema_decay: float = hparam(0.97, _LOCAL_EMA, minimum=0, maximum=1)


@dataclasses.dataclass(frozen=True)
class FedSwitchHparams(TsServerHparams):
  """Hyper-parameters of FedSwitch."""

  _PREFIX: ClassVar[str] = 'fedswitch.'

  local_ema_decay: float = hparam(
    0.97,
    _LOCAL_EMA,
    minimum=0,
    maximum=1,
    when=lambda fedswitch: fedswitch.labeler != STUDENT,
  )
  labeler: str = hparam(
    CLOSEST,
    'Who makes the pseudo-labels of a round. closest: the one whose divergence'
    ' from uniform is closer to prior_divergence (eq. 3 and text); farthest:'
    ' the other one (algorithms 1 and 2); teacher, student: always this one.',
    choices=(CLOSEST, FARTHEST, TEACHER, STUDENT),
  )
  prior_divergence: float = hparam(
    0.0,
    "beta, the divergence of clients' labels from equal shares of all C"
    ' classes, in nats: 0 for IID clients, at most log C. The paper gives no'
    ' value; the expected one of Dir(a) with 10 classes is 1.46 for a = 0.1,'
    ' 0.37 for a = 1 and 0.04 for a = 10. Labels cannot tell it: of these,'
    ' clients hold equally many of each class.',
    minimum=0,
    maximum=25,
    when=lambda fedswitch: fedswitch.switches,
  )
  student_view: str = hparam(
    'strong',
    "Of which views the student's divergence is measured. strong: those that"
    ' it learns from (section 4.2); weak: those that it labels, at the cost of'
    ' one more pass in teacher rounds. (Strong views flatten predictions.)',
    choices=('strong', 'weak'),
  )
  divergence_of: str = hparam(
    names.PROBABILITIES,
    "What a batch's divergence is taken of. probabilities: the mean"
    ' prediction; labels: the histogram of the most probable classes, which is'
    ' biased in small batches. The paper does not say which.',
    choices=(names.PROBABILITIES, names.LABELS),
  )
  teacher_probe: str = hparam(
    HOLD,
    "Where the teacher's divergence comes from while the student labels, and"
    ' clients do not get the teacher. hold: it is the last one measured; probe:'
    ' every probe_period rounds the teacher is sent and measured, while the'
    ' student goes on labelling; always_send: it is sent in each round, as in'
    ' algorithms 1 and 2, which costs what the switch saves.',
    choices=(HOLD, PROBE, ALWAYS_SEND),
    when=lambda fedswitch: fedswitch.switches,
  )
  probe_period: int = hparam(
    20,
    'Rounds from probe to probe; 20 are an epoch over 100 clients, five a'
    ' round.',
    minimum=1,
    maximum=10**6,
    when=lambda own: own.switches and own.teacher_probe == PROBE,
  )

  @property
  def switches(self) -> bool:
    """Whether divergences decide who labels; clients then send them."""
    return self.labeler in (CLOSEST, FARTHEST)

  @property
  def measuring_period(self) -> int:
    """Every how many rounds the teacher is sent, whoever labels; 0: never."""
    if not self.switches:
      return 0
    return {HOLD: 0, PROBE: self.probe_period, ALWAYS_SEND: 1}[
      self.teacher_probe
    ]
