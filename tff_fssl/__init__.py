"""Federated semi-supervised learning on TensorFlow Federated."""

import atexit
import gc
import sys

__version__ = '0.3.0'


@atexit.register
def _drop_default_context() -> None:
  """Drops TFF's own context while it can still clean up, and so is quiet.

  TFF makes one when it is imported. Python, when it ends, takes away first what
  that context cleans up with, and then reports "Exception ignored in ...
  ServiceManager.__del__".
  """
  framework = getattr(
    sys.modules.get('tensorflow_federated'), 'framework', None
  )
  if framework is None:
    return

  class NoContext(framework.SyncContext):  # type: ignore[name-defined]
    def invoke(self, comp, arg):
      raise RuntimeError('Python is about to end.')

  framework.set_default_context(NoContext())
  gc.collect()
