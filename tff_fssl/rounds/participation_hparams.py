"""Hyper-parameters of the participation of clients in rounds.

docs/participation.md explains them.
"""

import dataclasses
import fractions
import math

from tff_fssl import hparams
from tff_fssl.hparams import hparam


@dataclasses.dataclass(frozen=True)
class ParticipationHparams:
  """The availability of clients, and their behaviour in a round."""

  availability_file: str = hparam(
    '',
    'A CSV file that says in which rounds clients can be drawn, with the header'
    ' client,from,to: the number of a client, a round, and the round before'
    ' which its availability ends. A client may have several rows; clients that'
    ' are not named are always available. The run keeps a copy,'
    ' availability.csv (docs/participation.md).',
    group='Participation of clients',
    when=lambda own: own.trains_clients,
  )
  availability_period: int = hparam(
    0,
    'Rounds after which --availability_file begins again, such as 24 for days'
    ' of 24 rounds. 0: never; clients that it names are then not available'
    ' after their last row.',
    minimum=0,
    maximum=10**7,
    when=lambda own: own.trains_clients and own.availability_file,
  )
  dropout_probability: float = hparam(
    0.0,
    'Probability that a client that was drawn for a round does not report: it'
    ' does not take part.',
    minimum=0,
    maximum=0.999,
    when=lambda own: own.trains_clients,
  )
  straggler_probability: float = hparam(
    0.0,
    'Probability that a client makes only a part of its local steps, at least'
    ' one, and sends what it has then.',
    minimum=0,
    maximum=1,
    when=lambda own: own.trains_clients,
  )
  straggler_least_share: float = hparam(
    0.0,
    'The least share of its local steps that a straggler makes; the share is'
    ' drawn evenly between this and 1.',
    minimum=0,
    maximum=1,
    when=lambda own: own.trains_clients and own.straggler_probability,
  )
  overselect: float = hparam(
    0.0,
    'How many more clients are drawn than take part: 0.3 draws 1.3 times'
    ' --clients_per_round, rounded up, of which the first --clients_per_round'
    ' that report take part. Stragglers report last.',
    minimum=0,
    maximum=100,
    when=lambda own: own.trains_clients and own.some_report_late,
  )

  def __post_init__(self) -> None:
    hparams.validate(self)

  @property
  def some_report_late(self) -> bool:
    """Tells whether to draw more clients than needed makes a difference."""
    return bool(self.dropout_probability or self.straggler_probability)

  @property
  def is_on(self) -> bool:
    """Tells whether cohorts can lack clients, or clients can stop early."""
    return self.some_report_late or bool(self.availability_file)

  @property
  def may_be_empty(self) -> bool:
    """Tells whether there can be rounds in which no client reports."""
    return bool(self.dropout_probability or self.availability_file)

  def num_drawn(self, clients_per_round: int) -> int:
    """Computes the number of clients to draw, if enough are available."""
    if not self.some_report_late:
      return clients_per_round
    # In decimals, as the user wrote it: in binary, 1.1 * 10 is more than 11.
    more = fractions.Fraction(repr(self.overselect)) * clients_per_round
    return clients_per_round + math.ceil(more)

  def check_cohort(self, clients_per_round: int, num_clients: int) -> None:
    """Raises `UsageError` if more clients would be drawn than exist."""
    num_drawn = self.num_drawn(clients_per_round)
    if num_drawn > num_clients:
      raise hparams.UsageError(
        f'--overselect={self.overselect}: {num_drawn} clients would be drawn'
        f' for --clients_per_round={clients_per_round}, but there are'
        f' {num_clients}; give less, or fewer clients a round'
      )
