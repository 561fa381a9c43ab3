"""Runs TFF's own tests, from a checkout of its sources, under our runtime.

    python tests/runtime/tff_source.py CHECKOUT [--all] [--only PART]
      [--json FILE]

CHECKOUT is TensorFlow Federated's repository at the tag of the installed
version (v0.87.0): the package on the index has no tests. Every test module
that names an execution context runs twice, in processes of its own: under our
in-process context, and, for the tests that did not pass, under TFF's own. What
the package lacks (test helpers) is taken from the checkout, all else from the
package. Prints a table of the tests that invoked a computation, and a line for
each that did not pass. With --all, so does every other test module, such as the
type system's, which shows that TFF works beside the installed packages.
"""

import argparse
import collections
import inspect
import json
import multiprocessing
import os
import pathlib
import queue as queue_lib
import sys
import time
import unittest

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

# Errors that docs/runtimes.md gives as answers of the runtime.
_REFUSALS = ('NotImplementedError',)
_MODULE_SECS = 300


def _add_helpers(checkout: pathlib.Path) -> None:
  """Lets the installed packages find modules that only the checkout has."""

  class Finder:
    """Finds what is not found elsewhere."""

    @staticmethod
    def find_spec(name, path=None, target=None):
      del path, target
      import importlib.util

      if not name.startswith('tensorflow_federated.'):
        return None
      file = checkout / (name.replace('.', '/') + '.py')
      if not file.is_file():
        return None
      return importlib.util.spec_from_file_location(name, file)

  sys.meta_path.append(Finder)


def _use_our_contexts(counts: collections.Counter) -> None:
  """Replaces what TFF's tests create their contexts with."""
  from tensorflow_federated.python.core.backends.native import (
    execution_contexts as native,
  )
  from tensorflow_federated.python.core.backends.test import (
    execution_contexts as test,
  )

  from tff_fssl import runtime

  def create(build, simulate):
    def fn(
      default_num_clients=0,
      max_concurrent_computation_calls=-1,
      stream_structs=False,
    ):
      del max_concurrent_computation_calls, stream_structs
      settings = runtime.Settings(
        simulate_secure_aggregation=simulate,
        default_num_clients=default_num_clients,
      )
      context = build(settings)
      return _counted(context, counts)

    return fn

  for module, kind in ((native, 'local'), (test, 'test')):
    for mode, build in (
      ('sync', runtime.build_context),
      ('async', runtime.build_async_context),
    ):
      name = f'create_{mode}_{kind}_cpp_execution_context'
      setattr(module, name, create(build, kind == 'test'))


def _counted(context, counts):
  """A context whose invocations are counted."""
  invoke = context.invoke

  def counting(comp, arg):
    counts['invocations'] += 1
    return invoke(comp, arg)

  async def counting_async(comp, arg):
    return await counting(comp, arg)

  # TFF's mocks await the result of a coroutine function only.
  is_async = inspect.iscoroutinefunction(invoke)
  context.invoke = counting_async if is_async else counting
  return context


class _Result(unittest.TestResult):
  """Outcomes by test."""

  def __init__(self, counts):
    super().__init__()
    self.counts = counts
    self.outcomes = {}

  def startTest(self, test):
    super().startTest(test)
    self.counts['invocations'] = 0

  def _add(self, test, outcome, error=None):
    message = ''
    if error is not None:
      message = f'{error[0].__name__}: {error[1]}'
    self.outcomes.setdefault(
      test.id(), (outcome, self.counts['invocations'], message[:600])
    )

  def addSuccess(self, test):
    self._add(test, 'passed')

  def addSkip(self, test, reason):
    self._add(test, 'skipped')

  def addError(self, test, err):
    self._add(test, 'error', err)

  def addFailure(self, test, err):
    self._add(test, 'failure', err)

  def addSubTest(self, test, subtest, err):
    if err is not None:
      self._add(test, 'failure', err)


def _run_module(checkout, path, ours, names, queue) -> None:
  """Runs a module's tests (in a process of its own)."""
  import importlib.util

  log = os.open(os.devnull, os.O_WRONLY)
  os.dup2(log, 1)
  os.dup2(log, 2)
  counts: collections.Counter = collections.Counter()
  _add_helpers(checkout)
  import absl.flags

  import tff_fssl  # noqa: F401  # Before tensorflow_federated: see `bridge`.

  absl.flags.FLAGS(['tff_source'])
  if ours:
    _use_our_contexts(counts)
  from tensorflow_federated.python.core.backends.native import (
    execution_contexts as native,
  )
  from tensorflow_federated.python.core.backends.test import (
    execution_contexts as test,
  )

  text = path.read_text()
  if 'set_async_test' in text:
    test.set_async_test_cpp_execution_context()
  elif 'set_sync_test' in text:
    test.set_sync_test_cpp_execution_context()
  elif 'set_async_local' in text:
    native.set_async_local_cpp_execution_context()
  else:
    native.set_sync_local_cpp_execution_context()
  result = _Result(counts)
  try:
    spec = importlib.util.spec_from_file_location(
      str(path.relative_to(checkout))[:-3].replace('/', '.'), path
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    if names:
      suite = unittest.TestSuite(t for t in _flat(suite) if t.id() in names)
    suite.run(result)
  except BaseException as error:  # pylint: disable=broad-except
    result.outcomes[f'{path.stem} (module)'] = (
      'module',
      0,
      f'{type(error).__name__}: {error}'[:600],
    )
  queue.put(result.outcomes)
  queue.close()
  queue.join_thread()
  os._exit(0)


def _flat(suite):
  for test in suite:
    if isinstance(test, unittest.TestSuite):
      yield from _flat(test)
    else:
      yield test


def _run_in_process(checkout, path, ours, names=()):
  """Outcomes of a module."""
  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  process = context.Process(
    target=_run_module, args=(checkout, path, ours, set(names), queue)
  )
  process.start()
  deadline = time.monotonic() + _MODULE_SECS
  try:
    while True:
      try:
        return queue.get(timeout=1)
      except queue_lib.Empty:
        if not process.is_alive() or time.monotonic() > deadline:
          why = 'hangs' if process.is_alive() else 'died'
          return {f'{path.stem} (module)': ('module', 0, why)}
  finally:
    process.join(5)
    process.kill()


def main() -> int:
  """Runs and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('checkout', type=pathlib.Path)
  parser.add_argument('--only', default='', help='part of a path')
  parser.add_argument('--all', action='store_true', help='not only contexts')
  parser.add_argument('--after', default='', help='a path in the checkout')
  parser.add_argument('--json')
  args = parser.parse_args()
  checkout = args.checkout.resolve()
  paths = sorted(
    path
    for path in (checkout / 'tensorflow_federated').rglob('*_test.py')
    if (args.all or 'execution_context' in path.read_text())
    and args.only in str(path)
    and str(path.relative_to(checkout)) > args.after
  )
  table: collections.Counter = collections.Counter()
  everything = {}
  for path in paths:
    outcomes = _run_in_process(checkout, path, ours=True)
    failed = [n for n, o in outcomes.items() if o[0] in ('error', 'failure')]
    theirs = _run_in_process(checkout, path, False, failed) if failed else {}
    for name, (outcome, invocations, message) in outcomes.items():
      if outcome in ('error', 'failure'):
        if theirs.get(name, ('',))[0] != 'passed':
          outcome = "fails under TFF's own context, too"
        elif message.startswith(_REFUSALS):
          outcome = 'refused'
      everything[name] = (outcome, invocations, message)
      if outcome not in ('passed', 'skipped'):
        print(f'{outcome}: {name}: {message}', flush=True)
      if args.all or invocations or outcome not in ('passed', 'skipped'):
        table[outcome] += 1
    print(f'{path.relative_to(checkout)}: {len(outcomes)} tests', flush=True)
  for outcome, count in table.most_common():
    print(f'{count:6} {outcome}')
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(everything, indent=1))
  return int(bool(table['failure'] or table['error']))


if __name__ == '__main__':
  sys.exit(main())
