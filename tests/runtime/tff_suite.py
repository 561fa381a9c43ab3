"""TFF's own computations under its C++ runtime and under ours, compared.

    python tests/runtime/tff_suite.py [--only SUBSTRING]

The package on the index has no tests, so this restates what they execute: the
intrinsics over types, numbers of clients and structures, TensorFlow's control
flow and resources, `tff.aggregators`, `tff.analytics` and `tff.learning`. Each
case runs under TFF's worker and under ours, with one client at a time and with
three. (`tff_source.py` runs the tests themselves, where a checkout is at hand.)

Prints a table: passed (the same result, or the error that is meant), refused
(by ours alone, with `NotImplementedError`), more (TFF's worker does not run it,
ours does), wrong; no case is what neither runs, a mistake in this file.
"""

import argparse
import collections
from collections.abc import Callable
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

# pylint: disable=wrong-import-position
import numpy as np

from tff_fssl import runtime
from tff_fssl.lazy import tf, tff

# isort: split
from tests.runtime import tff_language_cases
from tests.runtime import tff_library_cases

Case = tff_language_cases.Case


def cases() -> list[Case]:
  """All cases."""
  return [*tff_language_cases.cases(), *tff_library_cases.cases()]


def _plain(value: Any) -> Any:
  """A result in lists and arrays."""
  if isinstance(value, tf.data.Dataset):
    return [_plain(element) for element in value]
  if isinstance(value, tf.Tensor):
    return value.numpy()
  if hasattr(value, '_asdict'):
    value = value._asdict()
  if hasattr(value, '__attrs_attrs__'):
    value = {a.name: getattr(value, a.name) for a in value.__attrs_attrs__}
  if isinstance(value, dict):
    return [[name, _plain(v)] for name, v in value.items()]
  if isinstance(value, tff.structure.Struct):
    return [[n, _plain(v)] for n, v in tff.structure.iter_elements(value)]
  if isinstance(value, (list, tuple)):
    return [_plain(element) for element in value]
  return value


def _differ(a: Any, b: Any) -> str:
  """'' if two results agree, to rounding."""
  if isinstance(a, list) or isinstance(b, list):
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
      return f'{a!r} is not {b!r}'
    return next(filter(None, map(_differ, a, b)), '')
  x, y = np.asarray(a), np.asarray(b)
  if x.dtype.kind in 'fc' and y.dtype == x.dtype and x.shape == y.shape:
    same = np.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
  else:
    same = x.dtype == y.dtype and np.array_equal(x, y)
  return '' if same else f'{a!r} is not {b!r}'


def _outcome(context: Any, run: Callable[[], Any]) -> tuple[str, Any]:
  with tff.framework.get_context_stack().install(context):
    try:
      return 'result', _plain(run())
    except Exception as error:  # pylint: disable=broad-except
      return 'error', error


def compare(case: Case, theirs: Any, ours: Any) -> tuple[str, str]:
  """('passed', 'refused' or 'wrong', and why)."""
  kind, expected = _outcome(theirs, case[2])
  results = [_outcome(context, case[2]) for context in ours]
  for found_kind, found in results:
    if found_kind == 'error' and kind == 'result':
      refused = isinstance(found, NotImplementedError)
      return 'refused' if refused else 'wrong', repr(found)[:500]
    if kind == 'result':
      why = _differ(found, expected)
      if why:
        return 'wrong', why[:500]
  if kind == 'error':
    both = [k for k, _ in results if k == 'error']
    if len(both) < len(results):
      return 'more', repr(expected)[:200]
    why = '' if 'fails' in case[1] else f'refused by both: {expected!r}'[:300]
    return 'passed' if not why else 'no case', why
  return 'passed', ''


def main(argv: list[str] | None = None) -> int:
  """Runs the cases, prints the table; 1 if a result is wrong."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--only', default='', help='part of a group or name')
  args = parser.parse_args(argv)
  ours = [
    runtime.build_context(
      runtime.Settings(client_threads=n, simulate_secure_aggregation=True)
    )
    for n in (1, 3)
  ]
  table: dict[str, collections.Counter] = {}
  with runtime.build_context(
    runtime.Settings('tff_worker', simulate_secure_aggregation=True)
  ) as theirs:
    for case in cases():
      group, name, _ = case
      if args.only not in f'{group}: {name}':
        continue
      outcome, why = compare(case, theirs, ours)
      table.setdefault(group, collections.Counter())[outcome] += 1
      if why:
        print(f'{outcome}: {group}: {name}: {why}', flush=True)
  outcomes = ('passed', 'refused', 'more', 'wrong', 'no case')
  print(f'{"":22}' + ''.join(f' {outcome:>8}' for outcome in outcomes))
  total: collections.Counter = collections.Counter()
  for group, counts in [*table.items(), ('all', total)]:
    row = ''.join(f' {counts[k]:8}' for k in outcomes)
    print(f'{group:22}{row}', flush=True)
    total.update(counts)
  return int(total['wrong'] + total['no case'] > 0)


if __name__ == '__main__':
  sys.exit(main())
