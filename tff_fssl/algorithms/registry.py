"""All algorithms by name, and the flags that they had in older versions."""

from __future__ import annotations

import dataclasses

from tff_fssl.algorithms import cbafed
from tff_fssl.algorithms import fedcon
from tff_fssl.algorithms import feddb
from tff_fssl.algorithms import feddure
from tff_fssl.algorithms import fedmatch
from tff_fssl.algorithms import fedrgd
from tff_fssl.algorithms import fedswitch
from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import fl2
from tff_fssl.algorithms import local_training
from tff_fssl.algorithms import mixmatch
from tff_fssl.algorithms import protofssl
from tff_fssl.algorithms import proxyfl
from tff_fssl.algorithms import sage
from tff_fssl.algorithms import semifl
from tff_fssl.algorithms import supervised
from tff_fssl.algorithms import uda
from tff_fssl.interface import base
from tff_fssl.interface import entry

Algorithm = entry.Algorithm
REGISTRY: dict[str, Algorithm] = {}
# The default of `--algorithm`.
DEFAULT = fl2.Fl2.name
# Flags of older versions -> their names now, as in `configuration.flags`.
RENAMED_FLAGS = {
  'local_fixmatch.confidence_threshold': 'fixmatch.confidence_threshold',
  'local_fixmatch.unlabeled_loss_weight': 'fixmatch.unlabeled_loss_weight',
  'local_uda.confidence_threshold': 'uda.confidence_threshold',
  'local_uda.temperature': 'uda.temperature',
  'local_uda.tsa': 'uda.tsa',
  'local_uda.tsa_rounds': 'uda.tsa_rounds',
  'local_uda.unlabeled_loss_weight': 'uda.unlabeled_loss_weight',
  'ts_client_ema.confidence_threshold': 'fedswitch.confidence_threshold',
  'ts_client_ema.ema_decay': 'fedswitch.ema_decay',
  'ts_client_ema.local_ema_decay': 'fedswitch.local_ema_decay',
  'ts_client_ema.unlabeled_loss_weight': 'fedswitch.unlabeled_loss_weight',
  'ts_server_ema.confidence_threshold': 'fedswitch.confidence_threshold',
  'ts_server_ema.ema_decay': 'fedswitch.ema_decay',
  'ts_server_ema.unlabeled_loss_weight': 'fedswitch.unlabeled_loss_weight',
}
# Flags of older versions that are gone -> (value that always holds now, what to
# give instead).
REMOVED_FLAGS = {
  'fedmatch.deltas': (
    'applied',
    'omit it for applied, give --fedmatch.variant=code for counted,'
    ' --fedmatch.delta_threshold=-1 for none',
  ),
  'fedmatch.helper_cache': (
    'one_round',
    'omit it for one_round, give --fedmatch.variant=paper for interval',
  ),
  'fedmatch.patience_factor': ('3.0', 'it is always 3 now; omit it'),
  'fedmatch.psi_factor': ('0.2', 'it is always 0.2 now; omit it'),
  'fedmatch.tie': (
    'local',
    'omit it for local, give --fedmatch.variant=code for lowest',
  ),
  'fedswitch.divergence_of': (
    'probabilities',
    'the divergence is always that of probabilities now; omit it',
  ),
  'fedswitch.probe_period': (
    '20',
    'the teacher is never sent only to be measured now; omit it',
  ),
  'fedswitch.student_view': (
    'strong',
    'the divergence is always that of strong views now; omit it',
  ),
  'fedswitch.teacher_probe': (
    'hold',
    'omit it for hold, give --fedswitch.labeler=algorithms for always_send',
  ),
  'fl2.asam_eta': ('0.01', 'it is always 0.01 now; omit it'),
  'fl2.class_thresholds': (
    'false',
    'omit it for false, give --fl2.diagnostics=true for true',
  ),
  'fl2.gradient_norms': (
    'false',
    'omit it for false, give --fl2.diagnostics=true for true',
  ),
  'fl2.temperature': ('1.0', 'it is always 1 now; omit it'),
  'protofssl.distance': (
    'mse',
    'omit it for mse, give --protofssl.variant=paper for euclid',
  ),
  'protofssl.stop_gradient': (
    'true',
    'omit it for true, give --protofssl.variant=code for false',
  ),
  'semifl.mixup': (
    'true',
    'omit it for true, give --semifl.mixup_concentration=0 for false',
  ),
}


def register(algorithm: type[base.Algorithm]) -> None:
  """Makes an algorithm a value of `--algorithm`, and its fields flags.

  Args:
    algorithm: A class with `@dataclasses.dataclass(frozen=True)`, and a `name`
      that no other algorithm has.

  Raises:
    TypeError: If it is not such a class.
  """
  # Without the decorator, a class has only the fields of its base class.
  fields = {field.name for field in dataclasses.fields(algorithm)}
  missing = set(algorithm.__annotations__) - fields
  missing -= set(vars(base.Algorithm))
  if missing and '__dataclass_params__' not in vars(algorithm):
    raise TypeError(
      f'{algorithm.__name__}: {", ".join(sorted(missing))} would be no flag;'
      ' decorate the class with @dataclasses.dataclass(frozen=True)'
    )
  if not algorithm.name:
    raise TypeError(f'{algorithm.__name__}: give it a name')
  # A notebook may run the cell with the class again.
  known = REGISTRY.get(algorithm.name)
  if known is not None and known.hparams.__module__ != algorithm.__module__:
    raise TypeError(
      f'{algorithm.__name__}: {known.hparams.__module__} already has an'
      f' algorithm of the name {algorithm.name!r}; give it another name'
    )
  REGISTRY[algorithm.name] = Algorithm.describe(algorithm)


for _algorithm in (
  supervised.Supervised,
  fixmatch.FixMatch,
  uda.Uda,
  mixmatch.MixMatch,
  semifl.SemiFl,
  fl2.Fl2,
  fedswitch.FedSwitch,
  fedswitch.TsServerEma,
  fedswitch.TsClientEma,
  fedcon.FedCon,
  fedrgd.FedRgd,
  protofssl.ProtoFssl,
  fedmatch.FedMatch,
  sage.Sage,
  proxyfl.ProxyFl,
  cbafed.CbaFed,
  feddb.FedDb,
  feddure.FedDure,
  local_training.LocalSupervised,
  local_training.LocalUda,
  local_training.LocalFixMatch,
):
  register(_algorithm)
