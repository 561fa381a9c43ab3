"""The server's own work: its first model, and its training on labels."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Protocol

from tff_fssl import seeds
from tff_fssl.client import training
from tff_fssl.interface import base
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.models.weights import Weights, select
from tff_fssl.rounds import client_data
from tff_fssl.rounds import optimizers
from tff_fssl.rounds import plan as plan_lib

Metrics = collections.OrderedDict[str, tf.Tensor]
_Momentum = tuple[tf.Tensor, ...]


class Train(Protocol):
  """The server's training, inside a computation."""

  def __call__(
    self,
    weights: Weights,
    round_num: tf.Tensor,
    momentum: _Momentum,
    copy: int,
    sets: Mapping[str, Weights],
    control: Mapping[str, tf.Tensor],
    /,
  ) -> tuple[Weights, Metrics, _Momentum, Mapping[str, Weights]]:
    """Trains.

    Args:
      weights: The model's.
      round_num: int32 scalar.
      momentum: That of copy 0 in the previous round, zeros in the first round.
      copy: The number of the training, if the server trains several times.
      sets: The weights from which auxiliary networks start.
      control: `ServerModel.control`.

    Returns:
      (weights, metrics, momentum, weights of auxiliary networks).
    """


def build_initial_model(plan: plan_lib.Plan) -> tff.Computation:
  """Builds `( -> ServerModel)`, the model before the first round."""

  @tff.tensorflow.computation
  def initial_model() -> server_model.ServerModel:
    network = plan.networks.make_initial()

    @tf.function(autograph=False)
    def run() -> server_model.ServerModel:
      weights = network.initial_weights()
      # Clients need statistics before a round has gathered any.
      if network.is_static and plan.data.server_data_fn is not None:
        kind = plan.hparams.batch_norm_statistics
        sums = statistics.gather(
          network,
          weights,
          _read_data(plan).x,
          plan.data.views,
          kind=kind,
          batch_size=plan.server_statistics_batch_size,
        )
        weights = statistics.put(network, weights, sums, kind=kind)
      return plan.states.start(weights)

    initial: server_model.ServerModel = run()
    return initial

  return initial_model


def make_training(plan: plan_lib.Plan) -> Train:
  """Makes the training on labels. Call it where variables may be made."""
  hparams = plan.hparams
  local = training.LocalTraining(
    plan.networks.make(),
    plan.algorithm.server_trainer(),
    plan.data.views,
    training.LoopConfig(
      hparams.server_epochs,
      hparams.server_batch_size,
      hparams.server_batch_size,
      optimizers.sgd(hparams),
      jit_compile=hparams.jit_compile,
      keeps_momentum=plan.server_keeps_momentum,
    ),
    {
      name: plan.networks.make()
      for name in training.server_networks(plan.algorithm)
    },
    at_server=True,
  )

  def train(
    weights: Weights,
    round_num: tf.Tensor,
    momentum: _Momentum,
    copy: int,
    sets: Mapping[str, Weights],
    control: Mapping[str, tf.Tensor],
  ) -> tuple[Weights, Metrics, _Momentum, Mapping[str, Weights]]:
    labeled = _read_data(plan)
    seed = seeds.server_seed(plan.setup.seed, round_num)
    if copy:  # The first training has the same seed, however many follow.
      seed = seeds.fold_in(seeds.fold_in(seed, seeds.COPY), copy)
    result = local.run(
      weights,
      labeled,
      # The server has no unlabelled examples.
      base.Examples(labeled.x[:0], labeled.y[:0]),
      learning_rate=optimizers.learning_rate(
        hparams, hparams.server_learning_rate, round_num, control
      ),
      seed=seed,
      round_num=round_num,
      momentum=momentum,
      received=sets,
    )
    networks = select(
      result.is_finite, local.auxiliary_weights(sets), lambda: dict(sets)
    )
    trained = tuple(w - u for w, u in zip(weights.trainable, result.update))
    weights = weights._replace(
      trainable=trained, non_trainable=result.non_trainable
    )
    return weights, _metrics(result), result.momentum, networks

  return train


def _read_data(plan: plan_lib.Plan) -> base.Examples:
  """Reads the server's labelled examples."""
  assert plan.data.server_data_fn is not None  # Called only then.
  whole = client_data.read_one(plan.data.server_data_fn())
  x, y = client_data.read_examples(whole)
  num_classes = plan.networks.num_classes
  are_classes = tf.reduce_all((y >= 0) & (y < num_classes))
  # Else the loss would fail, or be NaN on a GPU.
  text = (
    f'the labels of server_data_fn must be from 0 to {num_classes - 1}, as the'
    f' model has {num_classes} outputs; given are'
  )
  with tf.control_dependencies([tf.debugging.Assert(are_classes, [text, y])]):
    return base.Examples(x, tf.identity(y))


def _metrics(result: training.LocalResult) -> Metrics:
  """Computes the metrics of the training on labels."""
  metrics = collections.OrderedDict(
    (f'server_{name}', total / count)
    for name, (total, count) in sorted(result.metrics.items())
  )
  metrics['server_num_examples'] = result.num_examples
  metrics['server_non_finite'] = tf.cast(
    tf.logical_not(result.is_finite), tf.int32
  )
  return metrics
