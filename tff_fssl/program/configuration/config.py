"""The configuration of a run: built from its flags, and checked as a whole.

TensorFlow-free: everything that can be refused without data is refused here.
"""

from collections.abc import Collection, Sequence
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import catalog
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition_settings as partition_settings_lib
from tff_fssl.hparams import UsageError
from tff_fssl.models import names as model_names
from tff_fssl.program.configuration import checks
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import run_hparams as run_hparams_lib
from tff_fssl.rounds import participation_hparams
from tff_fssl.rounds import round_hparams as round_hparams_lib

if TYPE_CHECKING:
  from tff_fssl.data import streaming as streaming_lib

PartitionSettings = partition_settings_lib.PartitionSettings
AggregatorHparams = aggregator_hparams.AggregatorHparams
DataHparams = data_hparams.DataHparams
ParticipationHparams = participation_hparams.ParticipationHparams
RoundHparams = round_hparams_lib.RoundHparams
RunHparams = run_hparams_lib.RunHparams

_SERVER = data_names.LABELS_AT_SERVER
_CLIENTS = data_names.LABELS_AT_CLIENTS
# Flags that say what becomes of updates, besides those of aggregation.
_OF_COMMON_MODEL = (
  'client_weighting',
  'server_optimizer',
  'server_optimizer_learning_rate',
  'server_optimizer_momentum',
  'average_decay',
  'statistics_phase',
  'min_clients',
)


@dataclasses.dataclass(frozen=True)
class Config:
  """The configuration of a run.

  Attributes:
    run: Hyper-parameters of the run.
    round: Hyper-parameters of a round.
    aggregator: Hyper-parameters of the aggregation.
    algorithm: Hyper-parameters of the algorithm, an `entry.hparams`.
    data: How the images of the data set are read.
    participation: Hyper-parameters of who takes part in rounds.
    info: The data set, as far as it is known without loading it.
  """

  run: RunHparams
  round: RoundHparams
  aggregator: AggregatorHparams
  algorithm: Any
  data: DataHparams
  participation: ParticipationHparams
  info: data_names.DataSetInfo

  @property
  def entry(self) -> registry.Algorithm:
    """The algorithm's registry entry."""
    return registry.REGISTRY[self.run.algorithm]

  @property
  def prefix(self) -> str:
    """The prefix of the algorithm's flags."""
    return f'{self.run.algorithm}.'

  @property
  def first_round(self) -> int:
    """The number of the first round: 1, or less with pre-training."""
    return 1 - self.round.num_pretraining_rounds

  @property
  def trains_clients(self) -> bool:
    """Whether rounds have a cohort."""
    trains = self.entry.capabilities.trains_clients
    return self.round.scenario in trains or self.run.full_labels

  @property
  def trains_alone(self) -> bool:
    """Whether each client trains alone, so that there is no common model."""
    return not self.entry.capabilities.weight_sets_up

  @property
  def learns_unlabeled(self) -> bool:
    """Whether clients train on unlabelled examples."""
    compute = self.entry.compute
    passes = compute.unlabeled.equivalents + compute.once.equivalents
    return self.trains_clients and bool(passes)

  @property
  def uses_unlabeled(self) -> bool:
    """Whether clients train on them, or take batch norm statistics of them."""
    is_static = self.run.norm == model_names.STATIC_BATCH_NORM
    return self.learns_unlabeled or (self.trains_clients and is_static)

  @property
  def aggregates(self) -> bool:
    """Whether rounds combine updates of clients."""
    return self.trains_clients and not self.trains_alone

  @property
  def is_private(self) -> bool:
    """Whether nothing of a client may be released but by the sum."""
    protects = self.aggregator.aggregator in aggregator_hparams.PRIVATE
    return self.aggregates and protects

  @property
  def sets_weights(self) -> bool:
    """Whether the algorithm sets the weights of clients."""
    own = self.entry.capabilities.own_weights
    return bool(own) and getattr(self.algorithm, own)

  @property
  def own_weights_flag(self) -> str:
    """The flag that makes the algorithm set weights, if `sets_weights`."""
    return f'{self.prefix}{self.entry.capabilities.own_weights}'

  @property
  def keeps_client_state(self) -> bool:
    """Whether there is a state for each client, by its identity."""
    return self.entry.capabilities.keeps_client_state(self.algorithm)

  @property
  def sends_signals(self) -> bool:
    """Whether clients send numbers that are not part of the sum of updates."""
    name = self.entry.capabilities.signals
    return bool(name) and getattr(self.algorithm, name)

  @property
  def without_signals(self) -> str:
    """The flag that turns these off, if there is one."""
    flag = self.entry.capabilities.without_signals
    return f'--{self.prefix}{flag}' if flag else ''

  @property
  def has_groups(self) -> bool:
    """Whether the updates of several groups of clients are combined apart."""
    name = self.entry.capabilities.groups
    return bool(name) and getattr(self.algorithm, name)

  @property
  def model_norm(self) -> str:
    """The norm that the network is built with: 'bn', 'gn' or 'none'."""
    is_static = self.run.norm == model_names.STATIC_BATCH_NORM
    return model_names.BATCH_NORM if is_static else self.run.norm

  @property
  def partition_settings(self) -> PartitionSettings:
    """The settings of the data's partition; raises `UsageError`."""
    run = self.run
    return PartitionSettings(
      num_classes=self.info.num_classes,
      num_clients=run.num_clients,
      num_labels=run.num_labels,
      scenario=self.round.scenario,
      partition=run.partition,
      alpha=run.alpha,
      alpha_meaning=run.alpha_meaning,
      equal_sizes=run.equal_sizes,
      min_client_examples=run.min_client_examples,
      class_draws=run.class_draws,
      shards_per_client=run.shards_per_client,
      num_validation=run.num_validation,
      num_unlabeled=run.num_unlabeled,
      full_labels=run.full_labels,
      labeled_clients=run.labeled_clients,
      client_labels=run.client_labels,
      client_label_classes=run.client_label_classes,
      label_noise=run.label_noise,
      client_test_fraction=run.client_test_fraction,
      seed=run.seed,
    )

  @property
  def streaming(self) -> 'streaming_lib.Streaming':
    """When clients have which of their unlabelled examples."""
    # It needs NumPy: not for `--help`.
    from tff_fssl.data import streaming as streaming_lib  # pylint: disable=C0415

    run = self.run
    return streaming_lib.Streaming(
      run.streaming_steps, run.streaming_rounds, run.streaming_cycles, run.seed
    )

  def flags(self) -> dict[str, Any]:
    """Every flag that has an effect, by name: together they repeat the run."""
    values = _all_flags(self)
    for name in _without_effect(self):
      del values[name]
    return values


def groups() -> list[flags.Group]:
  """All flags of `programs/train.py`."""
  return [
    flags.Group(RunHparams),
    flags.Group(DataHparams),
    flags.Group(RoundHparams),
    flags.Group(ParticipationHparams),
    flags.Group(AggregatorHparams),
    *map(own_group, registry.REGISTRY.values()),
  ]


def own_group(entry: registry.Algorithm) -> flags.Group:
  """The flags of an algorithm."""
  return flags.Group(
    entry.hparams,
    f'--algorithm={entry.name} ({entry.summary.rstrip(".")})',
    f'{entry.name}.',
    f'Unless given: {flags.to_arguments(entry.run_defaults)}.'
    if entry.run_defaults
    else '',
  )


def from_command_line(argv: Sequence[str]) -> Config:
  """A checked configuration.

  Args:
    argv: The arguments, without the program's name.

  Returns:
    The configuration.

  Raises:
    UsageError: One line: what was given, what is allowed, what to do.
  """
  return from_flags(flags.parse(argv, groups()))


def from_flags(parsed: flags.ParsedFlags) -> Config:
  """A checked configuration from parsed flags; raises `UsageError`."""
  run, in_file = parsed.build(RunHparams), {}
  data = parsed.build(DataHparams)
  model_names.check_model(run.model)
  info = catalog.find(run.dataset, run.data_dir, data)
  if run.partition_file:
    in_file = _of_partition_file(run, parsed, info.num_classes)
    run = dataclasses.replace(
      run, **{n: v for n, v in in_file.items() if hasattr(run, n)}
    )
  for name, entry in registry.REGISTRY.items():
    for flag, _ in own_group(entry).named_fields():
      if name != run.algorithm and parsed.is_set(flag):
        raise UsageError(
          f'--{flag}{parsed.source(flag)}: is a flag of --algorithm={name}, but'
          f' --algorithm={run.algorithm} is selected; leave the flag out'
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
    parsed.build(entry.hparams, f'{run.algorithm}.'),
    data,
    parsed.build(ParticipationHparams),
    info,
  )
  config = _follow(config, parsed)
  # An aggregator is meant wherever it is set: nobody shall believe in a
  # protection that is not there.
  meant = ('aggregator',) if config.trains_alone else ()
  parsed.refuse(_without_effect(config), meant)
  config = _drop_idle(config)
  checks.check(config)
  if not run.output_dir:
    folder = f'runs/{run.algorithm}_{_data_name(run)}_{config.round.scenario}'
    config = dataclasses.replace(
      config,
      run=dataclasses.replace(
        config.run, output_dir=f'{folder}_seed{run.seed}'
      ),
    )
  return config


def _data_name(run: RunHparams) -> str:
  """The data set, as a part of a folder's name."""
  if not run.dataset.startswith(data_names.PATHS):
    # Configurations of TFDS's and the hub's sets, and its owners.
    return run.dataset.removeprefix(data_names.HUB).replace('/', '-')
  path = run.dataset.partition(':')[2]
  return os.path.basename(os.path.abspath(os.path.expanduser(path)))


def _of_partition_file(
  run: RunHparams, parsed: flags.ParsedFlags, known: int
) -> dict[str, Any]:
  """The flags that follow from the partition in a file, by name.

  The seed does not: it is that of training. `known` are the data's classes.

  Raises:
    UsageError: If there is no partition in the file, it is of other classes, or
      a flag that was typed says otherwise.
  """
  # It needs NumPy: not for `--help`.
  from tff_fssl.data import partition  # pylint: disable=import-outside-toplevel

  given = f'--partition_file={run.partition_file}'
  try:
    record = partition.read(run.partition_file).settings.recorded()
  except UsageError as error:
    copy = '; a run that was made with it has a copy, partition.json'
    is_missing = not os.path.lexists(run.partition_file)
    raise UsageError(
      f'--partition_file={error}{copy if is_missing else ""}'
    ) from error
  del record['seed']
  if (num_classes := record.pop('num_classes')) != known:
    raise UsageError(
      f'{given}: is of data with {num_classes} classes, but'
      f' --dataset={run.dataset} has {known}'
    )
  for name, value in record.items():
    if name in parsed.command_line and parsed.values[name] != value:
      raise UsageError(
        f'--{name}={hparams.to_text(parsed.values[name])}: has no effect with'
        f' {given}, whose partition was made with {hparams.to_text(value)};'
        ' leave it out'
      )
  return record


def _follow(config: Config, parsed: flags.ParsedFlags) -> Config:
  """Values that follow from others, unless the user set them."""
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
  if not parsed.is_set('num_validation'):
    num_validation = run.num_validation or config.info.num_validation
    run = dataclasses.replace(run, num_validation=num_validation)
  is_client_data = run.dataset.startswith(data_names.CLIENT_DATA)
  if is_client_data and not parsed.is_set('partition'):
    run = dataclasses.replace(run, partition=data_names.NATURAL)
  if run.partition == data_names.NATURAL:
    if not parsed.is_set('num_clients'):
      run = dataclasses.replace(run, num_clients=0)
    if at_clients and not parsed.is_set('client_labels'):
      run = dataclasses.replace(run, client_labels=data_names.OWN)
  return dataclasses.replace(config, run=run, round=round_hparams)


def _drop_idle(config: Config) -> Config:
  """Flags of data and participation that have no effect, at their defaults.

  They may stand in a flagfile that serves several runs. `Config.flags` leaves
  them out, so neither a partition nor a cohort may depend on them.
  """
  idle = _without_effect(config)
  return dataclasses.replace(
    config,
    run=_at_defaults(config.run, idle),
    participation=_at_defaults(config.participation, idle),
  )


def _at_defaults(part: Any, names: Collection[str]) -> Any:
  """Hyper-parameters, those of `names` with their defaults."""
  fields = dataclasses.fields(part)
  defaults = {f.name: f.default for f in fields if f.name in names}
  return dataclasses.replace(part, **defaults)


def _parts(config: Config) -> tuple[tuple[Any, str], ...]:
  """All hyper-parameters, each with the prefix of its flags."""
  return (
    (config.run, ''),
    (config.data, ''),
    (config.round, ''),
    (config.participation, ''),
    (config.aggregator, ''),
    (config.algorithm, config.prefix),
  )


def _all_flags(config: Config) -> dict[str, Any]:
  """The value of every flag that the algorithm allows, by name."""
  return {
    f'{prefix}{name}': value
    for part, prefix in _parts(config)
    for name, value in hparams.values(part).items()
  }


def _without_effect(config: Config) -> dict[str, str]:
  """Flags that change nothing in this configuration -> the reason."""
  values = _all_flags(config)
  result: dict[str, str] = {}
  for part, prefix in _parts(config):
    result |= hparams.without_effect(type(part), values, prefix)
    own_rules = getattr(part, 'without_effect', dict)
    result |= {f'{prefix}{name}': why for name, why in own_rules().items()}
  result |= {
    field.name: f'--dataset={config.run.dataset}'
    for field in dataclasses.fields(DataHparams)
    if field.name not in (*config.info.uses, *data_hparams.NUMBERS)
  }
  if config.info.kind != data_names.IMAGES:
    result['augmentation'] = f'--dataset={config.run.dataset}'
  elif config.data.normalization != data_hparams.STANDARD:
    why = f'--normalization={config.data.normalization}'
    result |= dict.fromkeys(('mean', 'std'), why)
  if config.info.kind == data_names.TEXTS:
    why = f'--dataset={config.run.dataset}'
    result |= dict.fromkeys(data_hparams.NUMBERS, why)
  result |= dict.fromkeys(
    config.entry.capabilities.ignores, f'--algorithm={config.run.algorithm}'
  )
  if config.sets_weights:
    result['client_weighting'] = f'--{config.own_weights_flag}=true'
  if not config.trains_clients:
    result |= dict.fromkeys(
      (
        *dataclasses.asdict(config.aggregator),
        *dataclasses.asdict(config.participation),
        'debug_non_finite',
        'min_clients',
        'statistics_phase',
      ),
      f'--algorithm={config.run.algorithm} and --scenario={_SERVER}: clients do'
      ' not train',
    )
  if not config.uses_unlabeled:
    result |= dict.fromkeys(
      run_hparams_lib.STREAMING,
      f'--algorithm={config.run.algorithm} and --norm={config.run.norm}:'
      ' clients use no unlabelled examples',
    )
  if config.trains_alone:
    result |= dict.fromkeys(
      (*dataclasses.asdict(config.aggregator), *_OF_COMMON_MODEL),
      f'--algorithm={config.run.algorithm}, whose clients train alone',
    )
  return result
