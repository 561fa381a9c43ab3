"""The clients' side of a round: training, and batch norm statistics."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tff_fssl import hparams as hparams_lib
from tff_fssl.client import batches
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.rounds import client_work
from tff_fssl.rounds import composer
from tff_fssl.rounds import delivery as delivery_lib
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import optimizers
from tff_fssl.rounds import server as server_lib
from tff_fssl.rounds import states as states_lib
from tff_fssl.rounds import statistics_phase


@dataclasses.dataclass(frozen=True)
class ClientSide:
  """The clients' side of a process.

  Attributes:
    networks: Makes their networks.
    algorithm: The algorithm.
    states: Its states.
    views: Makes network inputs of stored examples.
    element_spec: The spec of the one element of a client's data set.
    exchange: The exchange, if there is one.
    delivery: The weights that travel.
  """

  networks: network_factory.NetworkFactory
  algorithm: base.Algorithm
  states: states_lib.States
  views: augment.Views
  element_spec: Any
  exchange: exchange_lib.Exchange | None
  delivery: delivery_lib.Delivery

  @property
  def hparams(self) -> round_hparams_lib.RoundHparams:
    """Returns the round's hyper-parameters."""
    return self.algorithm.round

  def part(self, release_metrics: bool) -> client_work.ClientPart:
    """Describes the clients' part of a round."""
    hparams, streams = self.hparams, self.algorithm.streams()
    every = {base.UNLABELED: False, base.LABELED: True}
    trains_on = [
      kind
      for kind, labeled in every.items()
      if batches.trains_on(streams, labeled=labeled)
      and (hparams.labels_at_clients or not labeled)
    ]
    return client_work.ClientPart(
      make_training=self._training,
      learning_rate_fn=optimizers.learning_rate_fn(
        hparams, hparams.client_learning_rate
      ),
      num_classes=self.networks.num_classes,
      accepts=self.views.accepts,
      weigh_by_examples=hparams.client_weighting == 'examples',
      draws_episodes=batches.draws_episodes(streams),
      # Clients that do not train report whatever they hold.
      trains_on=tuple(trains_on or every),
      track_non_trainable=self.networks.tracks_moving_averages,
      uploads=self.algorithm.uploads(self.states.setup),
      exchange=self.exchange,
      delivery=self.delivery,
      release_metrics=release_metrics,
    )

  def own_statistics(self) -> client_work.OwnStatistics:
    """Builds the function that gathers a client's own statistics.

    Call it where variables may be made.
    """
    if not self._gathers_statistics:
      return lambda model, images: model
    network, predicting = self.networks.make(), self.states.prediction.weights

    def gather(
      model: server_model.ServerModel, images: tf.Tensor
    ) -> server_model.ServerModel:
      renewed = statistics.renewed(
        network,
        predicting(model),
        images,
        self.views,
        kind=self.hparams.batch_norm_statistics,
        batch_size=self.hparams.statistics_batch_size,
      )
      # The weights that predict may differ from the model's (an average): only
      # their statistics are taken.
      return model.replace_weights(renewed._replace(trainable=model.trainable))

    return gather

  def _training(self) -> training.LocalTraining:
    """Makes a client's training. Call it where variables may be made."""
    hparams, local = self.hparams, self.networks.make()
    streams = self.algorithm.streams()
    uses_unlabeled = batches.trains_on(streams, labeled=False)
    further, initial = {}, {}
    for name, declared in self.algorithm.networks().items():
      # An auxiliary network without a `build` is a copy of the model's network.
      if declared.build is None:
        further[name] = self.networks.make()
      else:
        further[name], initial[name] = self.networks.make_other(
          declared.build, local
        )
    return training.LocalTraining(
      local,
      self.algorithm,
      self.views,
      training.LoopConfig(
        hparams.client_epochs,
        *hparams.client_batch_sizes(uses_unlabeled),
        optimizers.client_optimizer(hparams),
        hparams.proximal_strength,
        hparams.jit_compile,
        num_steps=hparams.client_steps,
      ),
      further,
      initial,
    )

  @property
  def has_second_phase(self) -> bool:
    """Tells whether clients gather statistics after the round's update."""
    in_training = self.hparams.statistics_phase == round_hparams_lib.TRAINING
    return self._gathers_statistics and not in_training

  @property
  def _gathers_statistics(self) -> bool:
    """Tells whether clients gather statistics for static batch norm."""
    # Clients that train alone gather the statistics of their own models in
    # `finish`.
    return self.networks.is_static and not self.algorithm.alone

  def statistics_phases(
    self,
    model_type: tff.Type,
    message_type: tff.Type,
    server: server_lib.ServerSide,
  ) -> tuple[list[composer.LastPhase], int]:
    """Builds the phases that gather statistics.

    Args:
      model_type: The type of the `ServerModel`.
      message_type: The type of a `Message`.
      server: The server's side, which adds the statistics of its own data.

    Returns:
      The phases, and the bytes that a client sends in them.

    Raises:
      UsageError: If clients start from models of groups, whose statistics
        cannot be gathered in training.
    """
    if not self._gathers_statistics:
      return [], 0
    if self.delivery.groups is not None and not self.has_second_phase:
      raise hparams_lib.UsageError(
        f'--statistics_phase={round_hparams_lib.TRAINING}: clients of this'
        ' algorithm start from the models of their groups; set'
        f' --statistics_phase={round_hparams_lib.OWN}, or another --norm'
      )
    gathering = statistics_phase.Gathering(
      self.networks.make,
      self.views,
      kind=self.hparams.batch_norm_statistics,
      batch_size=self.hparams.statistics_batch_size,
      max_client_examples=self.hparams.most_client_examples,
      num_classes=self.networks.num_classes,
      server_data_fn=server.data_fn,
      server_batch_size=server.statistics_batch_size,
      predicting=self.states.prediction.weights,
      # The new weights are one model for all: groups play no part here.
      delivery=delivery_lib.Delivery(kept=self.delivery.kept),
    )
    states = self.states
    # Name of a set, '' for the model -> the rounds whose statistics are
    # gathered. None: all rounds.
    when = {
      **dict.fromkeys(('', *states.statistics_of)),
      **{
        name: functools.partial(states.is_sent, name)
        for name in states.statistics_if_sent
      },
    }
    phases = [
      statistics_phase.build_statistics_phase(
        model_type,
        self.element_spec,
        gathering,
        name,
        is_needed,
        None if self.has_second_phase else message_type,
      )
      for name, is_needed in when.items()
    ]
    return [phase for phase, _ in phases], sum(up for _, up in phases)
