"""Hyper-parameters of `fedmatch`. TensorFlow-free."""

import dataclasses
from typing import ClassVar

from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.hparams import hparam
from tff_fssl.semisup import names

_TRAVELS = 'What travels (% of one dense model)'
METRICS = (
  metrics.of_clients(
    'loss_helpers',
    'Kullback-Leibler divergence of predictions from those of helpers, mean'
    ' over confident examples and helpers; `nan` without helpers.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve(metrics.LOSS_AT_CLIENTS, 'consistency', metrics.DOTTED),
  ),
  metrics.of_clients(
    'unmasked_cross_entropy',
    'Cross-entropy of strong views with the most probable classes of the'
    ' examples as they are, confident or not, mean over examples. With labels'
    " at the server, it drives the clients' learning rates.",
    metrics.NATS,
    metrics.LOWER,
  ),
  metrics.of_clients(
    'helped_clients',
    'Clients that had helpers, among all.',
    metrics.SHARE,
    curve=metrics.Curve('Clients with helpers'),
  ),
  metrics.of_clients(
    'percent_down',
    'Elements that a client is sent as differences from what it has, helpers'
    ' included, in % of the elements of one dense model (sigma or psi); mean'
    ' over clients. As in the paper, indices do not count.',
    metrics.PERCENT,
    metrics.LOWER,
    curve=metrics.Curve(_TRAVELS, 'to clients'),
    compared='down (% of model)',
  ),
  metrics.of_clients(
    'percent_up',
    'The same of what a client sends.',
    metrics.PERCENT,
    metrics.LOWER,
    curve=metrics.Curve(_TRAVELS, 'from clients', metrics.DASHED),
    compared='up (% of model)',
  ),
  metrics.of_clients(
    'psi_distance',
    "L2 norm of sigma - psi over that of sigma, of clients' uploads; mean over"
    ' clients. 1 - psi_factor at the start; 0 where psi is a copy of sigma.',
    'ratio',
    curve=metrics.Curve('Distance of psi from sigma'),
  ),
  metrics.of_clients(
    'learning_rate_factor',
    "Factor of the clients' learning rates; mean over clients.",
    'ratio',
  ),
)

CLIENTS, PAST = 'clients', 'past'
ONE_ROUND, INTERVAL = 'one_round', 'interval'
APPLIED, COUNTED, NONE = 'applied', 'counted', 'none'


@dataclasses.dataclass(frozen=True)
class FedMatchHparams:
  """Hyper-parameters of FedMatch."""

  _PREFIX: ClassVar[str] = 'fedmatch.'

  confidence_threshold: float = hparam(
    0.85,
    'tau: an unlabelled example is learnt from if the local model gives some'
    ' class at least this probability (paper; code: 0.75).',
    minimum=0,
    maximum=1,
  )
  labeled_loss_weight: float = hparam(
    10.0, 'lambda_s, the weight of the loss on labels.', minimum=0
  )
  pseudo_label_weight: float = hparam(
    0.01,
    'lambda_a, the weight of the loss on pseudo-labels (lambda_ICCS).',
    minimum=0,
  )
  consistency_weight: float = hparam(
    0.01,
    'lambda_i, the weight of the divergence from helpers (lambda_ICCS); 0: no'
    ' inter-client consistency.',
    minimum=0,
    when=lambda own: own.num_helpers and own.finds_helpers,
  )
  l1_weight: float = hparam(
    1e-5,
    'lambda_L1, of the sum of |psi|: 1e-5 with labels at the server, 1e-4 with'
    ' labels at the clients.',
    minimum=0,
    when=lambda fedmatch: fedmatch.decomposition,
  )
  l2_weight: float = hparam(
    10.0,
    'lambda_L2, of the sum of (sigma - psi)^2, for psi alone. A step of rate r'
    ' takes psi the share 2 r lambda_L2 of the way to sigma: with the default'
    ' rate psi becomes a copy of sigma. Above r lambda_L2 = 1 it diverges.',
    minimum=0,
    when=lambda fedmatch: fedmatch.decomposition,
  )
  psi_factor: float = hparam(
    0.2,
    "psi at the start, as a multiple of sigma (the authors' code; the paper"
    ' does not say). Their sum is what a network without psi starts from.',
    minimum=0,
    maximum=1,
    when=lambda fedmatch: fedmatch.decomposition,
  )
  psi_threshold: float = hparam(
    1e-5,
    'Elements of psi of at most this size count as 0 in evaluation, at the'
    ' server, and where psi is sent (code: 1e-5 with labels at the server, 5e-6'
    ' with labels at the clients).',
    minimum=0,
    when=lambda fedmatch: fedmatch.decomposition,
  )
  decomposition: bool = hparam(
    True,
    'Whether weights are sigma + psi, sigma learns from labels and psi from'
    ' unlabelled examples. If false, one set learns from both (table 5).',
  )
  evaluate_sets: bool = hparam(
    False,
    'Whether evaluation also measures the network with sigma alone and with psi'
    ' alone (figure 6b): sigma/accuracy, psi/accuracy. Statistics of batch norm'
    ' are those of the sum, and wrong for each alone: take --norm=none or gn.',
    when=lambda fedmatch: fedmatch.decomposition,
  )
  agreement: bool = hparam(
    True,
    'Whether helpers vote on pseudo-labels; if false, the local model decides.',
    when=lambda own: own.num_helpers and own.finds_helpers,
  )
  tie: str = hparam(
    names.LOCAL,
    'Which class has a tied vote. local: that of the local model; lowest: the'
    " lowest one, as in the authors' code.",
    choices=(names.LOCAL, names.LOWEST),
    when=lambda fedmatch: fedmatch.uses_helpers and fedmatch.agreement,
  )
  num_helpers: int = hparam(
    2,
    'H, the other clients whose models help; 0: none, so that neither'
    ' consistency nor agreement has an effect.',
    minimum=0,
    maximum=100,
    when=lambda own: (
      not own.num_helpers or (own.wants_help and own.finds_helpers)
    ),
  )
  helpers: str = hparam(
    CLIENTS,
    'Who helps. clients: other clients, by what they last uploaded; past: the'
    ' global models before the last H rounds in which helpers were due, which'
    ' all clients get (ours). With --fedmatch.remembered_clients=0 the server'
    ' then needs to know no client.',
    choices=(CLIENTS, PAST),
    when=lambda fedmatch: fedmatch.num_helpers and fedmatch.wants_help,
  )
  helper_interval: int = hparam(
    10,
    'R_H: helpers are chosen in rounds whose number is a multiple of this.',
    minimum=1,
    maximum=10**6,
    when=lambda fedmatch: fedmatch.uses_helpers,
  )
  helper_cache: str = hparam(
    ONE_ROUND,
    'For how long helpers are used. one_round: in the round in which they are'
    " chosen (authors' code); interval: in all rounds until others are chosen"
    ' (the other way to read the paper), which costs the clients H more sets'
    ' in each round.',
    choices=(ONE_ROUND, INTERVAL),
    when=lambda fedmatch: fedmatch.uses_helpers,
  )
  deltas: str = hparam(
    APPLIED,
    'What travels. applied: only differences above delta_threshold from what'
    ' the receiver has, which keeps its own values elsewhere (paper); counted:'
    ' the same is counted, but a client gets the whole model, and only its'
    " upload is cut (authors' code); none: whole models.",
    choices=(APPLIED, COUNTED, NONE),
    when=lambda fedmatch: fedmatch.remembered_clients,
  )
  delta_threshold: float = hparam(
    1e-5,
    'Differences of at most this size are not sent (paper: 1e-5 to 5e-5; code:'
    ' 1e-5 with labels at the server, 5e-5 with labels at the clients).',
    minimum=0,
    when=lambda fedmatch: fedmatch.sends_deltas,
  )
  patience: int = hparam(
    5,
    'After so many rounds of a client, without a lower loss on its batches as'
    ' they come, its learning rate falls; 0: it never does (paper: 5; code: 20'
    ' with labels at the server).',
    minimum=0,
    maximum=10**6,
    when=lambda fedmatch: fedmatch.remembered_clients,
  )
  patience_factor: float = hparam(
    3.0,
    'By what the learning rate is then divided.',
    minimum=1,
    when=lambda fedmatch: fedmatch.adapts_rates,
  )
  remembered_clients: int = hparam(
    10**6,
    'The most clients whose last upload the server keeps; who has not taken'
    ' part for longest is forgotten. 0: no state of clients, hence no helpers,'
    ' no deltas and no patience.',
    minimum=0,
    maximum=10**6,
  )
  uploads: str = hparam(
    names.AUTO,
    'Where the server keeps the sets that clients last sent. state: in its'
    ' state, of at most 1.5 GB, and so in each checkpoint; files: beside the'
    " checkpoints, a file for each client's last round, of which a round reads"
    " only its cohort's and their helpers'; auto: files above 200 MB. Results"
    ' are the same. A program of your own must bring what is in files.',
    choices=(names.AUTO, names.STATE, names.FILES),
    when=lambda fedmatch: fedmatch.uses_clients or fedmatch.sends_deltas,
  )

  def __post_init__(self) -> None:
    hparams.validate(self, self._PREFIX)

  @property
  def remembers(self) -> bool:
    """Whether the server keeps anything of single clients."""
    return bool(self.remembered_clients) and bool(
      self.uses_clients or self.sends_deltas or self.patience
    )

  @property
  def uses_helpers(self) -> bool:
    """Whether clients get helpers."""
    return self._asks_for_helpers and self.finds_helpers

  @property
  def wants_help(self) -> bool:
    """Whether helpers, if there are any, have something to do."""
    return bool(self.agreement or self.consistency_weight)

  @property
  def finds_helpers(self) -> bool:
    """Whether the server has something that can help."""
    return self.helpers == PAST or bool(self.remembered_clients)

  @property
  def uses_clients(self) -> bool:
    """Whether these are other clients."""
    return (
      self._asks_for_helpers
      and self.helpers == CLIENTS
      and bool(self.remembered_clients)
    )

  @property
  def uses_past(self) -> bool:
    """Whether these are earlier models."""
    return self._asks_for_helpers and self.helpers == PAST

  @property
  def _asks_for_helpers(self) -> bool:
    """Whether helpers are asked for."""
    return bool(self.num_helpers) and self.wants_help

  @property
  def sends_deltas(self) -> bool:
    """Whether small differences do not travel."""
    return bool(self.remembered_clients) and self.deltas != NONE

  @property
  def sent_above(self) -> float | None:
    """The size above which differences are sent; None: whole sets are."""
    return self.delta_threshold if self.sends_deltas else None

  @property
  def keeps_own(self) -> bool:
    """Whether clients keep their own values where nothing is sent."""
    return self.deltas == APPLIED

  @property
  def adapts_rates(self) -> bool:
    """Whether clients have learning rates of their own."""
    return bool(self.remembered_clients and self.patience)
