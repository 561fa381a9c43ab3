"""Hyper-parameters of the aggregation of updates."""

from collections.abc import Callable
import dataclasses
from typing import Any

from tff_fssl import hparams
from tff_fssl.hparams import hparam

MEAN = 'mean'
ROBUST = 'robust'
SECURE = 'secure'
COMPRESSION = 'compression'
DP = 'dp'
# Of fewer clients, honest ones could not outvote a single liar.
MIN_ROBUST_CLIENTS = 3
# Aggregators that release nothing about a client except its part of a sum.
PRIVATE = (SECURE, DP)


@dataclasses.dataclass(frozen=True)
class Aggregator:
  """A method of combining updates.

  Attributes:
    summary: Its description in `--help`.
    builder: 'module:function', which returns a
      `tff.aggregators.WeightedAggregationFactory`. Its arguments are the
      `AggregatorHparams` and, as keywords, max_weight, clients_per_round and
      population (see `factory.build_aggregator`).
    fields: The fields of `AggregatorHparams` that it reads.
  """

  summary: str
  builder: str
  fields: tuple[str, ...] = ()


_LIMITS = ('aggregator_limits',)
AGGREGATORS = {
  MEAN: Aggregator(
    'the weighted mean', 'tff_fssl.aggregators.factory:build_mean'
  ),
  ROBUST: Aggregator(
    'the geometric median of updates that are clipped to the median norm and'
    ' mixed with their nearest neighbours. Medians also bound weights, static'
    " batch norm statistics and ProtoFSSL's prototypes, but not FedMatch's"
    ' helpers. Only this aggregator resists lying clients',
    'tff_fssl.aggregators.factory:build_robust',
    _LIMITS,
  ),
  SECURE: Aggregator(
    'the mean, by secure sums, of updates clipped to an adaptive norm, with'
    ' much larger updates zeroed. Needs --simulate_secure_aggregation here',
    'tff_fssl.aggregators.factory:build_secure',
    _LIMITS,
  ),
  COMPRESSION: Aggregator(
    'the mean of secure, by plain sums, with large tensors quantized to 8'
    ' bits. Neither it nor secure resists a lying client (docs/privacy.md)',
    'tff_fssl.aggregators.factory:build_compression',
    _LIMITS,
  ),
  DP: Aggregator(
    'a differentially private mean, by clipping and Gaussian noise',
    'tff_fssl.aggregators.factory:build_private',
    ('dp_noise_multiplier', 'dp_clipping_norm', 'dp_delta'),
  ),
}
_SUMMARIES = '; '.join(f'{n}: {a.summary}' for n, a in AGGREGATORS.items())


def _read(name: str) -> Callable[[Any], bool]:
  """Builds the predicate of a field that only some aggregators read."""
  return lambda own: (
    own.aggregates and name in AGGREGATORS[own.aggregator].fields
  )


@dataclasses.dataclass(frozen=True)
class AggregatorHparams:
  """Hyper-parameters of the aggregation, with any algorithm."""

  aggregator: str = hparam(
    MEAN,
    f"Method of combining clients' updates. {_SUMMARIES}. With secure and dp"
    ' nothing else about a client is released, not even metrics.',
    choices=AGGREGATORS,
    group='Aggregation',
    when=lambda own: own.aggregates,
  )
  aggregator_limits: bool = hparam(
    True,
    'Whether updates are clipped: to their median norm, and to at most twice'
    ' the norm of the round before (robust), or to the 0.8 quantile of norms'
    ' (secure, compression), and very large ones skipped (robust: above 10'
    ' times the median norm) or zeroed (secure, compression).',
    when=_read('aggregator_limits'),
  )
  dp_noise_multiplier: float = hparam(
    1.0,
    'Standard deviation of the noise on the sum of updates, as a multiple of'
    ' the clipping norm. It covers the privacy cost of adaptive clipping (dp).',
    minimum=0,
    exclusive_minimum=True,
    when=_read('dp_noise_multiplier'),
  )
  dp_clipping_norm: float = hparam(
    0.0,
    'Norm to which updates are clipped. 0: the median norm, estimated privately'
    ' starting from 0.1 (dp).',
    minimum=0,
    when=_read('dp_clipping_norm'),
  )
  dp_delta: float = hparam(
    1e-5,
    'Delta for which epsilon is reported, less than 1 / num_clients (dp).',
    minimum=0,
    maximum=0.5,
    exclusive_minimum=True,
    when=_read('dp_delta'),
  )

  def __post_init__(self) -> None:
    hparams.validate(self)


def check_sizes(
  *, delta: float, clients_per_round: int, population: int
) -> None:
  """Rejects cohorts and deltas without a privacy guarantee.

  Args:
    delta: The delta of (epsilon, delta).
    clients_per_round: The cohort's size.
    population: The number of clients.

  Raises:
    UsageError: If they give no guarantee.
  """
  if not 1 <= clients_per_round <= population:
    raise hparams.UsageError(
      f'clients_per_round={clients_per_round}: must be from 1 to'
      f' {population}, the number of clients'
    )
  if not 0 < delta * population < 1:
    raise hparams.UsageError(
      f'--dp_delta={delta}: must be less than 1/{population}, one over the'
      ' number of clients; a larger one would allow to publish all data of a'
      ' client'
    )


def check_majority(clients_per_round: int | None) -> None:
  """Rejects cohorts in which honest clients could not outvote a liar.

  Args:
    clients_per_round: The cohort's size, None if it is not known.

  Raises:
    UsageError: If it is less than `MIN_ROBUST_CLIENTS`.
  """
  if clients_per_round is None or clients_per_round >= MIN_ROBUST_CLIENTS:
    return
  raise hparams.UsageError(
    f'--clients_per_round={clients_per_round}: with --aggregator={ROBUST} at'
    f' least {MIN_ROBUST_CLIENTS} clients must take part, since one honest'
    ' client cannot outvote one liar; take more clients, or another'
    ' aggregator'
  )


def check_confidential(
  aggregator: str,
  *,
  own_weights: bool | str,
  client_weighting: str,
  batch_norm: bool,
  static: bool,
  also_sends: bool | str = False,
) -> None:
  """Rejects settings that would release more than the protected sum.

  Args:
    aggregator: `SECURE` or `DP`.
    own_weights: Whether the algorithm sets the weights of clients, or the name
      of the flag that turns this off.
    client_weighting: `RoundHparams.client_weighting`.
    batch_norm: Whether the model has batch norm layers.
    static: Whether their statistics are gathered in a client phase.
    also_sends: Whether clients also send values outside of the sum of updates,
      or the flag that turns this off.

  Raises:
    UsageError: If a setting would release more.
  """
  given = f'--aggregator={aggregator}'
  if static:
    raise hparams.UsageError(
      f"{given}: clients' static batch norm statistics are not part of the sum"
      ' of updates and would be sent unprotected; set --norm=gn or --norm=none'
    )
  if also_sends:
    remedy = f'set {also_sends}, ' if isinstance(also_sends, str) else ''
    raise hparams.UsageError(
      f'{given}: clients of this algorithm also send values that are not part'
      f' of the sum of updates, and would be unprotected; {remedy}use another'
      ' aggregator, or another algorithm'
    )
  if aggregator == SECURE:
    return
  if own_weights:
    remedy = (
      f'set {own_weights}'
      if isinstance(own_weights, str)
      else 'turn them off in its hyper-parameters'
    )
    raise hparams.UsageError(
      f'{given}: clients must count equally, so that each moves the sum by at'
      ' most the clipping norm; the weights that the algorithm sets depend on'
      f" clients' data and get no noise: {remedy}"
    )
  if client_weighting != 'uniform':
    raise hparams.UsageError(
      f'--client_weighting={client_weighting}: with {given} clients must count'
      ' equally, so that each moves the sum by at most the clipping norm; set'
      ' --client_weighting=uniform'
    )
  if batch_norm:
    raise hparams.UsageError(
      f'{given}: batch norm changes the statistics of single layers by more'
      ' than the noise can hide; set --norm=gn or --norm=none'
    )
