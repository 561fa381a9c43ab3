"""FedRGD: what section 3.1 of its specification says of it."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_plan
import tiny_rounds
import tiny_task

from tff_fssl import hparams as hparams_lib
from tff_fssl import runtime
from tff_fssl.aggregators import factory
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import fedrgd
from tff_fssl.interface import base
from tff_fssl.interface import groups as groups_lib
from tff_fssl.interface import round_hparams
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights
from tff_fssl.program import config as config_lib
from tff_fssl.rounds import process as process_lib
from tff_fssl.rounds import screen as screen_lib

_SERVER, _CLIENTS = tiny_rounds.SERVER, tiny_rounds.CLIENTS
_model = tiny_rounds.model


def _networks():
  return base.Networks(
    adapter.Network(functools.partial(tiny_task.model_fn, 'none'), seed=1), {}
  )


def _batch():
  """Eight unlabelled examples, whose two views differ much."""
  x, y = tiny_task.examples(8, 3)
  images = tf.cast(x, tf.float32) / 255.0
  views = {'weak': images, 'strong': 1.0 - images}
  examples = base.BatchExamples(views, tf.constant(y), tf.ones([8]))
  return base.Batch({base.UNLABELED: examples}, {}, None, tf.constant([0, 0]))


def _make(scenario=_SERVER, **own):
  return fedrgd.FedRgd(
    **own, round=round_hparams.RoundHparams(scenario=scenario)
  )


def _cohort(process, scenario, round_num, size=5):
  return [
    tiny_task.dataset(element, process)
    for element in tiny_task.cohort(scenario, size, round_num)
  ]


def _rounds(process, scenario, num_rounds=2, size=5):
  state, outputs = process.initialize(), []
  for round_num in range(1, num_rounds + 1):
    outputs.append(
      process.next(state, _cohort(process, scenario, round_num, size))
    )
    state = outputs[-1].state
  return outputs


def _build(scenario=_SERVER, own=(), **settings):
  settings = {
    'num_pretraining_rounds': 0,
    'server_optimizer_momentum': 0.0,
    'proximal_strength': 0.0,
    **settings,
  }
  return tiny_rounds.build('fedrgd', scenario, own=own, **settings)


class TestReductions:
  @pytest.mark.parametrize(
    'norm, momentum',
    [pytest.param('none', 0.5, marks=pytest.mark.slow), ('bn', 0.0)],
  )
  def test_one_group_is_fedavg_to_the_bit(self, norm, momentum):
    settings = {'norm': norm, 'server_optimizer_momentum': momentum}
    ours = tiny_rounds.run(
      tiny_rounds.build('fedrgd', _CLIENTS, own={'num_groups': 1}, **settings),
      _CLIENTS,
    )
    theirs = tiny_rounds.run(
      tiny_rounds.build(
        'fixmatch', _CLIENTS, own={'confidence_threshold': 0.3}, **settings
      ),
      _CLIENTS,
    )
    for a, b in zip(ours, theirs, strict=True):
      tiny_rounds.assert_same(_model(a), _model(b))
    assert tiny_rounds.differ(_model(ours[0]), _model(ours[1]))

  def test_one_group_with_labels_at_the_server(self):
    """The server counts as one client more, and trains from the same start."""
    fixmatch = tiny_rounds.build(
      'fixmatch',
      own={'confidence_threshold': 0.3},
      proximal_strength=0.0,
      server_optimizer_momentum=0.0,
    )
    # The clients' mean alone, and the server's training alone.
    pretrained = fixmatch.next(fixmatch.initialize(), []).state
    outputs = []
    for rate in (0.0, 0.03):
      process = _build(
        own={'num_groups': 1},
        num_pretraining_rounds=1,
        server_learning_rate=rate,
        weight_decay=0.0,
      )
      state = process.initialize()._replace(
        global_model_weights=pretrained.global_model_weights,
        client_work=pretrained.client_work,
        finalizer=pretrained.finalizer,
      )
      outputs.append(
        (
          process.next(state, []),
          process.next(state, _cohort(process, _SERVER, 1)),
        )
      )
    start = pretrained.global_model_weights.trainable
    (_, still), (server, both) = outputs
    for w, s, c, b in zip(
      start,
      _model(server).trainable,
      _model(still).trainable,
      _model(both).trainable,
      strict=True,
    ):
      # Of five clients and a server at rest: 5/6 of the clients' mean change.
      expected = w + (c - w) + (s - w) / 6
      np.testing.assert_allclose(b, expected, atol=1e-6)

  @pytest.mark.parametrize(
    'scenario', [_SERVER, pytest.param(_CLIENTS, marks=pytest.mark.slow)]
  )
  def test_i8_equal_groups_change_nothing_in_a_round(self, scenario):
    """From one start, (1/S) sum theta_g is the flat mean of all."""
    results = []
    for mode in ('persistent_groups', 'two_level_mean'):
      process = _build(
        scenario, own={'mode': mode}, server_learning_rate=0.0, weight_decay=0.0
      )
      results.append(_rounds(process, scenario, 2, size=4))
    persistent, two_level = results
    tiny_rounds.assert_same(
      _model(persistent[0]).trainable, _model(two_level[0]).trainable, 1e-6
    )
    one = _build(
      scenario,
      own={'num_groups': 1},
      server_learning_rate=0.0,
      weight_decay=0.0,
    )
    flat = _model(_rounds(one, scenario, 1, size=4)[0]).trainable
    start = one.initialize().global_model_weights.trainable
    # The server counts once among 4 + 1, or twice among 4 + 2.
    share = 5 / 6 if scenario == _SERVER else 1.0
    for w, f, p in zip(start, flat, _model(persistent[0]).trainable):
      np.testing.assert_allclose(p, w + share * (f - w), atol=1e-6)
    # From the second round on, clients start elsewhere.
    assert tiny_rounds.differ(
      _model(persistent[1]).trainable, _model(two_level[1]).trainable
    )


class _Server(base.Server):
  """A server whose copies end at given numbers."""

  def __init__(self, copies):
    self.round_num = tf.constant(1)
    self._copies = copies

  def apply(self, weights, update):
    return weights._replace(trainable=(weights.trainable[0] - update[0],))

  def train(self, weights, copy=0):
    trained = tf.constant(self._copies[copy], tf.float32)
    return weights._replace(trainable=(trained,))


def _update(algorithm, groups, by_group, copies=None):
  """`update` of scalars: (theta, groups' models) after a round."""
  theta = np.float32(np.mean(groups))
  state = algorithm.initial_state(
    Weights((tf.constant(theta),), (), tf.constant(1.0)), base.Setup()
  )
  if algorithm.keeps_groups:
    state = state.remember(groups=(tf.constant(groups, tf.float32),))
  update, sizes, starts = by_group
  aggregate = base.Aggregate(
    (),
    {},
    tf.constant(0.0),
    lambda: groups_lib.ByGroup(
      (tf.constant(update, tf.float32),),
      tf.constant(sizes, tf.float32),
      tf.constant(starts, tf.float32),
    ),
  )
  after = algorithm.update(state, aggregate, _Server(copies))
  kept = after.memory.groups[0].numpy() if after.memory else None
  return float(after.weights.trainable[0]), kept


class TestServer:
  """Steps 2 and 3 of a round."""

  def test_labels_at_the_server(self):
    """theta_g = (copy_g + sum of its clients) / (1 + |g|)."""
    # Group 0 at 1, three clients end at 2, 3, 4; group 1 at 3, two at 5, 7.
    by_group = ([1 - 3, 3 - 6], [3, 2], [[1, 0], [0, 1]])
    theta, groups = _update(_make(), [1, 3], by_group, [10, 20])
    expected = [(10 + 2 + 3 + 4) / 4, (20 + 5 + 7) / 3]
    np.testing.assert_allclose(groups, expected, rtol=1e-6)
    assert theta == pytest.approx(np.mean(expected), abs=1e-5)

  def test_labels_at_the_clients(self):
    """The first client of each group started from theta = 2."""
    by_group = ([0.5, -1], [4, 2], [[0.75, 0, 0.25], [0, 0.5, 0.5]])
    theta, groups = _update(_make(_CLIENTS), [1, 3], by_group)
    expected = [0.75 * 1 + 0.25 * 2 - 0.5, 0.5 * 3 + 0.5 * 2 + 1]
    np.testing.assert_allclose(groups, expected, rtol=1e-6)
    assert theta == pytest.approx(np.mean(expected), abs=1e-6)

  def test_a_group_without_clients(self):
    by_group = ([0.0, -1.0], [0, 2], [[0, 0], [0, 1]])
    _, groups = _update(_make(), [1, 3], by_group, [10, 20])
    np.testing.assert_allclose(groups, [10, (20 + 8) / 3], rtol=1e-6)
    by_group = ([0.0, -1.0], [0, 2], [[0, 0, 0], [0, 1, 0]])
    theta, groups = _update(_make(_CLIENTS), [1, 3], by_group)
    np.testing.assert_allclose(groups, [1, 4], rtol=1e-6)
    assert theta == pytest.approx(2.5)

  def test_two_level_mean(self):
    """One model of the server's counts in each group."""
    algorithm = _make(mode='two_level_mean')
    by_group = ([1.0, -2.0], [3, 2], [[1], [1]])
    theta, kept = _update(algorithm, [4, 4], by_group, [10])
    assert kept is None
    assert theta == pytest.approx(((10 + 3 * 3) / 4 + (10 + 2 * 6) / 3) / 2)

  def test_copies_draw_batches_of_their_own(self):
    """With clients at rest, group models are means with different copies."""
    process = _build(client_learning_rate=0.0)
    model = _model(_rounds(process, _SERVER, 1)[0])
    (groups, *_), theta = model.sets['groups'], model.trainable[0]
    assert np.any(groups[0] != groups[1])
    np.testing.assert_allclose(groups.mean(0), theta, atol=1e-6)


class TestClients:
  def test_they_start_from_their_group(self):
    """At rest, they send their start: labels at clients, with a first one."""
    process = _build(_CLIENTS, client_learning_rate=0.0)
    state = process.initialize()
    model = state.global_model_weights
    groups = tuple(
      np.stack([t + 1.0, t - 3.0]).astype(np.float32) for t in model.trainable
    )
    sets = type(model.sets)(model.sets, groups=groups)
    state = state._replace(global_model_weights=model._replace(sets=sets))
    after = process.next(state, _cohort(process, _CLIENTS, 1))
    # Slots 0, 2, 4 and 1, 3; slots 0 and 1 start from theta.
    for t, stack, theta in zip(
      model.trainable,
      _model(after).sets['groups'],
      _model(after).trainable,
      strict=True,
    ):
      np.testing.assert_allclose(stack[0], t + 2 / 3, atol=1e-5)
      np.testing.assert_allclose(stack[1], t - 1.5, atol=1e-5)
      np.testing.assert_allclose(theta, t + (2 / 3 - 1.5) / 2, atol=1e-5)
    inner = after.metrics['aggregator']['inner']
    assert (inner['smallest_group'], inner['largest_group']) == (2, 3)

  @pytest.mark.parametrize('num_groups', [2, 3])
  def test_groups_by_position_differ_by_one_at_most(self, num_groups):
    groups = _make(num_groups=num_groups).groups()
    assert groups.needs_slots
    of_slots = [
      int(groups.place(tf.constant(s), None).group) for s in range(11)
    ]
    sizes = np.bincount(of_slots)
    assert len(sizes) == num_groups and sizes.max() - sizes.min() == 1

  def test_random_groups_are_drawn_by_the_client(self):
    groups = _make(_CLIENTS, grouping='random', num_groups=3).groups()
    assert not groups.needs_slots and groups.num_starts == 4
    places = [
      groups.place(tf.constant(0), tf.constant([i, 1])) for i in range(600)
    ]
    sizes = np.bincount([int(p.group) for p in places])
    assert len(sizes) == 3 and sizes.min() > 150
    first = [p for p in places if p.start == 3]
    assert 80 < len(first) < 160  # A fifth.
    assert all(p.start == p.group for p in places if p.start != 3)
    again = groups.place(tf.constant(9), tf.constant([5, 1]))
    assert again.group == places[5].group

  def test_random_groups_need_no_slot(self):
    process = _build(own={'grouping': 'random'})
    assert not process.needs_slots
    assert process_lib.get_map_reduce_form(process) is not None
    outputs = _rounds(process, _SERVER), _rounds(_build(), _SERVER)
    assert tiny_rounds.differ(*(_model(o[-1]).trainable for o in outputs))

  def test_each_view_is_the_loss_of_the_code(self):
    """The mean over 2 B views, each with its own pseudo-label."""
    networks, batch = _networks(), _batch()
    algorithm = _make(
      confidence_threshold=0.36,
      unlabeled_loss_weight=0.7,
      pseudo_labels='each_view',
    )
    loss, metrics = algorithm.unlabeled_loss(networks, batch)
    gradients = algorithm.step(networks, batch).gradients
    logits = np.concatenate(
      [
        networks.model.logits(v, training=True)
        for v in batch.unlabeled.views.values()
      ]
    )
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kept = np.exp(log_probs.max(-1)) >= 0.36
    assert 0 < kept.sum() < 16
    expected = 0.7 * np.mean(np.where(kept, -log_probs.max(-1), 0.0))
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert float(metrics['loss_pseudo_label'].count) == kept.sum() / 2
    assert any(np.any(g.numpy()) for g in gradients)


def test_bytes():
  """Section 1.4: one model down, one up, and a place of two numbers."""
  (output,) = _rounds(_build(), _SERVER, 1)
  figures = output.metrics['communication']
  model = sum(np.asarray(t).nbytes for t in _model(output).trainable)
  assert figures['bytes_down_per_client'] == model + 4 + 4
  assert figures['bytes_down_model'] == model + 4  # And a count.
  assert figures['bytes_up_model'] == model + 4 + 8  # And a weight, a place.


@pytest.mark.parametrize(
  'place, possible',
  [
    ((1, 2), True),
    ((2, 0), False),
    ((0, np.nan), False),
  ],
)
def test_false_places_are_rejected(screen, place, possible):
  """The others: tests/interface/groups_test.py."""
  update = collections.OrderedDict(
    model=[np.ones([2], np.float32)], place=np.array(place, np.float32)
  )
  result = tff.learning.templates.ClientResult(update, 1.0)
  report = collections.OrderedDict(
    is_finite=True,
    reports=True,
    num_examples=10.0,
    ratios=collections.OrderedDict(),
    ranges=collections.OrderedDict(),
    uploads=collections.OrderedDict(),
  )
  result, (sums, *_) = screen(result, report)
  assert sums['num_rejected_clients'] == int(not possible)
  assert np.isnan(result.update_weight) != possible


@pytest.fixture(scope='module')
def screen():
  """The check of what a client sent, for two groups and three rows."""
  types = tff.to_type(
    (
      tff.learning.templates.ClientResult(
        collections.OrderedDict(
          model=[(np.float32, [2])], place=(np.float32, [2])
        ),
        np.float32,
      ),
      collections.OrderedDict(
        is_finite=np.bool_,
        reports=np.bool_,
        num_examples=np.float32,
        ratios=collections.OrderedDict(),
        ranges=collections.OrderedDict(),
        uploads=collections.OrderedDict(),
      ),
    )
  )
  plan = tiny_plan.bare(groups=_make(_CLIENTS).groups())
  return screen_lib.build_screen(plan, *types)


class TestAggregators:
  def test_a_process_with_groups_refuses_an_aggregator(self):
    with pytest.raises(hparams_lib.UsageError, match='2 groups of clients'):
      tiny_task.build(
        'fedrgd',
        norm='none',
        aggregator=aggregator_hparams.AggregatorHparams('robust'),
      )

  def test_one_group_with_secure_sums(self):
    """The server's share follows from the size of the cohort."""
    secure = aggregator_hparams.AggregatorHparams(
      'secure', aggregator_limits=False
    )
    plain = _rounds(_build(own={'num_groups': 1}), _SERVER)
    process = _build(own={'num_groups': 1}, aggregator=secure)
    previous = tff.framework.get_context_stack().current
    tff.framework.set_default_context(
      runtime.build_context(runtime.Settings(simulate_secure_aggregation=True))
    )
    try:
      other = _rounds(process, _SERVER)
    finally:
      tff.framework.set_default_context(previous)
    tiny_rounds.assert_same(
      _model(plain[-1]).trainable, _model(other[-1]).trainable, atol=1e-3
    )

  def test_one_group_under_differential_privacy(self):
    """Almost without noise, it is the plain mean; the cohort has a size."""
    private = factory.build_aggregator(
      aggregator_hparams.AggregatorHparams(
        'dp', dp_noise_multiplier=1e-9, dp_clipping_norm=50.0, dp_delta=0.01
      ),
      clients_per_round=5,
      population=8,
    )
    plain, other = (
      _rounds(_build(own={'num_groups': 1}, **settings), _SERVER)
      for settings in ({}, {'model_aggregator': private})
    )
    tiny_rounds.assert_same(
      _model(plain[-1]).trainable, _model(other[-1]).trainable, atol=1e-4
    )


def test_group_norm_is_the_default():
  assert config_lib.parse_config(['--algorithm=fedrgd']).run.norm == 'gn'
  given = ['--algorithm=fedrgd', '--norm=sbn']
  assert config_lib.parse_config(given).run.norm == 'sbn'
  assert config_lib.parse_config([]).run.norm == 'sbn'


def test_moving_averages_of_batch_norm_are_averaged_by_group():
  process = _build(norm='bn', batch_norm_statistics='moving_average')
  model = _model(_rounds(process, _SERVER)[-1])
  stacks = model.sets['groups']
  assert len(stacks) == len(model.trainable) + len(model.non_trainable)
  for stack, theta in zip(
    stacks, (*model.trainable, *model.non_trainable), strict=True
  ):
    np.testing.assert_allclose(stack.mean(0), theta, atol=1e-5)
  assert np.any(stacks[-1][0] != stacks[-1][1])
