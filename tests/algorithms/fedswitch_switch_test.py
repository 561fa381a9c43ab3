"""FedSwitch's switch: who labels, what clients send for it, what is refused.

Ids (I2, C6, ...) and sections are those of the FedSwitch specification.
"""

import math

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds

from tff_fssl.algorithms import fedswitch
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.models.weights import Weights
from tff_fssl.program import config

_SERVER = tiny_rounds.SERVER
_LOG_3 = math.log(3)


def _aggregated(of_teacher, of_student, share=1.0, num_reports=3.0):
  """What clients send, of whom `share` have unlabelled examples."""
  uploads = {
    'teacher_divergence': share * of_teacher,
    'student_divergence': share * of_student,
    'is_measured': share,
  }
  constants = {name: tf.constant(value) for name, value in uploads.items()}
  return _reports(constants, num_reports)


def _reports(uploads, num_reports=3.0):
  return base.Aggregate(
    (tf.zeros([2]),), uploads, tf.constant(num_reports), None
  )


class _IdleServer(base.Server):
  """A server without labels, to which updates change nothing."""

  def __init__(self, round_num):
    self.round_num = tf.constant(round_num)

  def apply(self, weights, update):
    return weights

  def train(self, weights, copy=0):
    return weights


class _Switch:
  """The server's part of FedSwitch, round after round, without clients."""

  def __init__(self, **hparams):
    self.algorithm = fedswitch.FedSwitch(**hparams)
    weights = Weights((tf.zeros([2]),), (), tf.constant(1.0))
    self._state = self.algorithm.initial_state(weights, base.Setup())
    self.round_num = 1

  @property
  def memory(self):
    return self._state.memory

  def labels(self, of_teacher, of_student, **more):
    """Who labels after a round with these divergences: 'T' or 'S'."""
    self._state = self.algorithm.update(
      self._state,
      _aggregated(of_teacher, of_student, **more),
      _IdleServer(self.round_num),
    )
    self.round_num += 1
    return 'T' if self.memory.by_teacher == 1.0 else 'S'

  def sends(self):
    """Whether the teacher is sent next."""
    return bool(self.algorithm.broadcasts(self._state)['teacher'].when)


class TestSwitch:
  """Eq. 3; sections 1.1, 1.2 and 7."""

  @pytest.mark.parametrize(
    'of_teacher, of_student, beta, expected',
    [
      (0.70, 0.30, 0.0, 'ST'),
      (0.70, 0.30, 0.60, 'TS'),
      (0.75, 1.20, 1.60, 'ST'),
      (0.25, 0.75, 0.50, 'ST'),  # A tie.
      (0.0, 0.0, 0.60, 'ST'),
    ],
  )
  def test_i3_equation_3_and_algorithm_1(
    self, of_teacher, of_student, beta, expected
  ):
    for labeler, who in zip(('closest', 'algorithms'), expected, strict=True):
      switch = _Switch(prior_divergence=beta, labeler=labeler)
      assert switch.labels(of_teacher, of_student) == who

  def test_c7_the_first_round_is_the_teachers_and_nothing_is_measured(self):
    switch = _Switch()
    assert switch.memory.by_teacher == 1.0
    assert switch.sends()
    assert np.isnan(switch.memory.student_divergence)
    assert np.isnan(switch.memory.teacher_divergence)
    assert not _Switch(labeler='student').sends()

  def test_i3_trace_with_hold(self):
    """What clients report of a teacher that they did not get is not read."""
    switch = _Switch(prior_divergence=0.6)
    rounds = [(0.30, 0.45), (0.0, 0.50), (0.0, 0.95), (0.70, 0.80)]
    assert [switch.labels(*pair) for pair in rounds[:2]] == ['S', 'S']
    held = switch.memory.teacher_divergence
    assert float(held) == pytest.approx(0.30)
    assert not switch.sends()
    assert switch.labels(*rounds[2]) == 'T' and switch.sends()
    assert switch.labels(*rounds[3]) == 'T'

  def test_algorithms_1_and_2_always_send(self):
    switch = _Switch(prior_divergence=0.6, labeler='algorithms')
    assert switch.labels(0.6, 0.1) == 'S' and switch.sends()
    assert switch.labels(0.1, 0.6) == 'T' and switch.sends()

  def test_a_round_without_a_report_changes_nothing(self):
    switch = _Switch(prior_divergence=0.6)
    nothing = {'share': 0.0, 'num_reports': 0.0}
    assert switch.labels(0.0, 0.0, **nothing) == 'T'
    assert switch.labels(0.1, 0.6) == 'S'
    assert switch.labels(0.0, 0.0, **nothing) == 'S'

  def test_clients_without_unlabelled_examples_do_not_count(self):
    """Theirs would be zeros in the mean."""
    switch = _Switch(prior_divergence=0.6)
    assert switch.labels(0.9, 0.5, share=0.5) == 'S'
    last = switch.memory
    assert float(last.teacher_divergence) == pytest.approx(0.9)
    assert float(last.student_divergence) == pytest.approx(0.5)

  @pytest.mark.parametrize('share', [0.0, 1e-30, 0.1])
  def test_a_liars_share_of_a_measurement_is_nobody(self, share):
    switch = _Switch(prior_divergence=0.6)
    assert switch.labels(0.3, 0.45) == 'S'
    held = switch.memory
    lie = {n: tf.constant(_LOG_3 / 3) for n in fedswitch._DIVERGENCES}
    lie['is_measured'] = tf.constant(share / 3)
    _, last = switch.algorithm._switch(held, _reports(lie))
    for name, value in last.items():
      assert value == getattr(held, name)
    # Beside two honest clients, it moves the mean by its own value at most.
    lie = {n: tf.constant((2 * 0.4 + _LOG_3) / 3) for n in lie}
    lie['is_measured'] = tf.constant((2 + share) / 3)
    memory = held._replace(teacher_sent=tf.constant(1.0))
    _, last = switch.algorithm._switch(memory, _reports(lie))
    assert all(v <= 0.4 + _LOG_3 / 2 + 1e-6 for v in last.values())

  def test_i2_clients_count_equally_whatever_their_number_of_batches(self):
    constant = lambda *pair: base.Mean(*map(tf.constant, pair))
    of_clients = [
      fedswitch.FedSwitch()
      .finish(
        None,
        {
          'student_divergence': constant(total, count),
          'teacher_divergence': constant(0.0, 0.0),
        },
      )
      .uploads
      for total, count in ((0.2 + 0.4 + 0.6, 3.0), (1.0, 1.0), (0.0, 0.0))
    ]
    sent = [float(s['student_divergence']) for s in of_clients]
    measured = [float(s['is_measured']) for s in of_clients]
    assert measured == [1.0, 1.0, 0.0]
    assert np.sum(sent) / np.sum(measured) == pytest.approx(0.7)
    assert [float(s['teacher_divergence']) for s in of_clients] == [0.0] * 3

  @pytest.mark.parametrize('beta', [0.0, 1.0986])
  def test_the_mode_is_what_the_divergences_say(self, beta):
    """All clients have as many batches, so that train.csv has their means."""
    process = tiny_rounds.build('fedswitch', own={'prior_divergence': beta})
    held, modes = None, [1.0]
    for output in tiny_rounds.run(process, num_rounds=4):
      train = output.metrics['client_work']['train']
      assert train['labeled_by_teacher'] == modes[-1]
      if modes[-1]:
        held = train['teacher_divergence']
        assert 0.0 <= held <= _LOG_3
      else:
        assert np.isnan(train['teacher_divergence'])
      teacher_fits = abs(held - beta) < abs(train['student_divergence'] - beta)
      modes.append(float(tiny_rounds.model(output).control['by_teacher']))
      assert modes[-1] == teacher_fits

  def test_beta_decides(self):
    """With two of the extremes, one of them stays with the teacher."""
    first = [
      float(
        tiny_rounds.model(
          tiny_rounds.run(
            tiny_rounds.build('fedswitch', own={'prior_divergence': beta}),
            _SERVER,
            1,
          )[0]
        ).control['by_teacher']
      )
      for beta in (0.0, 1.0986)
    ]
    assert sorted(first) == [0.0, 1.0]


def test_bytes_by_mode():
  """Section 1.4: 1 + rho models down, one up and two scalars."""
  outputs = []
  for beta in (0.0, 1.0986):
    process = tiny_rounds.build('fedswitch', own={'prior_divergence': beta})
    outputs += tiny_rounds.run(process, num_rounds=4)
  model = sum(
    np.asarray(w).nbytes for w in tiny_rounds.model(outputs[0]).weights[0]
  )
  seen = set()
  for output in outputs:
    figures = output.metrics['communication']
    by_teacher = output.metrics['client_work']['train']['labeled_by_teacher']
    seen.add(float(by_teacher))
    assert figures['bytes_down_model'] == model + 4  # And a count.
    assert figures['bytes_down_teacher'] == by_teacher * (model + 4)
    assert figures['bytes_down_scalars'] == 4 + 2 * 4
    assert figures['bytes_down_per_client'] == (
      (1 + by_teacher) * (model + 4) + 12
    )
    assert figures['bytes_up_model'] == model + 4  # And a weight.
    assert figures['bytes_up_per_client'] == (
      model + 4 + figures['bytes_up_scalars']
    )
  assert seen == {0.0, 1.0}


_DEPLOYED = ('--norm=gn', '--num_labels=10', '--max_client_examples=60000')


@pytest.mark.parametrize(
  'given',
  [
    ('labeler=teacher', 'prior_divergence=0.5'),
    ('labeler=student', 'local_ema_decay=0.5'),
  ],
)
def test_flags_without_effect_are_refused(given):
  flags = [f'--fedswitch.{flag}' for flag in given]
  with pytest.raises(UsageError, match='has no effect'):
    config.parse_config(['--algorithm=fedswitch', *_DEPLOYED, *flags])


@pytest.mark.parametrize(
  'flag, message',
  [
    ('ema_decay=1.5', 'at most 1'),
    ('local_ema_decay=-0.1', 'at least 0'),
    ('prior_divergence=-1', 'at least 0'),
    ('labeler=both', 'allowed are closest'),
  ],
)
def test_values_out_of_range_are_refused(flag, message):
  name, value = flag.split('=')
  kind = type(getattr(fedswitch.FedSwitch(), name))
  with pytest.raises(UsageError, match=message) as refused:
    fedswitch.FedSwitch(**{name: kind(value)})
  assert str(refused.value).startswith('--fedswitch.')


@pytest.mark.parametrize('name', ['ts_server_ema', 'ts_client_ema'])
def test_c16_the_baselines_go_with_protected_sums(name):
  given = [f'--algorithm={name}', *_DEPLOYED]
  config.parse_config([*given, '--aggregator=dp'])
  secure = ['--aggregator=secure', '--simulate_secure_aggregation']
  config.parse_config([*given, *secure])


def test_the_baselines_read_its_flags():
  for name in ('ts_server_ema', 'ts_client_ema'):
    with pytest.raises(UsageError, match='--fedswitch.ema_decay'):
      registry.REGISTRY[name].hparams(ema_decay=2.0)
