"""Hyper-parameters of `local_uda` and `local_fixmatch`. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl.algorithms import fixmatch_hparams
from tff_fssl.algorithms import uda_hparams


@dataclasses.dataclass(frozen=True)
class LocalUdaHparams(uda_hparams.UdaHparams):
  """Hyper-parameters of UDA by each client alone: those of `uda`."""

  def __post_init__(self) -> None:
    hparams.validate(self, 'local_uda.')


@dataclasses.dataclass(frozen=True)
class LocalFixMatchHparams(fixmatch_hparams.FixMatchHparams):
  """Hyper-parameters of FixMatch by each client alone: those of `fixmatch`."""

  def __post_init__(self) -> None:
    hparams.validate(self, 'local_fixmatch.')
