"""The batch loop: what it feeds, how it ends, and what it leaves alone."""

import functools

import handmade
import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.algorithms import registry
from tff_fssl.algorithms import supervised
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import adapter


def _plain(x, seed=None):
  del seed
  return tf.cast(x, tf.float32)


_VIEWS = augment.Views(_plain, _plain, _plain)
_SEED = tf.constant([3, 4])


def _scalar_model() -> tf.keras.Model:
  """One weight: logits w * x for two classes from x in R^1."""
  return tf.keras.Sequential(
    [tf.keras.Input([1]), tf.keras.layers.Dense(2, use_bias=False)]
  )


def _examples(values, labels=None):
  x = np.array(values, np.float32).reshape(-1, 1)
  y = np.array([-1] * len(values) if labels is None else labels, np.int32)
  return base.Examples(tf.constant(x), tf.constant(y))


_NONE = _examples([])
_UNLABELED = {base.UNLABELED: handmade.stream()}
_LABELED = {base.LABELED: handmade.stream(labeled=True)}
_SUPERVISED = supervised.Supervised(
  round=round_hparams.RoundHparams(scenario='labels_at_clients')
)


def _weak(batch):
  return batch.unlabeled.views['weak']


def _algorithm(step, streams=_UNLABELED, **methods):
  return handmade.algorithm(step=step, streams=lambda: streams, **methods)


def _recorder(labeled=False, unlabeled=True):
  """An algorithm that adds up what it sees, and steps by gradient 1."""

  def step(networks, batch):
    metrics = {}
    if unlabeled:
      total = tf.reduce_sum(_weak(batch)[:, 0])
      metrics['sum'] = base.Mean.ratio(total, 1)
      metrics['square'] = base.Mean.ratio(tf.square(total), 1)
    if labeled:
      part = batch.labeled
      total = tf.reduce_sum(part.views['weak'][:, 0] * part.weights)
      metrics['labeled_sum'] = base.Mean.ratio(total, 1)
    return base.StepResult(handmade.ones(networks), metrics)

  streams = {
    **(_UNLABELED if unlabeled else {}),
    **(_LABELED if labeled else {}),
  }
  return _algorithm(step, streams)


def _run(algorithm, labeled=_NONE, unlabeled=_NONE, *, sgd=None, **kwargs):
  config = {'num_epochs': 2, 'batch_size': 4, 'labeled_batch_size': 3}
  enabled = kwargs.pop('enabled', True)
  seed = kwargs.pop('seed', _SEED)
  model_fn = kwargs.pop('model_fn', _scalar_model)
  config.update(kwargs)
  network = adapter.Network(model_fn, seed=0)
  local = training.LocalTraining(
    network,
    algorithm,
    _VIEWS,
    training.LoopConfig(optimizer=sgd or optimizer.Sgd(), **config),
  )
  weights = network.initial_weights()
  run = tf.function(
    lambda: local.run(
      weights,
      labeled,
      unlabeled,
      learning_rate=tf.constant(0.1),
      seed=seed,
      enabled=enabled,
    ),
    autograph=False,
  )
  return run()


def test_every_example_once_an_epoch_and_a_ragged_last_batch():
  values = [2.0**i for i in range(10)]
  result = _run(_recorder(), unlabeled=_examples(values))
  total, steps = (float(v) for v in result.metrics['sum'])
  assert total == 2 * sum(values)
  assert steps == 6  # 4 + 4 + 2, twice.
  assert float(result.num_examples) == 20
  np.testing.assert_allclose(result.update[0], np.full([1, 2], 0.6), rtol=1e-5)


def test_order_is_a_function_of_the_seed():
  values = _examples([2.0**i for i in range(10)])
  squares = [
    float(_run(_recorder(), unlabeled=values, seed=seed).metrics['square'][0])
    for seed in (tf.constant([1, 1]), tf.constant([1, 1]), tf.constant([1, 2]))
  ]
  assert squares[0] == squares[1] != squares[2]


def test_empty_client():
  result = _run(_recorder(labeled=True))
  assert float(result.num_examples) == 0
  np.testing.assert_array_equal(result.update[0], np.zeros([1, 2]))
  assert bool(result.is_finite)


def test_disabled():
  result = _run(_recorder(), unlabeled=_examples([1.0]), enabled=False)
  assert float(result.metrics['sum'][1]) == 0


def test_labels_cycle_beside_the_longer_stream():
  result = _run(
    _recorder(labeled=True),
    _examples([1.0, 2.0], [0, 1]),
    _examples([1.0] * 12),
  )
  assert float(result.metrics['sum'][1]) == 6
  assert float(result.metrics['labeled_sum'][0]) == 6 * 3.0
  assert float(result.num_examples) == 6 * 2 + 24


def test_labels_alone_where_nothing_is_unlabelled():
  result = _run(_recorder(labeled=True), _examples([1.0, 2.0], [0, 1]))
  assert float(result.metrics['labeled_sum'][0]) == 2 * 3.0
  assert float(result.num_examples) == 4


def test_only_selected_examples_are_trained_on():
  def prepare(client):
    return base.Prepared(
      tf.constant([1, 3]), per_example={'double': 2 * client.unlabeled.x[:, 0]}
    )

  seen = []

  def step(networks, batch):
    double = batch.unlabeled.per_example['double']
    seen.append(double.shape)
    total = tf.reduce_sum(double - _weak(batch)[:, 0])
    return base.StepResult(
      handmade.zeros(networks), {'sum': base.Mean.ratio(total, 1)}
    )

  algorithm = _algorithm(step, prepare=prepare)
  result = _run(algorithm, unlabeled=_examples([1.0, 10.0, 100.0, 1000.0]))
  assert float(result.metrics['sum'][0]) == 2 * 1010.0


def test_non_finite_update_is_zeroed():
  def step(networks, batch):
    del batch
    return base.StepResult(
      [tf.fill(v.shape, np.nan) for v in networks.model.trainable_variables], {}
    )

  result = _run(_algorithm(step), unlabeled=_examples([1.0]))
  assert not bool(result.is_finite)
  np.testing.assert_array_equal(result.update[0], np.zeros([1, 2]))


def _counting(name='count'):
  """An algorithm whose steps count, and whose count is the client's weight."""

  def step(networks, batch):
    count = batch.values['count'] + 1
    ratio = base.Mean.ratio(tf.cast(batch.values['count'], tf.float32), 1)
    return base.StepResult(
      handmade.zeros(networks), {'before': ratio}, values={name: count}
    )

  def finish(client, metrics):
    del metrics
    weight = tf.cast(client.values['count'], tf.float32)
    return base.ClientOutput({'kept': client.values['kept']}, weight=weight)

  start = {'count': tf.constant(5), 'kept': tf.constant([1.0, 2.0])}
  return _algorithm(
    step, prepare=lambda client: base.Prepared(values=start), finish=finish
  )


def test_steps_carry_values_to_finish():
  result = _run(_counting(), unlabeled=_examples([1.0] * 9))
  # Two epochs of three batches.
  assert result.metrics['before'].total == 5 + 6 + 7 + 8 + 9 + 10
  assert result.weight == 11
  np.testing.assert_array_equal(result.uploads['kept'], [1, 2])


def test_values_of_a_client_without_steps_are_the_first_ones():
  assert _run(_counting(), enabled=False).weight == 5


def test_a_step_replaces_only_what_prepare_declares():
  with pytest.raises(ValueError, match="values='cuont'.*count"):
    _run(_counting('cuont'), unlabeled=_examples([1.0]))


def test_a_step_sets_its_rates_and_trains_a_network_within_itself():
  network, other = (adapter.Network(_scalar_model, seed=0) for _ in range(2))

  def step(networks, batch):
    (weight,) = networks['other'].trainable_variables
    before = tf.reduce_sum(weight.read_value())
    factor = tf.cast(batch.time.step + 1, tf.float32)
    networks.descend('other', [tf.ones_like(weight)], factor)
    fall = before - tf.reduce_sum(weight.read_value())
    networks.descend(base.MODEL, handmade.ones(networks), 10.0 * factor)
    return base.StepResult(None, {'fall': base.Mean.ratio(fall, 1)})

  declared = {'other': base.AuxiliaryNetwork(trained=True)}
  local = training.LocalTraining(
    network,
    _algorithm(step, networks=lambda: declared),
    _VIEWS,
    training.LoopConfig(2, 4, 3, optimizer.Sgd()),
    {'other': other},
  )
  weights = network.initial_weights()
  result = tf.function(
    lambda: local.run(
      weights,
      _NONE,
      _examples([1.0] * 4),
      learning_rate=tf.constant(0.1),
      seed=_SEED,
    )
  )()
  # Two weights; steps of 0.1 and 0.2, those of the model of 1 and 2.
  np.testing.assert_allclose(result.metrics['fall'], [0.6, 2.0], rtol=1e-5)
  np.testing.assert_allclose(result.update[0], [[3.0, 3.0]], rtol=1e-5)
  np.testing.assert_allclose(
    weights.trainable[0] - other.trainable_variables[0], [[0.3] * 2], rtol=1e-5
  )
  assert result.auxiliary == {}


def test_momentum_starts_at_zero_each_time():
  network = adapter.Network(_scalar_model, seed=0)
  local = training.LocalTraining(
    network,
    _recorder(),
    _VIEWS,
    training.LoopConfig(3, 4, 3, optimizer.Sgd(momentum=0.9)),
  )
  weights = network.initial_weights()
  run = tf.function(
    lambda: local.run(
      weights,
      _NONE,
      _examples([1.0] * 9),
      learning_rate=tf.constant(0.1),
      seed=_SEED,
    )
  )
  first, second = run().update[0], run().update[0]
  np.testing.assert_array_equal(first, second)


def test_proximal_term_pulls_back():
  free = _run(_recorder(), unlabeled=_examples([1.0] * 8))
  pulled = _run(
    _recorder(), unlabeled=_examples([1.0] * 8), proximal_strength=1.0
  )
  # Steps of 0.1 (1 + mu (w - w0)): 0.1 (1 + 0.9 + 0.9^2 + 0.9^3).
  np.testing.assert_allclose(free.update[0], np.full([1, 2], 0.4), rtol=1e-5)
  np.testing.assert_allclose(
    pulled.update[0], np.full([1, 2], 0.3439), rtol=1e-5
  )


def _dropout_algorithm():
  """Adds up what dropout makes of ones; leaves the weights as they are."""

  def step(networks, batch):
    ones = tf.ones_like(_weak(batch))
    logits = networks.model.logits(ones, training=True)
    total = tf.reduce_sum(logits)
    metrics = {
      'sum': base.Mean.ratio(total, 1),
      'square': base.Mean.ratio(tf.square(total), 1),
    }
    return base.StepResult(handmade.zeros(networks), metrics)

  return _algorithm(step)


def _dropout_model() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([1]),
      tf.keras.layers.Dense(64, kernel_initializer='ones'),
      tf.keras.layers.Dropout(0.5),
      tf.keras.layers.Dense(2, kernel_initializer='ones'),
    ]
  )


def test_dropout_is_a_function_of_seed_and_step():
  def totals(seed, **kwargs):
    result = _run(
      _dropout_algorithm(),
      unlabeled=_examples([1.0] * 8),
      model_fn=_dropout_model,
      seed=tf.constant(seed),
      **kwargs,
    )
    return [float(result.metrics[name][0]) for name in ('sum', 'square')]

  total, square = totals([3, 4])
  assert [total, square] == totals([3, 4])
  assert total != totals([3, 5])[0]
  assert total != totals([2, 4])[0]
  # Four steps whose totals were all one would make these equal.
  assert abs(4 * square - total**2) > 1.0
  compiled, _ = totals([3, 4], jit_compile=True)
  assert compiled == totals([3, 4], jit_compile=True)[0]


def _regularized_model() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([1]),
      tf.keras.layers.Dense(3, kernel_regularizer='l1', use_bias=False),
      tf.keras.layers.Dense(
        2,
        bias_regularizer='l2',
        kernel_regularizer=tf.keras.regularizers.L1L2(0.01, 0.01),
      ),
    ]
  )


def test_regularizers_are_part_of_the_loss():
  examples = _examples([0.5, -1.0, 2.0], [0, 1, 1])
  kwargs = {'labeled': examples, 'model_fn': _regularized_model}
  result = _run(_SUPERVISED, num_epochs=1, **kwargs)
  network = adapter.Network(_regularized_model, seed=0)
  # All that Keras has for it, in one step.
  with tf.GradientTape() as tape:
    logits = network.logits(examples.x, training=True)
    loss = tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(examples.y, logits)
    )
    penalty = tf.add_n(network.model.losses)
    total = loss + penalty
  expected = tape.gradient(total, network.trainable_variables)
  for update, gradient in zip(result.update, expected, strict=True):
    np.testing.assert_allclose(update, 0.1 * gradient, rtol=1e-5, atol=1e-7)
  assert result.metrics['loss_regularization'][1] == 1.0
  np.testing.assert_allclose(
    result.metrics['loss_regularization'][0], penalty, rtol=1e-6
  )
  # The other losses are without it.
  np.testing.assert_allclose(
    result.metrics['loss_labeled'][0], 3.0 * loss, rtol=1e-6
  )
  plain = _run(_SUPERVISED, labeled=examples)
  assert 'loss_regularization' not in plain.metrics


@functools.cache
def _trained_client(name, num_epochs, share):
  """What a client of an algorithm has after local training; NumPy arrays."""
  entry = registry.REGISTRY[name]
  hparams = round_hparams.RoundHparams(scenario='labels_at_clients')
  algorithm = entry.configure(entry.hparams(**entry.tiny_hparams), hparams)
  network = adapter.Network(tiny_task.model_fn, seed=0)
  local = training.LocalTraining(
    network,
    algorithm,
    tiny_task.VIEWS,
    training.LoopConfig(num_epochs, 5, 3, optimizer.Sgd(momentum=0.9)),
  )
  element = tiny_task.client(0, labeled=4)
  labeled, unlabeled = (
    base.Examples(*map(tf.constant, element[kind].values()))
    for kind in ('labeled', 'unlabeled')
  )

  @tf.function
  def run():
    return local.run(
      network.initial_weights(),
      labeled,
      unlabeled,
      learning_rate=tf.constant(0.1),
      seed=_SEED,
      share=None if share is None else tf.constant(share),
    )

  result = run()._replace(weight=())  # These algorithms set none.
  return tf.nest.map_structure(lambda t: t.numpy(), result)


def _are_equal(first, second):
  return all(
    np.array_equal(a, b, equal_nan=True)
    for a, b in zip(
      tf.nest.flatten(first), tf.nest.flatten(second), strict=True
    )
  )


@pytest.mark.parametrize('name', ['supervised', 'fixmatch'])
def test_a_straggler_is_a_client_with_fewer_steps(name):
  whole = _trained_client(name, 2, None)
  half = _trained_client(name, 2, 0.5)
  assert _are_equal(whole, _trained_client(name, 2, 1.0))
  assert _are_equal(half, _trained_client(name, 1, None))
  assert not _are_equal(half.update, whole.update)
  assert half.num_examples < whole.num_examples


def test_a_straggler_makes_at_least_one_step():
  first = _trained_client('fixmatch', 2, 0.0)
  assert first.num_examples == 8  # 5 unlabelled and 3 labelled ones.
  assert _are_equal(first, _trained_client('fixmatch', 2, 0.3))
  assert np.any(first.update[0])
