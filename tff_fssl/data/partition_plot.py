"""A plot of the numbers of examples of each class at clients."""

from collections.abc import Sequence
import io
import os
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.data import partition as partition_lib

_MAX_TICKS = 25
# Characters of a class's name.
_MAX_NAME = 16
# More rows would be thinner than a pixel, and slow to draw.
_MAX_ROWS = 1_000


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


def plot(
  partition: partition_lib.Partition,
  path: str | os.PathLike[str],
  class_names: Sequence[str] = (),
) -> None:
  """Draws a partition into a PNG file.

  Args:
    partition: The partition to plot.
    path: The PNG file to write.
    class_names: The name of each class. (): their numbers.
  """
  # pylint: disable-next=import-outside-toplevel
  from matplotlib.backends import backend_agg

  canvas = draw(partition, class_names)
  backend_agg.FigureCanvasAgg(canvas)
  content = io.BytesIO()
  canvas.savefig(content, dpi=110, format='png')
  durable.write_file(os.fspath(path), [content.getvalue()])


def draw(
  partition: partition_lib.Partition, class_names: Sequence[str] = ()
) -> Any:
  """Draws class counts per client as a heat map, next to the clients' sizes.

  With more than 1,000 clients, each row is the mean of several clients, as the
  label of the axis tells.

  Args:
    partition: The partition to plot.
    class_names: As in `plot`.

  Returns:
    The matplotlib figure.
  """
  # Without pyplot, which would choose a GUI for the whole process.
  from matplotlib import figure  # pylint: disable=import-outside-toplevel

  num_clients, num_classes = partition.class_counts.shape
  in_row = -(-num_clients // _MAX_ROWS)
  height = float(np.clip(2.2 + 0.13 * num_clients, 3.6, 16))
  width = float(np.clip(4.5 + 0.25 * num_classes, 7, 13))
  canvas = figure.Figure(figsize=(width, height), layout='constrained')
  heat, sizes = canvas.subplots(
    1, 2, sharey=True, gridspec_kw={'width_ratios': [3, 1]}
  )
  image = _draw_counts(heat, partition.class_counts, in_row)
  canvas.colorbar(image, ax=heat, label='examples', pad=0.02, aspect=40)
  if any(name != str(i) for i, name in enumerate(class_names)):
    names = [_short(class_names[i]) for i in heat.get_xticks()]
    # A class may be called '$x'.
    heat.set_xticklabels(names, rotation=90, parse_math=False)
  _draw_sizes(sizes, partition, in_row)
  canvas.legend(loc='outside lower right', ncols=2, frameon=False, fontsize=9)
  canvas.suptitle(_title(partition), fontsize=10)
  return canvas


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
  axes.set_xticks(_ticks(num_classes))
  axes.set_yticks(_ticks(num_clients))
  if num_clients <= 20 and num_classes <= 20:
    dark = counts.max() / 3
    for (client, class_), count in np.ndenumerate(counts):
      axes.text(
        class_,
        client,
        count,
        ha='center',
        va='center',
        size=7,
        color='black' if count > dark else 'white',
      )
  return image


def _held(partition: partition_lib.Partition) -> tuple[np.ndarray, np.ndarray]:
  """Counts the labelled and unlabelled examples of each client."""
  return (
    np.array([len(a) for a in partition.client_labeled]),
    np.array([len(a) for a in partition.client_unlabeled]),
  )


def _draw_sizes(
  axes: Any, partition: partition_lib.Partition, in_row: int
) -> None:
  """Draws the numbers of clients' examples."""
  labeled, unlabeled = _held(partition)
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


def _title(partition: partition_lib.Partition) -> str:
  """Describes the partition in two lines."""
  settings = partition.settings
  labeled, unlabeled = _held(partition)
  wrong = len(partition.wrong_examples)
  noise = f' {wrong} wrong labels,' if wrong else ''
  return (
    f'{settings.title}, {partition.num_clients} clients, each with'
    f' {_range(labeled)} labelled and {_range(unlabeled)} unlabelled examples\n'
    f'{len(partition.server_labeled)} labelled at the server,'
    f'{noise}'
    f' {len(partition.validation)} for validation, seed {settings.seed}'
  )
