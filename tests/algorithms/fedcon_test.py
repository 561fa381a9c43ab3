"""FedCon: what sections 3.2 and 7 (I11) of its specification say of it."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds
import tiny_task

from tff_fssl import hparams as hparams_lib
from tff_fssl.aggregators import factory
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import fedcon
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.program import config as config_lib
from tff_fssl.rounds import compute
from tff_fssl.semisup import losses

_ROUND = round_hparams.RoundHparams()
_model = tiny_rounds.model


def _build(own=(), **settings):
  settings = {
    'server_optimizer_momentum': 0.0,
    'proximal_strength': 0.0,
    'weight_decay': 0.0,
    **settings,
  }
  return tiny_rounds.build('fedcon', own=own, **settings)


def _time(round_num, step):
  return base.StepTime(
    tf.constant(round_num), tf.constant(step), tf.constant(10)
  )


class TestI11:
  def test_distance(self):
    value = losses.negative_cosine(
      tf.constant([[1.0, 2.0, 2.0]]), tf.constant([[2.0, 0.0, 1.0]])
    )
    assert float(value[0]) == pytest.approx(-0.596285, abs=1e-6)

  @pytest.mark.parametrize(
    'round_num, weight',
    [(0, 0.006738), (25, 0.060055), (50, 0.286505), (100, 1), (150, 1)],
  )
  def test_ramp(self, round_num, weight):
    value = float(fedcon.ramp(tf.constant(round_num), 100))
    assert value == pytest.approx(weight, abs=1e-6)
    assert float(fedcon.ramp(tf.constant(-3), 100)) == pytest.approx(
      0.006738, abs=1e-6
    )
    assert float(fedcon.ramp(tf.constant(round_num), 0)) == 1

  @pytest.mark.parametrize(
    'round_num, step, tau',
    [
      (0, 0, 0.999600),
      (5, 0, 0.999659),
      (9, 1000, 0.999800),
      (20, 0, 1.0),
      (30, 0, 0.999800),
    ],
  )
  def test_decay(self, round_num, step, tau):
    share = float(fedcon.server_share(_time(round_num, step), 0.9996))
    half = float(fedcon.server_share(_time(round_num, step), 0.9998))
    assert half == pytest.approx(share / 2, abs=1e-9)
    assert 1 - share == pytest.approx(tau, abs=1e-6)

  def test_spread_of_features(self):
    same = tf.ones([8, 4])
    # Processors normalize by roots that differ in the last digit.
    assert float(losses.feature_deviation(same)) == pytest.approx(0, abs=1e-6)
    normal = tf.random.stateless_normal([4000, 32], [1, 2])
    assert float(losses.feature_deviation(normal)) == pytest.approx(1, abs=0.02)


def test_the_moving_average_is_used_and_kept():
  """In the authors' code it is neither: the first round's one batch."""
  process = _build()
  start = process.initialize().global_model_weights
  tiny_rounds.assert_same(start.trainable, start.sets['target'].trainable)
  output = process.next(process.initialize(), [])
  model = _model(output)
  for old, new, target in zip(
    start.trainable, model.trainable, model.sets['target'].trainable
  ):
    assert np.any(old != new)
    np.testing.assert_allclose(target, old + 4e-4 * (new - old), atol=1e-7)
  # It goes on from what it was, not from the new model.
  after = _model(process.next(output.state, []))
  share = 4e-4 * (np.cos(np.pi * 1000 / 20000) + 1) / 2
  for old, new, target in zip(
    model.sets['target'].trainable,
    after.trainable,
    after.sets['target'].trainable,
  ):
    np.testing.assert_allclose(target, old + share * (new - old), atol=1e-7)


class TestRounds:
  def test_the_head_stays_frozen_to_the_bit(self):
    """What clients do, server optimizer and weight decay leave it alone."""
    process = _build(
      server_learning_rate=0.0,
      weight_decay=0.1,
      server_optimizer='adam',
      server_optimizer_momentum=0.5,
    )
    start = process.initialize().global_model_weights
    model = _model(tiny_rounds.run(process)[-1])
    kernel, *head = zip(start.trainable, model.trainable, strict=True)
    assert np.any(kernel[0] != kernel[1])
    tiny_rounds.assert_same(*zip(*head))

  @pytest.mark.parametrize('norm', ['none', 'bn'])
  def test_bytes(self, norm):
    """Section 1.4: one backbone down and up, without the head."""
    process = _build(norm=norm)
    model = process.initialize().global_model_weights
    *backbone, _, _ = model.trainable
    head = sum(np.asarray(t).nbytes for t in model.trainable[-2:])
    assert head == 4 * (4 * 3 + 3)
    own = sum(np.asarray(t).nbytes for t in backbone)
    others = sum(np.asarray(t).nbytes for t in model.non_trainable) + 4
    figures = tiny_rounds.run(process, num_rounds=1)[0].metrics['communication']
    assert figures['bytes_down_model'] == own + others
    assert figures['bytes_down_statistics'] == (
      own + others if norm == 'bn' else 0
    )
    assert figures['bytes_up_model'] == own + 4  # And a weight.
    assert figures['percent_of_model_down'] == pytest.approx(
      100 * figures['bytes_down_per_client'] / (own + head + others)
    )

  def test_clients_learn_from_unlabelled_examples(self):
    """In the authors' code they move by 2e-5 of their norm, or not at all."""
    process = _build()
    outputs = tiny_rounds.run(process, num_rounds=3)
    finalizer = outputs[0].metrics['finalizer']
    assert finalizer['update_norm'] > 1e-3 * finalizer['weights_norm']
    state = process.next(process.initialize(), []).state
    cohort = tiny_task.cohort(tiny_rounds.SERVER)
    for element in cohort:
      element['unlabeled']['x'] = 255 - element['unlabeled']['x']
    other = process.next(state, [tiny_task.dataset(e, process) for e in cohort])
    assert tiny_rounds.differ(
      _model(outputs[0]).trainable, _model(other).trainable
    )

  def test_the_projector_is_the_same_for_all_and_in_each_round(self):
    """Clients and rounds with equal data and seeds do the same."""
    process = _build(server_learning_rate=0.0)
    state = process.next(process.initialize(), []).state
    one = tiny_task.dataset(tiny_task.client(3), process)
    single = _model(process.next(state, [one]))
    double = _model(process.next(state, [one, one]))
    tiny_rounds.assert_same(single.trainable, double.trainable, atol=1e-7)
    later = state._replace(client_work=np.int32(9))
    again = _model(process.next(later, [one]))
    tiny_rounds.assert_same(single.trainable, again.trainable)

  @pytest.mark.parametrize('state', ['none', 'table'])
  def test_what_is_computed(self, state):
    """Four forward passes and two backward ones, and the projector's."""
    cost = compute.measure(
      functools.partial(tiny_task.model_fn, 'none'),
      fedcon.FedCon(hidden_size=8, client_state=state, round=_ROUND),
      views=tiny_task.VIEWS,
      stored=tf.TensorSpec([None, *tiny_task.IMAGE_SHAPE], tf.uint8),
    ).clients
    head, projector = 2 * 4 * 3, 2 * 2 * 4 * 8
    # No pass through the head; two through the projector and back.
    expected = cost.passes(4, 2) - (4 + 2 * 2) * head + 2 * 3 * projector
    assert cost.unlabeled.most == expected


class TestClientState:
  _TABLE = {'client_state': 'table'}

  def _after(self, process, state, ids):
    cohort = [
      tiny_task.dataset(tiny_task.client(i, int(state.client_work)), process)
      for i in ids
    ]
    return process.next(state, cohort)

  def test_each_client_finds_its_own(self):
    """In the authors' code, that of whoever had as many batches before it."""
    process = _build(own=self._TABLE)
    assert process.num_clients == tiny_task.NUM_CLIENTS
    start = process.next(process.initialize(), []).state
    alone = self._after(process, start, [1]).state
    both = self._after(process, start, [1, 4]).state
    rows = [s.distributor['table']['own_weights'] for s in (alone, both)]
    np.testing.assert_array_equal(rows[0][1], rows[1][1])
    assert np.any(rows[1][4]) and np.any(rows[1][4] != rows[1][1])
    untouched = [i for i in range(10) if i not in (1, 4)]
    assert not np.any(rows[1][untouched])
    rounds = both.distributor['table']['own_num_rounds']
    np.testing.assert_array_equal(np.flatnonzero(rounds), [1, 4])
    # It matters what the client left, and only that.
    spoilt = rows[1].copy()
    spoilt[4] *= -3.0
    table = type(both.distributor['table'])(
      both.distributor['table'], own_weights=spoilt
    )
    distributor = type(both.distributor)(both.distributor, table=table)
    other = both._replace(distributor=distributor)
    results = {
      client: [
        _model(self._after(process, state, [client])).trainable
        for state in (both, other)
      ]
      for client in (1, 4)
    }
    tiny_rounds.assert_same(*results[1])
    assert tiny_rounds.differ(*results[4])

  def test_the_first_round_is_that_without_state(self):
    first, second = (
      tiny_rounds.run(_build(own=own)) for own in ({}, self._TABLE)
    )
    tiny_rounds.assert_same(_model(first[0]), _model(second[0]))
    assert tiny_rounds.differ(_model(first[1]), _model(second[1]))
    figures = second[0].metrics['communication']
    assert figures['bytes_up_exchange'] == figures['bytes_down_exchange'] == 0
    plain = first[0].metrics['communication']
    assert figures['bytes_down'] == plain['bytes_down']
    assert figures['bytes_up'] == plain['bytes_up']

  def test_foreign_ids_are_rejected(self):
    process = _build(own=self._TABLE)
    start = process.next(process.initialize(), []).state
    output = self._after(process, start, [1, 77])
    train = output.metrics['client_work']['train']
    assert train['num_rejected_clients'] == 1
    exchange = output.metrics['exchange']
    assert exchange['num_rows'] == 1

  def test_too_large_a_projector_is_refused(self):
    with pytest.raises(hparams_lib.UsageError, match='at most 1.5 GB'):
      _build(
        own={
          **self._TABLE,
          'hidden_size': 2**16,
        },
        model=_wide,
      )

  def test_state_needs_clients_that_come_back(self):
    argv = ['--algorithm=fedcon', '--norm=gn', '--cross_device']
    config_lib.parse_config(argv)
    with pytest.raises(hparams_lib.UsageError, match='--cross_device'):
      config_lib.parse_config([*argv, '--fedcon.client_state=table'])


def _wide():
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input(tiny_task.IMAGE_SHAPE),
      layers.Flatten(),
      layers.Dense(512, 'relu'),
      layers.Dense(tiny_task.NUM_CLASSES),
    ]
  )


def test_differential_privacy_without_state():
  """Almost without noise, it is the plain mean."""
  private = factory.build_aggregator(
    aggregator_hparams.AggregatorHparams(
      'dp', dp_noise_multiplier=1e-9, dp_clipping_norm=50.0, dp_delta=0.01
    ),
    clients_per_round=3,
    population=8,
  )
  plain, other = (
    tiny_rounds.run(_build(**settings), num_rounds=1)[0]
    for settings in ({}, {'model_aggregator': private})
  )
  tiny_rounds.assert_same(
    _model(plain).trainable, _model(other).trainable, atol=1e-4
  )


@pytest.mark.parametrize('last', ['activation', 'image'])
def test_models_without_features_are_refused(last):
  def model_fn():
    layers = tf.keras.layers
    images = tf.keras.Input(tiny_task.IMAGE_SHAPE)
    if last == 'activation':
      x = layers.Dense(3)(layers.Flatten()(images))
      x = layers.Activation('tanh')(x)
    else:
      x = layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3)(images))
    return tf.keras.Model(images, x)

  with pytest.raises(
    hparams_lib.UsageError, match='separates features from logits'
  ):
    _build(model=model_fn)
