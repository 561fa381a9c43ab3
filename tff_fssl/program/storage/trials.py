"""The trials of a sweep, kept as a study of Optuna.

A trial of the sweep has a number of its own, since Optuna's trials cannot be
resumed: one that was interrupted or has failed counts as failed for Optuna, and
another one with the same values takes its place.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import math
import sqlite3
from typing import Any
import warnings

import numpy as np
import optuna

from tff_fssl import files
from tff_fssl.data import seeds
from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import sweeps

COMPLETE, PRUNED, DIVERGED = 'complete', 'pruned', 'diverged'
FAILED, OPEN = 'failed', 'open'

_NUMBER, _SCORES, _NOTE = 'number', 'scores', 'note'
# Optuna calls it pruned: samplers ignore failed trials, and would draw more of
# their kind.
_DIVERGED = 'diverged'
_State = optuna.trial.TrialState
_ENDS = {
  COMPLETE: _State.COMPLETE,
  PRUNED: _State.PRUNED,
  DIVERGED: _State.PRUNED,
  FAILED: _State.FAIL,
}


@dataclasses.dataclass(frozen=True)
class Record:
  """The record of a trial.

  Attributes:
    number: Its number in the sweep.
    values: The values of the flags that vary.
    state: `COMPLETE`, `PRUNED`, `DIVERGED`, `FAILED` or `OPEN`.
    scores: Seed -> best validation accuracy, in [0, 1].
    note: The reason why it was pruned, has diverged or failed.
  """

  number: int
  values: dict[str, Any]
  state: str
  scores: dict[int, float]
  note: str = ''

  @property
  def mean(self) -> float:
    """Returns the mean of the scores, or NaN without scores."""
    return float(np.mean(list(self.scores.values()))) if self.scores else np.nan


class Running:
  """A trial that is running.

  Attributes:
    number: Its number in the sweep.
    values: The values of the flags that vary.
  """

  def __init__(self, number: int, trial: optuna.Trial, study: optuna.Study):
    """Sets the trial, for `Trials.take`."""
    self.number = number
    self.values: dict[str, Any] = dict(trial.params)
    self._trial = trial
    self._study = study
    self._reported: set[int] = set()

  def is_bad(self, scores: Mapping[int, float]) -> bool:
    """Reports the first seed's validation accuracy, and judges it.

    Args:
      scores: Round -> accuracy. Values that were reported are not repeated.

    Returns:
      True if pruning judges it worse than other trials.
    """
    for round_num in sorted(scores.keys() - self._reported):
      self._reported.add(round_num)
      with _errors():
        self._trial.report(scores[round_num], round_num)
        if self._trial.should_prune():
          return True
    return False

  def end(
    self, state: str, scores: Mapping[int, float], note: str = ''
  ) -> None:
    """Ends the trial, as any state but `OPEN`."""
    value = None
    if state == COMPLETE:
      value = float(np.mean(list(scores.values())))
    with _errors():
      # JSON has texts as keys.
      texts = {str(seed): score for seed, score in scores.items()}
      self._trial.set_user_attr(_SCORES, texts)
      self._trial.set_user_attr(_NOTE, note)
      self._trial.set_user_attr(_DIVERGED, state == DIVERGED)
      self._study.tell(self._trial, value, _ENDS.get(state, _State.FAIL))


class Trials:
  """All trials of a sweep.

  Attributes:
    study: Optuna's study of the trials.
  """

  def __init__(self, path: str, sweep: sweeps.Sweep, jobs: int):
    """Opens or makes a study, and queues trials that are not over.

    Args:
      path: The database.
      sweep: The sweep.
      jobs: The number of trials at a time.

    Raises:
      UsageError: If the database cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    self._path, self._sweep, self._jobs = path, sweep, jobs
    self._grid = sweep.grid() if sweep.search.sampler == sweeps.GRID else []
    with warnings.catch_warnings():
      # Steps need not end at the greatest value.
      warnings.simplefilter('ignore')
      self._distributions = {s.name: _distribution(s) for s in sweep.spaces}
    search = sweep.search
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if search.pruning == sweeps.MEDIAN:
      pruner = optuna.pruners.MedianPruner(
        search.pruning_trials, search.pruning_rounds
      )
    with _errors(path):
      storage = optuna.storages.RDBStorage(
        # Paths may hold characters with a meaning in a URL.
        'sqlite:///study.db',
        engine_kwargs={'creator': lambda: sqlite3.connect(path)},
      )
      self.study = optuna.create_study(
        study_name='sweep',
        storage=storage,
        direction='maximize',
        pruner=pruner,
        load_if_exists=True,
      )
      if self.study.direction != optuna.study.StudyDirection.MAXIMIZE:
        raise ValueError('it does not look for the largest accuracy')
      for trial in self._latest().values():
        if trial.state == _State.RUNNING:
          self.study.tell(trial.number, state=_State.FAIL)
        elif _state(trial) != FAILED:
          continue
        # Optuna's trials cannot be resumed: a new one takes the place.
        self._enqueue(trial.user_attrs[_NUMBER], trial.params)
    self.records()  # Checked, before anything is trained.

  def records(self) -> list[Record]:
    """Lists all trials that have begun, by number."""
    with _errors(self._path):
      latest = self._latest()
      return [self._record(n, latest[n]) for n in sorted(latest)]

  def _record(self, number: int, trial: optuna.trial.FrozenTrial) -> Record:
    """Reads a trial, or raises if we cannot have written it."""
    record = Record(
      number,
      dict(trial.params or trial.system_attrs.get('fixed_params', {})),
      _state(trial),
      {
        int(seed): float(score)
        for seed, score in trial.user_attrs.get(_SCORES, {}).items()
      },
      str(trial.user_attrs.get(_NOTE, '')),
    )
    # The database may be of another sweep, or edited by hand.
    allowed = self._grid[number : number + 1]
    if self._grid and record.values not in allowed:
      raise ValueError(f'trial {number} is not that of the grid')
    is_complete = record.state == COMPLETE
    odd = record.values.keys() ^ self._distributions.keys()
    if odd and (is_complete or odd - self._distributions.keys()):
      raise ValueError(f'trial {number} has other flags: {sorted(odd)}')
    scores = record.scores.values()
    if not record.scores.keys() <= set(self._sweep.seeds) or not all(
      0 <= score <= 1 for score in scores
    ):
      raise ValueError(f'trial {number} has the scores {record.scores}')
    if is_complete and (
      len(scores) < len(self._sweep.seeds)
      or not math.isclose(record.mean, trial.value or 0.0)
    ):
      raise ValueError(f'the scores of trial {number} are not its value')
    return record

  def take(self) -> Running | None:
    """Begins the next trial, and returns None if there are no more."""
    with _errors(self._path):
      latest = self._latest()
      if not any(t.state == _State.WAITING for t in latest.values()):
        free = set(range(self._sweep.num_trials)) - latest.keys()
        if not free:
          return None
        # The lowest number that is free, so that a resumed sweep makes the same
        # trials.
        number = min(free)
        self._enqueue(number, self._grid[number] if self._grid else {})
        latest = self._latest()
      # Optuna takes the waiting trial that is first in its own order.
      number = min(
        (trial.number, number)
        for number, trial in latest.items()
        if trial.state == _State.WAITING
      )[1]
      # A sampler for each trial draws the same however often the sweep was
      # killed.
      self.study.sampler = self._sampler(number)
      trial = self.study.ask(self._distributions)
      assert trial.user_attrs[_NUMBER] == number
      return Running(number, trial, self.study)

  def _latest(self) -> dict[int, optuna.trial.FrozenTrial]:
    """Returns Optuna's current trial of each number."""
    latest = {}
    for trial in self.study.get_trials(deepcopy=False):
      number = trial.user_attrs[_NUMBER]
      if not isinstance(number, int) or number < 0:
        raise ValueError(f'{number!r} is not the number of a trial')
      latest[number] = trial
    return latest

  def _enqueue(self, number: int, values: dict[str, Any]) -> None:
    self.study.enqueue_trial(values, user_attrs={_NUMBER: number})

  def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
    """Returns the sampler of a trial, which draws the same after a kill."""
    search = self._sweep.search
    generator = seeds.generator(
      search.sampler_seed, seeds.Purpose.SWEEP, number
    )
    seed = int(generator.integers(2**31))
    if search.sampler != sweeps.TPE:
      return optuna.samplers.RandomSampler(seed)
    with warnings.catch_warnings():
      # `constant_liar` is called experimental.
      warnings.simplefilter('ignore')
      return optuna.samplers.TPESampler(seed=seed, constant_liar=self._jobs > 1)


def _state(trial: optuna.trial.FrozenTrial) -> str:
  if trial.user_attrs.get(_DIVERGED):
    return DIVERGED
  names = {end: name for name, end in _ENDS.items() if name != DIVERGED}
  return names.get(trial.state, OPEN)


def _distribution(
  space: sweeps.Space,
) -> optuna.distributions.BaseDistribution:
  if space.choices:
    return optuna.distributions.CategoricalDistribution(space.choices)
  if isinstance(space.low, int):
    return optuna.distributions.IntDistribution(
      space.low, space.high, space.log, space.step or 1
    )
  return optuna.distributions.FloatDistribution(
    space.low, space.high, space.log, space.step
  )


@contextlib.contextmanager
def _errors(path: str = 'study.db') -> Iterator[None]:
  """Turns errors of the database into a `UsageError`.

  A database that somebody changed makes Optuna, SQLAlchemy and the reader of
  JSON fail in any way.
  """
  try:
    yield
  except UsageError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    raise files.FileError(
      path,
      f'the study cannot be used ({files.first_line(error)}); free some space'
      ' or fix the file, then give the command again',
    ) from error
