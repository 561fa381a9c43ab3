"""Model functions that change another one's network.

`FrozenFn` freezes layers, `EmbeddingFn` removes the classifier.

The weights of frozen layers belong to the network itself, as its activation
functions do: they are constants of each graph that uses it. So no state,
checkpoint or message contains them, and a client needs them only once, with the
program that it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, TypeAlias

from tff_fssl.hparams import UsageError
from tff_fssl.lazy import np, tf
from tff_fssl.models import checks
from tff_fssl.models import names as model_names

# 'LAYER/INDEX' -> weight.
FrozenValues: TypeAlias = 'Mapping[str, np.ndarray[Any, Any]]'

_NUM_SHOWN = 6


def frozen_variables(model: tf.keras.Model) -> dict[str, tf.Variable]:
  """Collects the weights of a model's frozen layers.

  Args:
    model: The model. Its layers have different names.

  Returns:
    'LAYER/INDEX' -> weight, in the order of layers and of their weights.
  """
  return {
    f'{layer.name}/{index}': variable.value
    for layer, own in _own_weights(model)
    if not layer.trainable
    for index, variable in enumerate(own)
  }


def freeze(model: tf.keras.Model, train_layers: str) -> None:
  """Freezes all layers of a model except some.

  Args:
    model: The model.
    train_layers: A regular expression. Layers train if it matches their whole
      name.

  Raises:
    UsageError: If the expression is invalid, or no layer with weights matches
      it.
  """
  pattern = model_names.layer_pattern(train_layers)
  layers = [layer for layer, _ in _own_weights(model)]
  names = [layer.name for layer in layers]
  # Names are the keys of frozen weights.
  for name in names:
    if names.count(name) > 1:
      raise UsageError(
        f'--train_layers={train_layers}: model {model.name!r} has two layers'
        f' named {name!r}; give each layer a name of its own'
      )
  for layer in layers:
    layer.trainable = pattern.fullmatch(layer.name) is not None
  if not model.trainable_weights:
    raise UsageError(
      f'--train_layers={train_layers}: matches no layer with trainable weights;'
      f' the last layers of model {model.name!r} are'
      f' {", ".join(names[-_NUM_SHOWN:])} ({len(names)} layers)'
    )


def _own_weights(
  model: tf.keras.Model,
) -> list[tuple[tf.keras.layers.Layer, list[tf.keras.Variable]]]:
  """Pairs layers with their own weights, which exclude inner layers' weights.

  Layers without weights of their own are skipped.
  """
  pairs = [(layer, checks.own_weights(layer)) for layer in checks.layers(model)]
  return [(layer, own) for layer, own in pairs if own]


@dataclasses.dataclass(frozen=True)
class FrozenFn:
  """A `model_fn` that freezes layers of another one's network.

  Attributes:
    model_fn: Builds the network, images -> logits.
    train_layers: See `freeze`.
    frozen_values: The weights of all other layers, named as by
      `frozen_variables`.
  """

  model_fn: checks.ModelFn
  train_layers: str
  frozen_values: FrozenValues

  def __call__(self) -> tf.keras.Model:
    """Builds the network. The frozen weights must still be assigned.

    Raises:
      UsageError: If the values belong to another network.
    """
    model = checks.call_model_fn(self.model_fn)
    freeze(model, self.train_layers)
    here = {name: tuple(v.shape) for name, v in frozen_variables(model).items()}
    there = {n: np.shape(value) for n, value in self.frozen_values.items()}
    wrong = [n for n in {**here, **there} if here.get(n) != there.get(n)]
    if wrong:
      raise UsageError(
        f'the frozen weights do not fit model {model.name!r}: {wrong[0]} is'
        f' {there.get(wrong[0], "missing")} in the weights,'
        f' {here.get(wrong[0], "missing")} in the model'
      )
    return model


def frozen_values_of(model_fn: checks.ModelFn) -> FrozenValues:
  """Returns the frozen weights of a `model_fn`'s network, if there are any."""
  return getattr(model_fn, 'frozen_values', {})


@dataclasses.dataclass(frozen=True)
class EmbeddingFn:
  """A `model_fn` that removes the last layer of another one's network.

  Attributes:
    classifier_fn: Builds the whole network, images -> logits. It is a
      functional or sequential model that ends with a `Dense` layer.
  """

  classifier_fn: checks.ModelFn

  @property
  def frozen_values(self) -> FrozenValues:
    """Returns the weights of the network's frozen layers."""
    return frozen_values_of(self.classifier_fn)

  def __call__(self) -> tf.keras.Model:
    """Builds the network, images float32 [B, H, W, C] -> embeddings [B, D]."""
    model = self._build_classifier()
    return tf.keras.Model(model.inputs, model.layers[-1].input, name=model.name)

  def _build_classifier(self) -> tf.keras.Model:
    """Builds the network with its classifier."""
    model = checks.call_model_fn(self.classifier_fn)
    # The layers of subclassed models have no order, so none is the last.
    last = model.layers[-1] if checks.inputs_of(model) else None
    if not isinstance(last, tf.keras.layers.Dense) or (
      last.output is not model.outputs[0]
    ):
      raise UsageError(
        f'model {model.name!r}: this algorithm uses networks without their'
        ' classifier; it must be a functional model, or a tf.keras.Sequential'
        ' with an Input, that ends with a Dense layer'
      )
    return model

  def num_classes(self, expected: int | None = None) -> int:
    """Returns the width of the removed classifier.

    Args:
      expected: The number of classes of the data. None skips the check.

    Returns:
      The width.

    Raises:
      UsageError: If it is not the expected one.
    """
    # In a graph of its own, the weights take no memory.
    with tf.Graph().as_default():
      model = self._build_classifier()
      return checks.check_output(model, model.outputs[0], expected)


def remove_classifier(model_fn: checks.ModelFn) -> EmbeddingFn:
  """Removes the classifier of a `model_fn`, unless it is removed already."""
  return (
    model_fn if isinstance(model_fn, EmbeddingFn) else EmbeddingFn(model_fn)
  )
