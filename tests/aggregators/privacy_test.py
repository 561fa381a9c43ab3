"""An audit: what an attacker learns of one client, against what is reported."""

import numpy as np
import pytest
from scipy import stats
import tensorflow_federated as tff

from tff_fssl.aggregators import factory
from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams

_SIZE = 4
_REPEATS = 150
_DELTA = 0.01
_ORDINARY = [0.1, 0.0, 0.0, 0.0]


@pytest.fixture(scope='module', params=[0.0, 0.1], ids=['adaptive', 'fixed'])
def aggregate(request):
  """One client's update -> (many aggregates with two others, epsilon)."""
  process = factory.build_aggregator(
    aggregator_hparams.AggregatorHparams(
      'dp',
      dp_delta=_DELTA,
      dp_noise_multiplier=3.0,
      dp_clipping_norm=request.param,
    ),
    clients_per_round=3,
    population=3,
  ).create(tff.to_type([(np.float32, [_SIZE])]), tff.TensorType(np.float32))
  state = process.initialize()
  others = [np.array(o, np.float32) for o in ([0.05, 0, 0, 0], [0, 0.2, 0, 0])]

  def run(update, repeats=_REPEATS):
    values = [[np.array(update, np.float32)], *([o] for o in others)]
    outputs = [process.next(state, values, [1.0] * 3) for _ in range(repeats)]
    epsilon = float(outputs[0].measurements['epsilon'])
    return np.array([o.result[0] for o in outputs]), epsilon

  return run


@pytest.fixture(scope='module')
def without(aggregate):
  """Aggregates in which the client has an opposite update."""
  return aggregate(np.negative(_ORDINARY))[0]


def _statistics(aggregates):
  """What an attacker may look at: [N, K], larger is more suspicious."""
  with np.errstate(all='ignore'):
    columns = [
      ~np.all(np.isfinite(aggregates), axis=1),
      np.all(aggregates == 0.0, axis=1),
      np.max(np.abs(aggregates), axis=1),
      *aggregates.T,
      *-aggregates.T,
    ]
  return np.nan_to_num(np.stack(columns, 1).astype(np.float64), nan=1e300)


def lower_bound(first, second, delta):
  """An epsilon that the mechanism exceeds, with 97.5% confidence.

  Half of the samples choose an event, the others bound its probabilities
  (Clopper and Pearson).
  """
  best = 0.0
  for a, b in ((first, second), (second, first)):
    chosen = (-np.inf, 0, 0.0)
    half = len(a) // 2
    for column in range(a.shape[1]):
      for threshold in np.unique(np.r_[a[:half, column], b[:half, column]]):
        for_a = np.mean(a[:half, column] >= threshold)
        for_b = np.mean(b[:half, column] >= threshold)
        ratio = (for_a - delta) / (for_b + 1.0 / half)
        chosen = max(chosen, (ratio, column, threshold))
    _, column, threshold = chosen
    hits_a = np.sum(a[half:, column] >= threshold)
    hits_b = np.sum(b[half:, column] >= threshold)
    least = stats.beta.ppf(0.0125, hits_a, half - hits_a + 1) if hits_a else 0.0
    most = 1.0
    if hits_b < half:
      most = stats.beta.ppf(0.9875, hits_b + 1, half - hits_b)
    best = max(best, np.log(max(least - delta, 1e-9) / most))
  return best


@pytest.mark.parametrize(
  'canary',
  [
    _ORDINARY,
    [1e3, 0.0, 0.0, 0.0],
    [1e11] * _SIZE,
    [1.9e19, 0.0, 0.0, 0.0],  # A norm that overflows float32.
    [-3e38] * _SIZE,
    [1e-45] * _SIZE,  # Subnormal.
    [-0.0] * _SIZE,
    [np.nan, 0.0, 0.0, 0.0],
    [np.inf, -np.inf, 0.0, 0.0],
  ],
  ids=str,
)
def test_no_canary_is_seen_beyond_epsilon(aggregate, without, canary):
  aggregates, epsilon = aggregate(canary)
  assert epsilon < 2.5  # Else the samples are too few to show a breach.
  bound = lower_bound(_statistics(aggregates), _statistics(without), _DELTA)
  assert bound < epsilon


def test_the_audit_sees_a_breach():
  """An update that is always seen, and a shift of six deviations."""
  rng = np.random.default_rng(0)
  noise = lambda: _statistics(rng.normal(0, 1.0, [_REPEATS, _SIZE]))
  skipped = _statistics(np.full([_REPEATS, _SIZE], np.nan))
  assert lower_bound(skipped, noise(), _DELTA) > 2.5
  assert lower_bound(noise(), noise(), _DELTA) < 0.7
  shifted = _statistics(rng.normal(6.0, 1.0, [_REPEATS, _SIZE]))
  assert lower_bound(shifted, noise(), _DELTA) > 2.5


def test_a_large_update_would_break_the_clipping(monkeypatch):
  """Why `MAX_ENTRY` is there: unscreened, the sum is NaN."""
  monkeypatch.setattr(guarded, 'MAX_ENTRY', 3.4e38)
  process = factory.build_aggregator(
    aggregator_hparams.AggregatorHparams('dp', dp_clipping_norm=0.1),
    clients_per_round=1,
    population=100,
  ).create(tff.to_type([(np.float32, [1])]), tff.TensorType(np.float32))
  update = [np.array([1.9e19], np.float32)]
  result = process.next(process.initialize(), [update], [1.0]).result
  assert np.isnan(result[0])
