"""Compilation to a single client phase."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_task

from tff_fssl import runtime
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.rounds import process as process_lib

_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'


def _group_norm_model() -> tf.keras.Model:
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input(tiny_task.IMAGE_SHAPE),
      layers.Conv2D(4, 3, use_bias=False),
      layers.GroupNormalization(2),
      layers.ReLU(),
      layers.GlobalAveragePooling2D(),
      layers.Dense(tiny_task.NUM_CLASSES),
    ]
  )


@functools.cache
def _process(name='fl2'):
  return tiny_task.build(name, _SERVER, model=_group_norm_model)


# FedSwitch sends a sequence of a teacher or of none, and numbers.
@pytest.mark.slow
@pytest.mark.parametrize('name', ['fedswitch', 'fl2'])
def test_group_norm_compiles_and_gives_the_same_round(name):
  process = _process(name)
  form = process_lib.get_map_reduce_form(process)
  assert isinstance(form, tff.backends.mapreduce.MapReduceForm)
  # Loops are functions, not cycles of nodes, whose shapes TensorFlow infers in
  # an order that no seed fixes.
  work = tff.framework.serialize_computation(form.work).SerializeToString()
  assert b'While' in work
  assert b'NextIteration' not in work
  compiled = tff.backends.mapreduce.get_computation_for_map_reduce_form(form)
  state = process.next(process.initialize(), []).state
  cohort = [tiny_task.dataset(e) for e in tiny_task.cohort(_SERVER)]
  expected = process.next(state, cohort).state
  previous = tff.framework.get_context_stack().current
  # The form has secure sums, of nothing.
  tff.framework.set_default_context(
    runtime.build_context(runtime.Settings(simulate_secure_aggregation=True))
  )
  try:
    actual, _ = compiled(state, cohort)
  finally:
    tff.framework.set_default_context(previous)
  for a, b in zip(
    actual['global_model_weights']['trainable'],
    expected.global_model_weights.trainable,
    strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_moving_averages_compile():
  process = tiny_task.build(
    'fl2', _SERVER, batch_norm_statistics='moving_average'
  )
  assert process_lib.get_map_reduce_form(process) is not None


@pytest.mark.parametrize(
  'name',
  [
    pytest.param('robust', marks=pytest.mark.slow),
    'secure',
    pytest.param('compression', marks=pytest.mark.slow),
  ],
)
def test_aggregators_compile(name):
  process = tiny_task.build(
    'fl2',
    _SERVER,
    norm='none',
    hparams=(
      ('confidence_threshold', 0.34),
      ('learning_status_aggregation', True),
    ),
    aggregator=aggregator_hparams.AggregatorHparams(name),
  )
  form = process_lib.get_map_reduce_form(process)
  assert bool(form.securely_aggregates_tensors) == (name == 'secure')


_VARIANTS = (
  ('feddb', _CLIENTS, {'weights': 'last_mean'}),
  ('protofssl', _CLIENTS, {'helper_interval': 2}),
  ('protofssl', _CLIENTS, {'prototypes': 'global', 'support': 'global'}),
  ('proxyfl', _CLIENTS, {'tuning': 'gpt'}),
  ('proxyfl', _CLIENTS, {'tuning': 'one_step'}),
)


# docs/deploying.md says so.
@pytest.mark.slow
@pytest.mark.parametrize(
  'name, scenario, own',
  [*((*scenario, {}) for scenario in tiny_task.scenarios()), *_VARIANTS],
)
def test_every_algorithm_compiles_to_both_forms(name, scenario, own):
  own = tuple(own.items())
  process = tiny_task.build(name, scenario, norm='none', hparams=own)
  form = process_lib.get_map_reduce_form(process)
  assert isinstance(form, tff.backends.mapreduce.MapReduceForm)
  form = tff.backends.native.compile_to_mergeable_comp_form(process.next)
  assert isinstance(form, tff.framework.MergeableCompForm)
