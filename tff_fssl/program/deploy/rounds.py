"""A deployed process: its description, and a round of it at the server.

Nothing here knows how messages travel, or TensorFlow Federated. No client is
believed: a reply is what anybody may have sent.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import json
import os
import struct
import typing
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import seeds
from tff_fssl.program.storage import checkpoint
from tff_fssl.rounds import participation as participation_lib
from tff_fssl.rounds import participation_hparams

ParticipationHparams = participation_hparams.ParticipationHparams

FORMAT, VERSION = 'tff_fssl.deployment', 1
# In the server's folder, beside the graphs.
NAME = 'deployment.json'
EVALUATION = 'evaluation'
# Copies of files of a run.
AVAILABILITY = 'availability.csv'
COPIED = ('partition.json', 'partition.png', 'frozen.ckpt')

# How names of the program begin, and paths of a checkpoint.
STATE, METRICS, PROCESS = 'state/', 'metrics/', 'process/'
_ITERATOR, _BAD_ROUNDS = 'iterator', 'num_bad_rounds'
# Seed and round, as in `rounds.sampling`.
_POSITION = '<qq'

# Name of the program's state -> array.
State = dict[str, np.ndarray]
# Where a reply says whose row it holds.
_OWNER = 'row/client_id'
# The most characters of a reason that a client gives.
_MAX_REASON = 200


class Saved(NamedTuple):
  """What a checkpoint holds.

  Attributes:
    state: The process's state.
    num_bad_rounds: Consecutive bad rounds up to it.
  """

  state: State
  num_bad_rounds: int


@dataclasses.dataclass(frozen=True)
class Deployment:
  """A deployed process.

  Attributes:
    values: The flags of its run, as text.
    owner: The owner of its checkpoints.
    is_private: Whether the aggregator protects clients.
    seed: The seed of the run.
    num_clients: Clients are 0 .. num_clients - 1.
    clients_per_round: The number of clients that train in a round.
    first_round: The first round. Rounds before 1 have no clients.
    done: The round of the initial state.
    total_rounds: The last round.
    rounds_per_evaluation: Multiples of it, and the last round, are evaluated.
    max_bad_rounds: Consecutive bad rounds after which the server stops.
    keep_checkpoints: The number of latest checkpoints that are kept.
    min_clients: Rounds with fewer usable clients change nothing.
    participation: The availability of clients, and their behaviour.
    splits: The data that the server evaluates on, such as 'test'.
  """

  values: dict[str, str]
  owner: checkpoint.Owner
  is_private: bool
  seed: int
  num_clients: int
  clients_per_round: int
  first_round: int
  done: int
  total_rounds: int
  rounds_per_evaluation: int
  max_bad_rounds: int
  keep_checkpoints: int
  min_clients: int
  participation: ParticipationHparams
  splits: tuple[str, ...]

  def flags(self) -> dict[str, str]:
    """Returns the flags of the run, as a configuration does."""
    return self.values

  @property
  def aggregator(self) -> aggregator_hparams.AggregatorHparams:
    """Returns the aggregator's hyper-parameters, as far as its name."""
    name = self.values.get('aggregator', aggregator_hparams.MEAN)
    return aggregator_hparams.AggregatorHparams(aggregator=name)

  @property
  def is_noised(self) -> bool:
    """Says whether only a noised sum may show anything of a client."""
    return self.aggregator.aggregator == aggregator_hparams.DP

  def encode(self) -> str:
    """Returns the content of its file."""
    content = {
      'format': FORMAT,
      'version': VERSION,
      **dataclasses.asdict(self),
      'owner': self.owner.encode(),
    }
    return json.dumps(content, indent=1) + '\n'

  def leaves(self, saved: Saved, round_num: int) -> dict[str, Any]:
    """Returns the leaves of the checkpoint of a state after a round."""
    return {
      **{checkpoint_path(name): array for name, array in saved.state.items()},
      _ITERATOR: struct.pack(_POSITION, self.seed, round_num + 1),
      _BAD_ROUNDS: saved.num_bad_rounds,
    }


def read_deployment(folder: str) -> Deployment:
  """Reads a deployment.

  Args:
    folder: The server's folder.

  Returns:
    The deployment.

  Raises:
    UsageError: If the folder has none, or that of another version.
  """
  path = os.path.join(folder, NAME)
  content = files.read_json(path)
  if (content.pop('format', ''), content.pop('version', 0)) != (
    FORMAT,
    VERSION,
  ):
    raise files.FileError(
      path, f'it is not {FORMAT} of version {VERSION}; deploy again'
    )
  try:
    participation = ParticipationHparams(**content.pop('participation'))
    if participation.availability_file:
      # The run named a file on another machine. Its copy is here.
      participation = dataclasses.replace(
        participation, availability_file=os.path.join(folder, AVAILABILITY)
      )
    found = Deployment(
      owner=checkpoint.Owner.decode(content.pop('owner')),
      participation=participation,
      splits=tuple(content.pop('splits')),
      **content,
    )
    for field in dataclasses.fields(found):
      value = getattr(found, field.name)
      # True is not the number 1 here.
      if type(value) is not (typing.get_origin(field.type) or field.type):
        raise TypeError(f'{field.name} is {value!r}')
    return found
  except (KeyError, TypeError, ValueError) as error:
    raise files.FileError(path, f'it is damaged ({error})') from error


def read_state(
  leaves: Mapping[str, Any], names: Iterator[str] | list[str]
) -> Saved:
  """Reads a state from the leaves of a checkpoint.

  Args:
    leaves: The leaves.
    names: The names of the program's state.

  Returns:
    The state.

  Raises:
    CheckpointError: If they are of another program.
  """
  paths = {name: checkpoint_path(name) for name in names}
  # Names in either of the two alone: neither may lack any.
  odd = set(paths.values()) ^ (set(leaves) - {_ITERATOR, _BAD_ROUNDS})
  if odd or _BAD_ROUNDS not in leaves:
    raise checkpoint.ForeignError(
      f'it belongs to another program: {min(odd, default=_BAD_ROUNDS)!r} is in'
      ' only one of the two'
    )
  state = {name: leaves[path] for name, path in paths.items()}
  return Saved(state, int(leaves[_BAD_ROUNDS]))


def select_metrics(
  result: Mapping[str, Any],
) -> collections.OrderedDict[str, Any]:
  """Selects the metrics of a round, named as in train.csv."""
  return collections.OrderedDict(
    (name.removeprefix(METRICS), value)
    for name, value in result.items()
    if name.startswith(METRICS)
  )


def checkpoint_path(name: str) -> str:
  """Returns the path in a checkpoint of a part of the program's state."""
  return f'{PROCESS}{name.removeprefix(STATE)}'


class Ask(NamedTuple):
  """A message to a client.

  Attributes:
    client_id: The client.
    about: What the message is about: round, phase, client, slot, seed, share of
      steps, and the digest of the program.
    values: The values that the phase sends.
  """

  client_id: int
  about: Mapping[str, Any]
  values: Sequence[Any]


class Reply(NamedTuple):
  """A reply, which nothing is known of but to which message it came.

  Attributes:
    client_id: The client that was asked.
    about: What it says that it is about.
    values: The values, or None if they have not the form of values.
    error: Why there is no reply, or ''.
  """

  client_id: int
  about: Mapping[str, Any]
  values: Sequence[Any] | None
  error: str = ''


# Sends messages, and returns the replies that came in time, in any order.
Send = Callable[[Sequence[Ask]], Iterable[Reply]]


class Outcome(NamedTuple):
  """The end of a round.

  Attributes:
    state: The state after it.
    metrics: The figures, as in train.csv.
    lines: What the log says of clients.
  """

  state: State
  metrics: dict[str, Any]
  lines: list[str]


@dataclasses.dataclass(frozen=True)
class Rounds:
  """The rounds of a federation.

  Attributes:
    program: The `artefact.Program` of a round.
    deployment: The deployment.
    availability: Which clients can be drawn when, if not all always.
    send: Sends messages to clients.
  """

  program: Any
  deployment: Deployment
  availability: participation_lib.Availability | None
  send: Send

  def run(self, state: State, round_num: int) -> Outcome:
    """Runs a round.

    A client whose message is not answered in time does not take part from then
    on. One whose reply cannot be one is rejected, and counted so. The process
    itself discards a round with too few usable clients.

    Args:
      state: The state before it.
      round_num: The round.

    Returns:
      The state after it, and its figures.
    """
    program, lines = self.program, list[str]()
    participants = self._draw(round_num)
    present = sorted(participants.slots)
    server = program.start(state)
    for phase in range(program.num_phases):
      program.stage(phase, server)
      sent = program.sent(phase, server)
      asks = [
        self._ask(round_num, phase, client_id, participants, sent)
        for client_id in present
      ]
      replies = self._collect(asks, lines) if asks else {}
      # The cohort's order, not that of arrival: sums repeat.
      present = [client_id for client_id in present if client_id in replies]
      totals = program.begin(phase, server)
      for client_id in present:
        reply = self._checked(phase, client_id, replies, lines)
        totals = program.add(phase, server, totals, reply)
      program.end(phase, server, totals)
      # Who was rejected for its form is not asked again.
      present = [i for i in present if replies[i].values is not None]
    program.stage(program.num_phases, server)
    result = program.finish(server)
    metrics = {
      **select_metrics(result),
      **self._counts(participants, result),
    }
    new = {name: result[name] for name in state}
    # Where only a noised sum is released, a line would tell who took part.
    return Outcome(new, metrics, [] if self.deployment.is_noised else lines)

  def _draw(self, round_num: int) -> participation_lib.Participants:
    """Draws the clients of a round."""
    if round_num < 1:
      return participation_lib.NOBODY
    deployed = self.deployment
    return participation_lib.draw(
      deployed.participation,
      self.availability,
      seed=deployed.seed,
      round_num=round_num,
      num_clients=deployed.num_clients,
      clients_per_round=deployed.clients_per_round,
    )

  def _ask(
    self,
    round_num: int,
    phase: int,
    client_id: int,
    participants: participation_lib.Participants,
    sent: Sequence[Any],
  ) -> Ask:
    """Makes the message to a client."""
    seed = seeds.seed_pair(
      self.deployment.seed, seeds.Purpose.CLIENT_ROUND, round_num, client_id
    )
    share = participation_lib.share_of_steps(
      self.deployment.participation, self.deployment.seed, round_num, client_id
    )
    about = {
      'round': round_num,
      'phase': phase,
      'client': client_id,
      'slot': participants.slots[client_id],
      'seed': [int(n) for n in seed],
      'share': share,
      'program': self.program.digest,
    }
    return Ask(client_id, about, sent)

  def _collect(self, asks: Sequence[Ask], lines: list[str]) -> dict[int, Reply]:
    """Sends messages, and returns one reply of each client that has one."""
    asked = {ask.client_id: ask for ask in asks}
    found: dict[int, Reply] = {}
    told: set[int] = set()
    place = f'phase {asks[0].about["phase"]}'
    for reply in self.send(asks):
      client_id = reply.client_id
      who = f'{place}: client {client_id}'
      # Whatever it sends, it was not late.
      told.add(client_id)
      if client_id not in asked:
        lines.append(f'{who}: was not asked; its reply is dropped')
      # The first one counts, so that nobody can replace it.
      elif client_id in found:
        lines.append(f'{who}: replied before; this reply is dropped')
      elif reply.error:
        # One line: a client could forge others in the log.
        reason = ' '.join(reply.error.split())[:_MAX_REASON]
        lines.append(f'{who}: failed: {reason}')
      elif reply.values is not None and any(
        reply.about.get(name) != asked[client_id].about[name]
        for name in ('round', 'phase', 'client', 'program')
      ):
        lines.append(
          f'{who}: replied to another message, or has another version of the'
          ' app; its reply is dropped'
        )
      else:
        found[client_id] = reply
    lines += [
      f'{place}: client {client_id}: no reply in time'
      for client_id in asked
      if client_id not in told
    ]
    return found

  def _checked(
    self,
    phase: int,
    client_id: int,
    replies: dict[int, Reply],
    lines: list[str],
  ) -> Sequence[Any]:
    """Returns a client's values, or what stands for a rejected client."""
    values = replies[client_id].values
    if values is None:
      problem = 'not values of the expected size'
    else:
      problem = self.program.problem(phase, values) or self._foreign(
        phase, client_id, values
      )
    if values is not None and not problem:
      return values
    lines.append(f'phase {phase}: client {client_id}: is rejected: {problem}')
    replies[client_id] = replies[client_id]._replace(values=None)
    unusable: Sequence[Any] = self.program.unusable(phase)
    return unusable

  def _foreign(self, phase: int, client_id: int, values: Sequence[Any]) -> str:
    """Says if a reply has the row of another client, or ''."""
    if 'client_id' not in self.program.data:
      return ''  # The process does not know clients by their numbers.
    for spec, value in zip(self.program.specs(phase), values):
      if spec['name'].endswith(_OWNER) and int(value) != client_id:
        return f'it sends a row of client {int(value)}'
    return ''

  def _counts(
    self,
    participants: participation_lib.Participants,
    result: Mapping[str, Any],
  ) -> dict[str, int]:
    """Counts the clients that the round lost, as in train.csv."""
    if not participants.num_drawn:
      return {}
    name = f'{METRICS}client_work/train/num_clients'
    reported = int(result.get(name, len(participants.slots)))
    missing = len(participants.slots) - reported
    return participants._replace(
      num_dropped_out=participants.num_dropped_out + missing
    ).counts() | {'participation/num_reported': reported}
