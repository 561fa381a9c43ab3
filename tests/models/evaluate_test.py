"""Evaluation of examples that do not fit into the memory at once."""

import numpy as np
import pytest
from sklearn import metrics as of_sklearn
import tiny_task

from tff_fssl import metrics
from tff_fssl.hparams import UsageError
from tff_fssl.models import adapter
from tff_fssl.models import evaluate


@pytest.mark.parametrize('norm', ['bn', 'none'])
def test_pieces_give_the_same_result(monkeypatch, tmp_path, norm):
  x, y = tiny_task.examples(50, seed=1)
  mapped = np.memmap(tmp_path / 'x', x.dtype, 'w+', shape=x.shape)
  mapped[:] = x

  def model_fn():
    return tiny_task.model_fn(norm)

  # Without batch norm statistics, those of each batch of 8 are used.
  weights = adapter.Network(model_fn, seed=0).initial_weights()
  sizes = []
  mean_over_pieces = evaluate.mean_over_pieces

  def count(of_piece, *args):
    def counted(x, y):
      sizes.append(len(x))
      return of_piece(x, y)

    return mean_over_pieces(counted, *args)

  def measure(bytes_at_once):
    sizes.clear()
    monkeypatch.setattr(evaluate, '_PIECE_BYTES', bytes_at_once)
    fn = evaluate.build_evaluate_fn(model_fn, tiny_task.VIEWS, batch_size=8)
    with monkeypatch.context() as patch:
      patch.setattr(evaluate, 'mean_over_pieces', count)
      result = fn(weights, mapped, y)
    return result

  whole = measure(2**28)
  assert max(sizes) == 50
  for most, expected in ((17 * x[0].nbytes, 16), (1, 8)):
    pieces = measure(most)
    assert max(sizes) == expected
    assert pieces.keys() == whole.keys()
    for name, value in whole.items():
      assert pieces[name] == pytest.approx(value, rel=1e-5)


def test_labels_without_an_output():
  x, y = tiny_task.examples(8, seed=1)
  model_fn = lambda: tiny_task.model_fn('none')
  weights = adapter.Network(model_fn, seed=0).initial_weights()
  fn = evaluate.build_evaluate_fn(model_fn, tiny_task.VIEWS)
  for labels in (y + tiny_task.NUM_CLASSES, y - 1 - y.max()):
    with pytest.raises(UsageError, match='labels go from .* the model has'):
      fn(weights, x, labels)


_FIGURES = tuple(metrics.FIGURES)


@pytest.mark.parametrize('figures', [_FIGURES, _FIGURES[:2]])
def test_figures_are_of_all_predictions_in_order(monkeypatch, figures):
  x, y = tiny_task.examples(50, seed=1)
  model_fn = lambda: tiny_task.model_fn('none')
  weights = adapter.Network(model_fn, seed=0).initial_weights()
  # Pieces of two batches each.
  monkeypatch.setattr(evaluate, '_PIECE_BYTES', 16 * x[0].nbytes)
  fn = evaluate.build_evaluate_fn(
    model_fn, tiny_task.VIEWS, batch_size=8, figures=figures
  )
  result = fn(weights, x, y)
  logits_fn = evaluate.build_logits_fn(model_fn, x.shape[1:])
  logits = logits_fn(
    (*weights, np.float32(0)), tiny_task.VIEWS.plain(x)
  ).numpy()
  expected = evaluate.score(figures, y, logits)
  assert list(result) == ['accuracy', 'loss', *figures]
  for name in figures:
    assert result[name] == pytest.approx(expected[name], abs=1e-6), name
  alone = evaluate.build_evaluate_fn(model_fn, tiny_task.VIEWS)(weights, x, y)
  assert alone['accuracy'] == pytest.approx(result['accuracy'])


@pytest.mark.parametrize('num_classes', [2, 4])
def test_figures_are_those_of_scikit_learn(num_classes):
  rng = np.random.default_rng(0)
  labels = np.minimum(rng.geometric(0.6, 200) - 1, num_classes - 1)
  logits = rng.normal(size=(200, num_classes)).astype(np.float32)
  logits[np.arange(200), labels] += 1
  probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  of_two = {'y_score': probs[:, 1]}
  of_more = {'y_score': probs, 'multi_class': 'ovr', 'average': 'macro'}
  found = evaluate.score(_FIGURES, labels, logits)
  classes = logits.argmax(1)
  assert list(found.values()) == pytest.approx(
    [
      of_sklearn.balanced_accuracy_score(labels, classes),
      of_sklearn.f1_score(labels, classes, average='macro'),
      of_sklearn.roc_auc_score(
        labels, **(of_two if num_classes == 2 else of_more)
      ),
    ]
  )


def test_figures_that_are_not_defined():
  labels, logits = np.array([0, 0, 1]), np.eye(3, dtype=np.float32)
  found = evaluate.score(_FIGURES, labels, logits)
  # Class 2 has no example: it counts for F1 alone, since it is predicted.
  assert found['balanced_accuracy'] == 0.25
  assert found['macro_f1'] == pytest.approx(2 / 9)
  assert np.isnan(found['auroc'])
  logits[0, 0] = np.nan
  assert np.isnan(evaluate.score(['auroc'], np.arange(3), logits)['auroc'])
