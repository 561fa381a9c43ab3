"""Accuracy and loss of a model on examples in memory."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any, TypeAlias

import numpy as np

from tff_fssl import loops
from tff_fssl import metrics
from tff_fssl.data import augment
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights

# Name -> float32 scalar.
Metrics: TypeAlias = 'collections.OrderedDict[str, tf.Tensor]'
# Called with (model, x, y), and the exchange's table if clients have models.
EvaluateFn = Callable[..., collections.OrderedDict[str, float]]
# (correct predictions, losses), each summed over examples.
_Sums: TypeAlias = 'tuple[tf.Tensor, tf.Tensor]'
# Logits of a batch -> what an evaluation keeps of them.
_Keep: TypeAlias = 'Callable[[tf.Tensor], tf.Tensor]'
# Examples may be mapped from a file that is larger than the memory.
_PIECE_BYTES = 2**28


def build_evaluate_fn(
  model_fn: adapter.ModelFn,
  views: augment.Views,
  *,
  prediction: server_model.Prediction = server_model.Prediction(),
  batch_size: int = 256,
  figures: Sequence[str] = (),
) -> EvaluateFn:
  """Builds an evaluation for any number of examples, traced at first use.

  Args:
    model_fn: Builds the Keras model, images -> logits.
    views: The preprocessing. Only `plain` is used.
    prediction: How the model predicts.
    batch_size: Examples in a batch. Until there are batch norm statistics, the
      moments of the batch are used.
    figures: Names of `metrics.FIGURES` to compute, too. Not where each client
      has its own model.

  Returns:
    `(model, x, y) -> OrderedDict(accuracy, loss)` with x as stored, [N, ...], y
    int [N] and N >= 1. The accuracy is in [0, 1], the loss is the mean
    cross-entropy in nats. `NAME/accuracy` and `NAME/loss` follow for each of
    `prediction.also`, then each of `figures`. If each client has its own model
    (`prediction.member`), the function takes a fourth argument, the exchange's
    table, and the result is that of `summarize_clients`.

  Examples:
    >>> import numpy as np
    >>> import tff_fssl as fssl
    >>> from tff_fssl.models import server_model
    >>> shape, test = (8, 8, 1), fssl.load('digits').test
    >>> evaluate_fn = fssl.build_evaluate_fn(
    ...   lambda: fssl.build_network('linear', shape, num_classes=10),
    ...   fssl.build_views(shape, mean=(0,), std=(1,), flip=False),
    ... )
    >>> weights = np.zeros([64, 10], np.float32), np.zeros([10], np.float32)
    >>> model = server_model.ServerModel(weights, (), np.float32(1))
    >>> print(f'{evaluate_fn(model, test.x, test.y)["loss"]:.3f}')  # log 10
    2.303
  """
  build = _graph_builder(model_fn, views, prediction, batch_size, figures)

  def fn(
    model: server_model.ServerModel, x: Any, y: Any, table: Any = ()
  ) -> collections.OrderedDict[str, float]:
    model, table = tf.nest.map_structure(
      tf.convert_to_tensor, (server_model.ServerModel(*model), table)
    )
    x, y = np.asarray(x), np.asarray(y)
    built, num_classes = build(x.shape[1:], x.dtype)
    if y.size and not 0 <= y.min() <= y.max() < num_classes:
      raise UsageError(
        f'labels go from {y.min()} to {y.max()}, but the model has'
        f' {num_classes} outputs, for labels from 0 to {num_classes - 1}'
      )
    kept: list[np.ndarray[Any, Any]] = []

    def evaluate(x: Any, labels: Any) -> Metrics:
      measured: Metrics
      measured, outputs = built(model, table, x, labels)
      kept.extend(output.numpy() for output in outputs)
      return measured

    # The spread over clients is not a mean over examples.
    whole = prediction.member is not None
    size = len(x) if whole else piece_size(x, batch_size)
    result = mean_over_pieces(evaluate, x, y, size)
    if figures:
      result.update(score(figures, y, np.concatenate(kept)))
    return result

  return fn


def _graph_builder(
  model_fn: adapter.ModelFn,
  views: augment.Views,
  prediction: server_model.Prediction,
  batch_size: int,
  figures: Sequence[str],
) -> Callable[[tuple[int, ...], np.dtype[Any]], Any]:
  """Builds (shape, dtype) of an example -> (graph, number of classes)."""
  keep = None
  if figures:
    # All scores are larger than classes: only AUROC needs them.
    keep = tf.identity if metrics.AUROC in figures else _most_probable

  @functools.cache
  def build(stored_shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    stored = tf.TensorSpec([None, *stored_shape], dtype)
    network = adapter.Network(
      model_fn, image_shape=augment.input_shape(views, stored)
    )
    passes = Passes(network, views, batch_size)

    @tf.function(autograph=False)
    def evaluate(
      model: server_model.ServerModel,
      table: Any,
      images: tf.Tensor,
      labels: tf.Tensor,
    ) -> tuple[Metrics, list[tf.Tensor]]:
      return _measure(passes, prediction, model, table, images, labels, keep)

    return evaluate, network.num_outputs

  return build


def _most_probable(logits: tf.Tensor) -> tf.Tensor:
  return tf.argmax(logits, -1, tf.int32)


def score(
  figures: Sequence[str], labels: np.ndarray, outputs: np.ndarray
) -> dict[str, float]:
  """Computes figures by scikit-learn's definitions.

  Args:
    figures: Names of `metrics.FIGURES`.
    labels: The true classes, int [N], in [0, C).
    outputs: Logits, float32 [N, C], or, without AUROC, predicted classes, int32
      [N].

  Returns:
    Name -> figure, in [0, 1]. AUROC is NaN if a class has no example, or a
    logit is not finite.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.models import evaluate
    >>> labels, classes = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
    >>> for name, value in evaluate.score(
    ...   ('balanced_accuracy', 'macro_f1'), labels, classes
    ... ).items():
    ...   print(f'{name} {value:.3f}')
    balanced_accuracy 0.833
    macro_f1 0.733
  """
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from sklearn import metrics as of_sklearn

  classes = outputs.argmax(1) if outputs.ndim == 2 else outputs
  functions: dict[str, Callable[[], float]] = {
    # The mean recall over the classes that there are.
    metrics.BALANCED_ACCURACY: lambda: of_sklearn.recall_score(
      labels, classes, labels=np.unique(labels), average='macro'
    ),
    metrics.MACRO_F1: lambda: of_sklearn.f1_score(
      labels, classes, average='macro', zero_division=0
    ),
    metrics.AUROC: lambda: _auroc(labels, outputs),
  }
  return {name: float(functions[name]()) for name in figures}


def _auroc(labels: np.ndarray, logits: np.ndarray) -> float:
  """Computes the area under the ROC curve, or NaN if it is not defined."""
  # Slow to import. pylint: disable=import-outside-toplevel
  from scipy import special
  from sklearn import metrics as of_sklearn

  num_classes = logits.shape[1]
  if len(np.unique(labels)) < num_classes or not np.isfinite(logits).all():
    return math.nan
  # In float32, many probabilities would be equal.
  probs = special.softmax(logits.astype(np.float64), 1)
  if num_classes == 2:
    return float(of_sklearn.roc_auc_score(labels, probs[:, 1]))
  return float(of_sklearn.roc_auc_score(labels, probs, multi_class='ovr'))


def build_logits_fn(
  model_fn: adapter.ModelFn,
  input_shape: tuple[int | None, ...],
  *,
  prediction: server_model.Prediction = server_model.Prediction(),
) -> Callable[..., tf.Tensor]:
  """Builds a function that predicts as the evaluation does.

  Args:
    model_fn: Builds the Keras model, images -> logits.
    input_shape: The shape of a preprocessed example.
    prediction: The prediction rule, without `member`.

  Returns:
    `(model, x) -> logits float32 [N, C]`, with x preprocessed, [N, ...], N >=
    1.
  """
  network = adapter.Network(model_fn, image_shape=input_shape)

  @tf.function(autograph=False, reduce_retracing=True)
  def logits(model: Any, x: tf.Tensor) -> tf.Tensor:
    network.assign(prediction.weights(model))
    return prediction.logits(network, model, x)

  def fn(model: server_model.ServerModel, x: Any) -> Any:
    model = server_model.ServerModel(*model)
    return logits(tf.nest.map_structure(tf.convert_to_tensor, model), x)

  return fn


def measure(
  passes: Passes,
  prediction: server_model.Prediction,
  model: server_model.ServerModel,
  table: Any,
  images: tf.Tensor,
  labels: tf.Tensor,
) -> Metrics:
  """Measures a model by all of its ways to predict, in a graph.

  Args:
    passes: The passes of the network.
    prediction: How the model predicts.
    model: The model.
    table: The exchange's table, or ().
    images: [N, ...] as stored, N >= 1.
    labels: int32 [N].

  Returns:
    The metrics of `build_evaluate_fn`, without `figures`.
  """
  return _measure(passes, prediction, model, table, images, labels)[0]


def _measure(
  passes: Passes,
  prediction: server_model.Prediction,
  model: server_model.ServerModel,
  table: Any,
  images: tf.Tensor,
  labels: tf.Tensor,
  keep: _Keep | None = None,
) -> tuple[Metrics, list[tf.Tensor]]:
  """(the metrics, what `keep` keeps of the model's outputs)."""
  result: Metrics = collections.OrderedDict()
  kept: list[tf.Tensor] = []
  ways = {'': prediction, **prediction.also}
  if prediction.member is not None:
    member = functools.partial(prediction.member, model, table)
    num_clients = tf.shape(tf.nest.flatten(table)[0])[0]
    result.update(passes.measure_clients(member, num_clients, images, labels))
    del ways['']
  for name, way in ways.items():
    prefix = f'{name}/' if name else ''
    accuracy, loss, *outputs = passes.measure(
      way.weights(model),
      functools.partial(way.logits, passes.network, model),
      images,
      labels,
      None if name else keep,
    )
    kept += outputs
    result[f'{prefix}accuracy'] = accuracy
    result[f'{prefix}loss'] = loss
  return result, kept


def mean_over_pieces(
  evaluate: Callable[[Any, Any], Mapping[str, Any]],
  x: np.ndarray[Any, Any],
  y: Any,
  size: int,
) -> collections.OrderedDict[str, float]:
  """Averages over pieces of `size` examples; exact for a single piece.

  Args:
    evaluate: (x, y int32) of a piece -> name -> mean over its examples.
    x: Examples as stored, [N, ...], N >= 1, perhaps mapped from a file.
    y: Labels, [N].
    size: See `piece_size`.

  Returns:
    Name -> mean over all examples.
  """
  totals: collections.OrderedDict[str, float] = collections.OrderedDict()
  starts = range(0, max(len(x) - 1, 1), size)
  for start in starts:
    # As in `loops.fold_batches`: a last example joins those before it.
    part = slice(start, len(x) if start == starts[-1] else start + size)
    labels = np.asarray(y[part]).astype(np.int32)
    for name, value in evaluate(x[part], labels).items():
      share = len(labels) / len(x)
      totals[name] = totals.get(name, 0.0) + share * float(value)
  return totals


def piece_size(x: np.ndarray[Any, Any], batch_size: int) -> int:
  """Returns the examples in memory at once: whole batches, at least one."""
  bytes_each = max(1, x[:1].nbytes)
  # Without statistics, batch norm depends on which examples share a batch.
  return max(1, _PIECE_BYTES // bytes_each // batch_size) * batch_size


class Passes:
  """Passes of a network over examples, to be called in a `tf.function`."""

  def __init__(
    self, network: adapter.Network, views: augment.Views, batch_size: int
  ):
    self.network, self._views = network, views
    self._batch_size = batch_size

  def measure(
    self,
    weights: Weights,
    logits_fn: Callable[[tf.Tensor], tf.Tensor],
    images: tf.Tensor,
    labels: tf.Tensor,
    keep: _Keep | None = None,
  ) -> tuple[tf.Tensor, ...]:
    """Measures (accuracy, mean cross-entropy) of the network with `weights`.

    With `keep`, what it returns of a batch's logits follows, for all examples.
    """
    self.network.assign(weights)
    size = tf.shape(images)[0]
    num_batches = loops.num_batches(size, self._batch_size)

    def add(index: tf.Tensor, rows: slice, sums: Any) -> Any:
      logits = logits_fn(self._views.plain(images[rows]))
      is_correct, losses = _judge(logits, labels[rows])
      correct, loss, *kept = sums
      correct += tf.reduce_sum(tf.cast(is_correct, tf.float32))
      if keep is not None:
        kept = [kept[0].write(index, keep(logits))]
      return correct, loss + tf.reduce_sum(losses), *kept

    initial: tuple[Any, ...] = (tf.constant(0.0), tf.constant(0.0))
    if keep is not None:
      of_none = keep(tf.zeros([0, self.network.num_outputs]))
      kept = tf.TensorArray(
        of_none.dtype, num_batches, element_shape=[None, *of_none.shape[1:]]
      )
      initial = (*initial, kept)
    correct, loss, *arrays = loops.fold_batches(
      add, initial, size=size, batch_size=self._batch_size
    )
    count = tf.cast(size, tf.float32)
    return correct / count, loss / count, *(a.concat() for a in arrays)

  def count_correct(
    self,
    weights: Weights,
    logits_fn: Callable[[tf.Tensor], tf.Tensor],
    images: tf.Tensor,
    labels: tf.Tensor,
    num_classes: int,
    max_loss: float,
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts correct examples per class, and sums losses.

    Args:
      weights: The weights of the network.
      logits_fn: Preprocessed images -> logits [B, num_classes].
      images: [N, ...] as stored. N may be 0.
      labels: int32 [N], in [0, num_classes).
      num_classes: The number of classes.
      max_loss: The limit to which larger losses of examples are reduced.

    Returns:
      Correctly classified examples of each class, int64 [classes], and the sum
      of losses in nats, float32.
    """
    self.network.assign(weights)

    def add(_: tf.Tensor, rows: slice, sums: _Sums) -> _Sums:
      logits = logits_fn(self._views.plain(images[rows]))
      is_correct, losses = _judge(logits, labels[rows])
      correct, loss = sums
      # -1 is no class of `one_hot`.
      classes = tf.where(is_correct, labels[rows], -1)
      correct += tf.reduce_sum(
        tf.one_hot(classes, num_classes, dtype=tf.int64), 0
      )
      # Unlike `tf.minimum`, this keeps NaN on any device.
      losses = tf.where(losses > max_loss, max_loss, losses)
      return correct, loss + tf.reduce_sum(losses)

    return loops.fold_batches(
      add,
      (tf.zeros([num_classes], tf.int64), tf.constant(0.0)),
      size=tf.shape(images)[0],
      batch_size=self._batch_size,
    )

  def measure_clients(
    self,
    member: Callable[[tf.Tensor], Weights],
    num_clients: tf.Tensor,
    images: tf.Tensor,
    labels: tf.Tensor,
  ) -> Metrics:
    """Evaluates each client's own weights, which `member` returns."""
    results = tf.TensorArray(tf.float32, num_clients, element_shape=[2])

    def measure(
      client_id: tf.Tensor, results: tf.TensorArray
    ) -> tf.TensorArray:
      measured = self.measure(
        member(client_id), self.network.inference_logits, images, labels
      )
      return results.write(client_id, tf.stack(measured))

    results = loops.fold(measure, results, end=num_clients)
    return summarize_clients(*tf.unstack(results.stack(), axis=1))


def _judge(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """(whether each example of a batch is correct, its loss)."""
  return (
    tf.equal(tf.argmax(logits, -1, tf.int32), labels),
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits),
  )


def summarize_clients(accuracies: tf.Tensor, losses: tf.Tensor) -> Metrics:
  """Summarizes the accuracies of clients that have models of their own.

  Args:
    accuracies: float32 [clients], in [0, 1].
    losses: float32 [clients].

  Returns:
    float32 scalars. `accuracy` and `loss` are means over clients.
    `accuracy_deviation` is the standard deviation over all clients (divided by
    their number). `accuracy_worst_decile` is the mean of the lowest tenth of
    the accuracies, rounded up to whole clients.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.models import evaluate
    >>> accuracies, losses = (
    ...   tf.constant([0.5, 0.9, 1.0]),
    ...   tf.constant([2.0, 1.0, 0.0]),
    ... )
    >>> for name, value in evaluate.summarize_clients(
    ...   accuracies, losses
    ... ).items():
    ...   print(f'{name} {value:.2f}')
    accuracy 0.80
    loss 1.00
    accuracy_deviation 0.22
    accuracy_worst_decile 0.50
  """
  num_worst = (tf.shape(accuracies)[0] + 9) // 10
  return collections.OrderedDict(
    accuracy=tf.reduce_mean(accuracies),
    loss=tf.reduce_mean(losses),
    accuracy_deviation=tf.math.reduce_std(accuracies),
    accuracy_worst_decile=tf.reduce_mean(tf.sort(accuracies)[:num_worst]),
  )
