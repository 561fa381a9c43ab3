"""The declarations of all columns.

Those of columns that any run can have are in metrics.toml. The others are
declared by the algorithms that report them.
"""

import functools
import os

import tff_fssl
from tff_fssl import files
from tff_fssl import metrics
from tff_fssl.algorithms import registry
from tff_fssl.metrics import Metric


@functools.cache
def declared() -> dict[str, tuple[Metric, ...]]:
  """Reads metrics.toml: name of a table -> its columns."""
  folder = os.path.dirname(os.path.abspath(tff_fssl.__file__))
  content = files.read_toml(os.path.join(folder, 'metrics.toml'))
  return {name: tuple(map(_metric, rows)) for name, rows in content.items()}


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
  own = {'train': algorithms_metrics()}
  return {
    f'{name}.csv': (*columns, *own.get(name, ()))
    for name, columns in declared().items()
  }


def all_metrics() -> tuple[Metric, ...]:
  """Returns the declarations of all columns of all tables."""
  return tuple(metric for table in tables().values() for metric in table)


def algorithms_metrics() -> dict[Metric, list[str]]:
  """Collects declarations -> the algorithms that have them."""
  names: dict[Metric, list[str]] = {}
  for algorithm in registry.REGISTRY.values():
    for metric in algorithm.metrics:
      names.setdefault(metric, []).append(algorithm.name)
  return names
