"""FedSwitch and its two baselines: what their specification says of them.

Ids (I2, C6, ...) and sections are those of the FedSwitch specification.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds
import tiny_task

from tff_fssl.algorithms import fedswitch
from tff_fssl.interface import base
from tff_fssl.models import adapter
from tff_fssl.models import statistics
from tff_fssl.rounds import statistics_phase

_SERVER, _CLIENTS = tiny_rounds.SERVER, tiny_rounds.CLIENTS
# With static batch norm, and without.
_BOTH = pytest.mark.parametrize(
  'scenario, norm',
  [
    (_SERVER, 'bn'),
    pytest.param(_CLIENTS, 'none', marks=pytest.mark.slow),
  ],
)
_HPARAMS = fedswitch.FedSwitch


class TestReductions:
  """Section 1.3."""

  @_BOTH
  def test_forced_to_the_student_it_is_fixmatch(self, scenario, norm):
    own = {'labeler': 'student'}
    ours = tiny_rounds.run(
      tiny_rounds.build('fedswitch', scenario, norm, own), scenario
    )
    theirs = tiny_rounds.run(
      tiny_rounds.build(
        'fixmatch', scenario, norm, {'confidence_threshold': 0.3}
      ),
      scenario,
    )
    for a, b in zip(ours, theirs, strict=True):
      tiny_rounds.assert_same(
        tiny_rounds.model(a).weights, tiny_rounds.model(b).weights
      )
      for metric, value in b.metrics['client_work']['train'].items():
        tiny_rounds.assert_same(
          a.metrics['client_work']['train'][metric], value
        )
      assert a.metrics['communication']['bytes_down_teacher'] == 0
    assert tiny_rounds.differ(
      tiny_rounds.model(ours[0]).weights, tiny_rounds.model(ours[1]).weights
    )

  @_BOTH
  def test_forced_to_the_teacher_it_is_ts_server_ema(self, scenario, norm):
    own = {'labeler': 'teacher', 'local_ema_decay': 1.0}
    ours = tiny_rounds.run(
      tiny_rounds.build('fedswitch', scenario, norm, own), scenario
    )
    theirs = tiny_rounds.run(
      tiny_rounds.build('ts_server_ema', scenario, norm), scenario
    )
    for a, b in zip(ours, theirs, strict=True):
      for output in (a, b):  # Section 1.4.
        figures = output.metrics['communication']
        assert figures['bytes_down_teacher'] == figures['bytes_down_model']
      tiny_rounds.assert_same(
        tiny_rounds.model(a).weights, tiny_rounds.model(b).weights
      )
      tiny_rounds.assert_same(
        tiny_rounds.model(a).sets['teacher'],
        tiny_rounds.model(b).sets['teacher'],
      )
    student, teacher = (
      tiny_rounds.model(ours[-1]).weights,
      tiny_rounds.model(ours[-1]).sets['teacher'],
    )
    assert tiny_rounds.differ(student, teacher)


class TestTeacher:
  """Section 1.1, steps 3e and 4; section 1.3."""

  def test_it_is_the_average_of_students_in_every_round(self):
    process = tiny_rounds.build('fedswitch', own={'ema_decay': 0.8})
    # A copy of the student until clients take part.
    state = process.next(process.initialize(), []).state
    model = state.global_model_weights
    tiny_rounds.assert_same(model.trainable, model.sets['teacher'].trainable)
    teacher = [t.copy() for t in model.trainable]
    for output in tiny_rounds.run(process, num_rounds=3):
      model = tiny_rounds.model(output)
      teacher = [0.8 * t + 0.2 * s for t, s in zip(teacher, model.trainable)]
      tiny_rounds.assert_same(
        teacher, list(model.sets['teacher'].trainable), atol=1e-6
      )

  @pytest.mark.parametrize('decay', [0.0, 0.9, 1.0])
  def test_i4_it_follows_at_clients(self, decay):
    """After each batch: T <- a' T + (1 - a') S; statistics stay its own."""
    networks = base.Networks(
      adapter.Network(tiny_task.model_fn, seed=1),
      {'teacher': adapter.Network(tiny_task.model_fn, seed=2)},
    )
    student, teacher = networks.model, networks['teacher']
    teacher.non_trainable_variables[0].assign(tf.fill([4], 7.0))
    before = [v.numpy() for v in teacher.trainable_variables]
    algorithm = _HPARAMS(local_ema_decay=decay)
    for _ in range(5):
      algorithm.after_step(networks, None)
    # I4: five updates move it by 1 - a^5 of the way.
    for t, s, old in zip(
      teacher.trainable_variables, student.trainable_variables, before
    ):
      expected = decay**5 * old + (1 - decay**5) * s.numpy()
      np.testing.assert_allclose(t, expected, atol=1e-6)
    np.testing.assert_array_equal(teacher.non_trainable_variables[0], 7.0)

  def test_moving_averages_of_batch_norm_follow_too(self):
    make = functools.partial(
      adapter.Network, tiny_task.model_fn, track_moving_averages=True
    )
    networks = base.Networks(make(seed=1), {'teacher': make(seed=2)})
    teacher = networks['teacher']
    teacher.non_trainable_variables[0].assign(tf.fill([4], 2.0))
    _HPARAMS(local_ema_decay=0.75).after_step(networks, None)
    np.testing.assert_allclose(teacher.non_trainable_variables[0], 1.5)

  def test_clients_do_not_change_what_the_server_keeps(self):
    """FedSwitch drops clients' teachers; TS-Client EMA gets them (C13)."""
    own = {'local_ema_decay': 1.0}
    process = tiny_rounds.build('ts_client_ema', _CLIENTS, own=own)
    start = process.initialize().global_model_weights.sets['teacher']
    for output in tiny_rounds.run(process, _CLIENTS):
      tiny_rounds.assert_same(
        start.trainable, tiny_rounds.model(output).sets['teacher'].trainable
      )
    figures = output.metrics['communication']
    assert figures['bytes_up_teacher'] == figures['bytes_up_model'] - 4
    assert figures['bytes_down_teacher'] == figures['bytes_down_model']

  def test_c13_the_mean_of_clients_teachers(self):
    """Teachers that are copies of their students have the students' mean."""
    process = tiny_rounds.build(
      'ts_client_ema',
      _CLIENTS,
      own={'local_ema_decay': 0.0},
      server_optimizer_momentum=0.0,
    )
    for output in tiny_rounds.run(process, _CLIENTS):
      model = tiny_rounds.model(output)
      tiny_rounds.assert_same(
        model.trainable, model.sets['teacher'].trainable, atol=1e-6
      )

  def test_labels_of_the_server_reach_the_teacher_of_ts_client_ema(self):
    own = {'local_ema_decay': 1.0, 'ema_decay': 0.8}
    process = tiny_rounds.build('ts_client_ema', own=own)
    teacher = [
      t.copy()
      for t in process.next(
        process.initialize(), []
      ).state.global_model_weights.trainable
    ]
    for output in tiny_rounds.run(process):
      model = tiny_rounds.model(output)
      teacher = [0.8 * t + 0.2 * s for t, s in zip(teacher, model.trainable)]
      tiny_rounds.assert_same(
        teacher, list(model.sets['teacher'].trainable), atol=1e-6
      )

  def test_it_labels_with_its_own_statistics(self):
    """The count says whether there are any: section 2.6."""
    network = adapter.Network(tiny_task.model_fn, seed=1)
    peers = {'teacher': adapter.Network(tiny_task.model_fn, seed=1)}
    images = tf.random.stateless_uniform([5, *tiny_task.IMAGE_SHAPE], [1, 2])
    examples = base.BatchExamples({'weak': images}, tf.zeros([5]), tf.ones([5]))

    def probs(count):
      weights = peers['teacher'].weights_now()
      peers['teacher'].assign(
        weights._replace(statistics_count=tf.constant(count))
      )
      batch = base.Batch({base.UNLABELED: examples}, {}, None, None)
      networks = base.Networks(network, peers)
      return _HPARAMS()._teacher_probs(networks, batch).numpy()

    of_batch = tf.nn.softmax(network.logits(images, training=True))
    np.testing.assert_allclose(probs(0.0), of_batch, atol=1e-6)
    peers['teacher'].non_trainable_variables[0].assign(tf.fill([4], 3.0))
    np.testing.assert_allclose(probs(0.0), of_batch, atol=1e-6)
    assert not np.allclose(probs(9.0), of_batch, atol=1e-2)

  @pytest.mark.parametrize(
    'labeler, scenario',
    [
      ('student', _SERVER),
      pytest.param('teacher', _SERVER, marks=pytest.mark.slow),
      pytest.param('student', _CLIENTS, marks=pytest.mark.slow),
    ],
  )
  def test_statistics_of_the_set_that_the_next_round_needs(
    self, labeler, scenario
  ):
    process = tiny_rounds.build(
      'fedswitch', scenario, 'bn', {'labeler': labeler}
    )
    model_bytes = sum(
      np.asarray(w).nbytes
      for w in tf.nest.flatten(
        process.initialize().global_model_weights.weights
      )
    )
    old = None
    for output in tiny_rounds.run(process, scenario, 3):
      figures = output.metrics['communication']
      phases = 1 if labeler == 'student' else 2
      assert figures['bytes_down_statistics'] == phases * model_bytes
      student, teacher = (
        tiny_rounds.model(output).weights,
        tiny_rounds.model(output).sets['teacher'],
      )
      if labeler == 'teacher':  # Gathered: of as many examples.
        assert teacher.statistics_count == student.statistics_count > 0
      elif old is not None:  # They follow the student's, a round late.
        assert teacher.statistics_count == old[0].statistics_count
        decay = 0.97 if old[1].statistics_count > 0 else 0.0
        for before, s, t in zip(
          old[1].non_trainable, old[0].non_trainable, teacher.non_trainable
        ):
          expected = decay * before + (1 - decay) * s
          np.testing.assert_allclose(t, expected, atol=1e-5)
      old = student, teacher


@pytest.mark.slow
def test_nobody_changes_statistics_that_were_not_asked_for(monkeypatch):
  honest = statistics_phase.client_sums

  def lying(*args, **kwargs):
    sums = honest(*args, **kwargs)
    more = lambda tensors, by: tuple(t + by for t in tensors)
    return statistics.Sums(
      more(sums.first, 5.0), more(sums.second, 50.0), sums.count + 5.0
    )

  build = tiny_task.build.__wrapped__
  own = (('confidence_threshold', 0.3), ('labeler', 'student'))
  models = []
  for sums in (honest, lying):
    monkeypatch.setattr(statistics_phase, 'client_sums', sums)
    process = build('fedswitch', _SERVER, hparams=own)
    models.append(tiny_rounds.model(tiny_rounds.run(process, num_rounds=1)[0]))
  assert tiny_rounds.differ(models[0].non_trainable, models[1].non_trainable)
  tiny_rounds.assert_same(models[0].sets['teacher'], models[1].sets['teacher'])


def test_the_gradient_is_that_of_the_loss_on_given_labels():
  """Section 2.6: none flows through labels, masks, divergences or teacher."""
  algorithm = _HPARAMS(confidence_threshold=0.34, unlabeled_loss_weight=0.7)
  model_fn = functools.partial(tiny_task.model_fn, 'none')
  networks = base.Networks(
    adapter.Network(model_fn, seed=1),
    {'teacher': adapter.Network(model_fn, seed=2)},
  )
  x, y = tiny_task.examples(8, 3)
  images = tf.cast(x, tf.float32) / 255.0
  examples = base.BatchExamples(
    {'weak': images, 'strong': images + 0.1}, tf.constant(y), tf.ones([8])
  )
  for by_teacher in (0.0, 1.0):
    constants = {'by_teacher': by_teacher, 'teacher_sent': by_teacher}
    batch = base.Batch(
      {base.UNLABELED: examples},
      {name: tf.constant(value) for name, value in constants.items()},
      None,
      tf.constant([0, 0]),
    )
    result = tf.function(lambda b=batch: algorithm.step(networks, b))()
    labeler = networks['teacher'] if by_teacher else networks.model
    probs = tf.nn.softmax(labeler.logits(images, training=True)).numpy()
    mask = probs.max(-1) >= 0.34
    assert 0 < mask.sum()
    local = networks.model
    losses = lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(
      probs.argmax(-1), local.logits(images + 0.1, training=True)
    )
    expected = 0.7 * np.sum(mask * losses()) / 8
    total, count = result.metrics['loss_pseudo_label']
    assert 0.7 * float(total) / 8 == pytest.approx(float(expected), abs=1e-6)
    assert count == mask.sum()
    # Central differences of one weight in each variable.
    for variable, gradient in zip(
      local.trainable_variables, result.gradients, strict=True
    ):
      value, step = variable.numpy(), 1e-2
      index = np.unravel_index(np.argmax(np.abs(gradient)), value.shape)
      sides = []
      for sign in (1.0, -1.0):
        moved = value.copy()
        moved[index] += sign * step
        variable.assign(moved)
        sides.append(0.7 * np.sum(mask * losses()) / 8)
      variable.assign(value)
      difference = (sides[0] - sides[1]) / (2 * step)
      assert gradient.numpy()[index] == pytest.approx(difference, abs=2e-3)
