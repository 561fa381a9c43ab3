"""Checks of the names that an algorithm gives and refers to."""

from __future__ import annotations

from collections.abc import Mapping

from tff_fssl.client import training
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import names
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import plan as plan_lib

_VIEW_KINDS = ('plain', 'weak', 'strong')


def check(
  plan: plan_lib.Plan, model_type: tff.Type, message_type: tff.Type
) -> None:
  """Checks a plan, with the types of the model and of its messages.

  The sets, streams and views that an algorithm names must exist. Its own names
  must not be those of others. (Names of metrics are checked where these meet.)
  Statistics for static batch norm must have a model to be of.

  Args:
    plan: The plan.
    model_type: The type of the `ServerModel`.
    message_type: The type of the `Message` to clients.

  Raises:
    UsageError: If something is wrong.
  """
  _check_names(plan, model_type, message_type)
  in_training = plan.gathers_statistics and not plan.has_last_phases
  if plan.groups is not None and in_training:
    raise UsageError(
      f'--statistics_phase={round_hparams_lib.TRAINING}: clients of this'
      ' algorithm start from the models of their groups; set'
      f' --statistics_phase={round_hparams_lib.OWN}, or another --norm'
    )


def _check_names(
  plan: plan_lib.Plan, model_type: tff.Type, message_type: tff.Type
) -> None:
  model = server_model.ServerModel(
    *tff.types.type_to_tf_tensor_specs(model_type)
  )
  sent = tff.structure.name_list(message_type.sets)
  algorithm, states = plan.algorithm, plan.states
  own = dict.fromkeys((channels.MODEL, channels.PLACE))
  names.join('networks or channels', own, algorithm.networks())
  # A network starts from the weights of its name, if these are sent, so that a
  # slip in the name would go unnoticed.
  kept = [n for n, v in model.sets.items() if isinstance(v, Weights)]
  of_clients = [name for name in sent if name in kept]
  _check_streams(training.streams_of(algorithm))
  for name in algorithm.networks():
    if name not in of_clients and closest(name, of_clients):
      names.check(name, of_clients, 'networks', 'weights that the server sends')
  trainer = algorithm.server_trainer()
  _check_streams(training.streams_of(trainer, at_server=True))
  for name in training.server_networks(algorithm):
    names.check(
      name, kept, 'server_trainer: networks', 'weights that the server keeps'
    )
  for prediction in (states.prediction, *states.prediction.also.values()):
    # Without AutoGraph, which would replace the class of errors.
    predicting = tf.function(prediction.weights, autograph=False)
    predicting.get_concrete_function(model)


def _check_streams(streams: Mapping[str, base.Stream]) -> None:
  for name, stream in streams.items():
    if stream.partner_of:
      others = [other for other in streams if other != name]
      names.check(
        stream.partner_of, others, f'stream {name!r}: partner_of', 'streams'
      )
    for view, kind in stream.views.items():
      names.check(
        kind, _VIEW_KINDS, f'stream {name!r}, view {view!r}', 'kinds of view'
      )
