"""Inspects a model, for the report and for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import TypeAlias

import numpy as np

from tff_fssl.data import augment
from tff_fssl.data import inspection
from tff_fssl.data import names as data_names
from tff_fssl.data import seeds
from tff_fssl.lazy import tf
from tff_fssl.models import evaluate
from tff_fssl.models import server_model
from tff_fssl.program import experiment
from tff_fssl.program import predictions
from tff_fssl.program import run_data

_BATCH_SIZE = 256
# By so much, at least, strong noise is larger than weak noise.
_STRONGER = 1.05
# Pseudo-labels are looked at for so many unlabelled examples.
_MAX_PSEUDO_LABELS = 2_000
_NUM_SHOWN = 6
# Of a picture of views: examples, and the least width of each in pixels.
_NUM_VIEWED, _LEAST_WIDTH, _BORDER = 8, 64, 4
# Confidences are looked at for so many test examples.
_MAX_CONFIDENCES = 1_000

View: TypeAlias = 'Callable[[tf.Tensor, int], tf.Tensor]'
_Predict = Callable[[np.ndarray, View], np.ndarray]


def look_over(
  name: str,
  task: experiment.Task,
  model: server_model.ServerModel,
  prediction: server_model.Prediction | None,
  changed: Sequence[str] = (),
) -> predictions.ModelFigures:
  """Inspects a model and its training data.

  Only a simulation can read examples of clients. Under `--aggregator=dp` and
  `secure`, they are not read.

  Args:
    name: The model's name.
    task: Its data and network.
    model: The model, of arrays.
    prediction: The way of predicting. None: by its network alone.
    changed: Parts of the data that are not those of the run.

  Returns:
    The figures.
  """
  prediction = prediction or server_model.Prediction()
  doubts = _doubts_of_data(task)
  if changed:
    doubts.append(f'data: the {" and ".join(changed)} are not those of the run')
  figures = predictions.ModelFigures(name, task.data.class_names, doubts=doubts)
  if prediction.member is not None:
    return figures._replace(
      about_clients='each client has a model of its own: train.csv and eval.csv'
      ' have the spread of their accuracies'
    )
  if not len(task.data.test):
    return figures._replace(about_clients='there are no test examples')
  predict = functools.partial(Predictor(task, prediction), model)
  test = predictions.Predictions(
    task.data.test.y, predict(task.data.test.x, _plain(task.views))
  )
  if not np.isfinite(test.probs).all():
    doubts.append('predictions for test examples are not finite')
    return figures._replace(about_clients='the model does not predict numbers')
  figures = figures._replace(test=test)
  class_names = task.data.class_names
  doubts.append(_doubt(test, 'predictions for test examples', class_names))
  doubts.append(_equal_views(task))
  if task.config.is_private:
    figures = figures._replace(
      about_clients='with --aggregator=dp or secure, nothing of single clients'
      ' is shown'
    )
  else:
    figures = _add_clients(figures, task, predict)
    figures = _add_pseudo_labels(figures, task, predict)
    if figures.pseudo is not None:
      doubts.append(
        _doubt(figures.pseudo, 'pseudo-labels of the last model', class_names)
      )
  return figures._replace(doubts=[doubt for doubt in doubts if doubt])


def _doubt(
  found: predictions.Predictions, what: str, class_names: Sequence[str]
) -> str:
  return predictions.misfit(found, what, class_names) or predictions.collapse(
    found, what, class_names
  )


def _equal_views(task: experiment.Task) -> str:
  """Says if a method uses strong views that are none, else returns ''."""
  config = task.config
  streams = config.entry.configure(config.algorithm, config.round).streams()
  kinds = {kind for s in streams.values() for kind in s.views.values()}
  train = run_data.measured_examples(config, task.data, task.partition)
  if 'strong' not in kinds or not len(train):
    return ''
  x = tf.constant(train.x[:_BATCH_SIZE])
  # Of equal draws, so that equal functions give equal views.
  pair = tf.constant(seeds.seed_pair(config.run.seed, seeds.Purpose.REPORT, -4))
  plain, weak, strong = (
    view.numpy()
    for view in (
      task.views.plain(x),
      task.views.weak(x, pair),
      task.views.strong(x, pair),
    )
  )
  if np.array_equal(weak, strong):
    what = 'equal weak ones'
  # Noise is drawn for each, but has a size.
  elif train.kind == data_names.VECTORS and np.std(
    strong - plain
  ) <= _STRONGER * np.std(weak - plain):
    what = 'are no farther from the examples than weak ones'
  else:
    return ''
  return (
    f'strong views {what}: --algorithm={config.run.algorithm} learns little'
    ' from predictions that agree anyway'
  )


class Predictor:
  """Probabilities by models of a task, a batch at a time."""

  def __init__(
    self, task: experiment.Task, prediction: server_model.Prediction
  ):
    """Sets the prediction, which is traced at the first use.

    Args:
      task: Data and network.
      prediction: How models predict, with one model for all clients.
    """
    self._logits_fn = evaluate.build_logits_fn(
      task.model_fn,
      augment.input_shape(
        task.views,
        tf.TensorSpec(
          [None, *task.data.example_shape], task.data.train.x.dtype
        ),
      ),
      prediction=prediction,
    )

  def __call__(
    self,
    model: server_model.ServerModel,
    x: np.ndarray,
    view: View,
  ) -> np.ndarray:
    """Predicts.

    Args:
      model: The model, of arrays.
      x: Examples [N, ...] as they are stored.
      view: Gets a batch, and the number of its first example.

    Returns:
      float32 [N, C].
    """
    parts = [
      tf.nn.softmax(
        self._logits_fn(model, view(tf.constant(x[i : i + _BATCH_SIZE]), i))
      ).numpy()
      for i in range(0, len(x), _BATCH_SIZE)
    ]
    return np.concatenate(parts)


def _plain(views: augment.Views) -> View:
  return lambda batch, _: views.plain(batch)


def _doubts_of_data(task: experiment.Task) -> list[str]:
  """Finds duplicates, and test examples among the training examples.

  Examples of protected clients are skipped.
  """
  train, test = task.data.train, task.data.test
  numbers = np.arange(len(train))
  if task.config.is_private:
    train = run_data.measured_examples(task.config, task.data, task.partition)
    numbers = run_data.public_examples(task.partition)

  def called(i: int) -> str:
    return f'train {numbers[i]}' if i < len(train) else f'test {i - len(train)}'

  problems = inspection.duplicate_problems(
    (train.x, test.x), (train.y, test.y), called
  )
  return [f'data: {problem.text}' for problem in problems]


def _add_clients(
  figures: predictions.ModelFigures,
  task: experiment.Task,
  predict: _Predict,
) -> predictions.ModelFigures:
  """Adds the accuracy of each client's examples."""
  held, train = task.partition.client_test, task.data.train
  holders = [indices for indices in held if len(indices)]
  if holders:
    probs = predict(train.x[np.concatenate(holders)], _plain(task.views))
    of_client = np.repeat(np.arange(len(holders)), list(map(len, holders)))
    right = probs.argmax(1) == train.y[np.concatenate(holders)]
    sums = np.bincount(of_client, right, len(holders))
    return figures._replace(
      clients=sums / np.bincount(of_client),
      about_clients='on the examples that the client holds out',
    )
  test = figures.test
  counts = task.partition.class_counts
  # Clients without known examples have no expected accuracy.
  counts = counts[counts.sum(1) > 0]
  if test is None or not len(counts):
    return figures
  recall = predictions.class_figures(test).recall
  # A class without test examples has no recall.
  known = np.isfinite(recall)
  counts = counts[counts[:, known].sum(1) > 0][:, known]
  return figures._replace(
    clients=counts @ recall[known] / counts.sum(1),
    about_clients='expected from its classes: the accuracies of classes on test'
    ' examples, weighted as the client holds the classes'
    ' (--client_test_fraction holds out examples for a measurement)',
  )


def _add_pseudo_labels(
  figures: predictions.ModelFigures,
  task: experiment.Task,
  predict: _Predict,
) -> predictions.ModelFigures:
  """Adds pseudo-labels of clients' examples, and pictures of some."""
  train, seed = task.data.train, task.config.run.seed
  indices = np.concatenate(
    [np.zeros([0], np.int64), *task.partition.client_unlabeled]
  )
  indices = indices[train.y[indices] != data_names.UNKNOWN_LABEL]
  if not len(indices):
    return figures
  generator = seeds.generator(seed, seeds.Purpose.REPORT)
  indices = np.sort(generator.permutation(indices)[:_MAX_PSEUDO_LABELS])

  def weak(batch: tf.Tensor, start: int) -> tf.Tensor:
    pair = seeds.seed_pair(seed, seeds.Purpose.REPORT, start)
    return task.views.weak(batch, tf.constant(pair))

  x, labels = train.x[indices], train.y[indices]
  pseudo = predictions.Predictions(labels, predict(x, weak))
  figures = figures._replace(pseudo=pseudo)
  if train.kind != data_names.IMAGES:
    return figures
  # Stable, so that the same report shows the same examples.
  order = np.argsort(-pseudo.probs.max(1), kind='stable')
  is_right = pseudo.classes[order] == labels[order]
  shown = np.concatenate(
    [order[is_right][:_NUM_SHOWN], order[~is_right][:_NUM_SHOWN]]
  )
  pair = tf.constant(seeds.seed_pair(seed, seeds.Purpose.REPORT, -1))
  # The weak view that gave the pseudo-label, and a strong one.
  starts = shown // _BATCH_SIZE * _BATCH_SIZE
  weak_views = [
    weak(tf.constant(x[s : s + _BATCH_SIZE]), s)[i - s]
    for i, s in zip(shown, starts)
  ]
  strong_views = task.views.strong(tf.constant(x[shown]), pair)
  examples = [
    predictions.ShownExample(
      task.data.class_names[labels[i]],
      task.data.class_names[pseudo.classes[i]],
      float(pseudo.probs[i].max()),
      _pixels(weak_view, task),
      _pixels(strong_view, task),
    )
    for i, weak_view, strong_view in zip(shown, weak_views, strong_views)
  ]
  num_right = min(int(is_right.sum()), _NUM_SHOWN)
  return figures._replace(
    right=examples[:num_right], wrong=examples[num_right:]
  )


def confidences(
  task: experiment.Task,
  predictor: Predictor,
  model: server_model.ServerModel,
) -> np.ndarray:
  """Returns the probability of each predicted class.

  Args:
    task: Data and network.
    predictor: Predicts for the task.
    model: The model, of arrays.

  Returns:
    float32 [N], for up to 1,000 test examples, evenly spread over all.
  """
  x = task.data.test.x
  step = -(-len(x) // _MAX_CONFIDENCES)
  return predictor(model, x[::step], _plain(task.views)).max(1)


def sample_views(task: experiment.Task) -> np.ndarray | None:
  """Draws views of a few training images.

  Under `--aggregator=dp` and `secure`, images of clients are not shown.

  Args:
    task: The data.

  Returns:
    uint8 [H, W, 1 or 3], each column an image: as it is, a weak and a strong
    view. None if there is none to be shown.
  """
  partition, seed = task.partition, task.config.run.seed
  held = [partition.server_labeled]
  if not task.config.is_private:
    held = [*partition.client_unlabeled, *partition.client_labeled, *held]
  indices = np.concatenate(held).astype(np.int64)[:_NUM_VIEWED]
  if task.data.train.kind != data_names.IMAGES or not len(indices):
    return None
  x = tf.constant(task.data.train.x[indices])
  weak_pair, strong_pair = (
    tf.constant(seeds.seed_pair(seed, seeds.Purpose.REPORT, number))
    for number in (-2, -3)
  )
  rows = [
    x.numpy(),
    _pixels(task.views.weak(x, weak_pair), task),
    _pixels(task.views.strong(x, strong_pair), task),
  ]
  times = -(-_LEAST_WIDTH // x.shape[2])
  large = np.array(rows).repeat(times, 2).repeat(times, 3)
  border = [(0, 0)] * 2 + [(_BORDER, _BORDER)] * 2 + [(0, 0)]
  large = np.pad(large, border, constant_values=255)
  return np.concatenate([np.concatenate([*row], 1) for row in large])


def _pixels(view: tf.Tensor, task: experiment.Task) -> np.ndarray:
  """Returns uint8 [H, W, C] of a normalized image."""
  # Back to pixels: views are normalized.
  std, mean = np.asarray(task.data.std), np.asarray(task.data.mean)
  values = view.numpy() * std + mean
  return np.rint(255 * values.clip(0, 1)).astype(np.uint8)
