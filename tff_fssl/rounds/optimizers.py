"""The optimizers of a round, from its hyper-parameters."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from tff_fssl.client import optimizer as optimizer_lib
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf
from tff_fssl.models.server_model import ServerModel
from tff_fssl.semisup import patience as patience_lib

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


def learning_rate(
  hparams: RoundHparams,
  initial: float,
  round_num: tf.Tensor,
  control: Mapping[str, tf.Tensor],
) -> tf.Tensor:
  """Computes the learning rate of a round.

  Args:
    hparams: The schedule.
    initial: The initial rate.
    round_num: int32 scalar.
    control: `ServerModel.control`, or what a client received.

  Returns:
    float32 scalar.
  """
  if hparams.follows_loss:
    return initial * _rule_state(control).rate
  return optimizer_lib.learning_rate(
    initial, hparams.learning_rate_schedule, hparams.schedule_rounds, round_num
  )


class Plateau:
  """The schedule that follows the loss on validation examples.

  The state of its rule is in control values of the model, which are saved with
  it and sent to clients.
  """

  def __init__(self, hparams: RoundHparams):
    """Makes its rule."""
    self._rule = patience_lib.Rule(
      hparams.schedule_patience, hparams.schedule_divisor
    )

  def start(self, model: ServerModel) -> ServerModel:
    """Adds the state before the first loss."""
    return _put(model, self._rule.start())

  def follow(
    self, model: ServerModel, loss: float
  ) -> tuple[ServerModel, float | None]:
    """Changes the state after an evaluation.

    Args:
      model: The model, as the process's state holds it between rounds.
      loss: The loss on validation examples. NaN changes nothing.

    Returns:
      (the model, the new factor of the learning rates if it has changed).
    """
    old = _rule_state(model.control)
    new = self._rule.update(old, tf.constant(loss, tf.float32))
    new = patience_lib.Patience(*(value.numpy() for value in new))
    fell = bool(new.rate < old.rate)
    return _put(model, new), float(new.rate) if fell else None


def _put(model: ServerModel, state: patience_lib.Patience) -> ServerModel:
  named = {f'validation_{n}': v for n, v in state._asdict().items()}
  return model._replace(control=collections.OrderedDict(model.control, **named))


def _rule_state(control: Mapping[str, tf.Tensor]) -> patience_lib.Patience:
  fields = patience_lib.Patience._fields
  return patience_lib.Patience(
    *(control[f'validation_{field}'] for field in fields)
  )
