"""Networks without their classifier, whose outputs are embeddings."""

from __future__ import annotations

import dataclasses

from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import checks
from tff_fssl.models import frozen


@dataclasses.dataclass(frozen=True)
class EmbeddingFn:
  """A `model_fn`: the network that another one builds, without its last layer.

  Attributes:
    classifier_fn: Builds the whole network, images -> logits, a functional or
      sequential model that ends with a `Dense` layer.
  """

  classifier_fn: adapter.ModelFn

  @property
  def frozen_values(self) -> frozen.Values:
    """The weights of layers of the network that do not train."""
    return frozen.values_of(self.classifier_fn)

  def __call__(self) -> tf.keras.Model:
    """The network, images float32 [B, H, W, C] -> embeddings [B, D]."""
    model = self._whole()
    return tf.keras.Model(model.inputs, model.layers[-1].input, name=model.name)

  def _whole(self) -> tf.keras.Model:
    """The network with its classifier."""
    model = checks.call_model_fn(self.classifier_fn)
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
    """The width of the classifier that is left out.

    Args:
      expected: The number of classes of the data; None to skip the check.

    Returns:
      The width.

    Raises:
      UsageError: If it is another one.
    """
    with tf.Graph().as_default():
      model = self._whole()
      return checks.check_output(model, model.output, expected)


def without_classifier(model_fn: adapter.ModelFn) -> EmbeddingFn:
  """The `model_fn` without classifier; one that is an `EmbeddingFn` stays."""
  return (
    model_fn if isinstance(model_fn, EmbeddingFn) else EmbeddingFn(model_fn)
  )
