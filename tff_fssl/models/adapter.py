"""A Keras model as local training uses it.

A `Network` is one Keras model in one graph. To use a weight set, assign it to
the model's variables. `Network` fixes three things that Keras leaves to global
or implicit state:

*   Initial weights are a function of (seed, place in the model). Keras's own
    seeding differs from build to build inside a computation.
*   Batch normalization in training normalizes with the batch's moments and, by
    default, tracks no averages: `statistics.py` gathers statistics instead.
*   Dropout and other random layers draw from seeds of the training step.

`keras_state.py` does this. Models that cannot be trained in this way are
rejected: see `checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
from typing import NamedTuple

from tff_fssl import hparams
from tff_fssl.lazy import tf
from tff_fssl.models import checks
from tff_fssl.models import keras_state
from tff_fssl.models import model_fns
from tff_fssl.models.weights import Weights

ModelFn = checks.ModelFn


class BatchMoments(NamedTuple):
  """Moments of one batch at one batch norm layer.

  Attributes:
    layer: Index of the layer in `Network.batch_norm_layers`.
    mean: float32 [channels].
    variance: float32 [channels], biased (divided by `count`).
    count: float32 scalar, values per channel.
  """

  layer: int
  mean: tf.Tensor
  variance: tf.Tensor
  count: tf.Tensor


def gradients(
  tape: tf.GradientTape, loss: tf.Tensor, *networks: Network
) -> list[list[tf.Tensor]]:
  """Computes gradients of a loss for several networks, in one backward pass.

  Args:
    tape: The tape that recorded the loss.
    loss: float32 scalar.
    *networks: The networks.

  Returns:
    For each network, the result of `Network.gradients`.
  """
  per_network = tape.gradient(
    loss,
    [network.trainable_variables for network in networks],
    unconnected_gradients=tf.UnconnectedGradients.ZERO,
  )
  return [[tf.convert_to_tensor(g) for g in own] for own in per_network]


class Network:
  """A Keras model in the current graph, used with explicit weights."""

  def __init__(
    self,
    model_fn: ModelFn,
    *,
    seed: int | None = None,
    num_classes: int | None = None,
    image_shape: Sequence[int | None] | None = None,
    track_moving_averages: bool = False,
    compute_dtype: str = 'float32',
    trace: bool = True,
  ):
    """Builds the model in the current graph.

    Args:
      model_fn: Builds the Keras model, images float32 [B, H, W, C] -> logits
        [B, num_classes].
      seed: Seed of the initial weights. None if weights will be assigned.
      num_classes: Expected width of the output. None skips the check.
      image_shape: (H, W, C). Needed by models without a shape of their own
        (subclassed models, `Sequential` without `Input`).
      track_moving_averages: Whether training updates Keras's moving averages.
      compute_dtype: 'bfloat16': layers compute in it, by Keras's mixed
        precision. Variables, moments of batch norm and the results of this
        class stay float32. 'float32': the model is as `model_fn` makes it.
      trace: Whether to trace forward passes, which checks the model.

    Raises:
      UsageError: If the model cannot be trained.
    """
    created: list[tf.keras.Variable] = []
    with (
      keras_state.seeded_variables(seed, created),
      keras_state.policy(compute_dtype),
    ):
      model = self.model = checks.call_model_fn(model_fn)
      checks.check_is_new(model, created)
      symbolic = checks.build(model, image_shape)
    self.num_outputs = checks.check_output(model, symbolic.output, num_classes)
    checks.check_layers(model, compute_dtype)
    self.trainable_variables = tuple(v.value for v in model.trainable_weights)
    self._frozen_values = model_fns.frozen_values_of(model_fn)
    self.frozen_variables = {
      name: variable
      for name, variable in model_fns.frozen_variables(model).items()
      if name in self._frozen_values
    }
    # Frozen weights are constants of the graph, so that no state contains them.
    constants = {variable.ref() for variable in self.frozen_variables.values()}
    # Not `variables`, among which are the states of random layers.
    self.non_trainable_variables = tuple(
      v.value
      for v in model.non_trainable_weights
      if v.value.ref() not in constants
    )
    # Of the assigned weights: `Weights.statistics_count`.
    self.statistics_count = tf.Variable(0.0, trainable=False)
    self._track_moving_averages = track_moving_averages
    self._recorded: list[BatchMoments] | None = None
    self._use_batch_moments = False
    self.batch_norm_layers = keras_state.trained_batch_norms(model)
    indices = {id(x): i for i, x in enumerate(self.batch_norm_layers)}
    for layer in keras_state.batch_norms(model):
      index = indices.get(id(layer))
      layer.call = self._batch_norm_call(index, layer, layer.call)
    self._random_layers = keras_state.RandomLayers(model)
    # `Normalization` copies its weights when it is built, so that it would not
    # see them change.
    self._finalized_layers = [
      layer
      for layer in checks.layers(model)
      if hasattr(layer, 'finalize_state')
    ]
    if trace:
      self._check_passes(symbolic)
    if seed is not None:
      self._finalize()  # Traces have left their tensors.
      checks.check_initial_weights(model, symbolic)

  def _check_passes(self, symbolic: checks.Symbolic) -> None:
    """Traces forward passes, which checks the model."""
    for training in (True, False):
      checks.check_forward_pass(
        self.model,
        functools.partial(self._trial, training=training),
        symbolic.image_shape,
        may_change=[
          moment.value
          for layer in self.batch_norm_layers
          for moment in (layer.moving_mean, layer.moving_variance)
          if training and self._track_moving_averages
        ],
      )

  def _finalize(self) -> None:
    """Lets preprocessing layers read their weights again."""
    for layer in self._finalized_layers:
      layer.finalize_state()

  def _trial(self, images: tf.Tensor, *, training: bool) -> tf.Tensor:
    """Computes logits, as any step or evaluation would."""
    with self.draws(tf.constant([0, 0])):
      return self.logits(images, training=training)

  def _batch_norm_call(
    self,
    index: int | None,
    layer: tf.keras.layers.Layer,
    keras_call: Callable[..., tf.Tensor],
  ) -> Callable[..., tf.Tensor]:
    """Makes a batch norm layer's `call` that uses this class's moments."""

    def call(
      inputs: tf.Tensor,
      training: bool | None = None,
      mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
      if mask is not None:
        raise hparams.UsageError(
          f'layer {layer.name!r} (batch normalization) gets a mask, which'
          ' static batch norm does not support; remove the masking'
        )
      # A frozen layer has no index.
      if index is None or not (training or self._use_batch_moments):
        return keras_state.normalize(layer, keras_call, inputs)
      outputs, moments = keras_state.normalize_batch(
        layer,
        inputs,
        moves_averages=(
          self._track_moving_averages and not self._use_batch_moments
        ),
      )
      if self._recorded is not None:
        self._recorded.append(BatchMoments(index, *moments()))
      return outputs

    return call

  def assign(self, weights: Weights) -> None:
    """Assigns weights to the model, and its frozen weights with them.

    Args:
      weights: The weights.

    Raises:
      ValueError: If the weights belong to another model.
    """
    for variable, value in zip(
      self.trainable_variables, weights.trainable, strict=True
    ):
      variable.assign(value)
    for variable, value in zip(
      self.non_trainable_variables, weights.non_trainable, strict=True
    ):
      variable.assign(value)
    for name, variable in self.frozen_variables.items():
      variable.assign(self._frozen_values[name])
    self.statistics_count.assign(weights.statistics_count)

  def initial_weights(self) -> Weights:
    """Returns the weights the model was built with, without statistics."""
    return Weights(
      tuple(tf.identity(v) for v in self.trainable_variables),
      tuple(tf.identity(v) for v in self.non_trainable_variables),
      # Moving averages are used from the first round on.
      tf.constant(float(self._track_moving_averages or not self.is_static)),
    )

  def weights_now(self) -> Weights:
    """Returns the current weights."""
    return Weights(
      tuple(v.read_value() for v in self.trainable_variables),
      tuple(v.read_value() for v in self.non_trainable_variables),
      self.statistics_count.read_value(),
    )

  @property
  def weight_specs(self) -> Weights:
    """Returns `tf.TensorSpec`s of the weights."""
    trainable, non_trainable = (
      tuple(tf.TensorSpec(v.shape, v.dtype) for v in variables)
      for variables in (self.trainable_variables, self.non_trainable_variables)
    )
    return Weights(trainable, non_trainable, tf.TensorSpec([], tf.float32))

  @property
  def variances(self) -> tuple[int, ...]:
    """Finds the indices of moving variances among non-trainable weights."""
    layers = keras_state.batch_norms(self.model)
    moving = {layer.moving_variance.value.ref() for layer in layers}
    return tuple(
      index
      for index, variable in enumerate(self.non_trainable_variables)
      if variable.ref() in moving
    )

  @property
  def is_static(self) -> bool:
    """Tells whether batch norm statistics are gathered after training."""
    return bool(self.batch_norm_layers) and not self._track_moving_averages

  def logits(
    self,
    images: tf.Tensor,
    *,
    training: bool,
    weights: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Computes the model's logits.

    If the network is random, call it within `draws` in training. A second pass
    of the same tensor repeats the draws of the first. Other tensors have draws
    of their own.

    Args:
      images: float32 [B, H, W, C].
      training: Whether layers behave as in training.
      weights: float32 [B], the examples' weights. If all are 0 (a client
        without examples), moving averages do not change. None: 1.

    Returns:
      Logits, float32 [B, C].
    """
    averages: Sequence[tf.Variable] = ()
    has_examples = tf.constant(True)
    if training and weights is not None and not self.is_static:
      averages = self.non_trainable_variables
      has_examples = tf.reduce_any(weights > 0.0)
    before = [tf.identity(v) for v in averages]
    logits = self._pass(self.model, images, training)
    for variable, old in zip(averages, before, strict=True):
      variable.assign(tf.where(has_examples, variable, old))
    return logits

  def _pass(
    self, model: tf.keras.Model, images: tf.Tensor, training: bool
  ) -> tf.Tensor:
    """Calls the model, or one that shares its layers, for float32 outputs."""
    self._finalize()
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if self._random_layers:
      context = self._random_layers.forward_pass(images, training)
    with context:
      outputs = model(images, training=training)
    if not (tf.is_tensor(outputs) and outputs.dtype.is_floating):
      # Keras's symbolic call may have told otherwise.
      checks.check_output(model, outputs, None)
    return tf.cast(outputs, tf.float32)

  @functools.cached_property
  def _head(self) -> tf.keras.layers.Layer:
    """Finds the layer that makes logits, or raises `UsageError`."""
    return checks.head(self.model)

  @functools.cached_property
  def _feature_model(self) -> tf.keras.Model:
    return tf.keras.Model(self.model.inputs, self._head.input)

  @property
  def feature_size(self) -> int:
    """Returns the number of features, the inputs of the last layer."""
    return int(self._head.input.shape[-1])

  @property
  def head(self) -> tuple[int, ...]:
    """Finds the last layer's weights: indices of trainable variables."""
    own = {v.value.ref() for v in self._head.trainable_weights}
    return tuple(
      i for i, v in enumerate(self.trainable_variables) if v.ref() in own
    )

  def features(self, images: tf.Tensor, *, training: bool) -> tf.Tensor:
    """Computes the inputs of the last layer, float32 [B, D], like `logits`."""
    return self._pass(self._feature_model, images, training)

  @property
  def is_random(self) -> bool:
    """Tells whether training draws random numbers (dropout)."""
    return bool(self._random_layers)

  def draws(self, seed: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Enters a context in which training draws from `seed`, int32 [2]."""
    return self._random_layers.seeded(seed)

  def gradients(
    self, tape: tf.GradientTape, loss: tf.Tensor
  ) -> list[tf.Tensor]:
    """Computes a loss's gradient with respect to each trainable variable.

    Args:
      tape: The tape that recorded the loss.
      loss: float32 scalar.

    Returns:
      Dense tensors of the variables' shapes, 0 where the loss does not depend
      on a variable.
    """
    return gradients(tape, loss, self)[0]

  @property
  def has_regularizers(self) -> bool:
    """Tells whether any layer has a regularizer of its weights."""
    return any(v.regularizer for v in self.model.trainable_weights)

  def regularization(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Computes the sum of the layers' regularizers, and its gradient.

    Returns:
      float32 scalar, and dense tensors, one per trainable variable.
    """
    with tf.GradientTape() as tape:
      loss = tf.add_n([tf.cast(t, tf.float32) for t in self.model.losses])
    return loss, self.gradients(tape, loss)

  def inference_logits(
    self, images: tf.Tensor, by_batch: tf.Tensor | None = None
  ) -> tf.Tensor:
    """Computes logits for evaluation, with batch norm statistics if any exist.

    If the assigned weights came without statistics, batch norm uses the moments
    of the batch.

    Args:
      images: float32 [B, H, W, C].
      by_batch: bool scalar, whether batch norm uses the moments of the batch in
        any case. None: no.

    Returns:
      float32 [B, C].
    """
    if self.is_static:
      missing = self.statistics_count <= 0.0
      by_batch = missing if by_batch is None else missing | by_batch
    if by_batch is None or not self.batch_norm_layers:
      return self.logits(images, training=False)

    def batch_logits() -> tf.Tensor:
      with self._batch_moments():
        return self.logits(images, training=False)

    return tf.cond(
      by_batch, batch_logits, lambda: self.logits(images, training=False)
    )

  def moments(self, images: tf.Tensor) -> Sequence[BatchMoments]:
    """Records the moments at every batch norm layer in a forward pass."""
    with self._batch_moments():
      self._recorded = []
      self.logits(images, training=False)
      recorded, self._recorded = self._recorded, None
    return recorded

  @contextlib.contextmanager
  def _batch_moments(self) -> Iterator[None]:
    """Enters a context in which batch norm layers use the batch's moments."""
    self._use_batch_moments = True
    try:
      yield
    finally:
      self._use_batch_moments = False

  @contextlib.contextmanager
  def perturbed(
    self, perturbation: Sequence[tf.Tensor], *, moves_averages: bool = True
  ) -> Iterator[None]:
    """Enters a context in which trainable weights w are w + `perturbation`.

    Args:
      perturbation: One tensor per trainable variable, or none to change none.
      moves_averages: Whether passes within it move moving averages, as in
        training at w + `perturbation`. False: they stay those of w.
    """
    weights = self.trainable_variables if perturbation else ()
    keeps_averages = not (moves_averages or self.is_static)
    averages = self.non_trainable_variables if keeps_averages else ()
    changed = (*weights, *averages)
    saved = [v.read_value() for v in changed]
    for variable, change in zip(weights, perturbation, strict=True):
      variable.assign_add(change)
    try:
      yield
    finally:
      # Subtracting would not restore the weights to the bit.
      for variable, value in zip(changed, saved, strict=True):
        variable.assign(value)
