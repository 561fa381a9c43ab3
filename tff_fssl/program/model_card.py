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
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.data import names as data_names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import sources
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import partitions
from tff_fssl.program import runs as runs_lib

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
    formula: The formula from examples to inputs of `model.keras`.
  """

  config: config_lib.Config
  data: sources.DataSet
  partition: partition_lib.Partition
  run: runs_lib.Run
  round_num: int
  is_best: bool
  num_weights: int
  formula: str

  def measured(self, column: str) -> float | None:
    """Returns a figure of the model's round, or None if it is not known."""
    rounds, values = self.run.curve(column)
    at = rounds == self.round_num
    return float(values[at][0]) if at.any() else None


def render(subject: Subject) -> str:
  """Writes the card.

  Args:
    subject: The model.

  Returns:
    Markdown, with the front matter that model hubs read.
  """
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('tff_fssl.program', '.'),
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
  content = environment.get_template('model_card.md.j2').render(
    subject=subject,
    config=config,
    data=data,
    data_name=config_lib.data_name(config.run.dataset),
    task=_TASKS[data.train.kind],
    network=_strip_folders(config.run.model),
    accuracy=accuracy,
    interval=accuracy is not None
    and accuracy_interval(accuracy, len(data.test)),
    percent=console.format_percent,
    rows_of_data=_rows_of_data(subject),
    flags=_flags(config),
    privacy=_privacy(subject),
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


def _rows_of_data(subject: Subject) -> dict[str, str]:
  """Describes the data and their holders."""
  config, data = subject.config, subject.data
  training = f'{len(data.train):,} for training, ' * (not config.is_private)
  describe = (
    partitions.describe_public if config.is_private else partitions.describe
  )
  held = describe(subject.partition)
  held.pop('names', None)  # Client names may identify people.
  # Notes on other sets begin with their folder.
  is_file = config.run.dataset.startswith((*data_names.PATHS, data_names.HUB))
  note = {'note': data.notes} if data.notes and not is_file else {}
  return {
    'examples': f'{training}{len(data.test):,} for testing:'
    f' {data.train.kind.noun} of {data_names.shape_text(data.example_shape)}',
    **note,
    'scenario': config.round.scenario.replace('_', ' '),
    'division': held.pop('partition'),
    'of the training examples': held.pop('examples'),
    **held,
  }


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
