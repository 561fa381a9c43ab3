"""Moving averages: worked example I4 of FedSwitch's spec, and their ends."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl.semisup import moving_average

_TEACHER, _STUDENT = tf.constant([1.0, 2.0]), tf.constant([3.0, -1.0])


def _repeated(decay, *students):
  teacher = [_TEACHER]
  for student in students:
    teacher = moving_average.moving_average(
      teacher, [tf.constant(student)], decay
    )
  return teacher[0].numpy()


@pytest.mark.parametrize(
  ('decay', 'once', 'five_times', 'moved'),
  [
    (0.999, [1.002000, 1.997000], [1.009980, 1.985030], 0.004990),
    (0.99, [1.020000, 1.970000], [1.098020, 1.852970], 0.049010),
    (0.9, [1.200000, 1.700000], [1.819020, 0.771470], 0.409510),
  ],
)
def test_i4_constant_student(decay, once, five_times, moved):
  np.testing.assert_allclose(_repeated(decay, [3.0, -1.0]), once, atol=1e-6)
  teacher = _repeated(decay, *[[3.0, -1.0]] * 5)
  np.testing.assert_allclose(teacher, five_times, atol=1e-6)
  np.testing.assert_allclose((teacher - _TEACHER) / [2, -3], moved, atol=1e-6)


def test_i4_moving_student():
  teacher = _repeated(0.9, [3.0, -1.0], [2.0, 0.0], [1.0, 1.0])
  np.testing.assert_allclose(teacher, [1.252000, 1.477000], atol=1e-6)


@pytest.mark.parametrize(
  ('decay', 'half_life'),
  [(0.999, 692.800549), (0.99, 68.967564), (0.9, 6.578813)],
)
def test_i4_half_lives(decay, half_life):
  zero, teacher = tf.constant(0.0, tf.float64), [tf.constant(1.0, tf.float64)]
  distances = []
  for _ in range(int(half_life) + 1):
    teacher = moving_average.moving_average(teacher, [zero], decay)
    distances.append(float(teacher[0]))
  # Half of the distance is left between these two steps.
  before, after = np.log(distances[-2:])
  share = (before - np.log(0.5)) / (before - after)
  assert int(half_life) + share == pytest.approx(half_life, abs=1e-6)


@pytest.mark.parametrize('bad', [np.nan, np.inf, 3e38])
def test_ends_are_exact_whatever_the_other_is(bad):
  other = tf.constant([bad, -0.0])
  old = moving_average.moving_average([_TEACHER], [other], 1.0)
  new = moving_average.moving_average([other], [_STUDENT], 0.0)
  np.testing.assert_array_equal(old[0], _TEACHER)
  np.testing.assert_array_equal(new[0], _STUDENT)


_FLOATS = strategies.floats(-1e6, 1e6, width=32)


@hypothesis.given(_FLOATS, _FLOATS, strategies.floats(0, 1))
def test_averages_lie_between(old, new, decay):
  (average,) = moving_average.moving_average(
    [tf.constant(old)], [tf.constant(new)], decay
  )
  slack = 1e-6 * max(abs(old), abs(new))
  assert min(old, new) - slack <= float(average) <= max(old, new) + slack
  np.testing.assert_allclose(
    average, decay * old + (1 - decay) * new, rtol=1e-5, atol=slack
  )


@hypothesis.given(_FLOATS, strategies.floats(0, 1))
def test_equal_tensors_stay_equal_to_the_bit(value, decay):
  value = tf.constant(value)
  (average,) = moving_average.moving_average([value], [value], decay)
  np.testing.assert_array_equal(average, value)


def test_counters_have_no_average():
  old, new = tf.constant(3, tf.int64), tf.constant(7, tf.int64)
  for decay in (0.0, 0.5):
    assert moving_average.moving_average([old], [new], decay) == [new]
  assert moving_average.moving_average([old], [new], 1.0) == [old]


def test_lengths_must_agree():
  with pytest.raises(ValueError):
    moving_average.moving_average([_TEACHER], [_TEACHER] * 2, 0.5)


@pytest.mark.parametrize('decay', [-0.1, 1.1, float('nan')])
def test_decays_out_of_range(decay):
  with pytest.raises(hparams.UsageError, match='must be from 0 to 1'):
    moving_average.moving_average([_TEACHER], [_STUDENT], decay)
