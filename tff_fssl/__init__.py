"""Federated semi-supervised learning on TensorFlow Federated.

`import tff_fssl as fssl` is enough for a program that embeds an algorithm
(docs/embedding.md): `fssl.build_process(model_fn, algorithm, data, seed=0)`.
TensorFlow is imported when the first name that needs it is used. It is silent
unless `TF_CPP_MIN_LOG_LEVEL` is set, and uses its oneDNN kernels unless
`TF_ENABLE_ONEDNN_OPTS` is set, or it was imported before.
"""

import atexit
import gc
import importlib
import os
import sys
from typing import Any

__version__ = '0.5.0'

# TensorFlow reads these when it is imported. It reports factories of CUDA as
# errors, and types in sound graphs as warnings.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# It leaves these kernels off where there is no AVX-512. With them, networks on
# images take a third to two thirds of the time.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
os.environ.setdefault('KERAS_BACKEND', 'tensorflow')

# Older ones are told so by `this_python`.
if sys.version_info >= (3, 11):  # noqa: UP036
  from tff_fssl import bridge

  bridge.install()

# Name -> its module. `runtime` and `training` are modules themselves.
_EXPORTED = {
  'UsageError': 'tff_fssl.hparams',
  # Algorithms. A test compares them with the registry.
  'REGISTRY': 'tff_fssl.algorithms.registry',
  'Supervised': 'tff_fssl.algorithms.supervised',
  'FixMatch': 'tff_fssl.algorithms.fixmatch',
  'Uda': 'tff_fssl.algorithms.uda',
  'MixMatch': 'tff_fssl.algorithms.mixmatch',
  'SemiFl': 'tff_fssl.algorithms.semifl',
  'Fl2': 'tff_fssl.algorithms.fl2',
  'FreeMatch': 'tff_fssl.algorithms.freematch',
  'FedSwitch': 'tff_fssl.algorithms.fedswitch',
  'TsServerEma': 'tff_fssl.algorithms.fedswitch',
  'TsClientEma': 'tff_fssl.algorithms.fedswitch',
  'FedCon': 'tff_fssl.algorithms.fedcon',
  'FedRgd': 'tff_fssl.algorithms.fedrgd',
  'ProtoFssl': 'tff_fssl.algorithms.protofssl',
  'FedMatch': 'tff_fssl.algorithms.fedmatch',
  'Sage': 'tff_fssl.algorithms.sage',
  'ProxyFl': 'tff_fssl.algorithms.proxyfl',
  'CbaFed': 'tff_fssl.algorithms.cbafed',
  'FedDb': 'tff_fssl.algorithms.feddb',
  'FedDure': 'tff_fssl.algorithms.feddure',
  'LocalSupervised': 'tff_fssl.algorithms.local_training',
  'LocalUda': 'tff_fssl.algorithms.local_training',
  'LocalFixMatch': 'tff_fssl.algorithms.local_training',
  # The process.
  'LABELS_AT_CLIENTS': 'tff_fssl.interface.round_hparams',
  'LABELS_AT_SERVER': 'tff_fssl.interface.round_hparams',
  'RoundHparams': 'tff_fssl.interface.round_hparams',
  'DataSpec': 'tff_fssl.rounds.process',
  'build_process': 'tff_fssl.rounds.process',
  'build_network': 'tff_fssl.models.networks',
  'FrozenFn': 'tff_fssl.models.model_fns',
  'AggregatorHparams': 'tff_fssl.aggregators.hparams',
  'build_aggregator': 'tff_fssl.aggregators.factory',
  'is_acceptable': 'tff_fssl.aggregators.guarded',
  # Data and views.
  'DataHparams': 'tff_fssl.data.data_hparams',
  'NaturalClients': 'tff_fssl.data.clients',
  'ClientDataClients': 'tff_fssl.data.clients',
  'load': 'tff_fssl.data.sources',
  'RandomView': 'tff_fssl.data.augment',
  'Views': 'tff_fssl.data.augment',
  'build_views': 'tff_fssl.data.augment',
  'build_server_data_fn': 'tff_fssl.data.clients',
  'client_seed': 'tff_fssl.data.clients',
  'element_spec': 'tff_fssl.data.clients',
  'make_example': 'tff_fssl.data.clients',
  # Rounds.
  'ParticipationHparams': 'tff_fssl.rounds.participation_hparams',
  'build_data_source': 'tff_fssl.rounds.sampling',
  'runtime': 'tff_fssl.runtime',
  'training': 'tff_fssl.program.training',
  'OutsideRows': 'tff_fssl.program.checkpoint',
  'RowFiles': 'tff_fssl.program.checkpoint',
  # Evaluation and deployment.
  'build_evaluate_fn': 'tff_fssl.models.evaluate',
  'build_evaluation_process': 'tff_fssl.rounds.federated_evaluation',
  'build_weights_evaluation': 'tff_fssl.rounds.federated_evaluation',
  'whole_model': 'tff_fssl.rounds.federated_evaluation',
  'get_map_reduce_form': 'tff_fssl.rounds.process',
}


def __getattr__(name: str) -> Any:
  """Imports an exported name when it is first used (PEP 562)."""
  if name not in _EXPORTED:
    raise AttributeError(
      f'module {__name__!r} has no attribute {name!r}; it has'
      f' {", ".join(sorted(_EXPORTED))}'
    )
  module = importlib.import_module(_EXPORTED[name])
  is_module = module.__name__.rpartition('.')[2] == name
  value = module if is_module else getattr(module, name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  """Lists the names of this package, imported or not."""
  return sorted({*globals(), *_EXPORTED})


@atexit.register
def _drop_default_context() -> None:
  """Drops TFF's own context while it can still clean up.

  TFF makes a context when it is imported. At its end, Python first removes the
  modules that the context cleans up with, and then reports "Exception ignored
  in ... ServiceManager.__del__".
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
