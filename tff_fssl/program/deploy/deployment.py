"""The description of a deployed process, for the server of its federation."""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import json
import os
import struct
import typing
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.program import checkpoint
from tff_fssl.program import exported
from tff_fssl.rounds import participation_hparams

ParticipationHparams = participation_hparams.ParticipationHparams

FORMAT, VERSION = 'tff_fssl.deployment', 1
# In the server's folder, beside the graphs.
NAME = 'deployment.json'
EVALUATION = 'evaluation'
# Copies of files of a run.
AVAILABILITY = 'availability.csv'
COPIED = ('partition.json', 'frozen.ckpt', exported.ABOUT_FILE)

# How names of the program begin, and paths of a checkpoint.
STATE, METRICS, PROCESS = 'state/', 'metrics/', 'process/'
_ITERATOR, _BAD_ROUNDS = 'iterator', 'num_bad_rounds'
# Seed and round, as in `rounds.sampling`.
_POSITION = '<qq'

# Name of the program's state -> array.
State = dict[str, np.ndarray]


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


def read(folder: str) -> Deployment:
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
