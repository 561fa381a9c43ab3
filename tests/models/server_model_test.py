"""The server's model and the rules by which it predicts."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights


def _weights(value):
  return Weights((tf.fill([2], value),), (), tf.constant(value))


def _model():
  return server_model.ServerModel(
    *_weights(1.0), {'teacher': _weights(2.0)}, {'mode': tf.constant(0.0)}
  )


class _Network:
  """Returns the count of its weights as logits."""

  def __init__(self, weights):
    self._count = weights.statistics_count

  def inference_logits(self, images):
    return images * self._count


def test_replacements_keep_the_rest():
  model = _model()
  other = model.replace_weights(_weights(5.0))
  assert float(other.weights.statistics_count) == 5.0
  assert other.sets is model.sets and other.control is model.control
  more = model.replace_sets(teacher=_weights(3.0), memory=tf.ones([1]))
  assert list(more.sets) == ['teacher', 'memory']
  assert float(more.sets['teacher'].statistics_count) == 3.0
  assert float(model.sets['teacher'].statistics_count) == 2.0


def test_prediction_by_a_set():
  model, images = _model(), tf.ones([1, 1])
  own = server_model.Prediction()
  teacher = server_model.set_prediction('teacher')
  assert own.weights(model) == model.weights
  assert teacher.weights(model) is model.sets['teacher']
  for way, expected in ((own, 1.0), (teacher, 2.0)):
    np.testing.assert_array_equal(
      way.logits(_Network(way.weights(model)), model, images), [[expected]]
    )
  with pytest.raises(hparams.UsageError, match="no such set.*mean 'teacher'"):
    server_model.set_prediction('techer').weights(model)
