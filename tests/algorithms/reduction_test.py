"""Algorithms that become simpler ones where their extras are switched off."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tff_model
import tiny_local
import tiny_rounds
import tiny_task

from tff_fssl.aggregators import guarded
from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import fl2
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.interface import base
from tff_fssl.models import adapter

_AT_SERVER, _AT_CLIENTS = 'labels_at_server', 'labels_at_clients'


def _final(process, cohorts):
  state = process.initialize()
  for elements in cohorts:
    state = process.next(state, [tiny_task.dataset(e) for e in elements]).state
  return state


def _differs(first, second):
  return any(
    not np.allclose(a, b, atol=1e-6) for a, b in zip(first, second, strict=True)
  )


def _train(**own):
  """What a client of (FL)^2 sends."""
  element = tiny_task.client(0)
  # Some pseudo-labels are wrong, for `consistency_on='correct'`.
  element['unlabeled']['y'] = np.roll(element['unlabeled']['y'], 1)
  # The threshold is low, so that the tiny task has confident examples.
  return tiny_local.train(
    'fl2',
    _AT_SERVER,
    element,
    training.LoopConfig(3, 5, 5, optimizer.Sgd()),
    **{'confidence_threshold': 0.34, **own},
  )[1].update


def test_supervised_is_tffs_fedavg():
  """Against `tff.learning`, whole-batch steps, weighted by examples."""
  process = tiny_task.build(
    'supervised',
    _AT_CLIENTS,
    norm='none',
    plain=True,
    client_weighting='examples',
    client_batch_size=100,
    max_gradient_norm=0.0,
    weight_decay=0.0,
    nesterov=False,
    momentum=0.9,
    client_epochs=3,
    server_optimizer_momentum=0.5,
  )
  elements = [
    tiny_task.client(i, labeled=4 + 3 * i, unlabeled=2) for i in range(3)
  ]
  ours = _final(process, [elements] * 3)

  spec = (
    tf.TensorSpec([None, *tiny_task.IMAGE_SHAPE], tf.float32),
    tf.TensorSpec([None], tf.int32),
  )

  def tff_model_fn():
    return tff_model.KerasModel(tiny_task.model_fn('none'), spec)

  theirs = tff.learning.algorithms.build_weighted_fed_avg(
    tff_model_fn,
    client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.03, 0.9),
    server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0, 0.5),
    client_weighting=tff.learning.ClientWeighting.NUM_EXAMPLES,
    loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
  )
  state = theirs.set_model_weights(
    theirs.initialize(),
    _as_lists(process.get_model_weights(process.initialize())),
  )
  batches = [
    tf.data.Dataset.from_tensors(
      (
        e['labeled']['x'].astype(np.float32) / 255.0,
        e['labeled']['y'],
      )
    ).repeat(3)
    for e in elements
  ]
  for _ in range(3):
    state = theirs.next(state, batches).state
  for a, b in zip(
    process.get_model_weights(ours).trainable,
    theirs.get_model_weights(state).trainable,
    strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=1e-5)


def _as_lists(weights):
  return tff.learning.models.ModelWeights(
    list(weights.trainable), list(weights.non_trainable)
  )


def test_fl2_with_rho_0_has_no_consistency():
  none, zero, some = (
    _train(**own)
    for own in ({'consistency': 'none'}, {'rho': 0.0}, {'rho': 0.5})
  )
  # Differences of rounding alone: L_cs at W + 0 is 0 up to it.
  tiny_rounds.assert_same(none, zero, atol=1e-6)
  assert _differs(none, some)


def test_fl2_with_equal_learning_status_is_the_plain_mean():
  def final(cohort, **own):
    own = tuple({'confidence_threshold': 0.34, **own}.items())
    process = tiny_task.build('fl2', norm='none', hparams=own)
    return tiny_task.flat(_final(process, [[], cohort]))

  uniform = {'learning_status_aggregation': False}
  twins = [tiny_task.client(0) for _ in range(3)]
  tiny_rounds.assert_same(final(twins), final(twins, **uniform), atol=1e-6)
  others = tiny_task.cohort(_AT_SERVER)
  assert _differs(final(others), final(others, **uniform))


# The others are in the reference of fl2_test.py.
@pytest.mark.parametrize(
  'base, change',
  [
    ({}, {'adaptive_threshold': False}),
    ({'confidence_threshold': 0.6}, {'consistency_on': 'all'}),
    ({}, {'consistency_on': 'correct'}),
    ({}, {'pseudo_labels': 'per_step'}),
    ({}, {'confidence_threshold': 0.45}),
  ],
)
def test_hyper_parameters_of_fl2_do_something(base, change):
  assert _differs(_train(**base), _train(**{**base, **change}))


def _batch(per_example=None, values=None):
  x, y = tiny_task.examples(8, 3)
  images = tf.cast(x, tf.float32) / 255.0
  examples = base.BatchExamples(
    {'weak': images, 'strong': images + 0.1},
    tf.constant(y),
    tf.ones([8]),
    per_example or {},
  )
  now = base.StepTime(*tf.constant([1, 0, 1]))
  return base.Batch(
    {base.UNLABELED: examples}, values or {}, now, tf.constant([0, 0])
  )


def test_fl2_with_all_kept_and_none_confident_is_fixmatchs_step():
  """E14: ... -> FixMatch step with threshold 0."""
  network = adapter.Network(tiny_task.model_fn, seed=1)
  networks = base.Networks(network, {})
  ours = fl2.Fl2(pseudo_labels='per_step', confidence_threshold=1.0).step(
    networks, _batch(values={'limits': tf.zeros([3])})
  )
  theirs = fixmatch.FixMatch(confidence_threshold=0.0).step(networks, _batch())
  for a, b in zip(ours.gradients, theirs.gradients, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-7)


def test_batch_without_a_confident_example_gives_just_l_a():
  network = adapter.Network(tiny_task.model_fn, seed=1)
  labels = tf.constant([0, 1, 2, 0, 1, 2, 0, 1])
  batch = _batch(
    per_example={'labels': labels, 'confident': tf.zeros([8], tf.bool)}
  )
  with tf.GradientTape() as tape:
    logits = network.logits(batch.unlabeled.views['strong'], training=True)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
  expected = tape.gradient(loss, network.trainable_variables)
  result = fl2.Fl2().step(base.Networks(network, {}), batch)
  for a, b in zip(result.gradients, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-7)
  assert float(result.metrics['loss_consistency'][0]) == 0.0


@pytest.mark.parametrize('consistency', ['sacr', 'sam', 'none'])
def test_fillers_count_in_no_term_of_fl2(consistency):
  network = adapter.Network(tiny_task.model_fn, seed=1)
  batch = _batch(
    per_example={
      'labels': tf.zeros([8], tf.int32),
      'confident': tf.ones([8], tf.bool),
    }
  )
  filler = batch.unlabeled._replace(weights=tf.zeros([8]))
  batch = batch._replace(streams={base.UNLABELED: filler})
  algorithm = fl2.Fl2(consistency=consistency)
  metrics = algorithm.step(base.Networks(network, {}), batch).metrics
  assert metrics and all(m == (0.0, 0.0) for m in metrics.values())


@pytest.mark.parametrize('consistency', ['sacr', 'sam', 'none'])
def test_gradient_norms_are_those_of_the_terms(consistency):
  """w_a g_a and w_cs g_cs, whose sum is the step's gradient."""

  def run(**changed):
    network = adapter.Network(tiny_task.model_fn, seed=1)
    labels = tf.constant([0, 1, 2, 0, 1, 2, 0, 1])
    batch = _batch(
      per_example={'labels': labels, 'confident': tf.ones([8], tf.bool)}
    )
    algorithm = fl2.Fl2(
      consistency=consistency,
      pseudo_label_loss_weight=0.5,
      consistency_weight=3.0,
      diagnostics=True,
    )
    algorithm = dataclasses.replace(algorithm, **changed)
    return algorithm.step(base.Networks(network, {}), batch)

  result = run()
  alone = run(consistency='none')
  difference = [
    a - b for a, b in zip(result.gradients, alone.gradients, strict=True)
  ]
  norms = {
    'gradient_norm_pseudo_label': tf.linalg.global_norm(alone.gradients),
  }
  if consistency != 'none':
    other = {'sacr': 'consistency', 'sam': 'perturbed'}[consistency]
    norms[f'gradient_norm_{other}'] = tf.linalg.global_norm(difference)
  for name, norm in norms.items():
    np.testing.assert_allclose(result.metrics[name], [norm, 1.0], rtol=1e-4)
    assert norm > 0
  assert not any('norm' in n for n in run(diagnostics=False).metrics)


def test_e3_aggregation_by_learning_status():
  """beta_k = (1 - tau_k) / sum: worked example E3."""
  value_type = tff.to_type([(np.float32, [4])])
  process = guarded.GuardedFactory(tff.aggregators.MeanFactory()).create(
    value_type, tff.TensorType(np.float32)
  )
  tau = np.array([0.30, 0.55, 0.90, 0.95], np.float32)
  output = process.next(
    process.initialize(),
    [[row] for row in np.eye(4, dtype=np.float32)],
    list(1 - tau),
  )
  np.testing.assert_allclose(
    output.result[0], [0.538462, 0.346154, 0.076923, 0.038462], atol=1e-6
  )
  assert output.measurements['num_weighted_clients'] == 4


def test_a_round_that_weighs_nothing_is_marked():
  process = guarded.GuardedFactory(tff.aggregators.MeanFactory()).create(
    tff.to_type([(np.float32, [2])]), tff.TensorType(np.float32)
  )
  output = process.next(
    process.initialize(), [[np.ones([2], np.float32)]] * 2, [0.0, 0.0]
  )
  assert np.all(np.isnan(output.result[0]))
  assert output.measurements['num_weighted_clients'] == 0
