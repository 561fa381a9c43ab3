"""A round of an exported process at the server of a federation.

Nothing here knows how messages travel, or TensorFlow Federated. No client is
believed: a reply is what anybody may have sent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import secrets
from typing import Any, NamedTuple

from tff_fssl.data import seeds
from tff_fssl.lazy import tf
from tff_fssl.program.deploy import deployment as deployment_lib
from tff_fssl.rounds import participation as participation_lib

# Where a reply says whose row it holds.
_OWNER = 'row/client_id'
# The most characters of a reason that a client gives.
_MAX_REASON = 200


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
  """A reply. Only the message that it answers is known.

  Attributes:
    client_id: The client that was asked.
    about: What it says that it is about.
    values: The values, or None if they are malformed.
    error: Why there is no reply, or ''.
  """

  client_id: int
  about: Mapping[str, Any]
  values: Sequence[Any] | None
  error: str = ''


class NobodyError(Exception):
  """A round in which no client has sent its work: it does not count.

  Attributes:
    lines: What the log says of clients.
  """

  def __init__(self, lines: list[str]):
    super().__init__('no client has sent its work')
    self.lines = lines


class _ReplyError(Exception):
  """A reply that cannot be one: the message says why."""


# Sends messages, and returns the replies that came in time, in any order.
Send = Callable[[Sequence[Ask]], Iterable[Reply]]


class Outcome(NamedTuple):
  """The end of a round.

  Attributes:
    state: The state after it.
    metrics: The figures, as in train.csv.
    lines: What the log says of clients.
  """

  state: deployment_lib.State
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
  deployment: deployment_lib.Deployment
  availability: participation_lib.Availability | None
  send: Send

  def run(
    self, state: deployment_lib.State, round_num: int, attempt: int = 0
  ) -> Outcome:
    """Runs a round.

    A client that does not answer in time takes no further part in the round. A
    client with a malformed reply, or one that an operation refuses, is
    rejected, and counted as such. If an operation refuses the replies together,
    all are rejected. The process itself discards a round with too few usable
    clients.

    Args:
      state: The state before it.
      round_num: The round.
      attempt: The number of `NobodyError`s of this round. Each time, other
        clients are drawn: those of before may be gone for ever.

    Returns:
      The state after it, and its figures.

    Raises:
      NobodyError: If clients were asked, and none has sent its work.
    """
    participants = self._draw(round_num, attempt)
    lines, public = list[str](), list[str]()
    added: set[int] = set()

    def receive(
      phase: int, present: Sequence[int], sent: Sequence[Any]
    ) -> dict[int, Reply]:
      asks = [
        self._ask(round_num, phase, participants, i, sent) for i in present
      ]
      replies = self._collect(asks, lines) if asks else {}
      if asks and not phase and not replies:
        raise NobodyError([] if self.deployment.is_noised else lines)
      added.update(replies)
      return replies

    present = sorted(participants.slots)
    try:
      result = self._combine(state, present, receive, lines)
    except tf.errors.OpError as error:
      if not added:
        raise  # No client can have caused it.
      who = ', '.join(map(str, sorted(added)))
      public.append('is discarded: the replies cannot be combined')
      lines.append(f'{public[0]}, of clients {who}: {_one_line(error)}')
      nothing = {i: Reply(i, {}, None) for i in added}
      result = self._combine(state, sorted(added), lambda *_: nothing, [])
    metrics = {
      **deployment_lib.select_metrics(result),
      **self._counts(participants, result),
    }
    new = {name: result[name] for name in state}
    # Where only a noised sum is released, a line would tell who took part.
    told = public if self.deployment.is_noised else lines
    return Outcome(new, metrics, told)

  def _combine(
    self,
    state: deployment_lib.State,
    present: Sequence[int],
    receive: Callable[[int, Sequence[int], Sequence[Any]], dict[int, Reply]],
    lines: list[str],
  ) -> dict[str, Any]:
    """Computes a round, and returns its results by name.

    Args:
      state: The state before it.
      present: The clients of the first phase.
      receive: (phase, clients, values) -> the replies of some of the clients.
      lines: Gets what the log says of clients.
    """
    program = self.program
    server = program.start(state)
    for phase in range(program.num_phases):
      program.stage(phase, server)
      replies = receive(phase, present, program.sent(phase, server))
      totals, usable = program.begin(phase, server), []
      for client_id in present:  # In this order, so that sums repeat.
        if client_id not in replies:
          continue
        values = replies[client_id].values
        try:
          totals = self._add(phase, client_id, server, totals, values)
          usable.append(client_id)
        except (_ReplyError, tf.errors.OpError) as error:
          lines.append(
            f'phase {phase}: client {client_id}: is rejected:'
            f' {_one_line(error)}'
          )
          unusable = program.unusable(phase)
          totals = program.add(phase, server, totals, unusable)
      program.end(phase, server, totals)
      present = usable  # Who was rejected for its form is not asked again.
    program.stage(program.num_phases, server)
    result: dict[str, Any] = program.finish(server)
    return result

  def _draw(
    self, round_num: int, attempt: int = 0
  ) -> participation_lib.Participants:
    """Draws the clients of a round."""
    if round_num < 1:
      return participation_lib.NOBODY
    deployed = self.deployment
    # Epsilon counts on secret cohorts, and clients' graphs may hold the run's
    # seed. Such runs do not repeat in any case.
    seed = deployed.seed + attempt
    if deployed.is_noised:
      seed = secrets.randbits(32)
    return participation_lib.draw(
      deployed.participation,
      self.availability,
      seed=seed,
      round_num=round_num,
      num_clients=deployed.num_clients,
      clients_per_round=deployed.clients_per_round,
    )

  def _ask(
    self,
    round_num: int,
    phase: int,
    participants: participation_lib.Participants,
    client_id: int,
    sent: Sequence[Any],
  ) -> Ask:
    """Makes the message to a client."""
    seed: Sequence[int] = seeds.seed_pair(
      self.deployment.seed, seeds.Purpose.CLIENT_ROUND, round_num, client_id
    ).tolist()
    if self.deployment.is_noised:
      # A client could search for the run's seed, and so for secret cohorts.
      seed = [secrets.randbits(31) for _ in seed]
    share = participation_lib.share_of_steps(
      self.deployment.participation, self.deployment.seed, round_num, client_id
    )
    about = {
      'round': round_num,
      'phase': phase,
      'client': client_id,
      'slot': participants.slots[client_id],
      'seed': seed,
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
        lines.append(f'{who}: failed: {_one_line(reply.error)}')
        if self.deployment.is_noised:
          # Whether a client's data can be read must not change a count.
          found[client_id] = reply._replace(values=None)
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

  def _add(
    self,
    phase: int,
    client_id: int,
    server: Mapping[int, Any],
    totals: Mapping[int, Any],
    values: Sequence[Any] | None,
  ) -> Mapping[int, Any]:
    """Adds a reply to the totals, or raises an error, and changes nothing."""
    if values is None:
      raise _ReplyError('not values of the expected form')
    problem = self.program.problem(phase, values) or self._foreign(
      phase, client_id, values
    )
    if problem:
      raise _ReplyError(problem)
    added: Mapping[int, Any] = self.program.add(phase, server, totals, values)
    return added

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
    name = f'{deployment_lib.METRICS}client_work/train/num_clients'
    reported = int(result.get(name, len(participants.slots)))
    missing = len(participants.slots) - reported
    return participants._replace(
      num_dropped_out=participants.num_dropped_out + missing
    ).counts() | {'participation/num_reported': reported}


def _one_line(reason: Any) -> str:
  """Shortens a reason to one line: a client could forge others in the log."""
  return ' '.join(str(reason).split())[:_MAX_REASON]
