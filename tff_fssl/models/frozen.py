"""Networks of which only some layers train.

The weights of all other layers belong to the network itself, as its activation
functions do: they are constants of each graph that uses it. So they are in no
state, checkpoint or message, and a client needs them only once, with the
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
Values: TypeAlias = 'Mapping[str, np.ndarray[Any, Any]]'

_NUM_SHOWN = 6


def variables(model: tf.keras.Model) -> dict[str, tf.Variable]:
  """The weights of the layers of a model that do not train.

  Args:
    model: The model, whose layers have different names.

  Returns:
    'LAYER/INDEX' -> weight, in the order of layers and of their weights.
  """
  return {
    f'{layer.name}/{index}': variable
    for layer, own in _own_weights(model)
    if not layer.trainable
    for index, variable in enumerate(own)
  }


def freeze(model: tf.keras.Model, train_layers: str) -> None:
  """Lets only some layers of a model train.

  Args:
    model: The model.
    train_layers: A regular expression; layers whose whole names match train.

  Raises:
    UsageError: If the expression is none, or no layer matches it.
  """
  pattern = model_names.layer_pattern(train_layers)
  layers = [layer for layer, _ in _own_weights(model)]
  names = [layer.name for layer in layers]
  for name in names:
    if names.count(name) > 1:
      raise UsageError(
        f'--train_layers={train_layers}: model {model.name!r} has two layers of'
        f' the name {name!r}; give each a name of its own'
      )
  for layer in layers:
    layer.trainable = pattern.fullmatch(layer.name) is not None
  if not model.trainable_variables:
    raise UsageError(
      f'--train_layers={train_layers}: no layer with weights that train has'
      f' such a name; the last layers of model {model.name!r} are'
      f' {", ".join(names[-_NUM_SHOWN:])} ({len(names)} layers)'
    )


def _own_weights(
  model: tf.keras.Model,
) -> list[tuple[tf.keras.layers.Layer, list[tf.Variable]]]:
  """The layers of a model with their own weights, not those of layers in them.

  Those without any are left out.
  """
  pairs = [
    # pylint: disable-next=protected-access
    (layer, layer._trainable_weights + layer._non_trainable_weights)
    for layer in checks.layers(model)
  ]
  return [(layer, own) for layer, own in pairs if own]


@dataclasses.dataclass(frozen=True)
class FrozenFn:
  """A `model_fn`: the network that another one builds, partly frozen.

  Attributes:
    model_fn: Builds the network, images -> logits.
    train_layers: See `freeze`.
    frozen_values: The weights of all other layers, as `variables` names them.
  """

  model_fn: checks.ModelFn
  train_layers: str
  frozen_values: Values

  def __call__(self) -> tf.keras.Model:
    """The network, in which the weights must still be put.

    Raises:
      UsageError: If the values are those of another network.
    """
    model = checks.call_model_fn(self.model_fn)
    freeze(model, self.train_layers)
    here = {name: tuple(v.shape) for name, v in variables(model).items()}
    there = {n: np.shape(value) for n, value in self.frozen_values.items()}
    wrong = [n for n in {**here, **there} if here.get(n) != there.get(n)]
    if wrong:
      raise UsageError(
        f'the frozen weights given for model {model.name!r} are not its own:'
        f' {wrong[0]} is {there.get(wrong[0], "missing")} there,'
        f' {here.get(wrong[0], "missing")} here'
      )
    return model


def values_of(model_fn: checks.ModelFn) -> Values:
  """The frozen weights of what a `model_fn` builds; none if it has none."""
  return getattr(model_fn, 'frozen_values', {})
