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
from tff_fssl.algorithms import freematch
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

Entry = entry.Entry
REGISTRY: dict[str, Entry] = {}
# The default of `--algorithm`.
DEFAULT = fl2.Fl2.name


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
  REGISTRY[algorithm.name] = Entry.describe(algorithm)


for _algorithm in (
  supervised.Supervised,
  fixmatch.FixMatch,
  freematch.FreeMatch,
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
