"""The server's first model."""

import contexts
import numpy as np
import pytest
import tiny_plan
import tiny_task

from tff_fssl.algorithms import supervised
from tff_fssl.lazy import tf
from tff_fssl.rounds import server_training

_context = contexts.of_each_module()


def _first_model(norm='bn', labels=True, seed=0):
  plan = tiny_plan.build(
    supervised.Supervised(),
    norm,
    labels=tiny_task.examples(9, 7) if labels else None,
    seed=seed,
  )
  return server_training.build_initial_model(plan)()


@pytest.mark.parametrize('labels', [True, False])
def test_the_first_model_has_the_statistics_of_the_labelled_data(labels):
  model = _first_model(labels=labels)
  assert (model.statistics_count > 0) == labels
  mean, variance = model.non_trainable
  assert np.any(mean != 0) == np.any(variance != 1) == labels


def test_the_first_model_is_that_of_the_seed():
  kernels = [
    _first_model(norm='none', seed=seed).trainable[0] for seed in (1, 1, 2)
  ]
  np.testing.assert_array_equal(kernels[0], kernels[1])
  assert np.any(kernels[0] != kernels[2])


def test_labels_without_an_output_are_named():
  x, y = tiny_task.examples(9, 7)
  plan = tiny_plan.build(supervised.Supervised(), 'none', labels=(x, y + 1))
  with pytest.raises(
    tf.errors.InvalidArgumentError, match='labels of server_data_fn must be'
  ):
    server_training._read_data(plan)
