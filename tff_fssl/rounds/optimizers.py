"""The optimizers of a round, from its hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable
import functools

from tff_fssl.client import optimizer as optimizer_lib
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf

RoundHparams = round_hparams_lib.RoundHparams


def sgd(hparams: RoundHparams) -> optimizer_lib.Sgd:
  """Makes the SGD of the server and, by default, of clients."""
  return optimizer_lib.Sgd(
    hparams.momentum,
    hparams.nesterov,
    hparams.weight_decay,
    hparams.max_gradient_norm,
  )


def client_optimizer(hparams: RoundHparams) -> optimizer_lib.Optimizer:
  """Makes the optimizer with which clients train."""
  penalties = hparams.weight_decay, hparams.max_gradient_norm
  if hparams.client_optimizer == 'rmsprop':
    return optimizer_lib.RmsProp(*penalties)
  if hparams.client_optimizer == 'adam':
    return optimizer_lib.Adam(*penalties)
  return sgd(hparams)


def learning_rate_fn(
  hparams: RoundHparams, initial: float
) -> Callable[[tf.Tensor], tf.Tensor]:
  """Returns `round number -> learning rate`, which starts from `initial`."""
  return functools.partial(
    optimizer_lib.learning_rate,
    initial,
    hparams.learning_rate_schedule,
    hparams.schedule_rounds,
  )
