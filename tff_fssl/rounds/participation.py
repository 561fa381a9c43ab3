"""The participants of a round, as functions of (seed, round, client).

Nothing here needs TensorFlow, or depends on clients' data.
"""

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple, TypeAlias

import numpy as np

from tff_fssl import files
from tff_fssl.data import seeds
from tff_fssl.hparams import UsageError
from tff_fssl.rounds import participation_hparams

ParticipationHparams = participation_hparams.ParticipationHparams
Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
_HEADER = ('client', 'from', 'to')
_MOST = 2**31 - 1  # Of clients and of rounds.


class Participants(NamedTuple):
  """The clients of a round.

  Attributes:
    slots: Id of each client that takes part -> its slot, its position in the
      order in which clients were drawn for the round.
    shares: Id of each of them that is a straggler -> the share of its local
      steps that it makes, in [0, 1].
    num_drawn: The clients that were drawn.
    num_dropped_out: Drawn clients that did not report.
    num_discarded: Drawn clients that reported after enough others.
  """

  slots: Mapping[int, int]
  shares: Mapping[int, float]
  num_drawn: int
  num_dropped_out: int
  num_discarded: int

  def counts(self) -> dict[str, int]:
    """Returns the numbers by name, as in train.csv."""
    return {
      'participation/num_drawn': self.num_drawn,
      'participation/num_dropped_out': self.num_dropped_out,
      'participation/num_discarded': self.num_discarded,
      'participation/num_reported': len(self.slots),
      'participation/num_stragglers': len(self.shares),
    }


NOBODY = Participants({}, {}, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Availability:
  """The rounds in which clients can be drawn.

  Attributes:
    rows: (client, first round, the round after the last one), sorted. Rows of a
      client do not overlap.
    period: Rounds after which the rows begin again. 0: never.
  """

  rows: tuple[tuple[int, int, int], ...]
  period: int = 0

  def __post_init__(self) -> None:
    table = np.array(self.rows, np.int64).reshape(-1, 3)
    # A frozen dataclass cannot assign: the table is a cache.
    object.__setattr__(self, '_table', table)

  def ids(self, round_num: int, num_clients: int) -> Ids:
    """Lists the clients that can be drawn in a round: int64 [N], ascending."""
    at = (round_num - 1) % self.period + 1 if self.period else round_num
    clients, first, end = self._table.T  # type: ignore[attr-defined]
    is_available = np.ones(num_clients, bool)
    # Clients without a row are always available.
    is_available[clients] = False
    is_available[clients[(first <= at) & (at < end)]] = True
    return np.flatnonzero(is_available)

  def format_csv(self) -> str:
    """Formats the file that `read_availability` reads."""
    lines = [','.join(map(str, row)) for row in (_HEADER, *self.rows)]
    return '\n'.join(lines) + '\n'


def read_availability(
  settings: ParticipationHparams, num_clients: int = 0
) -> Availability | None:
  """Reads `availability_file`.

  Args:
    settings: Names the file and its period.
    num_clients: Clients are 0 .. num_clients - 1. 0: not known yet.

  Returns:
    The availability. None if no file is named.

  Raises:
    UsageError: If the file cannot be read, or is not such a file. The error
      names the wrong line.
  """
  path = settings.availability_file
  if not path:
    return None
  given = f'--availability_file={path}'
  try:
    text = files.read_text(path)
  except files.FileError as error:
    raise UsageError(f'{given}: cannot be read: {error.reason}') from error
  lines = text.splitlines()
  header = tuple(cell.strip() for cell in lines[0].split(',')) if lines else ()
  if header != _HEADER:
    raise UsageError(
      f'{given}, line 1: {ascii(lines[0][:40]) if lines else "nothing"}; the'
      f' first line must be {",".join(_HEADER)}'
    )
  if not text.endswith(('\n', '\r')):
    raise UsageError(
      f'{given}, line {len(lines)}: has no line end, so the file may have been'
      ' cut off; complete it'
    )
  last = settings.availability_period or _MOST - 1
  rows: list[tuple[int, int, int, int]] = []
  for number, line in enumerate(lines[1:], 2):
    if line.strip():
      where = f'{given}, line {number}'
      rows.append((*_read_row(where, line, last, num_clients), number))
  # Sorted rows of a client are neighbours, and so are rows that overlap.
  rows.sort()
  for (client, _, end, _), (other, start, _, number) in zip(rows, rows[1:]):
    if client == other and start < end:
      raise UsageError(
        f'{given}, line {number}: client {client} is available in round {start}'
        ' by another line, too; rows of a client must not overlap'
      )
  return Availability(
    tuple(row[:3] for row in rows), settings.availability_period
  )


def _read_row(
  where: str, line: str, last: int, num_clients: int
) -> tuple[int, int, int]:
  """Reads (client, from, to) from a line, or raises `UsageError`."""
  try:
    client, start, end = map(int, line.split(','))
  except ValueError as error:
    raise UsageError(
      f'{where}: {ascii(line[:40])}; a line is three whole numbers,'
      f' {",".join(_HEADER)}'
    ) from error
  last_client = (num_clients or _MOST) - 1
  if not 0 <= client <= last_client:
    raise UsageError(
      f'{where}: client {str(client)[:20]}: clients are 0 to {last_client}'
    )
  if not 1 <= start < end:
    raise UsageError(
      f'{where}: from {start} to {end}: rounds are numbered from 1, and a'
      ' client is available from a round up to, but not in, a later one'
    )
  if end > last + 1:
    raise UsageError(
      f'{where}: to {end}: must be at most {last + 1}, one more than'
      ' --availability_period or the greatest number of rounds'
    )
  return client, start, end


def draw_order(
  seed: int, round_num: int, available: int | Ids, num: int
) -> list[int]:
  """Draws clients without replacement, in a random order.

  Args:
    seed: Seed of the run.
    round_num: The round, >= 1.
    available: The ids that can be drawn. A number N stands for 0 .. N - 1.
    num: The number to draw, at most that of available ids.

  Returns:
    The ids.
  """
  generator = seeds.cohort_generator(seed, round_num)
  return [int(i) for i in generator.choice(available, num, replace=False)]


class _Fate(NamedTuple):
  """The random behaviour of a drawn client in a round."""

  drops_out: bool
  is_straggler: bool
  share: float
  order: float


def _fate(
  settings: ParticipationHparams, seed: int, round_num: int, client_id: int
) -> _Fate:
  """Draws the behaviour of a client in a round."""
  generator = seeds.generator(
    seed, seeds.Purpose.PARTICIPATION, round_num, client_id
  )
  # All numbers are drawn in any case, so that one flag does not change the
  # draws of another.
  drop, straggle, share, order = generator.random(4)
  least = settings.straggler_least_share
  return _Fate(
    bool(drop < settings.dropout_probability),
    bool(straggle < settings.straggler_probability),
    float(least + (1.0 - least) * share),
    float(order),
  )


def share_of_steps(
  settings: ParticipationHparams, seed: int, round_num: int, client_id: int
) -> float:
  """Returns the share of its local steps that a client makes, in [0, 1]."""
  if not settings.straggler_probability:
    return 1.0
  fate = _fate(settings, seed, round_num, client_id)
  return fate.share if fate.is_straggler else 1.0


def draw(
  settings: ParticipationHparams,
  availability: Availability | None,
  *,
  seed: int,
  round_num: int,
  num_clients: int,
  clients_per_round: int,
) -> Participants:
  """Draws the participants of a round.

  Args:
    settings: The settings.
    availability: The contents of their file, if they name one.
    seed: Seed of the run.
    round_num: The round, >= 1.
    num_clients: Clients are 0 .. num_clients - 1.
    clients_per_round: The most that take part, at most `num_clients`.

  Returns:
    The participants. They are fewer than `clients_per_round`, possibly none, if
    fewer are available, or if clients drop out and too few others were drawn.
  """
  available: int | Ids = num_clients
  most = num_clients
  if availability is not None:
    available = availability.ids(round_num, num_clients)
    most = len(available)
  num_drawn = min(settings.num_drawn(clients_per_round), most)
  if not num_drawn:
    return NOBODY
  drawn = draw_order(seed, round_num, available, num_drawn)
  fates = {i: _fate(settings, seed, round_num, i) for i in drawn}
  reporting = [i for i in drawn if not fates[i].drops_out]
  # Stragglers report last. The others report in a random order.
  reporting.sort(key=lambda i: (fates[i].is_straggler, fates[i].order))
  used = set(reporting[:clients_per_round])
  return Participants(
    # Slots are positions among all drawn clients: a client's slot does not
    # depend on which others drop out.
    {i: slot for slot, i in enumerate(drawn) if i in used},
    {i: fates[i].share for i in sorted(used) if fates[i].is_straggler},
    num_drawn,
    num_drawn - len(reporting),
    len(reporting) - len(used),
  )
