"""The search of a sweep: flags, their values, and the sampler.

A sweep trains a configuration with several values of some flags, and chooses
the values with the best validation accuracy. Training with one set of values is
a trial. Errors are found here, before the first trial.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import math
import re
from typing import Any

from tff_fssl import files
from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import usage

GRID, RANDOM, TPE = 'grid', 'random', 'tpe'
NO_PRUNING, MEDIAN = 'none', 'median'

# Samplers that draw from ranges, and the keys of a range.
_SAMPLED = (RANDOM, TPE)
_RANGE = ('low', 'high', 'log', 'step')
# A sweep file may be hostile, and a typo can ask for millions of trials.
_MAX_BYTES = 2**20
_MAX_TRIALS = 10_000
# Flags that a sweep sets itself, or that would change its selection.
_NOT_VARIED = {
  'seed': 'each trial trains with all of --seeds',
  **dict.fromkeys(
    (
      'num_validation',
      'dataset',
      'label_field',
      'split_preset',
      'svhn_extra',
      'test_share',
    ),
    'trials are compared on the same validation examples',
  ),
}


@dataclasses.dataclass(frozen=True)
class SearchHparams:
  """The search of a sweep: flags, or keys of the sweep file."""

  sampler: str = hparam(
    GRID,
    'grid: every combination of the values; random: --trials combinations, each'
    ' drawn at random; tpe: --trials combinations, drawn near good ones'
    ' (Bergstra et al., 2011).',
    choices=(GRID, *_SAMPLED),
    group='Search (also keys of the sweep file)',
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
  pruning: str = hparam(
    NO_PRUNING,
    'median: stop a trial if, in a round in which its first seed is evaluated,'
    ' its best validation accuracy so far is below the median of the other'
    " trials' in that round. none: train all of them to the end.",
    choices=(NO_PRUNING, MEDIAN),
  )
  pruning_trials: int = hparam(
    5,
    'Number of complete trials before one may be stopped.',
    minimum=1,
    when=lambda search: search.pruning == MEDIAN,
  )
  pruning_rounds: int = hparam(
    0,
    'Number of rounds that each trial trains before it may be stopped.',
    minimum=0,
    when=lambda search: search.pruning == MEDIAN,
  )

  def __post_init__(self):
    hparams.validate(self)
    self.seed_numbers()

  def seed_numbers(self) -> tuple[int, ...]:
    """Parses the seeds, or raises `UsageError`."""
    parts = self.seeds.split(',')
    if not all(re.fullmatch(r'\d{1,10}', part, re.ASCII) for part in parts):
      raise UsageError(
        f'--seeds={self.seeds}: must be whole numbers, joined by commas:'
        ' --seeds=0,1,2'
      )
    numbers = tuple(map(int, parts))
    if len(set(numbers)) < len(numbers):
      raise UsageError(
        f'--seeds={self.seeds}: a seed is given twice; its run would be the'
        ' same'
      )
    return numbers


@dataclasses.dataclass(frozen=True)
class Space:
  """The values of a flag that varies.

  Attributes:
    name: The flag.
    choices: The listed values. Empty: those from `low` to `high`.
    low: The least value.
    high: The greatest value.
    log: Whether values are drawn evenly on a logarithmic scale.
    step: The distance of neighbouring values. None: any, for floats.
  """

  name: str
  choices: tuple[Any, ...] = ()
  low: Any = None
  high: Any = None
  log: bool = False
  step: Any = None

  @property
  def text(self) -> str:
    """Writes the values: '0.01, 0.1' or '0.01 to 0.1 (log)'."""
    if self.choices:
      return ', '.join(map(hparams.format_value, self.choices))
    how = 'log' if self.log else f'step {self.step}' if self.step else ''
    ends = (
      f'{hparams.format_value(self.low)} to {hparams.format_value(self.high)}'
    )
    return f'{ends} ({how})' if how else ends

  def probes(self) -> tuple[Any, ...]:
    """Returns the values that are checked before the first trial."""
    return self.choices or (self.low, self.high)

  def listed(self) -> 'Space':
    """Lists the values, or raises `UsageError` if they are too many."""
    if self.choices:
      return self
    if self.step is None or self.log:
      raise UsageError(
        f'{self.name}: --sampler={GRID} tries every value, but {self.text} is a'
        ' range; give a list, or a step without log, or'
        f' --sampler={RANDOM} or {TPE}'
      )
    # A tiny step: their number would be infinite.
    if self.high - self.low > self.step * _MAX_TRIALS:
      raise UsageError(
        f'{self.name}: {self.text} are more than {_MAX_TRIALS:,} values; give a'
        f' greater step, or --sampler={RANDOM} or {TPE}'
      )
    # Without the small number, 0.1 to 0.3 by 0.1 would lack its end.
    count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
    values = (self.low + i * self.step for i in range(count))
    # 0.1 + 2 * 0.1 is 0.30000000000000004: round to 12 digits.
    return Space(
      self.name,
      tuple(float(f'{v:.12g}') if isinstance(v, float) else v for v in values),
    )


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A checked sweep.

  Attributes:
    base: The flags of all trials.
    spaces: The flags that vary.
    search: The search.
    config: The configuration of `base`, with the first seed.
  """

  base: flags.ParsedFlags
  spaces: tuple[Space, ...]
  search: SearchHparams
  config: config_lib.Config

  @property
  def folder(self) -> str:
    """Returns --output_dir as typed, or else the run's with '_sweep'."""
    given = self.config.run.output_dir
    return given if 'output_dir' in self.base.command_line else f'{given}_sweep'

  @property
  def seeds(self) -> tuple[int, ...]:
    """Returns the seeds of each trial."""
    return self.search.seed_numbers()

  @property
  def num_trials(self) -> int:
    """Returns the number of trials."""
    if self.search.sampler == GRID:
      return math.prod(len(space.choices) for space in self.spaces)
    return self.search.trials

  @property
  def base_values(self) -> dict[str, Any]:
    """Returns the values that the base gives to the flags that vary."""
    known = self.config.flags()
    return {s.name: known.get(s.name) for s in self.spaces}

  def grid(self) -> list[dict[str, Any]]:
    """Returns all combinations. The last flag varies fastest."""
    names = [space.name for space in self.spaces]
    values = itertools.product(*(space.choices for space in self.spaces))
    return [dict(zip(names, combination)) for combination in values]

  def config_of(self, values: Mapping[str, Any]) -> config_lib.Config:
    """Builds the configuration of a trial, or raises `UsageError`."""
    parsed = dataclasses.replace(
      self.base,
      values={**self.base.values, **values},
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

  def definition(self) -> dict[str, dict[str, str]]:
    """Returns the texts that must not change when a sweep is resumed."""
    varied = {space.name for space in self.spaces}
    left_out = {*config_lib.neutral_flags(), 'seed', *varied}
    # A flag without effect on the base may have one on a trial.
    given = {
      n: self.base.values[n] for n in config_lib.fields() if self.base.is_set(n)
    }
    values = {**given, **self.config.flags()}
    return {
      'flags': {
        name: hparams.format_value(value)
        for name, value in sorted(values.items())
        if name not in left_out
      },
      'varied': {space.name: space.text for space in self.spaces},
      'search': {
        name: hparams.format_value(value)
        for name, value in dataclasses.asdict(self.search).items()
        if name != 'trials'  # More of them may follow.
      }
      | self._partition_file(),
    }

  def _partition_file(self) -> dict[str, str]:
    """Returns the checksum of the partition file, which may be moved."""
    path = self.base.values.get('partition_file')
    if not path:
      return {}
    digest = hashlib.sha256(files.read_bytes(path)).hexdigest()
    return {'partition_file': f'(SHA-256 {digest[:16]})'}


def values_text(values: Mapping[str, Any]) -> str:
  """Formats values: 'momentum=0.9 fl2.rho=0.05'."""
  return ' '.join(f'{n}={value_text(v)}' for n, v in values.items())


def value_text(value: Any) -> str:
  """Formats a value for tables: four digits of a float."""
  return (
    f'{value:.4g}' if isinstance(value, float) else hparams.format_value(value)
  )


def build(parsed: flags.ParsedFlags, path: str, grid: Sequence[str]) -> Sweep:
  """Builds a sweep, and checks it.

  Args:
    parsed: The command line, with the flags of training and of the search.
    path: The sweep file, or '' if there is none.
    grid: 'FLAG=VALUE,VALUE,...' of flags, which replace those of the file.

  Returns:
    The sweep.

  Raises:
    UsageError: If it makes no sense.
  """
  in_file: dict[str, Any] = {}
  if path:
    with _about('--sweep'):
      in_file = files.read_toml(path, limit=_MAX_BYTES)
  with _about(path):
    spaces = _read_spaces(in_file.pop('flags', {}))
  typed = [_parse_space(text) for text in grid]
  names = [space.name for space in typed]
  for name in names:
    if names.count(name) > 1:
      raise UsageError(
        f'--grid={name}: is given twice; give all values at once'
      )
  spaces |= dict(zip(names, typed))
  if not spaces:
    raise UsageError(
      'no flag to vary was given; give --grid=FLAG=VALUE,VALUE or --sweep=FILE'
    )
  search = _search(parsed, path, in_file)
  if 'seed' in parsed.command_line:
    raise UsageError('--seed: has no effect with --seeds; omit it')
  seed = search.seed_numbers()[0]
  base = dataclasses.replace(parsed, values={**parsed.values, 'seed': seed})
  sweep = Sweep(
    base, tuple(spaces.values()), search, config_lib.build_config(base)
  )
  if not sweep.config.run.num_validation:
    raise UsageError(
      '--num_validation=0: a sweep selects by validation accuracy, never on'
      ' test data; give --num_validation=N'
    )
  if search.sampler == GRID:
    listed = tuple(space.listed() for space in sweep.spaces)
    sweep = dataclasses.replace(sweep, spaces=listed)
    if sweep.num_trials > _MAX_TRIALS:
      raise UsageError(
        f'the grid has {sweep.num_trials:,} combinations; at most'
        f' {_MAX_TRIALS:,} are allowed: use --sampler={RANDOM} or {TPE}'
      )
  _check(sweep)
  return sweep


def _check(sweep: Sweep) -> None:
  """Builds the configurations of trials, or raises `UsageError`."""
  if sweep.search.sampler == GRID:
    combinations = sweep.grid()
  else:
    # Drawn trials are not known yet: check each flag by itself.
    combinations = [{s.name: v} for s in sweep.spaces for v in s.probes()]
  for number, values in enumerate(combinations):
    given = flags.join_arguments(values)
    with _about(f'with {given}' if len(values) > 1 else ''):
      # All seeds are checked with one trial: no other value matters to them.
      for seed in sweep.seeds if number == 0 else sweep.seeds[:1]:
        sweep.config_of({**values, 'seed': seed})


def _search(
  parsed: flags.ParsedFlags, path: str, in_file: Mapping[str, Any]
) -> SearchHparams:
  """Reads the search in the file and on the command line, which wins."""
  fields = [field.name for field in dataclasses.fields(SearchHparams)]
  given = {n: parsed.values[n] for n in fields if parsed.is_set(n)}
  with _about(path if in_file else ''):
    for name, value in in_file.items():
      if name not in fields:
        raise UsageError(
          f'{name!r} is not a key of a sweep file; there are flags,'
          f' {", ".join(fields)}{hparams.closest(name, ["flags", *fields])}'
        )
      if isinstance(value, list):
        value = ','.join(map(str, value))
      group = flags.Group(SearchHparams)
      read = flags.parse(flags.arguments({name: value}), [group]).values
      # The command line is already in it, and takes precedence.
      given.setdefault(name, read[name])
    search = SearchHparams(**given)
  unused = usage.find_idle(search)
  for name in given:
    if name in unused:
      where = '' if parsed.is_set(name) else f' (in {path})'
      raise UsageError(
        f'--{name}{where}: has no effect with {unused[name]}; omit it'
      )
  return search


@contextlib.contextmanager
def _about(subject: str) -> Iterator[None]:
  """Puts a subject in front of an error, if it is not empty."""
  try:
    yield
  except UsageError as error:
    raise UsageError(
      f'{subject}: {error}' if subject else str(error)
    ) from error


def _read_spaces(table: Any) -> dict[str, Space]:
  """Reads the flags of a sweep file, by name."""
  if not isinstance(table, Mapping):
    raise UsageError('flags must be a table, [flags]')
  # A table with one of these keys is a range, not flags of an algorithm.
  named = flags.flatten(
    table, lambda inner: not inner.keys().isdisjoint(_RANGE)
  )
  return {name: _space(name, values) for name, values in named.items()}


def _parse_space(text: str) -> Space:
  """Reads 'FLAG=VALUE,VALUE,...', or raises `UsageError`."""
  name, _, values = text.partition('=')
  with _about(f'--grid={text}'):
    if not values:
      raise UsageError('must be FLAG=VALUE,VALUE,...')
    return _space(name.lstrip('-'), values.split(','))


def _space(name: str, given: Any) -> Space:
  """Reads a flag's list or range, or raises `UsageError`."""
  _check_name(name)
  if isinstance(given, list):
    if not given:
      raise UsageError(f'{name}: the list is empty; give a value or more')
    choices = tuple(_value(name, value) for value in given)
    twice = [v for i, v in enumerate(choices) if v in choices[:i]]
    if twice:
      raise UsageError(
        f'{name}: {hparams.format_value(twice[0])} is given twice'
      )
    return Space(name, choices)
  if not isinstance(given, Mapping) or not {'low', 'high'} <= set(given):
    raise UsageError(
      f'{name}: must be a list of values, or a range {{low = 0.01, high = 0.1,'
      ' log = true}'
    )
  for key in given:
    if key not in _RANGE:
      raise UsageError(
        f'{name}: {key!r} is not a key of a range; there are'
        f' {", ".join(_RANGE)}{hparams.closest(key, _RANGE)}'
      )
  low, high, step = (
    _value(name, given[key]) if key in given else None
    for key in ('low', 'high', 'step')
  )
  log = given.get('log', False)
  space = Space(name, (), low, high, log, step)
  wrong = ''
  if type(low) not in (int, float):
    wrong = 'only flags that are numbers have ranges; give a list'
  elif not space.low < space.high:
    wrong = 'low must be less than high'
  elif not isinstance(log, bool):
    wrong = 'log must be true or false'
  elif log and (space.low <= 0 or step is not None):
    wrong = 'with log, low must be above 0, and there is no step'
  elif step is not None and not 0 < step <= space.high - space.low:
    wrong = 'step must be above 0, and at most high - low'
  if wrong:
    raise UsageError(f'{name}: {space.text}: {wrong}')
  return space


def _check_name(name: str) -> None:
  """Refuses a name that is no flag, or cannot vary (`UsageError`)."""
  known = config_lib.fields()
  if name not in known:
    matches = hparams.closest(name, sorted(known))
    raise UsageError(f'unknown flag --{name}{matches}')
  if name in _NOT_VARIED:
    raise UsageError(f'--{name} cannot vary: {_NOT_VARIED[name]}')
  if name in config_lib.neutral_flags():
    raise UsageError(
      f'--{name} cannot vary: it does not change results, by which trials are'
      ' compared'
    )


def _value(name: str, given: Any) -> Any:
  """Converts a value to the flag's type, or raises `UsageError`."""
  text = flags.arguments({name: given})
  return flags.parse(text, config_lib.groups()).values[name]
