import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.semisup import patience


def _rates(rule, losses):
  state, rates = rule.start(), []
  for loss in losses:
    state = rule.update(state, tf.constant(loss))
    rates.append(1e-3 * float(state.rate))
  return rates, state


def test_i7():
  """Drops at epochs 7 and 14; the second .8 is no improvement."""
  losses = [1.0, 0.9, *[0.95] * 6, 0.8, 0.8, *[0.85] * 4]
  rates, _ = _rates(patience.Rule(5, 3.0), losses)
  np.testing.assert_allclose(
    rates, [1e-3] * 6 + [1e-3 / 3] * 7 + [1e-3 / 9], rtol=1e-6
  )


@pytest.mark.parametrize('loss', [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_changes_nothing(loss):
  rule = patience.Rule(3, 3.0)
  _, before = _rates(rule, [1.0, 2.0])
  after = rule.update(before, tf.constant(loss, tf.float32))
  assert [float(v) for v in after] == [float(v) for v in before]


def test_states_are_in_their_ranges():
  rule = patience.Rule(2, 3.0)
  rng = np.random.default_rng(1)
  state = rule.start()
  for loss in [*rng.random(40).astype(np.float32), 1e30, 0.0, 3.0]:
    for name, (_, least, most) in rule.ranges().items():
      assert least <= float(getattr(state, name)) <= most
    state = rule.update(state, tf.constant(loss, tf.float32))
  assert float(state.rate) < 1e-3
