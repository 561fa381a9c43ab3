"""FedCoPL's quota: the examples that are kept, by hand and in rounds."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds

from tff_fssl.aggregators.hparams import AggregatorHparams
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.program import config
from tff_fssl.rounds import quota

_CLIENTS = round_hparams.LABELS_AT_CLIENTS
_TOTALS, _COUNTS = 'quota_totals', 'quota_counts'


def _probs(labels, confidences):
  """Probabilities of 3 classes."""
  rest = (1 - np.float32(confidences))[:, None] / 2
  one_hot = np.eye(3, dtype=np.float32)[labels]
  return np.where(one_hot > 0, np.float32(confidences)[:, None], rest)


def _kept(probs, totals):
  kept = quota.most_certain(tf.constant(probs), tf.constant(totals, tf.float32))
  return np.flatnonzero(kept).tolist()


def test_a_worked_example():
  """M = ceil(18 / 3) = 6; of 4, 1, 1 are kept ceil(4 6 / 10) = 3, 1, all."""
  labels = [0, 0, 1, 0, 2, 0]
  probs = _probs(labels, [0.6, 0.9, 0.5, 0.7, 0.4, 0.8])
  assert _kept(probs, [10, 7, 1]) == [1, 2, 3, 4, 5]
  np.testing.assert_array_equal(quota.count(tf.constant(probs)), [4, 1, 1])


def test_without_totals_all_are_kept():
  probs = _probs([0, 0, 1], [0.6, 0.9, 0.5])
  assert _kept(probs, [0, 0, 0]) == [0, 1, 2]
  # Nobody predicted the class of the last one before. M is 4.
  assert _kept(probs, [12, 0, 0]) == [1, 2]


def test_of_equally_confident_examples_the_first_are_kept():
  assert _kept(_probs([0, 0, 0, 0], [0.7, 0.8, 0.7, 0.7]), [6, 0, 0]) == [0, 1]


@pytest.mark.parametrize('wrong', [np.nan, np.inf])
def test_predictions_that_are_not_finite_are_kept_and_not_counted(wrong):
  probs = _probs([0, 0, 0], [0.6, 0.9, 0.8])
  probs[1, 2] = wrong
  assert _kept(probs, [30, 0, 0]) == [1, 2]
  np.testing.assert_array_equal(quota.count(tf.constant(probs)), [2, 0, 0])


def test_a_client_without_examples_keeps_none():
  probs = np.zeros([0, 3], np.float32)
  assert _kept(probs, [30, 0, 0]) == []
  np.testing.assert_array_equal(quota.count(tf.constant(probs)), [0, 0, 0])


def _brute_force(probs, totals):
  """Class by class, in whole numbers."""
  totals = [int(t) for t in totals]
  most, kept = -(-sum(totals) // len(totals)), []
  labels, confidences = probs.argmax(1), probs.max(1)
  for label, total in enumerate(totals):
    own = sorted(np.flatnonzero(labels == label), key=lambda i: -confidences[i])
    num = len(own) if total <= most else -(-len(own) * most // total)
    kept += own[:num]
  return sorted(int(i) for i in kept)


@pytest.mark.parametrize('seed', range(20))
def test_like_brute_force(seed):
  rng = np.random.default_rng(seed)
  num_classes = int(rng.integers(2, 8))
  # Few levels, so that there are ties.
  logits = rng.integers(0, 5, [int(rng.integers(1, 60)), num_classes])
  logits = logits + rng.exponential(size=num_classes).round()
  probs = tf.nn.softmax(logits.astype(np.float32)).numpy()
  totals = rng.integers(0, 200, num_classes) * rng.integers(0, 2, num_classes)
  assert _kept(probs, totals) == _brute_force(probs, totals)


def _algorithm(name, **settings):
  entry = registry.REGISTRY[name]
  scenario = entry.scenarios[-1]
  return entry.configure(
    None,
    round_hparams.RoundHparams(
      scenario=scenario, pseudo_label_quota=True, **settings
    ),
  )


def _fits(name):
  try:
    quota.check(_algorithm(name))
  except UsageError as error:
    assert '\n' not in str(error)
    assert f'--pseudo_label_quota=true: does not fit --algorithm={name}' in str(
      error
    )
    return False
  return True


def test_what_the_quota_fits():
  assert {name for name in registry.REGISTRY if not _fits(name)} == {
    'cbafed',
    'fedcon',
    'fedmatch',
    'local_fixmatch',
    'local_supervised',
    'local_uda',
    'protofssl',
    'supervised',
  }


def test_without_the_flag_nothing_is_added():
  algorithm = registry.REGISTRY['fixmatch'].hparams()
  assert quota.apply(algorithm) is algorithm


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--algorithm=supervised'], ['no effect', '--algorithm=supervised']),
    (
      ['--algorithm=local_uda', f'--scenario={_CLIENTS}', '--num_labels=50'],
      ['no effect', '--algorithm=local_uda'],
    ),
    (
      ['--algorithm=fedcon'],
      ['--pseudo_label_quota=true', '--algorithm=fedcon', 'no classes'],
    ),
    (
      ['--algorithm=fixmatch', f'--scenario={_CLIENTS}', '--full_labels'],
      ['no effect', '--full_labels=true'],
    ),
    (
      [
        '--algorithm=fixmatch',
        '--aggregator=secure',
        '--simulate_secure_aggregation',
        '--norm=gn',
        '--max_client_examples=9000',
      ],
      ['--aggregator=secure', 'set --pseudo_label_quota=false'],
    ),
  ],
)
def test_refused_in_one_line(argv, words):
  config.parse_config(argv)  # Without the flag all is well.
  with pytest.raises(UsageError) as error:
    config.parse_config([*argv, '--pseudo_label_quota'])
  message = str(error.value)
  assert '\n' not in message and all(word in message for word in words), message


def test_a_process_that_sums_securely_refuses_it():
  with pytest.raises(UsageError, match='also send values'):
    tiny_rounds.build(
      'fixmatch',
      aggregator=AggregatorHparams(aggregator='secure'),
      max_client_examples=50,
      pseudo_label_quota=True,
    )


@pytest.mark.parametrize(
  'sent, allowed',
  [
    ([20, 10, 10], True),
    ([0, 0, 0], True),
    ([41, 0, 0], False),
    ([20, 20, 1], False),
    ([-1, 0, 0], False),
    ([np.nan, 0, 0], False),
    ([np.inf, 0, 0], False),
  ],
)
def test_counts_are_of_what_a_client_can_have(sent, allowed):
  algorithm = quota.apply(_algorithm('fixmatch', max_client_examples=40))
  uploads = {_COUNTS: tf.constant(sent, tf.float32)}
  assert tiny_rounds.is_possible(algorithm, uploads) == allowed


def test_what_an_algorithm_checks_itself_is_checked_too():
  algorithm = quota.apply(_algorithm('freematch'))
  few = {_COUNTS: tf.constant([1.0, 0.0, 0.0])}
  assert tiny_rounds.is_possible(algorithm, few)
  much = {**few, 'averages': tf.fill([7], 9.0)}
  assert not tiny_rounds.is_possible(algorithm, much)


class _Client:
  """A client whose predictions are given."""

  def __init__(self, probs, totals):
    self._probs = tf.constant(probs)
    self.unlabeled = base.Examples(None, tf.fill([len(probs)], -1))
    self.received = {_TOTALS: tf.constant(totals, tf.float32)}
    self.values = {}

  def predict(self, batch_size):
    del batch_size
    return self._probs


def test_counted_and_kept_is_what_the_algorithm_selects():
  """SemiFL selects all but the second example: of 3, 2 are kept."""
  semifl = registry.REGISTRY['semifl'].hparams(
    round=round_hparams.RoundHparams(pseudo_label_quota=True),
    confidence_threshold=0.5,
  )
  probs = _probs([0, 0, 1, 0, 0], [0.6, 0.4, 0.8, 0.9, 0.7])
  client = _Client(probs, [6, 3, 3])
  prepared = quota.apply(semifl).prepare(client)
  np.testing.assert_array_equal(prepared.selected, [2, 3, 4])
  np.testing.assert_array_equal(prepared.values[_COUNTS], [3, 1, 0])
  assert set(prepared.per_example) == {'labels'}


def _rounds(name, scenario, num_rounds=2, **settings):
  process = tiny_rounds.build(name, scenario, **settings)
  return tiny_rounds.run(process, scenario, num_rounds)


@pytest.mark.parametrize('scenario', [tiny_rounds.SERVER, tiny_rounds.CLIENTS])
def test_the_first_round_is_that_without_the_quota(scenario):
  plain = _rounds('fixmatch', scenario)
  quoted = _rounds('fixmatch', scenario, pseudo_label_quota=True)
  first = [tiny_rounds.model(outputs[0]) for outputs in (plain, quoted)]
  tiny_rounds.assert_same(first[0].trainable, first[1].trainable, atol=1e-6)
  totals = first[1].control[_TOTALS]
  # 3 clients of 12 unlabelled examples.
  assert totals.sum() == 36
  second = [
    float(outputs[1].metrics['client_work']['train']['num_examples'])
    for outputs in (plain, quoted)
  ]
  least = np.minimum(totals, np.ceil(totals.sum() / 3)).sum()
  if scenario == tiny_rounds.SERVER:
    # Each client rounds up in each class.
    assert second[0] == 36 and least <= second[1] < min(36, least + 9)
  assert second[1] < second[0]
  assert tiny_rounds.differ(
    tiny_rounds.model(plain[1]).trainable,
    tiny_rounds.model(quoted[1]).trainable,
  )


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=() if name == 'freematch' else pytest.mark.slow)
    for name in registry.REGISTRY
    if _fits(name)
  ],
)
def test_every_algorithm_keeps_its_own_memory(name):
  scenario = registry.REGISTRY[name].scenarios[-1]
  plain = tiny_rounds.model(_rounds(name, scenario, 1)[0])
  output = _rounds(name, scenario, 1, pseudo_label_quota=True)[0]
  quoted = tiny_rounds.model(output)
  totals = quoted.control.pop(_TOTALS)
  assert 0 < totals.sum() <= 36
  assert output.metrics['client_work']['train']['num_rejected_clients'] == 0
  tiny_rounds.assert_same(plain, quoted, atol=1e-5)


def test_a_round_without_clients_changes_no_totals():
  process = tiny_rounds.build('fixmatch', pseudo_label_quota=True)
  output = tiny_rounds.run(process, num_rounds=1)[0]
  after = process.next(output.state, [])
  tiny_rounds.assert_same(
    tiny_rounds.model(output).control, tiny_rounds.model(after).control
  )
