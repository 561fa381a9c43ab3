"""A further set: models of earlier rounds, which clients get now and then."""

from __future__ import annotations

import collections

from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, flatten

ServerModel = server_model.ServerModel
# The set: float32 [models, elements of the trainable weights], latest first.
# The control value: how many of them clients get in the next round.
MODELS, NUM_SENT = 'past_models', 'num_past_models'


def with_past_models(
  server: server_algorithm.ServerAlgorithm,
  num: int,
  interval: int,
  *,
  in_every_round: bool,
  weights_of: server_model.WeightsOf = server_model.own_weights,
) -> server_algorithm.ServerAlgorithm:
  """Adds the models of the last rounds whose numbers are multiples.

  Clients get those that exist in rounds whose number is a multiple of
  `interval`; after such a round, the model before it is one of them.

  Args:
    server: The server's part of an algorithm.
    num: How many models are kept; 0: the server's part stays as it is.
    interval: Of such numbers all are multiples.
    in_every_round: Whether clients also get them in the rounds between.
    weights_of: The model -> the weights that are kept.

  Returns:
    The server's part with the set and the control value.
  """
  if not num:
    return server

  def with_control(model: ServerModel, num_sent: tf.Tensor) -> ServerModel:
    control = collections.OrderedDict(model.control)
    control[NUM_SENT] = tf.cast(num_sent, tf.float32)
    return model._replace(control=control)

  def is_multiple(round_num: tf.Tensor) -> tf.Tensor:
    # `==` compares identities in TFF's graphs.
    return tf.equal(round_num % interval, 0)

  def flat(model: ServerModel) -> tf.Tensor:
    return flatten(weights_of(model).trainable)

  def start(weights: Weights) -> ServerModel:
    model = server.start(weights)
    nothing = tf.zeros([num, *flat(model).shape])
    model = model.with_sets(**{MODELS: nothing})
    return with_control(model, tf.constant(0))

  def update(
    model: ServerModel,
    aggregated: server_algorithm.Aggregated,
    tools: server_algorithm.ServerTools,
  ) -> ServerModel:
    past, round_num = model.sets[MODELS], tools.round_num
    later = tf.concat([flat(model)[tf.newaxis], past[:-1]], axis=0)
    is_one = tf.logical_and(round_num >= 1, is_multiple(round_num))
    model = server.update(model, aggregated, tools).with_sets(
      **{MODELS: tf.where(is_one, later, past)}
    )
    is_due = tf.logical_or(is_multiple(round_num + 1), in_every_round)
    num_kept = tf.clip_by_value(round_num // interval, 0, num)
    return with_control(model, tf.where(is_due, num_kept, 0))

  def sends(model: ServerModel) -> dict[str, tf.Tensor]:
    return server.sent(model) | {MODELS: model.control[NUM_SENT] > 0.0}

  return server._replace(start=start, update=update, sends=sends)
