"""A factory of a process's networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
from typing import Any

from tff_fssl import hparams as hparams_lib
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import model_fns
from tff_fssl.models.weights import Weights


def network_fn(
  model_fn: adapter.ModelFn, algorithm: base.Algorithm
) -> adapter.ModelFn:
  """Returns an algorithm's model builder, perhaps without classifier."""
  if not algorithm.embeds:
    return model_fn
  return model_fns.remove_classifier(model_fn)


class NetworkFactory:
  """A factory of a process's networks, and their properties.

  Attributes:
    tracks_moving_averages: Whether training updates Keras's moving averages.
    num_classes: The number of classes.
    num_outputs: The width of the output: the number of classes, or the width of
      embeddings.
    num_trainable: The number of trainable variables.
    has_batch_norm: Whether there are trained batch norm layers.
    is_static: Whether batch norm statistics must be gathered after training.
    variances: `adapter.Network.variances`.
    weight_specs: `adapter.Network.weight_specs`.
  """

  def __init__(
    self,
    model_fn: adapter.ModelFn,
    hparams: round_hparams_lib.RoundHparams,
    *,
    image_shape: Sequence[int | None],
    num_classes: int | None,
    seed: int,
    checks: bool = True,
  ):
    """Builds a network, in a graph of its own, and checks it.

    Args:
      model_fn: Builds a Keras model, images -> logits. Or an
        `model_fns.EmbeddingFn`.
      hparams: The round's hyper-parameters.
      image_shape: The shape of a network's input.
      num_classes: Expected width of the classifier. None skips the check.
      seed: Seed of the initial weights.
      checks: Whether the network is traced to check it, which takes a second.

    Raises:
      UsageError: If the model cannot be trained.
    """
    self.tracks_moving_averages = (
      hparams.batch_norm_statistics == 'moving_average'
    )
    self._seed = seed
    of_classifier = None
    # The network's outputs are embeddings, so its width tells nothing of
    # classes.
    if isinstance(model_fn, model_fns.EmbeddingFn):
      of_classifier = model_fn.num_classes(num_classes)
      num_classes = None
    self._build = functools.partial(
      adapter.Network,
      model_fn,
      num_classes=num_classes,
      image_shape=image_shape,
      track_moving_averages=self.tracks_moving_averages,
      compute_dtype=hparams.compute_dtype,
    )
    # Only this network is traced, to check it. Those of `make` are equal.
    self._graph = tf.Graph()
    with self._graph.as_default():
      network = self._build(seed=seed, trace=checks)
    if network.num_outputs < 2:
      raise hparams_lib.UsageError(
        f'model {network.model.name!r} gives one logit; it must give one for'
        ' each class, two for two classes'
      )
    self.num_outputs = network.num_outputs
    self.num_classes = of_classifier or network.num_outputs
    self.num_trainable = len(network.trainable_variables)
    self.has_batch_norm = bool(network.batch_norm_layers)
    self.is_static = network.is_static
    self.variances = network.variances
    self.weight_specs = network.weight_specs
    self._checked = network

  @contextlib.contextmanager
  def probe(self) -> Iterator[adapter.Network]:
    """Enters the graph of a network whose variables never get values."""
    with self._graph.as_default():
      yield self._checked

  @property
  def head(self) -> dict[int, tf.TensorSpec]:
    """Returns the spec of each trainable weight of the last layer, by index."""
    specs = self.weight_specs.trainable
    return {index: specs[index] for index in self._checked.head}

  @property
  def feature_size(self) -> int:
    """Returns the width of the last layer's input, or raises `UsageError`."""
    return self._checked.feature_size

  def specs_of(
    self, model_fn: Callable[[adapter.Network], tf.keras.Model]
  ) -> Weights:
    """Returns the specs of an auxiliary network's weights, by its `build`."""
    with tf.Graph().as_default():
      return self.make_other(model_fn, self.make())[0].weight_specs

  def make_other(
    self,
    model_fn: Callable[[adapter.Network], tf.keras.Model],
    local: adapter.Network,
  ) -> tuple[adapter.Network, Callable[[], Weights]]:
    """Makes a network of another kind in the current graph.

    Args:
      model_fn: `AuxiliaryNetwork.build`.
      local: The model's network.

    Returns:
      The network, and a function without arguments that returns its initial
      weights at each call.
    """
    initializers: dict[Any, Callable[[], tf.Tensor]] = {}

    def remember(
      next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
      variable = next_creator(**kwargs)
      initializers[variable.ref()] = kwargs['initial_value']
      return variable

    # Clients' variables are assigned in each round, so their initial values are
    # lost. The initializers can compute them again.
    with tf.variable_creator_scope(remember):
      network = adapter.Network(
        lambda: model_fn(local), seed=self._seed, trace=False
      )

    def initial() -> Weights:
      trainable, non_trainable = (
        tuple(initializers[v.ref()]() for v in variables)
        for variables in (
          network.trainable_variables,
          network.non_trainable_variables,
        )
      )
      return Weights(trainable, non_trainable, tf.constant(0.0))

    return network, initial

  def make(self) -> adapter.Network:
    """Makes a network in the current graph, without initial weights."""
    return self._build(trace=False)

  def make_initial(self) -> adapter.Network:
    """Makes a network in the current graph, with initial weights."""
    return self._build(seed=self._seed, trace=False)
