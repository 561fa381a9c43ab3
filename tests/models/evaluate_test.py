"""Evaluation of examples that do not fit into the memory at once."""

import numpy as np
import pytest
import tiny_task

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
