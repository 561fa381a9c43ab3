"""The declarations of all columns, and docs/metrics.md from them.

Those of columns that any run can have are in metrics.toml. The others are
declared by the algorithms that report them.
"""

from collections.abc import Sequence
import functools
import os

import tff_fssl
from tff_fssl import files
from tff_fssl import metrics
from tff_fssl.algorithms import registry
from tff_fssl.metrics import Metric

_INTRODUCTION = """\
# Metrics

With this page you look up each column of a run's CSV files.

    cut -d, -f1,2,4 runs/quickstart/metrics/eval.csv | tail -n 1

prints a round, and the test and the validation accuracy after it:

    60,0.9333333373069763,0.9300000071525574

An empty cell or `nan` means that there was nothing to measure. Figures of \
clients are over the clients of the round whose report was accepted \
([what is checked](privacy.md#what-a-client-can-lie-about)). Means over \
examples weigh every example alike, whichever client and batch it was in. \
Under `--aggregator=secure` and `dp`, clients report nothing: of the columns \
`client_work/train/...`, only `num_clients` is there.

This page is made from the declarations of the metrics, by `python \
tools/update_metrics.py`. [A metric of your own](extending_more.md#a-metric) \
is declared in the same way.
"""
_HEADINGS = {
  'train': '## metrics/train.csv: one row a round\n',
  'eval': '## metrics/eval.csv: one row an evaluation\n',
  'timing': (
    '## metrics/timing.csv: one row a round\n\n'
    'These figures differ from run to run, also of one seed.\n'
  ),
}


@functools.cache
def _declared() -> dict[str, tuple[Metric, ...]]:
  """Reads metrics.toml: name of a table -> its columns."""
  folder = os.path.dirname(os.path.abspath(tff_fssl.__file__))
  content = files.read_toml(os.path.join(folder, 'metrics.toml'))
  return {name: tuple(map(_metric, content[name])) for name in _HEADINGS}


def _metric(entry: dict[str, str | dict[str, str]]) -> Metric:
  """Makes a declaration of its entry in the file, which wraps long texts."""
  values = {
    name: metrics.Curve(**value)
    if isinstance(value, dict)
    else ' '.join(value.split())
    for name, value in entry.items()
  }
  return Metric(**values)  # type: ignore[arg-type]


def tables() -> dict[str, tuple[Metric, ...]]:
  """Returns the declarations of the columns of each table."""
  own = {'train': _algorithms_metrics()}
  return {
    f'{name}.csv': (*columns, *own.get(name, ()))
    for name, columns in _declared().items()
  }


def all_metrics() -> tuple[Metric, ...]:
  """Returns the declarations of all columns of all tables."""
  return tuple(metric for table in tables().values() for metric in table)


def _algorithms_metrics() -> dict[Metric, list[str]]:
  """Collects declarations -> the algorithms that have them."""
  names: dict[Metric, list[str]] = {}
  for algorithm in registry.REGISTRY.values():
    for metric in algorithm.metrics:
      names.setdefault(metric, []).append(algorithm.name)
  return names


def page() -> str:
  """Makes docs/metrics.md."""
  units = ', '.join(f'`{name}`: {text}' for name, text in metrics.UNITS.items())
  parts = [_INTRODUCTION, f'Units: {units}.\n']
  for name, columns in _declared().items():
    parts += [_HEADINGS[name], _markdown(columns)]
    if name == 'train':
      # One heading for all algorithms that report the same columns.
      grouped: dict[tuple[str, ...], list[Metric]] = {}
      for metric, names in _algorithms_metrics().items():
        grouped.setdefault(tuple(names), []).append(metric)
      for users, own in grouped.items():
        heading = ', '.join(f'`{user}`' for user in users)
        parts += [f'### Only {heading}\n', _markdown(own)]
  return '\n'.join(parts)


def _markdown(members: Sequence[Metric]) -> str:
  """Makes a table, with arrows where higher or lower values are better."""
  lines = ['| column | unit | better | meaning |', '|---|---|---|---|']
  lines += [
    f'| `{m.column}` | {m.unit} | {metrics.ARROWS[m.better]} | {m.meaning} |'
    for m in members
  ]
  return '\n'.join(lines) + '\n'
