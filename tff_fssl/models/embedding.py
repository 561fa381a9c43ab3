"""Networks without their classifier, which output embeddings."""

from __future__ import annotations

import dataclasses

from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import checks
from tff_fssl.models import frozen


@dataclasses.dataclass(frozen=True)
class EmbeddingFn:
  """A `model_fn` that removes the last layer of another one's network.

  Attributes:
    classifier_fn: Builds the whole network, images -> logits. It is a
      functional or sequential model that ends with a `Dense` layer.
  """

  classifier_fn: adapter.ModelFn

  @property
  def frozen_values(self) -> frozen.Values:
    """Returns the weights of the network's frozen layers."""
    return frozen.values_of(self.classifier_fn)

  def __call__(self) -> tf.keras.Model:
    """Builds the network, images float32 [B, H, W, C] -> embeddings [B, D]."""
    model = self._build_classifier()
    return tf.keras.Model(model.inputs, model.layers[-1].input, name=model.name)

  def _build_classifier(self) -> tf.keras.Model:
    """Builds the network with its classifier."""
    model = checks.call_model_fn(self.classifier_fn)
    # The layers of subclassed models have no order, so none is the last.
    is_graph = model._is_graph_network  # pylint: disable=protected-access
    last = model.layers[-1] if is_graph else None
    if not isinstance(last, tf.keras.layers.Dense) or (
      last.output is not model.output
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
      return checks.check_output(model, model.output, expected)


def remove_classifier(model_fn: adapter.ModelFn) -> EmbeddingFn:
  """Removes the classifier of a `model_fn`, unless it is removed already."""
  return (
    model_fn if isinstance(model_fn, EmbeddingFn) else EmbeddingFn(model_fn)
  )
