"""The card of an exported model: README.md, for people and model hubs.

Every figure in it is one of the run's flags, partition or tables, so that the
same model of the same run always has the same card.
"""

from collections.abc import Sequence
import dataclasses
import importlib.metadata
import json
import platform
import re
from typing import Any

import jinja2

import tff_fssl
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl import metrics
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources
from tff_fssl.program import console
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.reporting import partitions
from tff_fssl.program.reporting import runs as runs_lib
from tff_fssl.program.storage import summary

# A card names so many classes. about.json has all.
_MAX_CLASSES = 20
# Packages that decide a model's output.
_PACKAGES = ('tensorflow', 'tensorflow-federated', 'keras', 'numpy')
# Kind -> the task, as model hubs call it.
_TASKS = {
  data_names.IMAGES: 'image-classification',
  data_names.VECTORS: 'tabular-classification',
  data_names.TEXTS: 'text-classification',
}
# Flags with values that may name a folder of the machine that trained.
_WITH_PATHS = ('availability_file', 'dataset', 'init_from', 'model')
# What Markdown or HTML would take for markup.
_MARKUP = re.compile(r'([\\`*_{}\[\]<>|#~$])')


@dataclasses.dataclass(frozen=True)
class Subject:
  """The model that a card is about, and where it comes from.

  Attributes:
    config: The configuration of its run.
    data: The data set.
    partition: The holders of the examples.
    run: The run's tables.
    round_num: The round after which this was the model.
    is_best: Whether validation examples selected that round, not the end.
    num_weights: The number of weights that train.
    num_frozen: The number of all others, statistics included.
    formula: The formula from examples to inputs of `model.keras`.
  """

  config: config_lib.Config
  data: sources.DataSet
  partition: partition_lib.Partition
  run: runs_lib.Run
  round_num: int
  is_best: bool
  num_weights: int
  num_frozen: int
  formula: str

  @property
  def kind(self) -> data_names.Kind:
    """Returns the kind of the examples."""
    return self.data.train.kind

  @property
  def num_unlabeled(self) -> int:
    """Counts the unlabelled examples that clients train on."""
    if not self.config.learns_unlabeled:
      return 0
    return sum(map(len, self.partition.client_unlabeled))

  @property
  def is_semi_supervised(self) -> bool:
    """Says whether clients train on unlabelled examples."""
    if self.config.is_private:  # Else it says whether they have any.
      return self.config.learns_unlabeled
    return bool(self.num_unlabeled)

  def measured(self, column: str) -> float | None:
    """Returns a figure of the model's round, or None if it is not known."""
    rounds, values = self.run.curve(column)
    at = rounds == self.round_num
    return float(values[at][0]) if at.any() else None

  def total(self, column: str) -> float | None:
    """Sums a figure up to the model's round, or None if it is not known."""
    rounds, values = self.run.curve(column)
    until = rounds <= self.round_num
    return float(values[until].sum()) if until.any() else None


def render(subject: Subject) -> str:
  """Writes the card.

  Args:
    subject: The model.

  Returns:
    Markdown, with the front matter that model hubs read.
  """
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('tff_fssl.program.reporting', '.'),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    # A misspelt name in the template is an error, not an empty text.
    undefined=jinja2.StrictUndefined,
  )
  environment.filters['md'] = _escaped
  environment.filters['yaml'] = lambda value: json.dumps(
    value, ensure_ascii=False
  )
  config, data = subject.config, subject.data
  accuracy = subject.measured('test/accuracy')
  interval: Sequence[str] = ()
  if accuracy is not None:
    ends = accuracy_interval(accuracy, len(data.test))
    interval = [console.format_percent(end) for end in ends]
  content = environment.get_template('model_card.md.j2').render(
    subject=subject,
    config=config,
    data=data,
    data_name=config_lib.data_name(config.run.dataset),
    from_hub=config.run.dataset.startswith(data_names.HUB),
    task=_TASKS[subject.kind],
    network=_strip_folders(config.run.model),
    accuracy=accuracy,
    interval=interval,
    validation=subject.measured(summary.VALIDATION_ACCURACY),
    percent=console.format_percent,
    classes=_classes(data.class_names),
    rows_of_data=_rows_of_data(subject),
    flags=_flags(config),
    cost=_cost(subject),
    limits=_limits(subject),
    shape=list(data.example_shape),
    versions=installed(_PACKAGES),
  )
  return files.printable(content, lines=True)


def accuracy_interval(
  accuracy: float, num_examples: int
) -> tuple[float, float]:
  """Computes Wilson's 95% interval of an accuracy.

  Args:
    accuracy: The share of correct predictions.
    num_examples: The number of predictions, at least 1.

  Returns:
    (low, high).
  """
  # SciPy's import takes long.
  from scipy import stats  # pylint: disable=import-outside-toplevel

  num_right = round(accuracy * num_examples)
  test = stats.binomtest(num_right, num_examples)
  interval = test.proportion_ci(0.95, 'wilson')
  return float(interval.low), float(interval.high)


def installed(packages: Sequence[str]) -> str:
  """Lists the versions of this package, of Python and of others.

  Args:
    packages: Names on the package index. Packages that are not installed are
      skipped.

  Returns:
    'tff_fssl 0.1.0, Python 3.11.2, ...'.
  """
  found = [
    f'tff_fssl {tff_fssl.__version__}',
    f'Python {platform.python_version()}',
  ]
  for package in packages:
    try:
      found.append(f'{package} {importlib.metadata.version(package)}')
    except importlib.metadata.PackageNotFoundError:
      continue
  return ', '.join(found)


def _escaped(text: Any) -> str:
  """Escapes a text of a data set or a flag as no markup."""
  return _MARKUP.sub(r'\\\1', ' '.join(str(text).split()))


def _classes(class_names: Sequence[str]) -> str:
  shown = ', '.join(class_names[:_MAX_CLASSES])
  more = len(class_names) - _MAX_CLASSES
  return f'{shown} and {more:,} more (about.json)' if more > 0 else shown


def _rows_of_data(subject: Subject) -> dict[str, str]:
  """Describes the data and their holders."""
  config, data = subject.config, subject.data
  training = f'{len(data.train):,} for training, ' * (not config.is_private)
  rows = {
    'data set': config_lib.data_name(config.run.dataset),
    'examples': f'{training}{len(data.test):,} for testing:'
    f' {subject.kind.noun} of {data_names.shape_text(data.example_shape)}',
  }
  # Notes on other sets begin with their folder.
  is_file = config.run.dataset.startswith((*data_names.PATHS, data_names.HUB))
  if data.notes and not is_file:
    rows['note'] = data.notes
  describe = partitions.describe
  if config.is_private:
    describe = partitions.describe_public
  held = describe(subject.partition)
  rows['scenario'] = config.round.scenario.replace('_', ' ')
  rows['division'] = held.pop('partition')
  rows['of the training examples'] = held.pop('examples')
  held.pop('names', None)  # Client names may identify people.
  return {**rows, **held}


def _flags(config: config_lib.Config) -> list[str]:
  """Lists the flags that are not at their defaults."""
  usual = runs_lib.usual_flags(config.run.algorithm)
  ignored = config_lib.neutral_flags()
  result = []
  for name, value in sorted(config.flags().items()):
    text = hparams.format_value(value)
    if name in ignored or text == usual.get(name):
      continue
    # The card may be published, and a path can name a user.
    if name in _WITH_PATHS:
      text = _strip_folders(text)
    result.append(f'--{name}={text}')
  return result


def _strip_folders(text: str) -> str:
  """Reduces a path in a flag's value to its last name."""
  if text.startswith(data_names.HUB):
    return text
  return re.sub('[^:]*/(?=[^/])', '', text)


def _cost(subject: Subject) -> dict[str, str]:
  """Describes the cost of training up to the model's round."""
  config, run = subject.config, subject.config.run
  if config.is_private:
    # Times and computation depend on clients' data.
    subject = dataclasses.replace(subject, run=subject.run.public)
  rounds = f'{subject.round_num:,}'
  if subject.is_best:
    rounds += f" of the run's {run.total_rounds:,}"
  if config.round.num_pretraining_rounds:
    rounds += (
      f', after {config.round.num_pretraining_rounds} of pre-training at the'
      ' server'
    )
  rows = {'rounds': rounds}
  num_clients = subject.total(f'{metrics.CLIENTS}/num_clients')
  if config.trains_clients:
    rows['clients'] = (
      f'{min(run.clients_per_round, subject.partition.num_clients)} of'
      f' {subject.partition.num_clients:,} drawn for a round'
    )
  else:
    rows['clients'] = 'none: only the server trains'
  sent, used = subject.run.used('bytes')
  # Up to this model, which may be of an earlier round than the last.
  until = sent <= subject.round_num
  if until.any():
    rows['sent and received by clients'] = f'{used[until][-1] / 1e6:,.1f} MB'
  compute = subject.run.compute
  if compute is not None:
    rows['compute of a round'] = compute.describe()
    if compute.client and num_clients:
      passes = num_clients * compute.client
      rows['compute of all clients'] = (
        f'at most {summary.flops_text(compute.flops(passes))}:'
        f' {passes:,.0f} forward passes of one example'
      )
  seconds = subject.total('seconds/round')
  if seconds is not None:
    rows['time of the rounds'] = (
      f'{console.format_seconds(seconds)}, simulated (--runtime={run.runtime})'
    )
  return rows


def _limits(subject: Subject) -> list[str]:
  """Lists limits of the model that follow from the configuration."""
  config, data, partition = subject.config, subject.data, subject.partition
  noun, num_classes = subject.kind.noun, data.num_classes
  name = config_lib.data_name(config.run.dataset)
  shape = data_names.shape_text(data.example_shape)
  if subject.kind == data_names.TEXTS:
    takes = f'It reads the first {data.example_shape[0]} words of a text'
  else:
    takes = f'It takes {noun} of {shape} only'
  seen = (
    f'{len(partition.labeled):,} labelled and {subject.num_unlabeled:,}'
    f' unlabelled {noun}'
  )
  if config.is_private:
    seen = f'{noun} of clients, whose numbers are not shown'
    if num_labels := len(partition.server_labeled):
      seen = f'{num_labels:,} labelled {noun} at the server, and {seen},'
  limits = [
    f'{takes}; the preprocessing that follows is part of the SavedModel.',
    f'It knows {num_classes:,} classes, and gives one of them to any input.',
    f'It was trained on {seen} of {_escaped(name)}.'
    ' Of other data its accuracy is not known.',
  ]
  num_wrong = len(partition.wrong_examples)
  if num_wrong and not config.is_private:
    limits.append(f'{num_wrong:,} of the labels were wrong, as requested.')
  if config.run.init_from:
    limits.append(
      'It started from weights that were trained before; this card does not'
      ' know their data.'
    )
  limits += [
    'Calibration, robustness to unusual or hostile inputs, and differences'
    ' between groups of people have not been measured.',
    'The clients were simulated: no devices or people took part.',
    _privacy(subject),
  ]
  return limits


def _privacy(subject: Subject) -> str:
  """Says which guarantee of privacy training data have."""
  aggregator = subject.config.aggregator
  if not subject.config.aggregates:
    name = ''
  else:
    name = aggregator.aggregator
  if name == aggregator_hparams.DP:
    epsilon = subject.measured('aggregator/epsilon')
    spent = 'unknown epsilon' if epsilon is None else f'epsilon {epsilon:.4g}'
    return (
      'Updates were clipped and noised: client-level differential privacy'
      f' (replacement of all data of one client) with {spent} at delta'
      f' {aggregator.dp_delta:g}. It does not hold against those who know the'
      ' seed, and so not against readers of this card; in a deployment there is'
      ' none. Labels at the server, and a choice among rounds or runs by their'
      ' results, are not covered.'
    )
  simulated = (
    ' Secure sums were replaced by plain ones.'
    if name == aggregator_hparams.SECURE
    else ''
  )
  return (
    'There is no privacy guarantee: the weights may reveal training data.'
    + simulated
  )
