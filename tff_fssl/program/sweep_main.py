"""`programs/sweep.py`: searches flags by validation accuracy.

Optuna draws the values of trials, prunes them and keeps them in its journal. A
trial trains with each seed, one after another. Each of these runs is the
training program in a folder of its own, and resumes from its own checkpoint.

A sweep's folder:

study.log             the trials, an Optuna study (JournalStorage)
trials/N/seedS/       the run of trial N with seed S
trials/N/seedS.log    its output
trials.csv            a row for each trial
winner.flags          the flagfile of the best trial
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any
import warnings

import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl import lazy
from tff_fssl import metrics
from tff_fssl import processes
from tff_fssl.data import seeds as seeds_lib
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import compare
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import csv_table
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import output_tree
from tff_fssl.program import summary
from tff_fssl.program import training_types

if TYPE_CHECKING:
  import optuna
  import optuna.storages.journal
else:
  optuna = lazy.LazyImport('optuna')

_USAGE = 'programs/sweep.py --grid=FLAG=VALUE,VALUE [--FLAG=VALUE ...]'
_ABOUT = (
  'Trains with every combination of some values of flags, or searches by random'
  ' or TPE search, and chooses the trial with the best validation accuracy (or'
  ' what --best_by names), the mean over seeds. Needs --num_validation. All'
  ' flags of programs/train.py but --restart may be given; they are those of'
  ' every trial. The same command continues a sweep that was stopped.\n'
  '--output_dir, on the command line, is the folder of the sweep, whose runs'
  " are in trials/; otherwise it is that of the flagfile's run, followed by"
  ' _sweep. docs/sweeps.md has an example.'
)
GRID, RANDOM, TPE = 'grid', 'random', 'tpe'
_SAMPLED = (RANDOM, TPE)
# A typo can ask for millions of trials.
_MAX_TRIALS = 10_000
# Flags that would change the examples by which trials are compared.
_NOT_VARIED = {
  'num_validation',
  'dataset',
  'label_field',
  'split_preset',
  'svhn_extra',
  'test_share',
  'seed',
  'metrics',
  'best_by',
}
COMPLETE, PRUNED, DIVERGED = 'complete', 'pruned', 'diverged'
FAILED, OPEN = 'failed', 'open'
# State -> Optuna's. Samplers ignore failed trials, and would draw more of the
# kind that diverges.
_ENDS = {
  COMPLETE: 'COMPLETE',
  PRUNED: 'PRUNED',
  DIVERGED: 'PRUNED',
  FAILED: 'FAIL',
}
# Between two looks at a run's process and its table.
_POLL_SECS = 0.2
# The error of a run is near the end of its log.
_MAX_ERROR_BYTES = 10_000


@dataclasses.dataclass(frozen=True)
class SweepHparams:
  """Flags of `programs/sweep.py`."""

  grid: tuple[str, ...] = hparam(
    (),
    'FLAG=VALUE,VALUE,...: the values of a flag. May be given several times.',
  )
  range: tuple[str, ...] = hparam(
    (),
    'FLAG=LOW,HIGH or FLAG=LOW,HIGH,log: the range of a number. log: drawn'
    ' evenly on a logarithmic scale. May be given several times.',
    when=lambda search: search.sampler in _SAMPLED,
  )
  sampler: str = hparam(
    GRID,
    'grid: every combination of the values; random: --trials combinations, each'
    ' drawn at random; tpe: --trials combinations, drawn near good ones'
    ' (Bergstra et al., 2011).',
    choices=(GRID, *_SAMPLED),
  )
  trials: int = hparam(
    20,
    'Number of combinations that are drawn.',
    minimum=1,
    maximum=_MAX_TRIALS,
    when=lambda search: search.sampler in _SAMPLED,
  )
  sampler_seed: int = hparam(
    0,
    'Seed of the draws.',
    minimum=0,
    maximum=2**31 - 1,
    when=lambda search: search.sampler in _SAMPLED,
  )
  seeds: str = hparam(
    '0',
    'The seeds with which each combination is trained, one after another. A'
    ' trial counts by the mean over them.',
  )
  pruning_trials: int = hparam(
    0,
    'N > 0: stop a trial if, in a round in which its first seed is evaluated,'
    ' its best validation accuracy so far is below the median of the other'
    " trials' in that round, once N are complete. 0: train all to the end.",
    minimum=0,
  )
  jobs: int = hparam(
    1,
    'Number of parallel trials. They share the cores, by --intra_op_threads,'
    ' unless that is given.',
    minimum=1,
    maximum=1024,
  )

  def __post_init__(self):
    hparams.validate(self)
    self.seed_numbers()

  def seed_numbers(self) -> tuple[int, ...]:
    """Parses the seeds, or raises `UsageError`."""
    parts = self.seeds.split(',')
    if len(set(parts)) < len(parts) or not all(
      re.fullmatch(r'0|[1-9]\d{0,9}', part, re.ASCII) for part in parts
    ):
      raise UsageError(
        f'--seeds={self.seeds}: must be different whole numbers, joined by'
        ' commas: --seeds=0,1,2'
      )
    return tuple(map(int, parts))


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A checked sweep.

  Attributes:
    base: The flags of all trials.
    spaces: Each flag that varies -> its values. Listed ones are texts.
    search: The search.
    config: The configuration of `base`, with the first seed.
  """

  base: flags.ParsedFlags
  spaces: dict[str, optuna.distributions.BaseDistribution]
  search: SweepHparams
  config: config_lib.Config

  @property
  def folder(self) -> str:
    """Returns --output_dir as typed, or else the run's with '_sweep'."""
    given = self.config.run.output_dir
    return given if 'output_dir' in self.base.command_line else f'{given}_sweep'

  @property
  def study(self) -> str:
    """Returns the journal of the trials."""
    return os.path.join(self.folder, 'study.log')

  @property
  def column(self) -> str:
    """Returns the column of eval.csv that trials are compared by."""
    return summary.selecting(self.config.run.best_by)

  @property
  def figure(self) -> str:
    """Names this figure: 'validation accuracy'."""
    by = self.config.run.best_by
    return f'validation {metrics.FIGURES.get(by, by)}'

  def num_changed(self, trial: optuna.trial.FrozenTrial) -> int:
    """Counts a trial's flags that differ from the base configuration."""
    own = self.config.flags()
    return sum(
      hparams.format_value(value) != hparams.format_value(own.get(name, ''))
      for name, value in values_of(trial).items()
    )

  def run(self, trial: int, seed: int) -> str:
    """Returns the folder of a trial's run with a seed."""
    return os.path.join(
      self.folder, output_tree.TRIALS, f'{trial:03}', f'seed{seed}'
    )

  @property
  def grid(self) -> list[dict[str, Any]]:
    """Returns all combinations, if it is a grid. The last varies fastest."""
    if self.search.sampler != GRID:
      return []
    values = itertools.product(*map(_probes, self.spaces.values()))
    return [dict(zip(self.spaces, combination)) for combination in values]

  def config_of(self, values: Mapping[str, Any]) -> config_lib.Config:
    """Builds the configuration of a trial, or raises `UsageError`."""
    typed = {n: _value(n, hparams.format_value(v)) for n, v in values.items()}
    parsed = dataclasses.replace(
      self.base,
      values={**self.base.values, **typed},
      # As if they were typed: one without an effect is refused.
      command_line=self.base.command_line | values.keys(),
    )
    return config_lib.build_config(parsed)

  def arguments(self, values: Mapping[str, Any]) -> list[str]:
    """Returns arguments of the training program: the flags that were given.

    Args:
      values: Flags that take precedence over the base's.

    Returns:
      '--NAME=VALUE' for each that has an effect, in the order of `--help`.

    Raises:
      UsageError: If they make no sense together.
    """
    given = {
      **{n: v for n, v in self.base.values.items() if self.base.is_set(n)},
      **values,
    }
    has_effect = self.config_of(values).flags()
    return flags.arguments({n: given[n] for n in has_effect if n in given})

  def definition(self) -> dict[str, str]:
    """Returns the texts that must not change when a sweep is resumed."""
    free = {'seed', 'trials', 'jobs', *config_lib.neutral_flags(), *self.spaces}
    values = {
      **{n: v for n, v in self.base.values.items() if self.base.is_set(n)},
      **self.config.flags(),
      **dataclasses.asdict(self.search),
    }
    names = sorted(values.keys() - free)
    texts = {name: hparams.format_value(values[name]) for name in names}
    path = self.base.values.get('partition_file')
    if path:  # It may be moved, but not changed.
      digest = hashlib.sha256(files.read_bytes(path)).hexdigest()
      texts['partition_file'] = f'(SHA-256 {digest[:16]})'
    return texts


def build(parsed: flags.ParsedFlags, search: SweepHparams) -> Sweep:
  """Builds a sweep, and checks it.

  Args:
    parsed: The command line.
    search: The flags of the search.

  Returns:
    The sweep.

  Raises:
    UsageError: If it makes no sense.
  """
  spaces: dict[str, optuna.distributions.BaseDistribution] = {}
  for flag, texts in (('grid', search.grid), ('range', search.range)):
    for text in texts:
      with _about(f'--{flag}={text}'):
        name, values = _split(text)
        if name in spaces:
          raise UsageError('the flag is given twice; give all values at once')
        spaces[name] = (_list if flag == 'grid' else _range)(name, values)
  if not spaces:
    raise UsageError(
      'no flag to vary was given; give --grid=FLAG=VALUE,VALUE or, with'
      f' --sampler={RANDOM} or {TPE}, --range=FLAG=LOW,HIGH'
    )
  if 'seed' in parsed.command_line:
    raise UsageError('--seed: has no effect with --seeds; omit it')
  seeds = search.seed_numbers()
  base = dataclasses.replace(parsed, values={**parsed.values, 'seed': seeds[0]})
  sweep = Sweep(base, spaces, search, config_lib.build_config(base))
  if not sweep.config.run.num_validation:
    raise UsageError(
      '--num_validation=0: a sweep selects by validation accuracy, never on'
      ' test data; give --num_validation=N'
    )
  size = math.prod(len(_probes(space)) for space in spaces.values())
  if search.sampler == GRID and size > _MAX_TRIALS:
    raise UsageError(
      f'the grid has {size:,} combinations; at most {_MAX_TRIALS:,} are'
      f' allowed: use --sampler={RANDOM} or {TPE}'
    )
  # Drawn trials are not known yet: each flag is checked by itself.
  combinations = sweep.grid or [
    {name: value} for name in spaces for value in _probes(spaces[name])
  ]
  # All seeds are checked with one trial: no other value matters to them.
  checked = [{**combinations[0], 'seed': seed} for seed in seeds]
  for combination in (*checked, *combinations[1:]):
    with _about(f'with {flags.join_arguments(combination)}'):
      sweep.config_of(combination)
  return sweep


@contextlib.contextmanager
def _about(subject: str) -> Iterator[None]:
  """Puts a subject in front of an error."""
  try:
    yield
  except UsageError as error:
    raise UsageError(f'{subject}: {error}') from error


def _split(text: str) -> tuple[str, list[str]]:
  """Splits 'FLAG=VALUE,...', or raises `UsageError`."""
  name, _, values = text.partition('=')
  name, known = name.lstrip('-'), config_lib.fields()
  if not values:
    raise UsageError('must be FLAG=VALUE,VALUE')
  if name not in known:
    matches = hparams.closest(name, sorted(known))
    raise UsageError(f'unknown flag --{name}{matches}')
  if name in _NOT_VARIED | config_lib.neutral_flags():
    raise UsageError(
      f'--{name} cannot vary: it changes no result, or the examples by which'
      ' trials are compared (--seeds sets the seeds)'
    )
  return name, values.split(',')


def _list(
  name: str, values: Sequence[str]
) -> optuna.distributions.BaseDistribution:
  # 0.1 and 0.10 are one value.
  texts = dict.fromkeys(hparams.format_value(_value(name, v)) for v in values)
  return optuna.distributions.CategoricalDistribution(tuple(texts))


def _range(
  name: str, values: Sequence[str]
) -> optuna.distributions.BaseDistribution:
  if len(values) not in (2, 3) or list(values[2:]) not in ([], ['log']):
    raise UsageError('must be FLAG=LOW,HIGH or FLAG=LOW,HIGH,log')
  low, high = (_value(name, value) for value in values[:2])
  if type(low) not in (int, float):
    raise UsageError('only flags that are numbers have ranges; use --grid')
  kind = {
    int: optuna.distributions.IntDistribution,
    float: optuna.distributions.FloatDistribution,
  }[type(low)]
  try:
    return kind(low, high, log=len(values) == 3)
  except ValueError as error:  # LOW above HIGH, or 0 with log.
    raise UsageError(files.first_line(error)) from error


def _probes(space: Any) -> tuple[Any, ...]:
  """Returns the listed values, or the ends of a range."""
  return space.choices if hasattr(space, 'choices') else (space.low, space.high)


@functools.cache
def _value(name: str, text: str) -> Any:
  """Converts a text to the flag's type, or raises `UsageError`."""
  return flags.parse([f'--{name}={text}'], config_lib.groups()).values[name]


class Trials:
  """All trials of a sweep, an Optuna study.

  Optuna's trials cannot be resumed. In place of one that was interrupted or
  has failed, another one with the same values gets its number in the sweep.
  """

  def __init__(self, sweep: Sweep):
    """Opens or makes the study in a folder that is locked.

    Args:
      sweep: The sweep.

    Raises:
      UsageError: If it is damaged, or that of another sweep.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    self._sweep, self._grid = sweep, sweep.grid
    new = sweep.definition()
    try:
      self._study = self._open()
      old = self._study.user_attrs.get('definition', new)
      latest = self.latest()
    except (UsageError, OSError):
      raise
    # A damaged line makes Optuna fail in any way.
    except Exception as error:  # pylint: disable=broad-except
      raise files.FileError(
        self._sweep.study,
        f'it is damaged ({files.first_line(error)}); give another --output_dir',
      ) from error
    names = [n for n in {**old, **new} if old.get(n) != new.get(n)]
    if names:
      words = config_lib.describe_differences(names, old, new)
      raise UsageError(
        f'--output_dir={sweep.folder}: holds a sweep of another configuration'
        f' ({words}); choose another folder, or give these values'
      )
    self._study.set_user_attr('definition', new)
    for trial in latest.values():
      if trial.state.name == 'RUNNING':
        self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    count = len(self._grid) or sweep.search.trials
    over = {number for number, t in latest.items() if t.value is not None}
    over |= {n for n, t in latest.items() if t.state.name == 'PRUNED'}
    # Optuna takes the one that waits first. The others follow by number, so
    # that a resumed sweep makes the same trials.
    waiting = [n for n, t in latest.items() if t.state.name == 'WAITING']
    self._left = [*waiting, *sorted({*range(count)} - over - {*waiting})]

  def _open(self) -> optuna.Study:
    path = self._sweep.study
    if os.path.lexists(path):
      # A full disk or a crash can leave a part of the last line.
      content = files.read_bytes(path)
      durable.write_file(path, [content[: content.rfind(b'\n') + 1]])
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if self._sweep.search.pruning_trials:
      pruner = optuna.pruners.MedianPruner(self._sweep.search.pruning_trials)
    # Optuna's own lock is a file that outlives a kill.
    lock: Any = threading.Lock()
    return optuna.create_study(
      study_name='sweep',
      storage=optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(path, lock)
      ),
      direction='maximize',
      pruner=pruner,
      load_if_exists=True,
    )

  @property
  def num_left(self) -> int:
    """Returns the number of trials that have not begun."""
    return len(self._left)

  def latest(self) -> dict[int, optuna.trial.FrozenTrial]:
    """Returns Optuna's current trial of each number that has begun."""
    trials = self._study.get_trials(deepcopy=False)
    latest = {trial.user_attrs['number']: trial for trial in trials}
    return dict(sorted(latest.items()))

  def take(self) -> optuna.Trial | None:
    """Begins the next trial, and returns None if there are no more."""
    if not self._left:
      return None
    number = self._left.pop(0)
    old = self.latest().get(number)
    if old is None or old.state.name != 'WAITING':
      values = self._grid[number] if self._grid else values_of(old)
      self._study.enqueue_trial(values, user_attrs={'number': number})
    search = self._sweep.search
    # A sampler for each trial draws the same however often the sweep was
    # killed.
    generator = seeds_lib.generator(
      search.sampler_seed, seeds_lib.Purpose.SWEEP, number
    )
    seed = int(generator.integers(2**31))
    self._study.sampler = optuna.samplers.RandomSampler(seed)
    if search.sampler == TPE:
      with warnings.catch_warnings():
        # `constant_liar` is called experimental.
        warnings.simplefilter('ignore')
        self._study.sampler = optuna.samplers.TPESampler(
          seed=seed, constant_liar=search.jobs > 1
        )
    return self._study.ask(self._sweep.spaces)

  def end(
    self, trial: optuna.Trial, state: str, scores: Sequence[float], note: str
  ) -> None:
    """Ends a trial, as any state but `OPEN`."""
    for name, value in (('scores', scores), ('note', note), ('state', state)):
      trial.set_user_attr(name, value)
    end = optuna.trial.TrialState[_ENDS[state]]
    mean = float(np.mean(scores)) if state == COMPLETE else None
    self._study.tell(trial, mean, end)


def values_of(trial: optuna.trial.FrozenTrial | None) -> dict[str, Any]:
  """Returns the values of a trial, as far as they are drawn."""
  if trial is None:
    return {}
  return {**trial.system_attrs.get('fixed_params', {}), **trial.params}


def state_of(trial: optuna.trial.FrozenTrial) -> str:
  """Returns the state of a trial: `COMPLETE`, ..., `OPEN`."""
  state = trial.user_attrs.get('state', OPEN)
  # A kill may fall between the two.
  return state if trial.state.name == _ENDS.get(state) else OPEN


def _ranked(
  sweep: Sweep, trials: Mapping[int, optuna.trial.FrozenTrial]
) -> list[tuple[int, optuna.trial.FrozenTrial]]:
  """Sorts numbered trials: complete ones first, the best ones first.

  Of equal ones, that with the most values of the base configuration comes
  first, then that given first.
  """
  states = (*_ENDS, OPEN)
  return sorted(
    trials.items(),
    key=lambda item: (
      states.index(state_of(item[1])),
      -_rounded(item[1]),
      sweep.num_changed(item[1]),
      item[0],
    ),
  )


def _rounded(trial: optuna.trial.FrozenTrial) -> float:
  # The mean of the same scores in another order may differ in its last digit.
  return round(trial.value or 0.0, 9)


def _describe_tie(
  sweep: Sweep, ranked: Sequence[tuple[int, optuna.trial.FrozenTrial]]
) -> str:
  """Says which of the best trials is kept, or '' if only one is best."""
  number, best = ranked[0]
  tied = {
    n: sweep.num_changed(trial)
    for n, trial in ranked
    if state_of(trial) == COMPLETE and _rounded(trial) == _rounded(best)
  }
  if len(tied) < 2:
    return ''
  least = tied[number]
  why = "it is nearest to the base's values"
  if set(tied.values()) == {least}:
    why = 'it was given first'
  elif not least:
    why = "it has the base's own values"
  return f'Of {len(tied)} equal best trials, trial {number} is kept: {why}.'


def _accuracy(scores: Sequence[float]) -> str:
  """Writes accuracies in percent: '92.5 ± 0.4', or '-'."""
  return (
    compare.mean_and_spread([100 * s for s in scores], 1) if scores else '-'
  )


def _text(values: Mapping[str, Any]) -> str:
  """Formats values with four digits: 'momentum=0.9 fl2.rho=0.05'."""
  return ' '.join(
    f'{n}={v:.4g}' if isinstance(v, float) else f'{n}={v}'
    for n, v in values.items()
  )


class _EndedError(Exception):
  """Ends a trial before it is complete, with a state and a note."""


@dataclasses.dataclass(frozen=True)
class Sweeper:
  """Makes the remaining trials of a sweep.

  Attributes:
    sweep: The sweep.
    trials: Its trials.
    stop: Asks for the end: runs that are being made then save and stop.
    say: Tells the user.
  """

  sweep: Sweep
  trials: Trials
  stop: training_types.StopRequest
  say: Callable[[str], None]

  async def run(self) -> None:
    """Makes trials until there are no more, or `stop` is set."""

    async def make() -> None:
      while self.stop.signal is None and (trial := self.trials.take()):
        await self._make(trial)
        _write_csv(self.sweep, self.trials.latest())

    try:
      async with asyncio.TaskGroup() as group:
        for _ in range(self.sweep.search.jobs):
          group.create_task(make())
    except ExceptionGroup as errors:
      raise errors.exceptions[0] from errors

  async def _make(self, trial: optuna.Trial) -> None:
    """Makes a trial, and reports its result."""
    number = trial.user_attrs['number']
    self.say(f'trial {number}: {_text(trial.params)}')
    scores: list[float] = []
    state, note = COMPLETE, ''
    try:
      for seed in self.sweep.search.seed_numbers():
        # Other trials have reported their first seed: only that compares.
        await self._train(trial, seed, is_first=not scores)
        scores.append(self._best(number, seed))
    except _EndedError as error:
      state, note = error.args
    except UsageError as error:
      state, note = FAILED, str(error)
    if state == OPEN:
      return
    if state == PRUNED:
      scores = [self._best(number, self.sweep.search.seed_numbers()[0])]
    self.trials.end(trial, state, scores, note)
    self.say(
      f'trial {number}: {state}, validation {_accuracy(scores)} %,'
      f' {self.trials.num_left} left{f" ({note})" if note else ""}'
    )

  def _best(self, number: int, seed: int) -> float:
    """Returns the best figure on validation examples of a run so far."""
    tree = output_tree.OutputTree(self.sweep.run(number, seed))
    by = self.sweep.config.run.best_by
    best = summary.best_round(csv_table.read(tree.eval_csv)[1], by)
    if best is None:
      reason = (
        f'seed {seed}: it has no {self.sweep.figure}; see {tree.path}.log'
      )
      raise _EndedError(FAILED, reason)
    return csv_table.number(best, self.sweep.column)

  async def _train(
    self, trial: optuna.Trial, seed: int, is_first: bool
  ) -> None:
    """Runs a seed to its end."""
    path = self.sweep.run(trial.user_attrs['number'], seed)
    arguments = self.sweep.arguments(
      {
        **trial.params,
        **_threads(self.sweep),
        'seed': seed,
        'output_dir': path,
      }
    )
    log = f'{path}.log'
    durable.make_folder(os.path.dirname(log))
    # A run of a sweep that was killed still saves.
    while output_tree.is_held(path) and self.stop.signal is None:
      await asyncio.sleep(_POLL_SECS)
    if self.stop.signal is not None:
      raise _EndedError(OPEN, '')
    with durable.storage_errors(), open(log, 'ab') as output:
      process = processes.start(
        [*train_command(), *arguments],
        signal.SIGTERM,
        stdout=output,
        stderr=subprocess.STDOUT,
      )
    try:
      await self._wait(process, path, trial if is_first else None)
    finally:
      if process.poll() is None:
        process.kill()  # What it has saved stays.
      processes.end_watch(process)
      process.wait()
    if not process.returncode:
      return
    if self.stop.signal is not None:
      raise _EndedError(OPEN, '')
    # The same seed would diverge again.
    diverged = process.returncode == main_lib.NOT_FINITE
    how = processes.describe_end(process.returncode)
    raise _EndedError(
      DIVERGED if diverged else FAILED,
      f'seed {seed}: {how}: {_last_words(log)}; see {log}',
    )

  async def _wait(
    self,
    process: subprocess.Popen[bytes],
    path: str,
    judged: optuna.Trial | None,
  ) -> None:
    """Waits for the end of a run, which `judged` may cause."""
    num_reported = 0
    while process.poll() is None and self.stop.signal is None:
      await asyncio.sleep(_POLL_SECS)
      if judged is None:
        continue
      with contextlib.suppress(UsageError):  # The run itself will say so.
        rows = csv_table.read(output_tree.OutputTree(path).eval_csv)[1]
        values = csv_table.column(rows, self.sweep.column)
        for row, value in list(zip(rows, values))[num_reported:]:
          num_reported += 1
          round_num = int(row[csv_table.KEY])
          if round_num < 1 or not math.isfinite(value):
            continue
          judged.report(value, round_num)
          if judged.should_prune():
            process.terminate()
            await asyncio.to_thread(process.wait)
            raise _EndedError(PRUNED, f'in round {round_num}')
    if process.poll() is None:
      process.terminate()
      await asyncio.to_thread(process.wait)


def _threads(sweep: Sweep) -> dict[str, int]:
  """Returns the flag with the cores of a run, if trials share them."""
  name = 'intra_op_threads'
  is_free = name in sweep.config.flags() and not sweep.base.is_set(name)
  if sweep.search.jobs == 1 or not is_free:
    return {}
  # A container or `taskset` may allow fewer cores than there are.
  cores = len(os.sched_getaffinity(0))
  return {name: max(1, cores // sweep.search.jobs)}


def _last_words(log: str) -> str:
  """Returns the last line of a log."""
  with open(log, 'rb') as file:
    file.seek(max(0, os.path.getsize(log) - _MAX_ERROR_BYTES))
    lines = file.read().decode(errors='replace').split('\n')
  lines = [line.strip() for line in lines if line.strip()]
  return lines[-1].removeprefix('error: ') if lines else 'it printed nothing'


def _write_csv(
  sweep: Sweep, trials: Mapping[int, optuna.trial.FrozenTrial]
) -> None:
  """Writes a row for each trial, or raises `UsageError`."""
  seeds = [f'seed{seed}' for seed in sweep.search.seed_numbers()]
  about = ['state', sweep.column, 'standard_deviation', *seeds, 'note']
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(['trial', *sweep.spaces, *about])
  for number, trial in trials.items():
    values, scores = values_of(trial), trial.user_attrs.get('scores', [])
    writer.writerow(
      [
        number,
        *(values.get(name, '') for name in sweep.spaces),
        state_of(trial),
        np.mean(scores) if scores else '',
        np.std(scores, ddof=1) if len(scores) > 1 else '',
        *scores,
        *[''] * (len(seeds) - len(scores)),
        trial.user_attrs.get('note', ''),
      ]
    )
  path = os.path.join(sweep.folder, 'trials.csv')
  durable.write_file(path, [text.getvalue().encode()])


def train_command() -> list[str]:
  """Returns the command that trains, started as this program was."""
  script = os.path.abspath(sys.argv[0])
  # An installed package has no programs/, and one command for all.
  folder, name = os.path.split(script)
  if name == 'sweep.py':
    return [sys.executable, os.path.join(folder, 'train.py')]
  return [sys.executable, script, 'train']


@main_lib.command(
  _USAGE,
  _ABOUT,
  SweepHparams,
  more=config_lib.groups,
  shown=list,
  most=0,
)
def sweep_main(settings: SweepHparams, parsed: flags.ParsedFlags) -> int:
  """Searches flags by validation accuracy."""
  sweep = build(parsed, settings)
  view, stop = console.Console(), training_types.StopRequest()
  with output_tree.LockedFolder(sweep.folder) as folder:
    _open_folder(folder)
    how = 'and saved'
    try:
      trials = Trials(sweep)
      runs = trials.num_left * len(settings.seed_numbers())
      view.say(
        f'{trials.num_left:,} trials, {runs:,} runs, are to be made in'
        f' {sweep.folder}. The trial with the best {sweep.figure} wins'
        f' ({sweep.config.run.num_validation:,} examples).'
      )
      sweeper = Sweeper(sweep, trials, stop, view.say)
      asyncio.run(main_lib.run_until_stopped(sweeper.run(), stop, view.say))
    except asyncio.CancelledError:
      how = 'at once'
    except OSError as error:
      # Optuna does not name its file.
      error.filename = error.filename or sweep.study
      raise
    if stop.signal is not None:
      view.say(f'Stopped {how}. To continue, give the same command again.')
      return main_lib.exit_code(stop.signal)
    return _close(sweep, trials.latest(), view)


def _open_folder(folder: output_tree.LockedFolder) -> None:
  """Makes and locks a sweep's folder, or raises `UsageError`."""
  folder.check_path()
  names = files.list_folder(folder.path) if os.path.lexists(folder.path) else {}
  if names and 'study.log' not in names:
    raise UsageError(
      f'--output_dir={folder.path}: the folder holds other files'
      f' ({next(iter(names))!r}) but no study.log of a sweep; choose another'
    )
  durable.make_folder(folder.path)
  folder.lock()
  durable.remove_leftovers(
    folder.path, lambda name: name in ('trials.csv', 'winner.flags')
  )


def _close(
  sweep: Sweep,
  trials: Mapping[int, optuna.trial.FrozenTrial],
  view: console.Console,
) -> int:
  """Writes and shows the results, and returns the exit code."""
  ranked = _ranked(sweep, trials)
  rows = [
    [
      _text(values_of(trial)),
      str(number),
      _accuracy(trial.user_attrs.get('scores', [])),
      state_of(trial),
    ]
    for number, trial in ranked
  ]
  header = ['values', 'trial', 'validation, %', 'state']
  view.say('')
  console.show(compare.plain_text([compare.Table(header, rows)]), flush=True)
  number, best = ranked[0]
  if best.value is not None:
    if tie := _describe_tie(sweep, ranked):
      view.say(f'\n{tie}')
    winner = _write_winner(sweep, number, best)
    pattern = os.path.join(os.path.dirname(sweep.run(number, 0)), '*')
    view.say(
      f'\nThe flags of trial {number} are in {winner}. Its test accuracy:\n'
      f'  {console.command_line("compare", pattern)}'
    )
  failed = {n: t for n, t in trials.items() if state_of(t) == FAILED}
  for number, trial in failed.items():
    main_lib.complain(f'trial {number}: {trial.user_attrs["note"]}')
  if failed:
    view.say('The same command tries the failed trials again.')
  return main_lib.FAILED if failed or best.value is None else main_lib.DONE


def _write_winner(
  sweep: Sweep, number: int, trial: optuna.trial.FrozenTrial
) -> str:
  """Writes the flagfile of the best trial, and returns its path."""
  path = os.path.join(sweep.folder, 'winner.flags')
  about = (
    f'Trial {number} of the sweep in {sweep.folder}, by tff_fssl'
    f' {tff_fssl.__version__}: the best {sweep.figure},'
    f' {_accuracy(trial.user_attrs["scores"])} % (seeds {sweep.search.seeds}).'
    f' Chosen by the sweep: {flags.join_arguments(trial.params)}. The other'
    ' flags were given to it.'
  )
  # The user's run gets a seed and a folder of its own.
  lines = flags.comments([about]) + [
    argument
    for argument in sweep.arguments(trial.params)
    if not argument.startswith(('--seed=', '--output_dir='))
  ]
  durable.write_file(path, ['\n'.join([*lines, '']).encode()])
  return path
