"""The cohorts of rounds, as functions of (seed, round)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import struct
import threading
from typing import Any, Protocol

from absl import logging
import numpy as np

from tff_fssl.data import clients
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf, tff
from tff_fssl.rounds import participation as participation_lib

ParticipationHparams = participation_lib.ParticipationHparams
_FORMAT = '<qq'
# The most characters of a message about a client whose data cannot be used.
_MAX_REASON = 200


class MakeClient(Protocol):
  """The data of a cohort's clients."""

  def __call__(self, round_num: int, client_id: int, slot: int, /) -> Any:
    """Makes a client's data, in a form that the runtime accepts."""


class LoadClient(Protocol):
  """The examples of clients."""

  def __call__(self, round_num: int, client_id: int, /) -> tuple[Any, Any]:
    """Loads labelled and unlabelled examples, for `clients.make_example`."""


class OnFailure(Protocol):
  """The answer to a client that is excluded from a round."""

  def __call__(self, round_num: int, client_id: int, reason: str, /) -> None:
    """Is called once for each. An exception that it raises ends the round."""


class Cohort(list[Any]):
  """A list of clients' data, each made when it is accessed.

  It holds functions without arguments, and access returns their results. The
  in-process runtime accesses a client when its turn comes, and does not keep
  its data. TFF's own contexts send all data at once, and so access all clients.
  It is a list because those contexts accept no other sequence.

  Attributes:
    recipe: Makes the clients' data on other machines, if that is possible. See
      `runtime.recipes`.
  """

  recipe: CohortRecipe | None = None

  def arguments_of(self, index: int) -> tuple[Any, ...]:
    """Returns a client's (round, client, slot), for the recipe."""
    # `super()` returns the function, which `self[index]` would call.
    make_client: functools.partial[Any] = super().__getitem__(index)
    return make_client.args

  def __getitem__(self, index: Any) -> Any:
    value = super().__getitem__(index)
    if isinstance(index, slice):
      part = Cohort(value)
      part.recipe = self.recipe
      return part
    return value() if callable(value) else value

  def __iter__(self) -> Iterator[Any]:
    return (self[index] for index in range(len(self)))


class FailedClients:
  """The clients that were excluded from a round, for its report."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._reasons: dict[tuple[int, int], str] = {}

  def add(self, round_num: int, client_id: int, reason: str) -> None:
    """Adds a client. This is an `OnFailure`."""
    with self._lock:
      self._reasons[round_num, client_id] = reason

  def take(self, round_num: int) -> list[tuple[int, str]]:
    """Returns a round's sorted (client, reason) pairs. Forgets all rounds."""
    with self._lock:
      taken, self._reasons = self._reasons, {}
    return sorted((c, why) for (r, c), why in taken.items() if r == round_num)


def warn_of_failure(round_num: int, client_id: int, reason: str) -> None:
  """Logs an excluded client. This is an `OnFailure`."""
  logging.warning(
    'round %d: client %d is left out: %s', round_num, client_id, reason
  )


def sample_cohort(
  seed: int, round_num: int, num_clients: int, clients_per_round: int
) -> list[int]:
  """Draws a round's clients, without replacement.

  Args:
    seed: Seed of the run.
    round_num: The round, >= 1.
    num_clients: Clients are 0 .. num_clients - 1.
    clients_per_round: The number to draw, at most `num_clients`.

  Returns:
    Client ids, ascending.

  Examples:
    >>> from tff_fssl.rounds import sampling
    >>> for round_num in (1, 2):
    ...   print(sampling.sample_cohort(0, round_num, 100, clients_per_round=5))
    [8, 45, 51, 87, 97]
    [28, 46, 52, 56, 81]
  """
  return sorted(draw_slots(seed, round_num, num_clients, clients_per_round))


def draw_slots(
  seed: int, round_num: int, num_clients: int, clients_per_round: int
) -> dict[int, int]:
  """Draws a round's clients, with their positions in the order of drawing.

  Args:
    seed: Seed of the run.
    round_num: The round, >= 1.
    num_clients: Clients are 0 .. num_clients - 1.
    clients_per_round: The number to draw, at most `num_clients`.

  Returns:
    Client id -> slot, in [0, clients_per_round).
  """
  drawn = participation_lib.draw_order(
    seed, round_num, num_clients, clients_per_round
  )
  return {client_id: slot for slot, client_id in enumerate(drawn)}


class CohortIterator(tff.program.FederatedDataSourceIterator):
  """An iterator over rounds. Its state is (seed, round), without data.

  Each source has its own subclass, which refers to the source. State managers
  (TFF's and ours) read saved bytes by the class of one of the source's
  iterators, so the iterator that they get has clients.
  """

  _source: CohortDataSource  # A class attribute.

  def __init__(self, seed: int, round_num: int):
    """Points at a round.

    Args:
      seed: Seed of the run.
      round_num: The round that is selected next.
    """
    self.seed = seed
    self.round_num = round_num

  @classmethod
  def from_bytes(cls, buffer: bytes) -> CohortIterator:
    """Reads the result of `to_bytes`, or raises `ValueError`."""
    iterator = cls(*struct.unpack(_FORMAT, buffer))
    if iterator.seed != cls._source.seed:
      raise ValueError(
        f'the iterator has seed {iterator.seed}, but the source has seed'
        f' {cls._source.seed}'
      )
    return iterator

  def to_bytes(self) -> bytes:
    """Packs seed and round into 16 bytes."""
    return struct.pack(_FORMAT, self.seed, self.round_num)

  @property
  def federated_type(self) -> tff.FederatedType:
    """Returns the type of a cohort."""
    return self._source.federated_type

  def select(self, k: int | None = None) -> Cohort:
    """Returns the cohort of the round, and advances to the next round.

    Args:
      k: The number of clients. None: the source's `clients_per_round`.

    Returns:
      A `Cohort`, empty in rounds without clients. A client's data is read when
      its turn comes.
    """
    cohort = self._source.cohort(self.seed, self.round_num, k)
    self.round_num += 1
    return cohort

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, CohortIterator):
      return NotImplemented
    return (self.seed, self.round_num) == (other.seed, other.round_num)

  __hash__ = None  # type: ignore[assignment]


class CohortDataSource(tff.program.FederatedDataSource):
  """A population of clients from which each round draws a cohort.

  Attributes:
    seed: Seed of the cohorts.
  """

  def __init__(
    self,
    federated_type: tff.FederatedType,
    make_client: MakeClient,
    *,
    seed: int,
    num_clients: int,
    clients_per_round: int,
    first_round: int = 1,
    trains_clients: bool = True,
    participation: ParticipationHparams = ParticipationHparams(),
    min_clients: int = 0,
    recipe: CohortRecipe | None = None,
  ):
    """Describes the population.

    Args:
      federated_type: `{D*}@CLIENTS` in TFF's notation: each client holds a data
        set whose elements are of type D.
      make_client: (round_num, client_id, slot) -> a client's data, a data set.
        It is called when the client's turn comes, perhaps in another thread,
        once for each phase. The slot is the client's position in the order in
        which the round's clients are drawn.
      seed: Seed of the cohorts.
      num_clients: Clients are 0 .. num_clients - 1.
      clients_per_round: The number to draw in each round.
      first_round: The number of the first round. Rounds before 1 (the server's
        pre-training) have no clients.
      trains_clients: Whether rounds have clients at all.
      participation: The availability of clients, and their behaviour.
      min_clients: Rounds with fewer clients have none.
      recipe: Does the same as `make_client` on other machines, if that is
        possible.

    Raises:
      UsageError: If more clients would be drawn than exist, or the file that
        `participation` names is wrong.
    """
    if not 1 <= clients_per_round <= num_clients and trains_clients:
      raise UsageError(
        f'clients_per_round={clients_per_round}: must be from 1 to'
        f' num_clients={num_clients}'
      )
    if trains_clients:
      participation.check_cohort(clients_per_round, num_clients)
    self._federated_type = federated_type
    self._make_client = make_client
    self.seed = seed
    self._num_clients = num_clients
    self._clients_per_round = clients_per_round
    self._first_round = first_round
    self._trains_clients = trains_clients
    self._participation = participation
    self._availability = participation_lib.read_availability(
      participation, num_clients
    )
    self._min_clients = min_clients
    self._recipe = recipe
    # `from_bytes` is a class method, so the class must know the source.
    self._iterator_class = type(
      'BoundCohortIterator', (CohortIterator,), {'_source': self}
    )

  @property
  def federated_type(self) -> tff.FederatedType:
    """Returns the type of a cohort."""
    return self._federated_type

  def iterator(self) -> CohortIterator:
    """Returns an iterator at the first round."""
    iterator: CohortIterator = self._iterator_class(
      self.seed, self._first_round
    )
    return iterator

  def client_ids(
    self, seed: int, round_num: int, k: int | None = None
  ) -> list[int]:
    """Lists a round's clients, ascending. Rounds before 1 have none."""
    return sorted(self._cohort_of(seed, round_num, k).slots)

  def counts(self, seed: int, round_num: int) -> dict[str, int]:
    """Counts the clients that a round lost, as in train.csv.

    Args:
      seed: Seed of the cohorts.
      round_num: The round.

    Returns:
      Name -> number. Empty if all drawn clients always take part fully.
    """
    if not (self._participation.is_on and self._trains_clients):
      return {}
    return self._participants(seed, round_num).counts()

  def _participants(
    self, seed: int, round_num: int, k: int | None = None
  ) -> participation_lib.Participants:
    """Draws the clients that report in a round, even if they are too few."""
    if round_num < 1 or not self._trains_clients:
      return participation_lib.NOBODY
    if k is None:
      k = self._clients_per_round
    if not 1 <= k <= self._num_clients:
      raise ValueError(f'k={k}: must be from 1 to {self._num_clients}')
    return participation_lib.draw(
      self._participation,
      self._availability,
      seed=seed,
      round_num=round_num,
      num_clients=self._num_clients,
      clients_per_round=k,
    )

  def _cohort_of(
    self, seed: int, round_num: int, k: int | None = None
  ) -> participation_lib.Participants:
    """Draws the clients that train in a round: none if too few report."""
    reporting = self._participants(seed, round_num, k)
    is_enough = len(reporting.slots) >= self._min_clients
    return reporting if is_enough else participation_lib.NOBODY

  def cohort(self, seed: int, round_num: int, k: int | None = None) -> Cohort:
    """Returns the data of a round's clients."""
    return self.chosen(round_num, self._cohort_of(seed, round_num, k).slots)

  def chosen(self, round_num: int, slots: Mapping[int, int]) -> Cohort:
    """Returns the data of the given clients (id -> slot) in a round."""
    # Ascending ids make the order of clients independent of the draw.
    cohort = Cohort(
      functools.partial(self._make_client, round_num, client_id, slot)
      for client_id, slot in sorted(slots.items())
    )
    cohort.recipe = self._recipe
    return cohort


def build_data_source(
  process: tff.learning.templates.LearningProcess,
  load_client: LoadClient,
  *,
  seed: int,
  on_failure: OnFailure = warn_of_failure,
  participation: ParticipationHparams = ParticipationHparams(),
  load_elsewhere: Callable[[], LoadClient] | None = None,
  **population: Any,
) -> CohortDataSource:
  """Builds the clients of one of our processes from their examples.

  `process.build_process` has an example.

  A client whose data cannot be used is excluded from the round. The process
  counts it as rejected. That is a client for which `load_client` raises, or
  returns examples that `clients.make_example` refuses, images that the process
  does not take, or labels that are not classes. Rounds with fewer clients than
  the process's `min_clients` have none.

  Args:
    process: The process that the clients train in.
    load_client: (round_num, client_id) -> (labelled, unlabelled) examples of
      the client in that round. Each is None or a pair (x, y) as
      `clients.make_example` takes them. It is called when the client's turn
      comes, perhaps in another thread, once for each phase. It must depend on
      nothing else, so that a resumed run has the same results.
    seed: Seed of the cohorts, and of clients' draws in a round.
    on_failure: Called for excluded clients. See `OnFailure`.
    participation: The availability of clients, and their behaviour. With
      stragglers, the process must have been built for an element with `share`
      (`clients.element_spec`).
    load_elsewhere: Makes an equal `load_client` on another machine. It is
      pickled, and called once in each process there. It must be small, and read
      that machine's own data. Without it, a runtime of several machines sends
      the data of each client.
    **population: `CohortDataSource`'s num_clients, clients_per_round, and
      optionally trains_clients and first_round, by default the process's.

  Returns:
    The source. Its cohorts work in any TFF context.

  Raises:
    UsageError: If `participation` does not fit the population or the process.
  """
  federated_type = process.next.type_signature.parameter[1]
  spec = tff.types.type_to_tf_tensor_specs(federated_type.member.element)
  if participation.straggler_probability and 'share' not in spec:
    raise UsageError(
      f'straggler_probability={participation.straggler_probability}: the'
      ' process was built for clients that make all of their steps; build it'
      ' with clients.element_spec(..., stragglers=True)'
    )
  maker = ClientMaker(
    spec,
    getattr(process, 'num_classes', None),
    seed,
    participation,
    load_client,
    _Once(on_failure),
  )
  population.setdefault('first_round', getattr(process, 'first_round', 1))
  return CohortDataSource(
    federated_type,
    maker,
    seed=seed,
    participation=participation,
    min_clients=getattr(process, 'min_clients', 0),
    recipe=load_elsewhere and CohortRecipe(maker, load_elsewhere),
    **population,
  )


class _Once:
  """An `OnFailure` that passes on the first failure of a client in a round."""

  def __init__(self, on_failure: OnFailure):
    self._on_failure = on_failure
    self._lock = threading.Lock()
    self._told: set[tuple[int, int]] = set()

  def __call__(self, round_num: int, client_id: int, reason: str) -> None:
    with self._lock:
      is_new = (round_num, client_id) not in self._told
      # Other rounds are over, and need no memory.
      self._told = {told for told in self._told if told[0] == round_num}
      self._told.add((round_num, client_id))
    if is_new:
      self._on_failure(round_num, client_id, reason)


@dataclasses.dataclass(frozen=True)
class ClientMaker:
  """A `MakeClient` for the clients of a process.

  Attributes:
    spec: Nested `tf.TensorSpec`s of a client's element.
    num_classes: Labels must be less, if known.
    seed: Seed of clients' draws.
    participation: The behaviour of clients in a round.
    load_client: Loads a client's examples.
    on_failure: Called for excluded clients.
  """

  spec: Any
  num_classes: int | None
  seed: int
  participation: ParticipationHparams
  load_client: LoadClient
  on_failure: OnFailure

  def __call__(
    self, round_num: int, client_id: int, slot: int
  ) -> tf.data.Dataset:
    """Makes a client's data, or an unusable element if that fails."""
    try:
      element = self._load(round_num, client_id, slot)
    # `load_client` is a user's function: any error excludes only this client.
    except Exception as error:  # pylint: disable=broad-except
      reason = f'{type(error).__name__}: {" ".join(str(error).split())}'
      self.on_failure(round_num, client_id, reason[:_MAX_REASON])
      element = clients.unusable_example(self.spec)
    return tf.data.Dataset.from_tensors(element)

  def _load(
    self, round_num: int, client_id: int, slot: int
  ) -> collections.OrderedDict[str, Any]:
    """Makes the client's element. Errors of `load_client` propagate."""
    labeled, unlabeled = self.load_client(round_num, client_id)
    element = clients.make_example(
      seed=clients.client_seed(self.seed, round_num, client_id),
      labeled=labeled,
      unlabeled=unlabeled,
      num_classes=self.num_classes,
    )
    _check_element(element, self.spec)
    share = participation_lib.share_of_steps(
      self.participation, self.seed, round_num, client_id
    )
    element['client_id'] = np.int32(client_id)
    element['slot'] = np.int32(slot)
    element['share'] = np.float32(share)
    # The process takes only some of these fields.
    return collections.OrderedDict((n, element[n]) for n in self.spec)


@dataclasses.dataclass(frozen=True)
class CohortRecipe:
  """A recipe for clients' data on other machines. See `runtime.recipes.Recipe`.

  Attributes:
    maker: Makes the clients' data here. Only its numbers travel.
    load_elsewhere: See `build_data_source`.
  """

  maker: ClientMaker
  load_elsewhere: Callable[[], LoadClient]

  def load(self, report: Callable[[Any], None]) -> ClientMaker:
    """Builds the maker on another machine, which sends failures to `report`."""
    return dataclasses.replace(
      self.maker,
      load_client=self.load_elsewhere(),
      on_failure=lambda *failure: report(failure),
    )

  def received(self, failure: tuple[int, int, str]) -> None:
    """Passes on a failure that another machine reported."""
    self.maker.on_failure(*failure)

  def __reduce__(self) -> Any:
    # The user's functions may hold data, or not be picklable.
    numbers = dataclasses.replace(
      self.maker, load_client=_not_here, on_failure=_not_here
    )
    return CohortRecipe, (numbers, self.load_elsewhere)


def _not_here(*_: Any) -> Any:
  raise RuntimeError('the recipe was not loaded')


def _check_element(element: Any, spec: Any) -> None:
  """Raises `UsageError` for examples that a process does not take."""
  for kind in ('labeled', 'unlabeled'):
    x, wanted = element[kind]['x'], spec[kind]['x']
    if not wanted.shape.is_compatible_with(x.shape) or wanted.dtype != x.dtype:
      raise UsageError(
        f'examples are {x.dtype} {list(x.shape[1:])}, but must be'
        f' {wanted.dtype.name} {wanted.shape[1:].as_list()}'
      )
