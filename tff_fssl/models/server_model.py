"""The server's model after a round, with its further sets of tensors."""

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
  """The server's model, further sets of tensors, and control values.

  Its first three fields are those of `Weights`.

  Attributes:
    trainable: See `Weights`.
    non_trainable: See `Weights`.
    statistics_count: See `Weights`.
    sets: Name -> a further set of tensors: `Weights` of a network (a teacher),
      or another structure (prototypes).
    control: Name -> a tensor that clients get in every round (a mode).
  """

  trainable: tuple[tf.Tensor, ...]
  non_trainable: tuple[tf.Tensor, ...]
  statistics_count: tf.Tensor
  sets: Mapping[str, Any] = collections.OrderedDict()
  control: Mapping[str, tf.Tensor] = collections.OrderedDict()

  @property
  def weights(self) -> Weights:
    """Returns the model's weights."""
    return Weights(
      tuple(self.trainable), tuple(self.non_trainable), self.statistics_count
    )

  def replace_weights(self, weights: Weights) -> ServerModel:
    """Returns a copy with other weights of the model."""
    return ServerModel(*weights, self.sets, self.control)

  def replace_sets(self, **sets: Any) -> ServerModel:
    """Returns a copy in which some sets are replaced or added."""
    replaced = collections.OrderedDict(self.sets)
    replaced.update(sets)
    return self._replace(sets=replaced)


class Head(NamedTuple):
  """Layers that predict from a network's outputs, and that Keras can save.

  Attributes:
    build: (the network, number of classes) -> a Keras model, images -> logits:
      the network, followed by layers of Keras's own.
    values: The model -> name of each of these layers with weights -> its
      weights.
  """

  build: Callable[[tf.keras.Model, int], tf.keras.Model]
  values: Callable[[ServerModel], Mapping[str, Sequence[tf.Tensor]]]


WeightsOf = Callable[[ServerModel], Weights]


def own_weights(model: ServerModel) -> Weights:
  """Returns the weights of the model itself."""
  return model.weights


class Prediction(NamedTuple):
  """The rule by which a process predicts, for evaluation and export.

  Attributes:
    weights: The model -> the weights to assign to the network. Batch norm
      statistics, `--average_decay` and `get_model_weights` refer to them, too.
    logits: (network with these weights, model, preprocessed images) -> logits
      float32 [B, C], as for evaluation.
    also: Name -> another rule, which is evaluated, too.
    member: (model, the exchange's table, client id int32 scalar) -> that
      client's weights, if each client has a model of its own. The first tensor
      of the table has a row for each client. Then all clients' models are
      evaluated instead of one, by the networks alone, and there is no model to
      export.
    head: The remaining layers of an exported Keras model, if the network's
      outputs are not the logits.
  """

  weights: WeightsOf = own_weights
  logits: Callable[[adapter.Network, ServerModel, tf.Tensor], tf.Tensor] = (
    lambda network, model, images: network.inference_logits(images)
  )
  also: Mapping[str, Prediction] = {}
  member: Callable[[ServerModel, Any, tf.Tensor], Weights] | None = None
  head: Head | None = None


def set_prediction(name: str, like: Prediction = Prediction()) -> Prediction:
  """Makes a rule that predicts as `like` does, with the weights of a set."""

  def weights(model: ServerModel) -> Weights:
    if name not in model.sets:
      raise UsageError(
        f'prediction by the set {name!r}: the model has no such set; its sets'
        f' are {", ".join(model.sets) or "none"}'
        f'{closest(name, model.sets)}'
      )
    found: Weights = model.sets[name]
    return found

  return Prediction(
    weights,
    lambda network, model, images: like.logits(
      network, model.replace_weights(model.sets[name]), images
    ),
  )
