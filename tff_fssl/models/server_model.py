"""What the server knows after a round: the model, and what goes with it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights


class ServerModel(NamedTuple):
  """The model and what goes with it.

  Its first three fields are those of `Weights`.

  Attributes:
    trainable: See `Weights`.
    non_trainable: See `Weights`.
    statistics_count: See `Weights`.
    sets: Name -> a further set of tensors: `Weights` of a network (a
      teacher), or any other structure (prototypes).
    control: Name -> float32 scalar, which is sent to the clients (a mode).
  """

  trainable: tuple[tf.Tensor, ...]
  non_trainable: tuple[tf.Tensor, ...]
  statistics_count: tf.Tensor
  sets: Mapping[str, Any] = collections.OrderedDict()
  control: Mapping[str, tf.Tensor] = collections.OrderedDict()

  @property
  def weights(self) -> Weights:
    """The model's weights."""
    return Weights(
      tuple(self.trainable), tuple(self.non_trainable), self.statistics_count
    )

  def with_weights(self, weights: Weights) -> ServerModel:
    """The same with other weights of the model."""
    return ServerModel(*weights, self.sets, self.control)

  def with_sets(self, **sets: Any) -> ServerModel:
    """The same with other contents of some sets, or with further ones."""
    replaced = collections.OrderedDict(self.sets)
    replaced.update(sets)
    return self._replace(sets=replaced)


class Head(NamedTuple):
  """What predicts from a network's outputs, as layers that Keras can save.

  Attributes:
    build: (the network, number of classes) -> a Keras model, images -> logits:
      the network, followed by layers of Keras's own.
    values: The model -> name of each of these layers that has weights -> its
      weights.
  """

  build: Callable[[tf.keras.Model, int], tf.keras.Model]
  values: Callable[[ServerModel], Mapping[str, Sequence[tf.Tensor]]]


WeightsOf = Callable[[ServerModel], Weights]


def own_weights(model: ServerModel) -> Weights:
  """The weights of the model itself."""
  return model.weights


class Prediction(NamedTuple):
  """How a process predicts: evaluation and export ask it.

  Attributes:
    weights: The model -> the weights that are assigned to the network. Its
      batch norm statistics, `--average_decay` and `get_model_weights` refer to
      them, too.
    logits: (network with these weights, model, preprocessed images) -> logits
      float32 [B, C], as for evaluation.
    also: Name -> another way to predict, which is evaluated, too.
    member: If each client has a model of its own, (model, the exchange's table,
      client id int32 scalar) -> that client's weights; the first tensor of the
      table has a row for each client. All clients' models are then evaluated
      instead of one, by the networks alone, and there is no model to export.
    with_table: If the process predicts by what its exchange keeps, (model, the
      exchange's table) -> the model with that as a set, for `logits`. Whoever
      evaluates or exports a model calls it first, by `completed`.
    head: If the network's outputs are not the logits, the rest of an exported
      Keras model.
  """

  weights: WeightsOf = own_weights
  logits: Callable[[adapter.Network, ServerModel, tf.Tensor], tf.Tensor] = (
    lambda network, model, images: network.inference_logits(
      images, model.statistics_count
    )
  )
  also: Mapping[str, Prediction] = {}
  member: Callable[[ServerModel, Any, tf.Tensor], Weights] | None = None
  with_table: Callable[[ServerModel, Any], ServerModel] | None = None
  head: Head | None = None

  @property
  def needs_table(self) -> bool:
    """Whether the exchange's table is needed to predict."""
    return self.member is not None or self.with_table is not None

  def completed(self, model: ServerModel, table: Any) -> ServerModel:
    """The model with all by which it predicts."""
    if self.with_table is None:
      return model
    return self.with_table(model, table)


def of_set(name: str, like: Prediction = Prediction()) -> Prediction:
  """Predicts as `like` does, by the network with the weights of a set."""

  def weights(model: ServerModel) -> Weights:
    if name not in model.sets:
      raise UsageError(
        f'prediction by the set {name!r}: there is no such name; the sets of'
        f' the model are {", ".join(model.sets) or "none"}'
        f'{closest(name, model.sets)}'
      )
    found: Weights = model.sets[name]
    return found

  return Prediction(
    weights,
    lambda network, model, images: like.logits(
      network, model.with_weights(model.sets[name]), images
    ),
  )
