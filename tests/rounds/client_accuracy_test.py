"""What a client may contribute to an evaluation, and what sums say."""

import collections
import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.rounds import client_accuracy

_MOST = 20


def _report(counts=(4, 6), correct=(3, 6), loss=12.5, usable=True):
  return collections.OrderedDict(
    usable=usable,
    num_examples=np.array(counts, np.int64),
    ways=collections.OrderedDict(
      model=collections.OrderedDict(
        correct=np.array(correct, np.int64), loss=np.float32(loss)
      )
    ),
  )


_TYPE = tff.to_type(
  collections.OrderedDict(
    usable=np.bool_,
    num_examples=(np.int64, [2]),
    ways=collections.OrderedDict(
      model=collections.OrderedDict(correct=(np.int64, [2]), loss=np.float32)
    ),
  )
)


@functools.cache
def _screen():
  return client_accuracy.build_screen(_TYPE, _MOST)


def _figures(reports):
  sums = [_screen()(report) for report in reports]
  total = tf.nest.map_structure(lambda *values: sum(values), *sums)
  finalize = tff.tensorflow.computation(
    client_accuracy.finalize, _screen().type_signature.result
  )
  return finalize(total)


@pytest.mark.parametrize(
  'lie',
  [
    {'usable': False},
    {'counts': (-1, 6)},
    {'counts': (15, 6)},
    {'counts': (2**62, 2**62), 'correct': (2**62, 2**62)},
    {'counts': (2**63 - 1, 1), 'correct': (0, 0)},
    {'correct': (5, 6)},
    {'correct': (-3, 6)},
    {'loss': np.nan},
    {'loss': np.inf},
    {'loss': -0.5},
    {'loss': 1.1e4},
  ],
  ids=str,
)
def test_impossible_reports_are_rejected_and_leave_nothing(lie):
  sums = _screen()(_report(**lie))
  assert (sums['num_clients'], sums['num_rejected_clients']) == (1, 1)
  assert sums['num_clients_with_examples'] == 0
  for value in tf.nest.flatten([sums['num_examples'], sums['ways']]):
    assert not np.any(value)
  # An honest client's figures do not change.
  alone, both = _figures([_report()]), _figures([_report(), _report(**lie)])
  for name in alone:
    if name not in ('num_clients', 'num_rejected_clients'):
      assert alone[name] == both[name]


def test_limits_hold_for_the_most_that_a_client_can_send():
  largest = _report(counts=(0, 20), correct=(0, 20), loss=2e4)
  sums = _screen()(largest)
  limits = client_accuracy.limits(_screen().type_signature.result, _MOST)
  assert sums['num_rejected_clients'] == 0
  for limit, value in zip(
    tf.nest.flatten(limits), tf.nest.flatten(sums), strict=True
  ):
    assert np.max(value) == limit or (limit == 1 and np.max(value) == 0)


@settings(max_examples=15, deadline=None)
@given(
  st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(0, 99)),
    min_size=1,
    max_size=25,
  )
)
def test_figures_are_those_of_numpy(drawn):
  counts = np.array([(a, b) for a, b, _ in drawn])
  rng = np.random.default_rng([seed for *_, seed in drawn])
  correct = rng.integers(0, counts + 1)
  losses = rng.uniform(0, 30, len(drawn)) * counts.sum(1)
  result = _figures(map(_report, counts, correct, losses))
  has = counts.sum(1) > 0
  assert result['num_clients'] == len(drawn)
  assert result['num_rejected_clients'] == 0
  assert result['num_clients_with_examples'] == has.sum()
  assert result['num_examples'] == counts.sum()
  if not has.any():
    figures = {n: v for n, v in result.items() if not n.startswith('num_')}
    assert len(figures) == 15 and all(map(np.isnan, figures.values()))
    return
  accuracies = correct.sum(1)[has] / counts.sum(1)[has]
  assert result['accuracy'] == correct.sum() / counts.sum()
  assert result['loss'] == pytest.approx(losses.sum() / counts.sum(), abs=1e-4)
  of_class = counts.sum(0) > 0
  recalls = correct.sum(0)[of_class] / counts.sum(0)[of_class]
  assert result['recall_mean'] == pytest.approx(recalls.mean())
  assert result['accuracy_mean'] == pytest.approx(accuracies.mean(), abs=1e-8)
  assert result['accuracy_deviation'] == pytest.approx(
    accuracies.std(), abs=1e-4
  )
  half = 0.5 / client_accuracy.RESOLUTION + 1e-9
  for percent in client_accuracy.PERCENTILES:
    expected = np.percentile(accuracies, percent, method='inverted_cdf')
    found = result[f'accuracy_percentile_{percent}']
    assert found == pytest.approx(expected, abs=half)
  worst = np.sort(accuracies)[: -(-len(accuracies) // 10)].mean()
  assert result['accuracy_worst_decile'] == pytest.approx(worst, abs=half)
