"""Translates an algorithm's class into the parts of a process.

It goes when the machinery of rounds calls the methods itself.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

from tff_fssl.algorithms import base
from tff_fssl.data import augment
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as local_lib
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import alone
from tff_fssl.rounds import parts as parts_lib


def to_parts(algorithm: base.Algorithm) -> parts_lib.Parts:
  """Translates an algorithm.

  Args:
    algorithm: The algorithm, with the hyper-parameters of its rounds.

  Returns:
    The parts from which `assemble` builds a process.
  """
  translator = _Translator(algorithm)
  parts = parts_lib.Parts(
    translator.clients(),
    translator.server_training(),
    translator.server(),
    algorithm.exchange(),
    algorithm.prediction() or translator.prediction(),
    algorithm.groups(),
    embeds=algorithm.embeds,
    head_stays=algorithm.head_stays,
  )
  if algorithm.alone:
    parts = alone.separate(parts, algorithm.round)
  return parts_lib.completed(parts, algorithm.round)


class _Server(base.Server):
  """The server's tools under the names of `base.Server`."""

  def __init__(self, tools: server_algorithm.ServerTools):
    self.round_num = tools.round_num
    self.apply = tools.apply  # type: ignore
    self.train = tools.train  # type: ignore
    self.train_networks = tools.train_with  # type: ignore


class _Translator:
  """Translates values and functions of one algorithm."""

  def __init__(self, algorithm: base.Algorithm):
    self._algorithm = algorithm
    with tf.Graph().as_default():
      weights = Weights((tf.zeros([1]),), (), tf.constant(0.0))
      state = algorithm.initial_state(weights)
      self._broadcasts = dict(algorithm.broadcasts(state))
    self._memory_type = type(state.memory) if state.memory else None
    fields = getattr(state.memory, '_fields', ())
    self._control = tuple(
      name
      for name, b in self._broadcasts.items()
      if name in fields and b.when is None and isinstance(b.value, tf.Tensor)
    )
    self._sets = tuple(f for f in fields if f not in self._control)
    self._uploads = algorithm.uploads()

  def _overrides(self, name: str) -> bool:
    default = getattr(base.Algorithm, name)
    return getattr(type(self._algorithm), name) is not default

  def _networks(self, networks: local_lib.Networks) -> base.Networks:
    return base.Networks(networks.local, networks.peers)

  def _batch(self, batch: local_lib.Batch) -> base.Batch:
    return base.Batch(
      local_lib.Named(
        (n, base.BatchExamples(*p)) for n, p in batch.parts.items()
      ),
      batch.constants,
      base.StepTime(*batch.clock),
      batch.seed,
    )

  def _client(
    self,
    networks: local_lib.Networks,
    data: local_lib.ClientData,
    views: augment.Views,
  ) -> base.Client:
    # A network that was not sent is the model's weights.
    received = local_lib.Named(
      (network.starts_from, data.weights)
      for network in self._algorithm.networks().values()
      if network.starts_from
    )
    received.update(data.sets)
    received.update(data.received)
    return base.Client(
      self._networks(networks),
      data.weights,
      base.Examples(*data.labeled),
      base.Examples(*data.unlabeled),
      received,
      views,
      data.round_num,
      data.seed,
    )

  def _state(self, model: server_model.ServerModel) -> base.ServerState:
    if self._memory_type is None:
      return base.ServerState(model.weights)
    values = {**model.sets, **model.control}
    fields = getattr(self._memory_type, '_fields', ())
    # Clients, and older files, have only a part of it.
    memory = self._memory_type(**{f: values.get(f) for f in fields})
    return base.ServerState(model.weights, memory)

  def _model(self, state: base.ServerState) -> server_model.ServerModel:
    model = server_model.ServerModel(*state.weights)
    if self._memory_type is None:
      return model
    memory = state.memory._asdict()
    model = model.replace_sets(**{n: memory[n] for n in self._sets})
    return model._replace(
      control=collections.OrderedDict((n, memory[n]) for n in self._control)
    )

  def _step(
    self, step: Callable[[base.Networks, base.Batch], base.StepResult]
  ) -> local_lib.Step:
    def run(
      networks: local_lib.Networks, batch: local_lib.Batch
    ) -> local_lib.StepResult:
      result = step(self._networks(networks), self._batch(batch))
      return local_lib.StepResult(
        result.gradients, result.metrics, result.auxiliary
      )

    return run

  def _after_step(
    self, algorithm: base.Algorithm
  ) -> Callable[[local_lib.Networks, local_lib.Batch], None]:
    def after_step(
      networks: local_lib.Networks, batch: local_lib.Batch
    ) -> None:
      algorithm.after_step(self._networks(networks), self._batch(batch))

    return after_step

  def _prepare(
    self,
    networks: local_lib.Networks,
    data: local_lib.ClientData,
    views: augment.Views,
  ) -> local_lib.Prepared:
    prepared = self._algorithm.prepare(self._client(networks, data, views))
    if prepared.selected is None:
      every = tf.range(tf.shape(data.unlabeled.x)[0])
      prepared = prepared._replace(selected=every)
    return local_lib.Prepared(*prepared)

  def _finish(
    self,
    networks: local_lib.Networks,
    data: local_lib.ClientData,
    views: augment.Views,
    ratios: Mapping[str, local_lib.Ratio],
  ) -> local_lib.Finished:
    client = self._client(networks, data, views)
    output = self._algorithm.finish(
      client, {name: base.Mean(*pair) for name, pair in ratios.items()}
    )
    reports = {name: output.uploads[name] for name in self._uploads}
    rows = {n: v for n, v in output.uploads.items() if n not in reports}
    return local_lib.Finished(reports, rows, output.metrics)

  def _signal(self, upload: base.Upload) -> local_lib.Signal:
    high = upload.high
    if not callable(high):
      return local_lib.Signal(upload.low, high)
    limit: Callable[[Mapping[str, int]], float] = high
    return local_lib.Signal(
      upload.low, lambda num_classes: limit({'classes': num_classes})
    )

  def clients(self) -> local_lib.LocalAlgorithm:
    """Translates the work of clients."""
    algorithm = self._algorithm
    steps = [algorithm.step]
    if algorithm.alternates:
      steps = [algorithm.unlabeled_step]
      if algorithm.round.labels_at_clients:
        steps.insert(0, algorithm.labeled_step)
    return local_lib.LocalAlgorithm(
      steps=tuple(map(self._step, steps)),
      streams={n: local_lib.Stream(*s) for n, s in algorithm.streams().items()},
      prepare=self._prepare if self._overrides('prepare') else None,
      after_step=(
        self._after_step(algorithm) if self._overrides('after_step') else None
      ),
      finish=self._finish if self._overrides('finish') else None,
      peers={
        name: local_lib.Peer(
          n.starts_from or local_lib.MODEL,
          n.trained,
          n.uploaded,
          n.build,
          n.start,
        )
        for name, n in algorithm.networks().items()
      },
      signals={
        name: self._signal(upload) for name, upload in self._uploads.items()
      },
      weighs=algorithm.sets_weights,
      start=algorithm.start if self._overrides('start') else None,
    )

  def server_training(self) -> local_lib.LocalAlgorithm:
    """Translates the server's training on its labels."""
    trainer = self._algorithm.server_trainer()
    own = trainer is not self._algorithm
    return local_lib.LocalAlgorithm(
      steps=(self._step(trainer.labeled_step),),
      streams={base.LABELED: local_lib.Stream(*trainer.labeled_stream())},
      after_step=self._after_step(trainer) if own else None,
      peers=(
        {name: local_lib.Peer(name) for name in trainer.networks()}
        if own
        else {}
      ),
    )

  def server(self) -> server_algorithm.ServerAlgorithm:
    """Translates the server's part of a round."""
    algorithm = self._algorithm

    def update(
      model: server_model.ServerModel,
      aggregated: server_algorithm.Aggregated,
      tools: server_algorithm.ServerTools,
    ) -> server_model.ServerModel:
      aggregate = base.Aggregate(
        aggregated.update,
        aggregated.of_peers,
        aggregated.signals,
        aggregated.num_reports,
        aggregated.of_groups,
      )
      state = algorithm.update(self._state(model), aggregate, _Server(tools))
      return self._model(state)

    def sends(model: server_model.ServerModel) -> dict[str, tf.Tensor]:
      return {
        name: tf.constant(True) if b.when is None else b.when
        for name, b in algorithm.broadcasts(self._state(model)).items()
        if name not in self._control
      }

    own = {n: b for n, b in self._broadcasts.items() if b.own_statistics}
    return server_algorithm.ServerAlgorithm(
      lambda weights: self._model(algorithm.initial_state(weights)),
      update,
      sends,
      statistics_of=tuple(n for n, b in own.items() if b.when is None),
      statistics_if_sent=tuple(n for n, b in own.items() if b.when is not None),
      num_trainings=algorithm.num_trainings,
    )

  def prediction(self) -> server_model.Prediction:
    """Translates how the model predicts."""
    algorithm = self._algorithm

    def translate(
      weights_of: Callable[[base.ServerState], Weights],
    ) -> server_model.Prediction:
      def logits(
        network: Any, model: server_model.ServerModel, images: tf.Tensor
      ) -> tf.Tensor:
        weights = weights_of(self._state(model))
        return server_model.Prediction().logits(
          network, model.replace_weights(weights), images
        )

      return server_model.Prediction(
        lambda model: weights_of(self._state(model)), logits
      )

    return server_model.Prediction(
      weights=lambda model: algorithm.predicting_weights(self._state(model)),
      also={
        name: translate(weights_of)
        for name, weights_of in algorithm.other_predictions().items()
      },
    )
