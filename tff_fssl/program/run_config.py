"""The configuration of a run, its consequences, and what is refused of it."""

import dataclasses
import importlib.util
from typing import Any

from tff_fssl import hparams
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import clients
from tff_fssl.data import data_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError
from tff_fssl.interface import round_hparams
from tff_fssl.models import names as model_names
from tff_fssl.program import run_hparams
from tff_fssl.program import usage
from tff_fssl.rounds import participation_hparams
from tff_fssl.rounds import quota

_CLIENTS = data_names.LABELS_AT_CLIENTS


@dataclasses.dataclass(frozen=True)
class Config:
  """The configuration of a run.

  Attributes:
    run: Hyper-parameters of the run.
    round: Hyper-parameters of a round.
    aggregator: Hyper-parameters of the aggregation.
    algorithm: Hyper-parameters of the algorithm, an `entry.hparams`.
    data: How the images of the data set are read.
    participation: Hyper-parameters of the participation in rounds.
    info: The data set, as far as it is known without loading it.
  """

  run: run_hparams.RunHparams
  round: round_hparams.RoundHparams
  aggregator: aggregator_hparams.AggregatorHparams
  algorithm: Any
  data: data_hparams.DataHparams
  participation: participation_hparams.ParticipationHparams
  info: data_names.DataSetInfo

  @property
  def entry(self) -> registry.Entry:
    """Returns the algorithm's registry entry."""
    return registry.REGISTRY[self.run.algorithm]

  @property
  def prefix(self) -> str:
    """Returns the prefix of the algorithm's flags."""
    return self.entry.prefix

  @property
  def first_round(self) -> int:
    """Returns the number of the first round, below 1 with pre-training."""
    return 1 - self.round.num_pretraining_rounds

  @property
  def trains_clients(self) -> bool:
    """Says whether rounds have a cohort."""
    # --algorithm, which is read last, is the reason if they have none.
    return (
      self.run.full_labels or self.round.scenario in self.entry.trains_clients
    )

  @property
  def trains_alone(self) -> bool:
    """Says whether clients train alone, without a common model."""
    return self.entry.is_alone

  @property
  def learns_unlabeled(self) -> bool:
    """Says whether clients train on unlabelled examples."""
    return self.trains_clients and self.entry.learns_unlabeled

  @property
  def uses_unlabeled(self) -> bool:
    """Says whether these are trained on, or batch norm uses them."""
    return self.learns_unlabeled or (
      self.trains_clients and self.run.norm == model_names.STATIC_BATCH_NORM
    )

  @property
  def streams(self) -> bool:
    """Says whether the time at which clients have examples matters."""
    return self.run.full_labels or self.uses_unlabeled

  @property
  def has_moments(self) -> bool:
    """Says whether networks see values minus their mean, or may."""
    kind = self.info.kind
    return kind != data_names.TEXTS and (
      kind != data_names.IMAGES
      or self.data.normalization == data_hparams.STANDARD
    )

  @property
  def has_episodes(self) -> bool:
    """Says whether clients learn from some labels of each class at a time."""
    return bool(self.entry.capabilities.labels_of_class)

  @property
  def aggregates(self) -> bool:
    """Says whether rounds combine updates of clients."""
    return not self.trains_alone and self.trains_clients

  @property
  def is_private(self) -> bool:
    """Says whether only the sum over clients may be released."""
    protects = self.aggregator.aggregator in aggregator_hparams.PRIVATE
    return self.aggregates and protects

  @property
  def sets_weights(self) -> bool:
    """Says whether the algorithm sets the weights of clients."""
    return bool(self.algorithm.sets_weights)

  @property
  def own_weights_off_flag(self) -> str:
    """Gives the flag, with its value, by which no algorithm sets weights."""
    return f'--{self.prefix}{self.entry.capabilities.without_own_weights}'

  @property
  def keeps_client_state(self) -> bool:
    """Says whether each client has a state, by its identity."""
    return self.entry.keeps_client_state(self.algorithm)

  @property
  def sends_signals(self) -> bool:
    """Says whether clients send numbers outside of the sum of updates."""
    name = self.entry.capabilities.signals
    has_signals = bool(name) and bool(getattr(self.algorithm, name))
    return has_signals or (self.aggregates and self.keeps_client_state)

  @property
  def signals_off_flag(self) -> str:
    """Names the flag that turns these off, if there is one."""
    flag = self.entry.capabilities.without_signals
    return f'--{self.prefix}{flag}' if flag else ''

  @property
  def has_groups(self) -> bool:
    """Says whether groups of clients are aggregated separately."""
    groups = self.algorithm.groups()
    return groups is not None and groups.num_groups > 1

  @property
  def model_norm(self) -> str:
    """Returns the norm of the network: 'bn', 'gn' or 'none'."""
    is_static = self.run.norm == model_names.STATIC_BATCH_NORM
    return model_names.BATCH_NORM if is_static else self.run.norm

  @property
  def partition_settings(self) -> partition_settings.PartitionSettings:
    """Returns the partition's settings, or raises `UsageError`."""
    return hparams.build_from(
      self.run,
      partition_settings.PartitionSettings,
      num_classes=self.info.num_classes,
      scenario=self.round.scenario,
      split_by=self.data.split_by,
    )

  @property
  def streaming(self) -> clients.Streaming:
    """Says when clients have which of their unlabelled examples."""
    run = self.run
    return clients.Streaming(
      run.streaming_steps, run.streaming_rounds, run.streaming_cycles, run.seed
    )

  def groups(self) -> tuple[tuple[Any, str], ...]:
    """Returns all hyper-parameters, each with the prefix of its flags."""
    return (
      (self.run, ''),
      (self.data, ''),
      (self.round, ''),
      (self.participation, ''),
      (self.aggregator, ''),
      (self.algorithm, self.prefix),
    )

  def idle(self) -> dict[str, str]:
    """Finds the flags that change nothing. See `usage.find_idle`."""
    found: dict[str, str] = {}
    for group, prefix in self.groups():
      found |= usage.find_idle(group, prefix, self)
    return found

  def flags(self) -> dict[str, Any]:
    """Returns every flag that has an effect: they repeat the run."""
    idle = self.idle()
    return {
      f'{prefix}{field.name}': getattr(group, field.name)
      for group, prefix in self.groups()
      for field in hparams.documented_fields(group)
      if f'{prefix}{field.name}' not in idle
    }


def check(config: Config) -> None:
  """Refuses combinations of values that make no sense.

  Args:
    config: The configuration.

  Raises:
    UsageError: A line with the given value, the allowed ones, the remedy.
  """
  run, round_hparams, entry = config.run, config.round, config.entry
  scenario = round_hparams.scenario
  if scenario not in entry.scenarios:
    others = [
      other.name
      for other in registry.REGISTRY.values()
      if scenario in other.scenarios
    ]
    raise UsageError(
      f'--scenario={scenario}: --algorithm={entry.name} runs with'
      f' {", ".join(entry.scenarios)} only;'
      f' {", ".join(others)} can do it'
    )
  if run.num_clients:  # Else the data set says how many there are.
    check_cohort(config, run.num_clients)
  if round_hparams.min_clients > run.clients_per_round:
    raise UsageError(
      f'--min_clients={round_hparams.min_clients}: no round has more than'
      f' --clients_per_round={run.clients_per_round} clients, so none would'
      ' count; give at most that'
    )
  if round_hparams.follows_loss and not run.num_validation:
    raise UsageError(
      f'--learning_rate_schedule={round_hparams.learning_rate_schedule}: there'
      ' are no validation examples whose loss it could follow; give'
      ' --num_validation=N'
    )
  if run.full_labels and scenario != _CLIENTS:
    if scenario in entry.trains_clients:
      raise UsageError(
        f'--full_labels: with --scenario={scenario}, clients of'
        f' --algorithm={entry.name} learn from unlabelled examples, of which'
        f' none are left; set --algorithm=supervised or --scenario={_CLIENTS}'
      )
    if not (run.num_labels or config.info.num_server):
      raise UsageError(
        f'--num_labels=0: with --scenario={scenario} the server needs labels of'
        f' its own; give at least {config.info.num_classes}, or set'
        f' --scenario={_CLIENTS}'
      )
  statistics = round_hparams.batch_norm_statistics
  allowed = {
    model_names.STATIC_BATCH_NORM: model_names.STATIC_STATISTICS,
    model_names.BATCH_NORM: (model_names.MOVING_AVERAGE,),
  }.get(run.norm, model_names.STATISTICS)
  if statistics not in allowed:
    raise UsageError(
      f'--batch_norm_statistics={statistics}: with --norm=sbn, pooled, median'
      ' or batch_mean are allowed; with --norm=bn, moving_average'
    )
  model_names.layer_pattern(run.train_layers)
  if run.train_layers and not run.init_from:
    raise UsageError(
      f'--train_layers={run.train_layers}: the other layers would stay random;'
      ' give their weights, --init_from=FILE, or omit it'
    )
  quota.check(entry.configure(config.algorithm, round_hparams))
  _check_examples(config)
  _check_statistics(config)
  run_hparams.parse_rounds(run.profile, run.total_rounds)
  _check_runtime(run)
  _check_trackers(run)
  if config.aggregates:
    _check_aggregator(config)
  _check_data(config)
  if run.cross_device:
    _check_cross_device(config)


def _check_runtime(run: run_hparams.RunHparams) -> None:
  """Refuses flags that a runtime does not support (`UsageError`)."""
  in_process = run.runtime == 'in_process'
  if run.profile and not in_process:
    raise UsageError(
      f'--profile: with --runtime={run.runtime} the work is done by another'
      ' process, which a profile cannot see; use --runtime=in_process'
    )
  if run.call_timeout_secs and in_process:
    raise UsageError(
      f'--call_timeout_secs={run.call_timeout_secs:g}: with'
      f' --runtime={run.runtime} there is no worker to call; omit it, or'
      ' use --runtime=tff_worker or ray'
    )
  if run.runtime == 'ray':
    if importlib.util.find_spec('ray') is None:
      raise UsageError(
        '--runtime=ray: Ray is not installed; `make setup-ray` installs it, or'
        ' `pip install --no-deps -r requirements-ray.txt`'
      )
    if run.client_devices not in ('auto', 'cpu', 'gpu'):
      raise UsageError(
        f'--client_devices={run.client_devices}: with --runtime=ray, allowed'
        ' are auto, cpu, gpu: Ray says which GPU a worker has'
      )


def _check_trackers(run: run_hparams.RunHparams) -> None:
  """Refuses trackers that are not installed (`UsageError`)."""
  for kind, where in run_hparams.parse_trackers(run.track).items():
    spec = importlib.util.find_spec(kind)
    # Without an origin, it is a folder of that name, such as wandb makes.
    if spec is None or spec.origin is None:
      raise UsageError(
        f'--track={kind}:{where}: {run_hparams.TRACKERS[kind]} is not'
        ' installed; `make setup-track` installs it, or `pip install --no-deps'
        ' -r requirements-track.txt`'
      )


def _check_examples(config: Config) -> None:
  """Refuses flags that do not fit the kind of the examples."""
  kind = config.info.kind
  model_names.check_inputs(config.run.model, kind)
  without = config.entry.capabilities.without_mixing
  if kind == data_names.TEXTS and without:
    if getattr(config.algorithm, without.partition('=')[0]):
      raise UsageError(
        f'--algorithm={config.run.algorithm}: mixes examples, but numbers of'
        f' words cannot be mixed; set --{config.prefix}{without}'
      )


def _check_statistics(config: Config) -> None:
  """Refuses numbers that the data or the aggregator do not allow."""
  run, data, info = config.run, config.data, config.info
  if info.kind == data_names.VECTORS:
    if data.normalization == data_hparams.SCALE:
      raise UsageError(
        f'--normalization={data.normalization}: is of pixels, which go from 0'
        f' to 255; the vectors of --dataset={run.dataset} have no such range:'
        f' set {data_hparams.STANDARD} or {data_hparams.NONE}'
      )
  if info.kind != data_names.TEXTS:
    data.moments(info.example_shape[-1])  # Refuses other numbers of them.
  if not config.is_private and info.has_clients:
    return
  given = f'--aggregator={config.aggregator.aggregator}'
  if config.is_private and run.dataset.startswith(
    (data_names.CLIENT_DATA, data_names.HUB)
  ):
    for flag, example in (('image_size', '32'), ('color', 'rgb')):
      if getattr(data, flag) in ('', 'auto'):
        raise UsageError(
          f'{given}: --{flag} would be that of the first images of'
          f' --dataset={run.dataset}, which are of clients; set it, such as'
          f' --{flag}={example}'
        )
  at_server = config.round.scenario == data_names.LABELS_AT_SERVER
  # The server or validation holds examples that may be measured.
  if run.num_validation or (at_server and (run.num_labels or info.num_server)):
    return  # They are measured.
  public = f'--num_validation=N or --scenario={data_names.LABELS_AT_SERVER}'
  if info.kind == data_names.TEXTS:
    if data.strong_replacement:
      raise UsageError(
        f'{given}: --strong_replacement={data.strong_replacement:g} needs to'
        ' know how often words occur, which would be counted in the texts of'
        f' clients; set --strong_replacement=0, or {public} to count in other'
        ' texts'
      )
    return
  if (
    data.normalization == data_hparams.STANDARD
    and not info.mean
    and not data.mean
  ):
    ways = 'scale or none' if info.kind == data_names.IMAGES else 'none'
    if not info.has_clients:
      raise UsageError(
        f'--dataset={run.dataset}: has no images whose mean and deviation could'
        f' be measured; give --mean and --std, or set --normalization={ways}'
      )
    raise UsageError(
      f'{given}: mean and deviation of --dataset={run.dataset} would be those'
      f" of clients' {info.kind.noun}; give --mean and --std, set"
      f' --normalization={ways}, or {public} to measure other ones'
    )


def check_cohort(config: Config, num_clients: int) -> None:
  """Refuses cohorts of more clients than there are (`UsageError`)."""
  if not config.trains_clients:
    return
  if config.run.clients_per_round > num_clients:
    raise UsageError(
      f'--clients_per_round={config.run.clients_per_round}: must be at most'
      f' --num_clients={num_clients}'
    )
  config.participation.check_cohort(config.run.clients_per_round, num_clients)


def _check_aggregator(config: Config) -> None:
  """Refuses flags that the aggregator does not support."""
  run, aggregator = config.run, config.aggregator
  if (
    aggregator.aggregator == aggregator_hparams.SECURE
    and not run.simulate_secure_aggregation
  ):
    raise UsageError(
      '--aggregator=secure: no runtime here has secure sums; with'
      ' --simulate_secure_aggregation they are replaced by plain ones, which'
      ' protect nothing'
    )
  name = aggregator.aggregator
  if config.has_groups and name != aggregator_hparams.MEAN:
    remedy = f'--{config.prefix}{config.entry.capabilities.without_groups}'
    raise UsageError(
      f'--aggregator={name}: the server of --algorithm={run.algorithm} needs'
      ' the plain mean of each group of clients, so that sums over less than'
      f' all clients leave them; set {remedy}, or --aggregator=mean'
    )
  if name == aggregator_hparams.ROBUST:
    # A majority of honest clients must exist to outvote liars.
    aggregator_hparams.check_majority(run.clients_per_round)
    if run.num_clients:  # Else the data set says who has labels.
      check_labeled_majority(
        config, config.partition_settings.num_labeled_clients
      )
  if name in aggregator_hparams.PRIVATE:
    for flag in ('debug_non_finite', 'strict_clients'):
      if getattr(run, flag):
        raise UsageError(
          f'--{flag}: reports on single clients, but with --aggregator={name}'
          ' nothing but the sum may leave a client; omit one of the two'
        )
    aggregator_hparams.check_confidential(
      name,
      own_weights=config.sets_weights and config.own_weights_off_flag,
      client_weighting=config.round.client_weighting,
      batch_norm=run.norm in model_names.BATCH_NORMS,
      static=run.norm == model_names.STATIC_BATCH_NORM,
      also_sends=(
        (config.sends_signals and (config.signals_off_flag or True))
        or (config.round.pseudo_label_quota and '--pseudo_label_quota=false')
      ),
    )
  if name == aggregator_hparams.DP:
    if config.participation.availability_file:
      raise UsageError(
        f'--availability_file={config.participation.availability_file}: with'
        f' --aggregator={name} epsilon holds only if every client can be drawn'
        ' in every round; omit one of the two'
      )
    if not run.num_clients:
      raise UsageError(
        f'--aggregator={name}: epsilon depends on the number of clients; give'
        ' --num_clients, too'
      )
    aggregator_hparams.check_sizes(
      delta=aggregator.dp_delta,
      clients_per_round=run.clients_per_round,
      population=run.num_clients,
    )
  if (
    name in aggregator_hparams.PRIVATE and not config.round.max_client_examples
  ):
    raise UsageError(
      f'--aggregator={name}: --max_client_examples would be the size of the'
      ' largest client, which bounds and scales what is released; set it to the'
      ' most examples that any client may have'
    )


def check_labeled_majority(config: Config, num_labeled: int) -> None:
  """Refuses fewer clients that train than `robust` needs in a round.

  Args:
    config: The configuration.
    num_labeled: The number of clients with labels.

  Raises:
    UsageError: If no round could apply an update.
  """
  is_robust = config.aggregator.aggregator == aggregator_hparams.ROBUST
  if config.entry.learns_unlabeled or not (is_robust and config.aggregates):
    return
  cohort = config.run.clients_per_round
  # As in `aggregators.robust`: also half of those that take part.
  least = max(aggregator_hparams.MIN_ROBUST_CLIENTS, (cohort + 1) // 2)
  if num_labeled < least:
    raise UsageError(
      f'--labeled_clients: {num_labeled} clients have labels, and only they'
      f' train with --algorithm={config.run.algorithm}; with'
      f' --aggregator={aggregator_hparams.ROBUST} an update is applied only if'
      f' at least {least} of --clients_per_round={cohort} made it; let more'
      ' clients hold labels, or take another aggregator'
    )


def _check_data(config: Config) -> None:
  """Refuses numbers that do not fit the data set's size and classes."""
  run = config.run
  info = config.info
  by = config.data.split_by
  draws = 'test_share' in info.uses or run.num_validation
  if by == data_names.CLIENT and not draws:
    raise UsageError(
      f'--split_by={by}: the data say which examples are for testing, and'
      ' there are none for validation; omit it, or give --num_validation=N'
    )
  settings = config.partition_settings  # Refuses what no labels could satisfy.
  at_clients = config.round.scenario == _CLIENTS
  holders = settings.num_labeled_clients if at_clients else 1
  if not at_clients:
    settings.check_labels(info.num_server)
  if not info.has_clients:
    return
  _check_labels_of_class(config)
  labels, rest = run.num_labels * holders, info.num_train - run.num_validation
  own = labels if settings.labels_own else 0
  if settings.labels_own:
    given = min(run.num_unlabeled + own, rest) if run.num_unlabeled else rest
    size = max(given, 0) // max(run.num_clients, 1)
    if run.partition == data_names.IID and run.num_labels > size:
      raise UsageError(
        f'--num_labels={run.num_labels} --client_labels={data_names.OWN}: each'
        f' of {run.num_clients} clients has {size} examples of {run.dataset};'
        f' set it to at most that{settings.or_more_unlabeled}'
      )
    labels = 0
  each = f' for each of {holders} clients' if at_clients else ''
  all_have_labels = labels and holders == run.num_clients and at_clients
  needed = labels + (0 if all_have_labels else run.num_clients)
  most = info.num_train - needed
  # The larger number is the mistake.
  if run.num_validation > max(most, needed) and most >= 0:
    raise UsageError(
      f'--num_validation={run.num_validation}: {run.dataset} has'
      f' {info.num_train} training examples, of which {needed} are needed for'
      f' --num_labels={run.num_labels}{each} and for --num_clients='
      f'{run.num_clients}; set it to at most {most}'
    )
  if labels > rest:
    beside = f' after --num_validation={run.num_validation}'
    raise UsageError(
      f'--num_labels={run.num_labels}{each}: {run.dataset} has'
      f' {max(rest, 0)} training examples'
      f'{beside if run.num_validation else ""}'
    )
  if rest - labels < run.num_clients and not all_have_labels:
    raise UsageError(
      f'--num_clients={run.num_clients}: only {rest - labels} of'
      f" {run.dataset}'s training examples are left for them"
    )
  if run.num_unlabeled and run.num_unlabeled > rest - labels - own:
    raise UsageError(
      f'--num_unlabeled={run.num_unlabeled}: only'
      f" {max(rest - labels - own, 0)} of {run.dataset}'s training examples are"
      ' left without a label for the clients; set it to at most that, or to 0'
      ' for all of them'
    )


def _check_labels_of_class(config: Config) -> None:
  """Refuses fewer labels than the algorithm can learn from."""
  run, name = config.run, config.entry.capabilities.labels_of_class
  if not name or run.full_labels or run.client_labels == data_names.OWN:
    return
  needed = getattr(config.algorithm, name)
  num_classes = config.partition_settings.label_classes
  if run.num_labels < needed * num_classes:
    raise UsageError(
      f'--num_labels={run.num_labels}: --algorithm={run.algorithm} needs'
      f' {needed} labels of each of {num_classes} classes at a client, some for'
      f' its prototypes and others to classify; give at least'
      f' {needed * num_classes}'
    )


def _check_cross_device(config: Config) -> None:
  """Refuses what needs identities of clients or several phases a round."""
  name = f'--cross_device: --algorithm={config.run.algorithm}'
  if config.keeps_client_state:
    remedy = (
      f'; set {config.signals_off_flag}' if config.signals_off_flag else ''
    )
    raise UsageError(
      f'{name} keeps a state for each client by its identity, which the server'
      f' of such a deployment does not know{remedy}'
    )
  if not config.trains_clients:
    return
  if (
    config.run.norm == model_names.STATIC_BATCH_NORM
    and config.round.statistics_phase == round_hparams.OWN
  ):
    raise UsageError(
      '--cross_device: --norm=sbn gathers statistics in a second client phase;'
      ' such a deployment has one: use --statistics_phase=training, --norm=gn'
      ' or --norm=bn'
    )
