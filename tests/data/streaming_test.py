from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from tff_fssl.data import streaming


def test_steps_of_the_paper():
  # FedMatch: 10 steps of 10 rounds.
  parts = streaming.Streaming(steps=10, rounds=10)
  assert [parts.step(r) for r in range(1, 101)] == [
    step for step in range(10) for _ in range(10)
  ]
  assert parts.step(101) == 9
  assert parts.last_begins == 91 and parts.step(91) == 9 > parts.step(90)
  assert streaming.Streaming().last_begins == 1
  # FedSwitch: one round each, and again.
  again = streaming.Streaming(steps=10, rounds=1, cycles=True)
  assert [again.step(r) for r in range(1, 24)] == [
    *range(10),
    *range(10),
    *range(3),
  ]


@given(
  size=st.integers(0, 40),
  steps=st.integers(1, 12),
  rounds=st.integers(1, 3),
  cycles=st.booleans(),
  seed=st.integers(-5, 5),
)
def test_parts_are_all_examples_once(size, steps, rounds, cycles, seed):
  parts = streaming.Streaming(steps, rounds, cycles, seed)
  examples = np.arange(7, 7 + 3 * size, 3)
  taken = [parts.part(examples, 4, 1 + rounds * s) for s in range(steps)]
  np.testing.assert_array_equal(np.sort(np.concatenate(taken)), examples)
  sizes = [len(a) for a in taken]
  assert max(sizes) - min(sizes) <= 1
  for step, part in enumerate(taken):
    assert np.all(np.diff(part) > 0)
    # All rounds of a step have the same, whenever they are asked for.
    last = parts.part(examples, 4, rounds * (step + 1))
    np.testing.assert_array_equal(last, part)
  after = parts.part(examples, 4, rounds * steps + 1)
  np.testing.assert_array_equal(after, taken[0 if cycles else -1])


def test_parts_are_random():
  examples = np.arange(100)
  parts = streaming.Streaming(steps=2, rounds=1)
  first = parts.part(examples, 0, 1)
  assert first.tolist() != list(range(50))
  assert first.tolist() != parts.part(examples, 1, 1).tolist()
  other = streaming.Streaming(steps=2, rounds=1, seed=1)
  assert first.tolist() != other.part(examples, 0, 1).tolist()
