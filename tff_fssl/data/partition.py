"""A partition of training examples, its file and its plot."""

from collections.abc import Sequence
import dataclasses
import json
import os
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.data import names
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError

_FORMAT = 'tff_fssl.partition'
_VERSION = 3
# The setting that is new in version 3. Files without it have version 2.
_WITHOUT_TEST = 2
_TEST_FRACTION = 'client_test_fraction'
# Later settings that change only drawing. Files omit their defaults, so that
# old partitions are written as before.
_LATER = {
  'num_unlabeled': 0,
  'client_label_classes': 0,
  'labeled_also_unlabeled': False,
  'classes_per_client': 2,
  'size_skew': names.LINEAR,
  'class_shares': '',
  'strictness': 1.0,
  'split_by': names.EXAMPLE,
}
# The greatest number of ticks on an axis of the plot.
_MAX_TICKS = 25
# Characters of a class's name.
_MAX_NAME = 16
# More rows would be thinner than a pixel, and slow to draw.
_MAX_ROWS = 1_000


def _none() -> Any:
  """Makes a field without indices."""
  return dataclasses.field(default_factory=lambda: np.zeros([0], np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
  """Indices into the training examples. No example is held twice.

  `partition_draw.build_partition` makes one.

  Attributes:
    server_labeled: int64, labelled examples at the server.
    validation: int64, examples for model selection, which nobody trains on.
    client_labeled: Labelled examples per client, int64, ascending.
    client_unlabeled: Unlabelled examples per client, int64, ascending.
    class_counts: int64 [clients, classes], the numbers of training examples of
      each true class at a client. Examples of unknown class are not counted.
    settings: Its settings, with the actual `num_clients`.
    num_examples: The number of training examples.
    client_names: The name of each client, if clients are natural ones.
    wrong_examples: int64, ascending: labelled examples with a wrong label.
    wrong_labels: int64, these labels.
    client_test: Per client, the examples of known class that are held out for
      evaluation at the client, int64, ascending. Nobody trains on them. The
      list is empty if nothing is held out.
  """

  server_labeled: np.ndarray
  validation: np.ndarray
  client_labeled: list[np.ndarray]
  client_unlabeled: list[np.ndarray]
  class_counts: np.ndarray
  settings: partition_settings.PartitionSettings
  num_examples: int
  client_names: tuple[str, ...] = ()
  wrong_examples: np.ndarray = _none()
  wrong_labels: np.ndarray = _none()
  client_test: list[np.ndarray] = dataclasses.field(default_factory=list)

  @property
  def num_clients(self) -> int:
    """Returns the number of clients."""
    return len(self.client_unlabeled)

  @property
  def unknown_counts(self) -> np.ndarray:
    """Counts each client's examples of unknown class, int64 [clients]."""
    return sum(_sizes(self)) - self.class_counts.sum(1)

  def client_name(self, client_id: int) -> str:
    """Names a client for people: '3', or '3 (north)'."""
    if not self.client_names:
      return str(client_id)
    return f'{client_id} ({self.client_names[client_id]})'

  @property
  def labeled(self) -> np.ndarray:
    """Lists all labelled examples, at the server and at clients, ascending."""
    return np.sort(np.concatenate([self.server_labeled, *self.client_labeled]))

  def given_labels(
    self, labels: np.ndarray, examples: np.ndarray
  ) -> np.ndarray:
    """Returns the labels that training uses, which may be wrong.

    Args:
      labels: int [N], the true classes of the training examples.
      examples: Indices of labelled examples.

    Returns:
      The labels of `examples`, with `wrong_labels`.
    """
    given = labels[examples]
    place = np.searchsorted(self.wrong_examples, examples)
    # A place past the end matches no example, but must be an index.
    place = np.minimum(place, max(len(self.wrong_examples) - 1, 0))
    if len(self.wrong_examples):
      is_wrong = self.wrong_examples[place] == examples
      given[is_wrong] = self.wrong_labels[place[is_wrong]]
    return given

  def check(self, labels: np.ndarray) -> None:
    """Checks that this is a partition of these training examples.

    Args:
      labels: int [N], the true classes of the training examples.

    Raises:
      UsageError: If an index is out of range or occurs twice, a client's
        examples have other classes than recorded, or an example is labelled
        whose class is not known.
    """
    held = np.concatenate(self._held())
    if self.num_examples != len(labels) or (
      len(held) and not 0 <= held.min() <= held.max() < len(labels)
    ):
      raise UsageError(
        f'the partition is of {self.num_examples} training examples, with'
        f' indices from {min(held, default=0)} to {max(held, default=0)}, but'
        f' there are {len(labels)}: it was made for other data'
      )
    if len(np.unique(held)) != len(held):
      raise UsageError('the partition has some examples more than once')
    counts = count_classes(
      labels,
      self.client_labeled,
      self.client_unlabeled,
      self.settings.num_classes,
    )
    if not np.array_equal(counts, self.class_counts):
      raise UsageError(
        "the partition's clients hold other classes in these data than it"
        ' says: it was made for other data'
      )
    needed = np.concatenate([self.labeled, self.validation, *self.client_test])
    if np.any(labels[needed] == names.UNKNOWN_LABEL):
      raise UsageError('the partition labels examples whose class is not known')
    if not np.all(np.isin(self.wrong_examples, self.labeled)):
      raise UsageError('the partition has wrong labels of unlabelled examples')

  def has_same_examples(self, other: 'Partition') -> bool:
    """Tells whether all hold the same examples with the same labels."""
    mine, theirs = self.parts(), other.parts()
    return self.num_clients == other.num_clients and all(
      map(np.array_equal, mine, theirs)
    )

  def parts(self) -> list[np.ndarray]:
    """Lists the examples of each holder, then the wrong labels."""
    return [*self._held(), self.wrong_examples, self.wrong_labels]

  def _held(self) -> list[np.ndarray]:
    """Lists the examples of the server, of validation and of each client."""
    return [
      self.server_labeled,
      self.validation,
      *self.client_labeled,
      *self.client_unlabeled,
      *self.client_test,
    ]

  def dump_json(self) -> str:
    """Writes this partition as JSON text for `parse_json`."""
    settings = self.settings.recorded()
    held_out: dict[str, Any] = {}
    if settings[_TEST_FRACTION]:
      held_out['client_test'] = [a.tolist() for a in self.client_test]
    else:
      del settings[_TEST_FRACTION]
    for name, default in _LATER.items():
      if settings[name] == default:
        del settings[name]
    return json.dumps(
      {
        'format': _FORMAT,
        'version': _VERSION if held_out else _WITHOUT_TEST,
        'settings': {**settings, 'num_examples': self.num_examples},
        'class_counts': self.class_counts.tolist(),
        'server_labeled': self.server_labeled.tolist(),
        'validation': self.validation.tolist(),
        'client_labeled': [a.tolist() for a in self.client_labeled],
        'client_unlabeled': [a.tolist() for a in self.client_unlabeled],
        'client_names': self.client_names,
        'wrong_examples': self.wrong_examples.tolist(),
        'wrong_labels': self.wrong_labels.tolist(),
        **held_out,
      }
    )

  @classmethod
  def parse_json(cls, text: str) -> 'Partition':
    """Reads the partition that `dump_json` wrote.

    Args:
      text: JSON text.

    Returns:
      The partition.

    Raises:
      UsageError: If the text is not a partition, or its version is unknown.
    """
    try:
      fields = json.loads(text)
      if fields['format'] != _FORMAT:
        raise ValueError(f'its format is {fields["format"]!r}')
      if fields['version'] not in (_WITHOUT_TEST, _VERSION):
        raise ValueError(f'its version is {fields["version"]}, not {_VERSION}')
      settings = fields['settings']
      partition = cls(
        server_labeled=_read_indices(fields['server_labeled']),
        validation=_read_indices(fields['validation']),
        client_labeled=[_read_indices(a) for a in fields['client_labeled']],
        client_unlabeled=[_read_indices(a) for a in fields['client_unlabeled']],
        class_counts=_read_indices(fields['class_counts'], 2),
        settings=partition_settings.PartitionSettings.parse_record(settings),
        num_examples=int(settings['num_examples']),
        client_names=tuple(map(str, fields.get('client_names', ()))),
        wrong_examples=_read_indices(fields.get('wrong_examples', ())),
        wrong_labels=_read_indices(fields.get('wrong_labels', ())),
        client_test=[_read_indices(a) for a in fields.get('client_test', ())],
      )
      partition._check_form()
    # Deep nesting, which none of our files has, exhausts Python's stack.
    except (
      AttributeError,
      KeyError,
      OverflowError,
      RecursionError,
      TypeError,
      ValueError,
    ) as e:
      reason = f'{e} is missing' if isinstance(e, KeyError) else e
      raise UsageError(
        f'not a partition of tff_fssl, or a damaged one: {reason}'
      ) from e
    return partition

  def _check_form(self) -> None:
    """Checks that the parts agree, or raises `ValueError`."""
    settings = self.settings
    clients = self.num_clients
    has_server = settings.scenario == names.LABELS_AT_SERVER
    at_server = settings.num_labels if has_server else 0
    if has_server and not at_server:  # All that the data put there.
      at_server = len(self.server_labeled)
    wrong = self.wrong_labels
    held = np.concatenate([*self._held(), self.wrong_examples])
    is_index = (held >= 0) & (held < self.num_examples)
    for is_right, what in (
      (np.all(is_index), 'num_examples'),
      (clients == settings.num_clients, 'num_clients'),
      (clients == len(self.client_labeled), 'client_labeled'),
      (
        self.class_counts.shape == (clients, settings.num_classes)
        and np.all(self.class_counts >= 0),
        'class_counts',
      ),
      (len(self.validation) == settings.num_validation, 'validation'),
      (len(self.server_labeled) == at_server, 'server_labeled'),
      (len(self.client_names) in (0, clients), 'client_names'),
      (
        len(self.client_test) == clients * bool(settings.client_test_fraction),
        'client_test',
      ),
      (
        wrong.shape == self.wrong_examples.shape
        and np.all((wrong >= 0) & (wrong < settings.num_classes))
        and np.all(np.diff(self.wrong_examples) > 0),
        'wrong_labels',
      ),
    ):
      if not is_right:
        raise ValueError(f'its {what} does not fit to the rest')

  def save_json(self, path: str | os.PathLike[str]) -> None:
    """Writes `dump_json` to a file atomically. Creates its folder."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    durable.write_file(os.fspath(path), [self.dump_json().encode()])


def read(path: str) -> Partition:
  """Reads the partition in a file.

  Args:
    path: A file that `Partition.save_json` wrote.

  Returns:
    The partition.

  Raises:
    UsageError: If it cannot be read, or is not a partition.
  """
  text = files.read_text(path)
  try:
    return Partition.parse_json(text)
  except UsageError as error:
    raise files.FileError(path, str(error)) from error


def count_classes(
  labels: np.ndarray,
  labeled: list[np.ndarray],
  unlabeled: list[np.ndarray],
  num_classes: int,
) -> np.ndarray:
  """Counts the examples of each class at each client.

  Args:
    labels: int [N], the classes of all examples, -1 where unknown.
    labeled: Indices of labelled examples per client, int64.
    unlabeled: Indices of unlabelled examples per client, int64.
    num_classes: The number of classes.

  Returns:
    int64 [clients, classes], without examples of unknown class.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import partition
    >>> labels = np.array([0, 0, 1, 1, 2, -1])
    >>> labeled = [np.array([0]), np.array([2])]
    >>> unlabeled = [np.array([1, 4]), np.array([3, 5])]
    >>> partition.count_classes(labels, labeled, unlabeled, num_classes=3)
    array([[2, 0, 1],
           [0, 2, 0]])
  """
  # Unknown labels, -1, are counted first, and the count is dropped.
  counts = [
    np.bincount(labels[np.concatenate(held)] + 1, minlength=num_classes + 1)[1:]
    for held in zip(labeled, unlabeled)
  ]
  return np.array(counts, np.int64).reshape(len(labeled), -1)


def _read_indices(values: Any, rank: int = 1) -> np.ndarray:
  """Reads integers from a file of unknown origin, or raises `ValueError`."""
  array = np.asarray(values)
  # Without an element, NumPy takes float64.
  is_wrong = array.ndim != rank or (array.size and array.dtype != np.int64)
  # No client: no row tells how many columns there are.
  if is_wrong and array.shape != (0,):
    raise ValueError(f'it has {array.dtype} {list(array.shape)} for integers')
  return array.astype(np.int64)


def _ticks(count: int) -> np.ndarray:
  """Spaces at most `_MAX_TICKS` numbers below `count` evenly."""
  steps = np.outer(10 ** np.arange(8), [1, 2, 5]).ravel()
  step = steps[np.searchsorted(steps, count / _MAX_TICKS)]
  return np.arange(0, count, step)


def _range(counts: np.ndarray) -> str:
  low, high = counts.min(), counts.max()
  return f'{low}' if low == high else f'{low} to {high}'


def _means(values: np.ndarray, size: int) -> np.ndarray:
  """Averages each group of `size` rows. The last group may be smaller."""
  starts = np.arange(0, len(values), size)
  lengths = np.diff([*starts, len(values)])
  sums = np.add.reduceat(values, starts, axis=0)
  return sums / lengths.reshape([-1] + [1] * (values.ndim - 1))


def make_figure(
  partitions: Sequence[Partition], class_names: Sequence[str] = ()
) -> Any:
  """Draws class counts per client as heat maps, next to the clients' sizes.

  Examples of unknown class are a column of its own, in shades of gray. With
  more than 1,000 clients, each row is the mean of several clients, as the label
  of the axis tells.

  Args:
    partitions: The partitions to plot, from left to right.
    class_names: The name of each class. (): their numbers.

  Returns:
    The matplotlib figure.
  """
  # Without pyplot, which would choose a GUI for the whole process.
  from matplotlib import figure  # pylint: disable=import-outside-toplevel

  most_clients = max(partition.num_clients for partition in partitions)
  height = float(np.clip(2.2 + 0.13 * most_clients, 3.6, 16))
  widths = [
    float(np.clip(4.5 + 0.25 * partition.settings.num_classes, 7, 13))
    for partition in partitions
  ]
  canvas = figure.Figure(figsize=(sum(widths), height), layout='constrained')
  parts = canvas.subfigures(
    1, len(partitions), squeeze=False, width_ratios=widths
  )
  for part, partition in zip(parts[0], partitions, strict=True):
    _draw(part, partition, class_names)
  return canvas


def _draw(
  canvas: Any, partition: Partition, class_names: Sequence[str]
) -> None:
  """Draws one partition."""
  num_clients, num_classes = partition.class_counts.shape
  in_row = -(-num_clients // _MAX_ROWS)
  heat, sizes = canvas.subplots(
    1, 2, sharey=True, gridspec_kw={'width_ratios': [3, 1]}
  )
  image = _draw_counts(heat, partition.class_counts, in_row)
  canvas.colorbar(image, ax=heat, label='examples', pad=0.02, aspect=40)
  ticks, labels = _ticks(num_classes), [*map(str, range(num_classes))]
  if has_names := any(name != labels[i] for i, name in enumerate(class_names)):
    labels = [*map(_short, class_names)]
  shown = {tick: labels[tick] for tick in ticks.tolist()}
  if (unknown := partition.unknown_counts).any():
    _draw_unknown(heat, unknown, num_classes, in_row)
    shown[num_classes] = f'not known\n({_range(unknown)})'
  # A class may be called '$x'.
  heat.set_xticks(
    [*shown],
    [*shown.values()],
    rotation=90 if has_names or num_classes in shown else 0,
    parse_math=False,
  )
  if partition.client_names and in_row == 1:
    called = [_short(partition.client_names[i]) for i in heat.get_yticks()]
    heat.set_yticklabels(called, parse_math=False)
  _draw_sizes(sizes, partition, in_row)
  canvas.legend(loc='outside lower right', ncols=2, frameon=False, fontsize=9)
  canvas.suptitle(_title(partition), fontsize=10)


def _short(name: str) -> str:
  name = files.printable(name)
  return name if len(name) <= _MAX_NAME else f'{name[: _MAX_NAME - 1]}…'


def _draw_counts(axes: Any, counts: np.ndarray, in_row: int) -> Any:
  """Draws the heat map, in which each row is the mean of `in_row` clients."""
  from matplotlib import colors  # pylint: disable=import-outside-toplevel

  num_clients, num_classes = counts.shape
  rows = counts if in_row == 1 else _means(counts, in_row)
  # Counts of a Dirichlet split span orders of magnitude: color by their root.
  image = axes.imshow(
    rows,
    extent=(-0.5, num_classes - 0.5, len(rows) * in_row - 0.5, -0.5),
    aspect='auto',
    interpolation='nearest',
    cmap='viridis',
    norm=colors.PowerNorm(0.5, vmin=0, vmax=max(1, rows.max())),
  )
  means = f' (each row the mean of {in_row})' if in_row > 1 else ''
  axes.set(xlabel='class', ylabel=f'client{means}')
  axes.set_yticks(_ticks(num_clients))
  if num_clients <= 20 and num_classes <= 20:
    dark = counts.max() / 3
    for (client, class_), count in np.ndenumerate(counts):
      _write(axes, class_, client, count, count > dark)
  return image


def _draw_unknown(
  axes: Any, counts: np.ndarray, num_classes: int, in_row: int
) -> None:
  """Draws the examples of unknown class beside the classes."""
  rows = _means(counts[:, np.newaxis], in_row)
  left, most = num_classes - 0.5, counts.max()
  axes.imshow(
    rows,
    extent=(left, left + 1, len(rows) * in_row - 0.5, -0.5),
    aspect='auto',
    interpolation='nearest',
    cmap='Greys',
    vmin=0,
    # So that no gray is black.
    vmax=1.6 * most,
  )
  axes.axvline(left, color='white', linewidth=3)
  axes.set_xlim(-0.5, left + 1)
  if len(counts) <= 20 and num_classes <= 20:
    for client, count in enumerate(counts):
      _write(axes, num_classes, client, count, True)


def _write(axes: Any, x: int, y: int, number: int, on_light: bool) -> None:
  """Writes a number into a cell of the heat map."""
  color = 'black' if on_light else 'white'
  axes.text(x, y, number, ha='center', va='center', size=7, color=color)


def _sizes(partition: Partition) -> tuple[np.ndarray, np.ndarray]:
  """Counts the labelled and unlabelled examples of each client."""
  return (
    np.array([len(a) for a in partition.client_labeled]),
    np.array([len(a) for a in partition.client_unlabeled]),
  )


def _draw_sizes(axes: Any, partition: Partition, in_row: int) -> None:
  """Draws the numbers of clients' examples."""
  labeled, unlabeled = _sizes(partition)
  # `stairs` makes one object for all clients, where bars would be one each.
  num_rows = -(-len(labeled) // in_row)
  edges = np.arange(num_rows + 1) * in_row - 0.5
  for start, stop, bar_color, kind in (
    (0 * labeled, labeled, 'tab:orange', 'labelled'),
    (labeled, labeled + unlabeled, 'tab:blue', 'unlabelled'),
  ):
    axes.stairs(
      _means(stop, in_row),
      edges,
      baseline=_means(start, in_row),
      orientation='horizontal',
      fill=True,
      color=bar_color,
      label=kind,
    )
  axes.set(xlabel='examples')
  axes.set_xlim(0)
  axes.set_ylim(len(labeled) - 0.5, -0.5)


def _title(partition: Partition) -> str:
  """Describes the partition in two lines."""
  settings = partition.settings
  labeled, unlabeled = _sizes(partition)
  wrong = len(partition.wrong_examples)
  noise = f' {wrong} wrong labels,' if wrong else ''
  return (
    f'{settings.title}, {partition.num_clients} clients, each with'
    f' {_range(labeled)} labelled and {_range(unlabeled)} unlabelled examples\n'
    f'{len(partition.server_labeled)} labelled at the server,'
    f'{noise}'
    f' {len(partition.validation)} for validation, seed {settings.seed}'
  )
