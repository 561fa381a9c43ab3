"""Builds and checks the configuration of a run, and compares it with others.

Everything that can be refused without data is refused here.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import os
from typing import Any

from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.models import names as model_names
from tff_fssl.program import flags
from tff_fssl.program import run_config
from tff_fssl.program import run_hparams as run_hparams_lib
from tff_fssl.rounds import participation_hparams

Config = run_config.Config
AggregatorHparams = aggregator_hparams.AggregatorHparams
DataHparams = data_hparams.DataHparams
ParticipationHparams = participation_hparams.ParticipationHparams
RoundHparams = round_hparams_lib.RoundHparams
RunHparams = run_hparams_lib.RunHparams

_CLIENTS = data_names.LABELS_AT_CLIENTS


def groups() -> list[flags.Group]:
  """Returns all flags of `programs/train.py`."""
  return [
    flags.Group(RunHparams),
    flags.Group(DataHparams),
    flags.Group(RoundHparams),
    flags.Group(ParticipationHparams),
    flags.Group(AggregatorHparams),
    *(own_group(e) for e in registry.REGISTRY.values() if not e.flags_of),
  ]


def fields() -> dict[str, dataclasses.Field[Any]]:
  """Returns the fields of all flags of `programs/train.py`, by flag."""
  return {
    name: field for group in groups() for name, field in group.named_fields()
  }


def own_group(entry: registry.Entry) -> flags.Group:
  """Returns the flags of an algorithm."""
  others = [
    other.name
    for other in registry.REGISTRY.values()
    if other.prefix == entry.prefix and other != entry
  ]
  note = (
    f'Unless given: {flags.join_arguments(entry.run_defaults)}.'
    * bool(entry.run_defaults),
    f'Shared with {", ".join(others)}.' * bool(others),
  )
  return flags.Group(
    entry.hparams,
    f'--algorithm={entry.name} ({entry.summary.rstrip(".")})',
    entry.prefix,
    ' '.join(filter(None, note)),
  )


def foreign_flags(algorithm: str) -> dict[str, str]:
  """Returns the flags that an algorithm lacks -> an algorithm that has them."""
  flags_of = {
    name: [flag for flag, _ in own_group(entry).named_fields()]
    for name, entry in registry.REGISTRY.items()
  }
  return {
    flag: name
    # The first algorithm of several is named.
    for name, own in reversed(flags_of.items())
    for flag in own
    if flag not in flags_of[algorithm]
  }


def parse_config(argv: Sequence[str]) -> Config:
  """Builds a checked configuration.

  Args:
    argv: The arguments, without the program's name.

  Returns:
    The configuration.

  Raises:
    UsageError: One line with the given value, the allowed ones, the remedy.
  """
  return build_config(flags.parse(argv, groups()))


def build_config(
  parsed: flags.ParsedFlags, info: data_names.DataSetInfo | None = None
) -> Config:
  """Builds a checked configuration, or raises `UsageError`.

  Args:
    parsed: The flags.
    info: The facts of the data set, if its files may be missing. None: they are
      found.
  """
  run, in_file = parsed.build(RunHparams), {}
  data = parsed.build(DataHparams)
  model_names.check_model(run.model)
  info = info or sources.find(run.dataset, run.data_dir, data)
  if run.partition_file:
    in_file = _read_partition_file(run, parsed, info.num_classes)
    run = dataclasses.replace(
      run, **{n: v for n, v in in_file.items() if hasattr(run, n)}
    )
  # A flag of another algorithm would do nothing, wherever it stands.
  for flag, name in foreign_flags(run.algorithm).items():
    if parsed.is_set(flag):
      raise UsageError(
        f'--{flag}{parsed.source(flag)}: is a flag of --algorithm={name}, but'
        f' --algorithm={run.algorithm} is selected; omit the flag'
      )
  entry = registry.REGISTRY[run.algorithm]
  if entry.norm and not parsed.is_set('norm'):
    run = dataclasses.replace(run, norm=entry.norm)
  is_image = info.kind == data_names.IMAGES
  if entry.normalization and is_image and not parsed.is_set('normalization'):
    data = dataclasses.replace(data, normalization=entry.normalization)
  config = Config(
    run,
    parsed.build(
      RoundHparams,
      **{
        name: value
        for name, value in entry.round_defaults.items()
        if not parsed.is_set(name)
      },
      **{n: in_file[n] for n in ('scenario',) if n in in_file},
    ),
    parsed.build(AggregatorHparams),
    parsed.build(entry.hparams, entry.prefix),
    data,
    parsed.build(ParticipationHparams),
    info,
  )
  # After all groups: some defaults follow from flags of other groups.
  config = _follow(config, parsed)
  # An aggregator is meant wherever it is set: nobody shall believe in a
  # protection that is not there.
  meant = ('aggregator',) if config.trains_alone else ()
  idle = config.idle()
  parsed.refuse(idle, meant)
  # They may stand in a flagfile that serves several runs. `Config.flags` drops
  # them, so neither a partition nor a cohort may depend on them.
  config = dataclasses.replace(
    config,
    run=_reset(config.run, idle),
    participation=_reset(config.participation, idle),
  )
  run_config.check(config)
  if not run.output_dir:
    # Names of TFDS's and the hub's sets have slashes.
    data_set = data_name(run.dataset).replace('/', '-')
    folder = f'runs/{run.algorithm}_{data_set}_{config.round.scenario}'
    config = dataclasses.replace(
      config,
      run=dataclasses.replace(
        config.run, output_dir=f'{folder}_seed{run.seed}'
      ),
    )
  return config


def data_name(dataset: str) -> str:
  """Shortens the value of --dataset to a name without a folder."""
  if not dataset.startswith(data_names.PATHS):
    return dataset.removeprefix(data_names.HUB)
  path = dataset.partition(':')[2]
  return os.path.basename(os.path.abspath(os.path.expanduser(path)))


def _read_partition_file(
  run: RunHparams, parsed: flags.ParsedFlags, known: int
) -> dict[str, Any]:
  """Reads the flags that follow from the partition in a file.

  The seed does not: it is that of training. `known` are the data's classes.

  Raises:
    UsageError: If there is no partition in the file, it is of other classes, or
      a flag that was typed says otherwise.
  """
  given = f'--partition_file={run.partition_file}'
  try:
    record = partition.read(run.partition_file).settings.recorded()
  except UsageError as error:
    copy = '; a run that was made with it has a copy, partition.json'
    is_missing = not os.path.lexists(run.partition_file)
    raise UsageError(
      f'--partition_file={error}{copy if is_missing else ""}'
    ) from error
  # Training has its own seed, whatever drew the partition.
  del record['seed']
  if (num_classes := record.pop('num_classes')) != known:
    raise UsageError(
      f'{given}: is of data with {num_classes} classes, but'
      f' --dataset={run.dataset} has {known}'
    )
  for name, value in record.items():
    if name in parsed.command_line and parsed.values[name] != value:
      raise UsageError(
        f'--{name}={hparams.format_value(parsed.values[name])}: has no effect'
        f' with {given}, whose partition was made with'
        f' {hparams.format_value(value)}; omit it'
      )
  return record


def _follow(config: Config, parsed: flags.ParsedFlags) -> Config:
  """Sets values that follow from others, unless the user set them."""
  run, round_hparams = config.run, config.round
  is_robust = config.aggregator.aggregator == aggregator_hparams.ROBUST
  kind = None
  if run.norm == model_names.BATCH_NORM:
    kind = model_names.MOVING_AVERAGE
  elif run.norm == model_names.STATIC_BATCH_NORM and is_robust:
    kind = model_names.MEDIAN
  if kind and not parsed.is_set('batch_norm_statistics'):
    round_hparams = dataclasses.replace(
      round_hparams, batch_norm_statistics=kind
    )
  # Without labels, the server cannot pre-train.
  if round_hparams.scenario == _CLIENTS:
    round_hparams = dataclasses.replace(round_hparams, num_pretraining_rounds=0)
  if not parsed.is_set('min_clients') and config.participation.may_be_empty:
    round_hparams = dataclasses.replace(round_hparams, min_clients=1)
  # A flag of a flagfile that has no effect must not change anything, either.
  if not config.aggregates:
    round_hparams = dataclasses.replace(round_hparams, min_clients=0)
  if run.partition_file:  # It says what these flags are.
    return dataclasses.replace(config, round=round_hparams)
  at_clients = round_hparams.scenario == _CLIENTS
  if run.full_labels and at_clients and not parsed.is_set('num_labels'):
    run = dataclasses.replace(run, num_labels=0)
  if not parsed.is_set('num_labels'):
    # The server has what the data put there. Deployed clients have what they
    # have, whatever the number is.
    if config.info.num_server and not at_clients:
      run = dataclasses.replace(run, num_labels=0)
    elif at_clients and not config.info.has_clients:
      run = dataclasses.replace(run, num_labels=config.info.num_classes)
  if not parsed.is_set('num_validation'):
    num_validation = run.num_validation or config.info.num_validation
    run = dataclasses.replace(run, num_validation=num_validation)
  if not parsed.is_set('partition'):
    run = dataclasses.replace(run, partition=config.info.partition)
  if run.partition == data_names.NATURAL:
    if not parsed.is_set('num_clients'):
      run = dataclasses.replace(run, num_clients=0)
  if run.partition in data_names.OF_OWNERS:
    if at_clients and not parsed.is_set('client_labels'):
      run = dataclasses.replace(run, client_labels=data_names.OWN)
  return dataclasses.replace(config, run=run, round=round_hparams)


def _reset(part: Any, names: Collection[str]) -> Any:
  """Sets the fields `names` to their defaults."""
  own = dataclasses.fields(part)
  defaults = {f.name: f.default for f in own if f.name in names}
  return dataclasses.replace(part, **defaults)


def changeable_flags() -> dict[str, bool | str]:
  """Returns flags that may differ in a continued run -> `may_change`."""
  found = {
    name: field.metadata['may_change'] for name, field in fields().items()
  }
  return {name: may for name, may in found.items() if may}


def neutral_flags() -> frozenset[str]:
  """Returns the flags on which results do not depend."""
  return frozenset(
    name for name, may in changeable_flags().items() if may is True
  )


def changeable_text() -> str:
  """Lists the names in `changeable_flags`, for users."""
  return ', '.join(
    name
    + (f' ({hparams.INCREASE_ONLY})' if may == hparams.INCREASE_ONLY else '')
    for name, may in sorted(changeable_flags().items())
  )


def differences(
  old: dict[str, str], new: dict[str, str]
) -> tuple[list[str], list[str]]:
  """Compares the flags of two runs.

  Args:
    old: Flags of the existing run, as text.
    new: Flags of the run that is to continue it, as text: all that have an
      effect.

  Returns:
    The names of flags that differ but must not, and of those that differ and
    may.
  """
  known = fields()
  refused: list[str] = []
  allowed: list[str] = []
  for name in sorted(old.keys() | new.keys()):
    field = known.get(name)
    if field and name not in new:
      # It has no effect now. If it had, the flag that is the reason differs.
      continue
    # A flag that was added after the run was made counts as its default.
    default = hparams.format_value(field.default) if field else None
    before, after = old.get(name, default), new.get(name, default)
    if before == after:
      continue
    may = field.metadata['may_change'] if field else False
    if may == hparams.INCREASE_ONLY:
      may = _is_at_least(after, before)
    (allowed if may else refused).append(name)
  return refused, allowed


def _is_at_least(after: str | None, before: str | None) -> bool:
  """Compares two values as numbers. Other texts give False."""
  try:
    # As texts, '9' would be larger than '10'.
    return float(after or 0) >= float(before or 0)
  except ValueError:
    return False


def describe_differences(
  names: Sequence[str], old: Mapping[str, str], new: Mapping[str, str]
) -> str:
  """Describes differences: '--a=1 there, 2 now; --b only now'."""

  def describe_one(name: str) -> str:
    if name in old and name in new:
      return f'--{name}={old[name]} there, {new[name]} now'
    return f'--{name} only {"there" if name in old else "now"}'

  return '; '.join(map(describe_one, names))
