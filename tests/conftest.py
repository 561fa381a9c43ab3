"""What all tests share: quiet TensorFlow, repeatable examples, real data."""

import ctypes
import gc
import os
import pathlib
import signal

# Before anything imports TensorFlow.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

# Processes that a shell starts in the background ignore Ctrl-C, and so would
# TFF's worker, which TFF ends by that signal, and then waits for.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

import tff_fssl  # noqa: F401  # Before tensorflow_federated: see `bridge`.

# As programs do, see `program.main`.
gc.set_threshold(20_000)

hypothesis.settings.register_profile(
  'repeatable', derandomize=True, database=None, deadline=None
)
hypothesis.settings.load_profile('repeatable')


@pytest.fixture(scope='session', autouse=True)
def caches(tmp_path_factory):
  """Keeps decoded images out of the user's own folder of caches."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('caches')))
    yield


@pytest.fixture(scope='module', autouse=True)
def memory(request):
  """Frees what a module's tests have built: graphs of up to 100 MB each."""
  yield
  for value in vars(request.module).values():
    if getattr(value, '__module__', None) == request.module.__name__:
      getattr(value, 'cache_clear', lambda: None)()
  gc.collect()
  # Without this, glibc keeps what was freed.
  ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope='session')
def repository() -> pathlib.Path:
  """The root of the source tree."""
  return pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope='session')
def tfds_dir(repository) -> str:
  """The folder of real TFDS data; without it, the test is skipped."""
  folder = os.environ.get('TFF_FSSL_TEST_DATA_DIR')
  path = pathlib.Path(folder or repository.parent / 'shared' / 'data' / 'tfds')
  if not (path / 'cifar10').is_dir():
    pytest.skip(f'no CIFAR-10 in {path} (TFF_FSSL_TEST_DATA_DIR)')
  return str(path)
