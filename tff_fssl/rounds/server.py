"""The server's side of a round: initial model, training on labels, step."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses

from tff_fssl import seeds
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.models.weights import Weights, select
from tff_fssl.rounds import client_data
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import optimizers
from tff_fssl.rounds import server_step
from tff_fssl.rounds import states as states_lib


@dataclasses.dataclass(frozen=True)
class ServerSide:
  """The server's side of a process.

  Attributes:
    networks: Makes its networks.
    algorithm: The algorithm.
    states: Its states.
    views: Makes network inputs of stored examples.
    data_fn: Returns its labelled data, a data set of one element OrderedDict(x,
      y). It is called inside a TFF computation. None: the server has no data.
    seed: Seed of the run.
  """

  networks: network_factory.NetworkFactory
  algorithm: base.Algorithm
  states: states_lib.States
  views: augment.Views
  data_fn: Callable[[], tf.data.Dataset] | None
  seed: int

  @property
  def hparams(self) -> round_hparams_lib.RoundHparams:
    """Returns the round's hyper-parameters."""
    return self.algorithm.round

  @property
  def statistics_batch_size(self) -> int:
    """Returns the examples in a batch of the pass that gathers statistics."""
    # Only `batch_mean` statistics depend on the batch size.
    if self.hparams.batch_norm_statistics == statistics.BATCH_MEAN:
      return self.hparams.server_batch_size
    return self.hparams.statistics_batch_size

  def build_initial_model(self) -> tff.Computation:
    """Builds `( -> ServerModel)`."""

    @tff.tensorflow.computation
    def initial_model() -> server_model.ServerModel:
      network = self.networks.make_initial()

      @tf.function(autograph=False)
      def run() -> server_model.ServerModel:
        weights = network.initial_weights()
        # Clients need statistics before a round has gathered any.
        if network.is_static and self.data_fn is not None:
          kind = self.hparams.batch_norm_statistics
          sums = statistics.gather(
            network,
            weights,
            self._read_data().x,
            self.views,
            kind=kind,
            batch_size=self.statistics_batch_size,
          )
          weights = statistics.put(network, weights, sums, kind=kind)
        return self.states.start(weights)

      initial: server_model.ServerModel = run()
      return initial

    return initial_model

  def build_step(
    self,
    model_type: tff.Type,
    aggregate_type: tff.Type,
    networks: Sequence[str],
    uploads: Mapping[str, channels.Upload],
    restore: server_step.Restore = tuple,
  ) -> tff.learning.templates.FinalizerProcess:
    """Builds the finalizer. See `server_step.build_server_step`."""
    return server_step.build_server_step(
      model_type,
      aggregate_type,
      server_step.build_optimizer(self.hparams),
      first_round=self.hparams.first_round,
      states=self.states,
      networks=networks,
      uploads=uploads,
      restore=restore,
      make_training=None if self.data_fn is None else self._make_training,
      keeps_momentum=self._keeps_momentum,
      non_negative=self.networks.variances,
    )

  @property
  def _keeps_momentum(self) -> bool:
    """Tells whether training starts with the previous round's momentum."""
    return bool(
      self.data_fn is not None
      and self.hparams.server_keeps_momentum
      and self.hparams.momentum
    )

  def _read_data(self) -> base.Examples:
    """Reads the labelled examples."""
    assert self.data_fn is not None  # Called only then.
    return client_data.read_examples(client_data.read_one(self.data_fn()))

  def _make_training(self) -> server_step.ServerTraining:
    """Makes the training on labels. Call it where variables may be made."""
    hparams = self.hparams
    local = training.LocalTraining(
      self.networks.make(),
      self.algorithm.server_trainer(),
      self.views,
      training.LoopConfig(
        hparams.server_epochs,
        hparams.server_batch_size,
        hparams.server_batch_size,
        optimizers.sgd(hparams),
        jit_compile=hparams.jit_compile,
        keeps_momentum=self._keeps_momentum,
      ),
      {
        name: self.networks.make()
        for name in training.server_networks(self.algorithm)
      },
      at_server=True,
    )
    rate_fn = optimizers.learning_rate_fn(hparams, hparams.server_learning_rate)

    def train(
      weights: Weights,
      round_num: tf.Tensor,
      momentum: server_step.Momentum,
      copy: int,
      sets: server_step.Sets,
    ) -> tuple[
      Weights,
      collections.OrderedDict[str, tf.Tensor],
      server_step.Momentum,
      server_step.Sets,
    ]:
      labeled = self._read_data()
      seed = seeds.server_seed(self.seed, round_num)
      if copy:  # The first training has the same seed, however many follow.
        seed = seeds.fold_in(seeds.fold_in(seed, seeds.COPY), copy)
      result = local.run(
        weights,
        labeled,
        # The server has no unlabelled examples.
        base.Examples(labeled.x[:0], labeled.y[:0]),
        learning_rate=rate_fn(round_num),
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


def _metrics(
  result: training.LocalResult,
) -> collections.OrderedDict[str, tf.Tensor]:
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
