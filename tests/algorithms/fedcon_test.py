"""FedCon: what sections 3.2 and 7 (I11) of its specification say of it."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds
import tiny_task

from tff_fssl import hparams as hparams_lib
from tff_fssl.aggregators import factory
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import fedcon
from tff_fssl.algorithms import fedcon_hparams
from tff_fssl.algorithms import registry
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import two_views
from tff_fssl.models import adapter
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.rounds import compute
from tff_fssl.rounds import deployment
from tff_fssl.rounds import round_hparams
from tff_fssl.semisup import losses

_HPARAMS = fedcon_hparams.FedConHparams
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


def _clock(round_num, step=0):
  return algorithm_lib.Clock(
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
    share = float(fedcon.server_share(_clock(round_num, step), 0.9996))
    half = float(fedcon.server_share(_clock(round_num, step), 0.9998))
    assert half == pytest.approx(share / 2, abs=1e-9)
    assert 1 - share == pytest.approx(tau, abs=1e-6)

  def test_spread_of_features(self):
    same = tf.ones([8, 4])
    # Processors normalize by roots that differ in the last digit.
    assert float(losses.feature_deviation(same)) == pytest.approx(0, abs=1e-6)
    normal = tf.random.stateless_normal([4000, 32], [1, 2])
    assert float(losses.feature_deviation(normal)) == pytest.approx(1, abs=0.02)


def _network(seed):
  return adapter.Network(
    functools.partial(tiny_task.model_fn, 'none'), seed=seed
  )


def _projector(local, hidden_size=8):
  model_fn = two_views.build_projector(hidden_size)
  return adapter.Network(functools.partial(model_fn, local), seed=7)


def _batch(name, round_num=50):
  x, y = tiny_task.examples(8, 3)
  images = tf.cast(x, tf.float32) / 255.0
  views = {'first': images, 'second': tf.reverse(images, [1]) ** 2}
  weights = tf.constant([1.0] * 7 + [0.0])  # A filler.
  part = algorithm_lib.Part(views, tf.constant(y), weights)
  return algorithm_lib.Batch(
    {name: part}, {}, _clock(round_num), tf.constant([0, 0])
  )


def _check_gradients(variables, gradients, loss_fn):
  """Central differences of the largest entry in each variable."""
  for variable, gradient in zip(variables, gradients, strict=True):
    value, step = variable.numpy(), 2e-3
    index = np.unravel_index(np.argmax(np.abs(gradient)), value.shape)
    sides = []
    for sign in (1.0, -1.0):
      moved = value.copy()
      moved[index] += sign * step
      variable.assign(moved)
      sides.append(loss_fn())
    variable.assign(value)
    difference = (sides[0] - sides[1]) / (2 * step)
    assert gradient.numpy()[index] == pytest.approx(difference, abs=2e-3)


def test_the_projector_normalizes_with_pytorchs_epsilon():
  """A hidden unit of 0.01 and -0.01: variance 1e-4, 0.01 / sqrt(1.1e-4)."""
  local = types.SimpleNamespace(feature_size=1)
  projector = two_views.build_projector(1)(local)
  one, zero = np.ones([1, 1]), np.zeros([1])
  projector.get_layer('hidden').set_weights([one, zero])
  projector.get_layer('prediction').set_weights([one, zero])
  output = projector(np.float32([[0.01], [-0.01]]), training=True)
  np.testing.assert_allclose(output, [[0.953463], [0.0]], atol=1e-6)


class TestClientStep:
  def _step(self):
    local, target = _network(1), _network(2)
    networks = algorithm_lib.Networks(
      local, {'target': target, 'projector': _projector(local)}
    )
    algorithm = fedcon.build_local_algorithm(_HPARAMS(), _ROUND)
    batch = _batch(objective.UNLABELED)
    return algorithm, networks, batch, algorithm.steps[0](networks, batch)

  def test_gradients(self):
    _, networks, batch, result = self._step()
    local, target = networks.local, networks.peers['target']
    projector = networks.peers['projector']
    views = batch.parts[objective.UNLABELED].views
    targets = {k: target.features(v, training=True) for k, v in views.items()}

    def mlp(features):
      """The projector, written out; its batch norm sees the filler, too."""
      w1, b1, gamma, beta, w2, b2 = (
        np.float64(v.numpy()) for v in projector.trainable_variables
      )
      hidden = features @ w1 + b1
      hidden = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)
      return np.maximum(hidden * gamma + beta, 0.0) @ w2 + b2

    def loss():
      total = 0.0
      for own, other in (('first', 'second'), ('second', 'first')):
        features = local.features(views[own], training=True).numpy()
        p, t = mlp(np.float64(features)), targets[other].numpy()
        norms = np.linalg.norm(p, axis=-1) * np.linalg.norm(t, axis=-1)
        total -= 0.5 * np.mean((np.sum(p * t, -1) / norms)[:7])
      return total

    value, count = result.ratios['loss_similarity']
    assert count == 7
    assert float(value) / 7 == pytest.approx(loss(), abs=1e-5)
    _check_gradients(local.trainable_variables, result.gradients, loss)
    _check_gradients(
      projector.trainable_variables, result.of_peers['projector'], loss
    )

  def test_what_is_alive_and_what_is_frozen(self):
    _, networks, _, result = self._step()
    local = networks.local
    assert local.head == (1, 2)
    for i, gradient in enumerate(result.gradients):
      assert np.any(gradient.numpy()) == (i not in local.head)
    # A bias before batch norm has none.
    alive = [np.abs(g).max() > 1e-5 for g in result.of_peers['projector']]
    assert alive == [True, False, True, True, True, True]
    assert set(result.of_peers) == {'projector'}

  @pytest.mark.parametrize('decay', [0.9, 1.0])
  def test_the_target_follows_after_each_batch(self, decay):
    algorithm = fedcon.build_local_algorithm(
      _HPARAMS(target_decay=decay), _ROUND
    )
    assert (algorithm.after_step is None) == (decay == 1.0)
    local, target = _network(1), _network(2)
    before = [v.numpy() for v in target.trainable_variables]
    if algorithm.after_step is not None:
      networks = algorithm_lib.Networks(local, {'target': target})
      algorithm.after_step(networks, None)
    for new, old, own in zip(
      target.trainable_variables, before, local.trainable_variables
    ):
      np.testing.assert_allclose(
        new, decay * old + (1 - decay) * own, atol=1e-6
      )


class TestServerStep:
  def _step(self, **own):
    networks = algorithm_lib.Networks(_network(1), {'target': _network(2)})
    algorithm = fedcon.build_server_training(_HPARAMS(**own), _ROUND)
    batch = _batch(objective.LABELED)
    return networks, batch, algorithm.steps[0](networks, batch), algorithm

  @pytest.mark.parametrize('target', ['ema', 'online'])
  def test_gradients(self, target):
    networks, batch, result, _ = self._step(server_target=target)
    local, part = networks.local, batch.parts[objective.LABELED]
    labeler = networks.peers['target'] if target == 'ema' else local
    log_softmax = lambda z: np.float64(tf.nn.log_softmax(z).numpy())
    targets = {
      k: log_softmax(labeler.logits(v, training=True))
      for k, v in part.views.items()
    }

    def loss():
      total = 0.0
      for own, other in (('first', 'second'), ('second', 'first')):
        log_probs = log_softmax(local.logits(part.views[own], training=True))
        entropy = -log_probs[np.arange(8), part.labels.numpy()]
        p = targets[other]
        kl = np.sum(np.exp(p) * (p - log_probs), -1)
        total += 0.5 * np.mean(entropy[:7]) + 0.286505 * 0.5 * np.mean(kl[:7])
      return total

    labeled = result.ratios['loss_labeled'][0] / 7
    consistency = result.ratios['loss_consistency'][0] / 7
    value = float(labeled + 0.286505 * consistency)
    assert value == pytest.approx(loss(), abs=1e-5)
    assert consistency > 1e-6
    _check_gradients(local.trainable_variables, result.gradients, loss)

  def test_hyper_parameters_are_alive(self):
    first = self._step()[2].gradients
    for own in (
      {'server_consistency_weight': 0.0},
      {'ramp_rounds': 60},
      {'server_target': 'online'},
    ):
      other = self._step(**own)[2].gradients
      assert any(np.any(a.numpy() != b.numpy()) for a, b in zip(first, other))

  def test_the_moving_average_is_used_and_kept(self):
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
    process = _build(norm=norm, client_batch_size=5)
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

  def test_it_compiles_to_map_reduce_form(self):
    assert deployment.get_map_reduce_form(_build()) is not None

  @pytest.mark.parametrize('state', ['none', 'table'])
  def test_what_is_computed(self, state):
    """Four forward passes and two backward ones, and the projector's."""
    cost = compute.measure(
      functools.partial(tiny_task.model_fn, 'none'),
      registry.REGISTRY['fedcon'].build_parts(
        _HPARAMS(hidden_size=8, client_state=state), _ROUND
      ),
      views=tiny_task.VIEWS,
      stored=tf.TensorSpec([None, *tiny_task.IMAGE_SHAPE], tf.uint8),
      hparams=_ROUND,
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

  @pytest.mark.parametrize(
    'arguments',
    [
      ['--aggregator=dp', '--norm=gn', '--dp_delta=0.001'],
      ['--aggregator=secure', '--norm=gn', '--simulate_secure_aggregation'],
      ['--cross_device', '--norm=gn'],
    ],
    ids=lambda a: a[0],
  )
  def test_what_state_rules_out(self, arguments):
    argv = ['--algorithm=fedcon', *arguments]
    config_lib.from_command_line(argv)
    with pytest.raises(hparams_lib.UsageError) as error:
      config_lib.from_command_line([*argv, '--fedcon.client_state=table'])
    assert arguments[0] in str(error.value)
    if 'aggregator' in arguments[0]:
      assert '--fedcon.client_state=none' in str(error.value)


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

  with pytest.raises(hparams_lib.UsageError, match='features and logits'):
    _build(model=model_fn)
