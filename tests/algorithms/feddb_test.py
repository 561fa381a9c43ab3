"""FedDB: worked examples DB1 to DB4 of its specification, limits, rounds."""

import numpy as np
import pytest
import tensorflow as tf
import tiny_local
import tiny_rounds
import tiny_steps
import tiny_task

from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import feddb
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import frequencies

_CLIENTS = tiny_rounds.CLIENTS


def _make(**values):
  return feddb.FedDb(**values, round=RoundHparams(scenario=_CLIENTS))


_PROBS = [[0.99, 0.008, 0.002], [0.90, 0.09, 0.01], [0.10, 0.88, 0.02]]
_PROBS += [[0.97, 0.02, 0.01], [0.30, 0.10, 0.60]]
_DB2 = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]]


class _Certain:
  """A client whose predictions are given."""

  def __init__(self, probs):
    self._probs = tf.constant(probs, tf.float32)
    self.unlabeled = base.Examples(None, tf.fill([len(probs)], -1))

  def predict(self, batch_size, *, own_moments=False):
    return self._probs


class TestDb1:
  """Debiased pseudo-labels of five examples of three classes."""

  def test_app_u_and_predictions(self):
    prior = feddb._mean(tf.constant(_PROBS), tf.ones([5]))
    np.testing.assert_allclose(prior, [0.652, 0.2196, 0.1284], atol=1e-6)
    expected = [[0.966884, 0.023198, 0.009919], [0.738921, 0.219388, 0.041691]]
    expected += [[0.035533, 0.928381, 0.036086], [0.898016, 0.054974, 0.047010]]
    expected += [[0.082335, 0.081486, 0.836179]]
    np.testing.assert_allclose(
      frequencies.divide(tf.constant(_PROBS), prior), expected, atol=1e-6
    )

  @pytest.mark.parametrize('debias, kept', [(True, [0]), (False, [0, 3])])
  def test_pseudo_labels(self, debias, kept):
    prepared = _make(debias=debias).prepare(_Certain(_PROBS))
    np.testing.assert_array_equal(
      prepared.per_example['labels'], [0, 0, 1, 0, 2]
    )
    np.testing.assert_array_equal(prepared.selected, kept)
    np.testing.assert_allclose(
      prepared.values['app_u'], [0.652, 0.2196, 0.1284], atol=1e-6
    )

  def test_a_failed_prediction_is_kept(self):
    """So that the client is seen to fail."""
    prepared = _make().prepare(_Certain([[np.nan, 0.5], [0.4, 0.6]]))
    assert 0 in prepared.selected

  def test_no_examples_have_a_uniform_mean(self):
    prepared = _make().prepare(_Certain(np.zeros([0, 4])))
    np.testing.assert_allclose(prepared.values['app_u'], [0.25] * 4)
    assert not np.size(prepared.selected)

  def test_a_class_without_probability_stays_without(self):
    probs = tf.constant([[1.0, 0.0], [1.0, 0.0]])
    np.testing.assert_array_equal(
      frequencies.divide(probs, tf.constant([1.0, 0.0])), probs
    )

  def _moved(self, mask=(1.0, 1.0), **values):
    """APP-U after two steps, whose logits are logarithms of probabilities."""
    algorithm = _make(**values)
    app_u = tf.constant([0.652, 0.2196, 0.1284])
    for mean in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]):
      views = np.log([mean, mean])
      examples = tiny_steps.examples(weak=views, strong=views, weights=mask)
      examples = examples._replace(per_example={'labels': tf.constant([0, 1])})
      batch = tiny_steps.batch(unlabeled=examples)
      network = _Linear()
      result = algorithm.unlabeled_step(
        base.Networks(network, {}), batch._replace(values={'app_u': app_u})
      )
      app_u = result.values.get('app_u', app_u)
    return app_u

  def test_app_u_follows_the_steps(self):
    np.testing.assert_allclose(
      self._moved(), [0.488, 0.3299, 0.1821], atol=1e-6
    )

  @pytest.mark.parametrize(
    'values',
    [{'app_u': 'start'}, {'weights': 'uniform'}, {'mask': (0.0, 0.0)}],
  )
  def test_app_u_stays(self, values):
    values = dict(values)
    mask = values.pop('mask', (1.0, 1.0))
    np.testing.assert_allclose(
      self._moved(mask, **values), [0.652, 0.2196, 0.1284], atol=1e-6
    )


class _Linear(tiny_steps.Identity):
  """A network whose inputs are its logits, without weights."""

  def gradients(self, tape, loss):
    return []


class TestWeights:
  """DB2 to DB4."""

  @pytest.mark.parametrize(
    'num, expected',
    [
      (1, [0.245597, 0.258361, 0.254303, 0.241739]),
      (2, [0.247121, 0.256384, 0.252343, 0.244152]),
      (100, [0.246730, 0.256770, 0.252912, 0.243588]),
    ],
  )
  def test_db2(self, monkeypatch, num, expected):
    monkeypatch.setattr(feddb, '_NUM_ITERATIONS', num)
    weights = feddb.cohort_weights(tf.constant(_DB2))
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    if num == 100:
      np.testing.assert_allclose(
        np.matmul(weights, _DB2), [0.395195, 0.276413, 0.328393], atol=1e-6
      )

  def test_db2_by_sums_only(self):
    mean = tf.reduce_mean(tf.constant(_DB2), axis=0)
    scores = [feddb.sum_only_score(tf.constant(p), mean) for p in _DB2]
    np.testing.assert_allclose(
      scores, [0.972929, 1.023494, 1.007416, 0.957645], atol=1e-6
    )
    # They are the weights after the first iteration.
    np.testing.assert_allclose(
      np.divide(scores, np.sum(scores)),
      [0.245597, 0.258361, 0.254303, 0.241739],
      atol=1e-6,
    )

  def test_db3(self):
    rows = tf.one_hot([0] * 9 + [1], 10)
    weights = feddb.cohort_weights(rows)
    np.testing.assert_allclose(weights, [0.097077] * 9 + [0.126311], atol=1e-6)
    np.testing.assert_allclose(
      tf.linalg.matvec(rows, weights, transpose_a=True)[0], 0.873689, atol=2e-6
    )

  def test_limits_of_scores(self):
    lower, upper = feddb._score_limits(10)
    np.testing.assert_allclose([lower, upper], [0.710, 1.039], atol=5e-4)
    scores = [
      float(feddb.sum_only_score(tf.one_hot(i, 10), tf.one_hot(0, 10)))
      for i in (0, 1)
    ]
    np.testing.assert_allclose(scores, [lower, upper], rtol=1e-6)

  def test_no_clients_have_no_weights(self):
    assert feddb.cohort_weights(tf.zeros([0, 3])).shape == [0]


class _Server(base.Server):
  """SGD with the rate 1 and the momentum 0.5."""

  def __init__(self):
    self.round_num = tf.constant(1)
    self._velocity = 0.0

  def apply(self, weights, update):
    (change,) = update
    self._velocity = 0.5 * self._velocity + change
    return weights._replace(trainable=(weights.trainable[0] - self._velocity,))

  def train(self, weights, copy=0):
    return weights


def _aggregate(models, weight, app_u):
  changes = weight - tf.constant(models)[:, None]
  return base.Aggregate(
    (tf.reduce_mean(changes, axis=0),),
    {'app_u': tf.constant(app_u), 'change': changes},
    tf.constant(1.0),
    lambda: None,
  )


def test_db4_two_rounds_of_a_scalar():
  algorithm, server = _make(), _Server()
  state = base.ServerState(Weights((tf.constant([2.0]),), (), tf.constant(1.0)))
  for models, expected in (
    ([1.0, 2.0, 3.0, 4.0], 2.493359),
    ([2.0] * 4, 2.246679),
  ):
    aggregate = _aggregate(models, state.weights.trainable[0], _DB2)
    state = algorithm.update(state, aggregate, server)
    np.testing.assert_allclose(
      state.weights.trainable[0], [expected], atol=1e-6
    )


def _run(name, own=(), num_rounds=1, norm='none', elements=None, **settings):
  process = tiny_rounds.build(name, _CLIENTS, norm, dict(own), **settings)
  if elements is None:
    return tiny_rounds.run(process, _CLIENTS, num_rounds)[-1]
  state = process.initialize()
  for _ in range(num_rounds):
    output = process.next(
      state, [tiny_task.dataset(e, process) for e in elements]
    )
    state = output.state
  return output


def _mean(output):
  return output.state.global_model_weights.control['mean_app_u']


class TestRounds:
  """Reductions, and the effect of weights."""

  @pytest.mark.parametrize('weights', ['cohort', 'last_mean'])
  def test_without_confidence_it_is_fedavg_on_labels(self, weights):
    """A threshold of 1, and clients of one APP-U, have weights alike."""
    elements = [tiny_task.client(0, labeled=4, unlabeled=6)] * 3
    ours, theirs = (
      _run(name, own, 2, elements=elements)
      for name, own in (
        ('feddb', {'confidence_threshold': 1.0, 'weights': weights}),
        ('supervised', {}),
      )
    )
    assert ours.metrics['client_work']['train']['pseudo_label_ratio'] == 0
    tiny_rounds.assert_same(
      tiny_rounds.model(ours).trainable,
      tiny_rounds.model(theirs).trainable,
      atol=1e-6,
    )

  def test_steps_that_see_a_part_of_the_examples_are_accepted(self):
    sizes = {'client_batch_size': 2, 'client_labeled_batch_size': 2}
    elements = [tiny_task.client(0, labeled=4, unlabeled=6)] * 2
    output = _run('feddb', {}, 1, 'none', elements, client_steps=1, **sizes)
    train = output.metrics['client_work']['train']
    assert train['num_clients'] == 2
    assert train['num_rejected_clients'] == 0

  def test_one_step_without_debiasing_is_fixmatch(self):
    """All examples are kept."""
    config = training.LoopConfig(1, 50, 50, optimizer.Sgd())
    element = tiny_task.client(0, labeled=4)
    ours, theirs = (
      tiny_local.train(
        name, _CLIENTS, element, config, confidence_threshold=0.0, **own
      )[1]
      for name, own in (
        ('feddb', {'debias': False, 'weights': 'uniform'}),
        ('fixmatch', {'pseudo_labels_by': 'received'}),
      )
    )
    tiny_rounds.assert_same(ours.update, theirs.update, atol=1e-6)

  def test_sums_keep_the_plain_mean_of_app_u(self):
    """Of clients who do not train, it is the mean of predictions."""
    settings = {'client_learning_rate': 0.0, 'plain': True}
    own = {'weights': 'last_mean', 'app_u': 'start'}
    elements = [tiny_task.client(i, labeled=2, unlabeled=6) for i in range(3)]
    # Each alone has its own; in the second round, weights are not equal.
    alone = [
      _mean(_run('feddb', own, 1, elements=[e], **settings)) for e in elements
    ]
    together = _mean(_run('feddb', own, 2, elements=elements, **settings))
    np.testing.assert_allclose(together, np.mean(alone, axis=0), atol=1e-6)
    np.testing.assert_allclose(np.sum(together), 1, atol=1e-6)

  def test_distances_are_reported(self):
    without, with_some = (
      tiny_task.client(i, labeled=4, unlabeled=n) for i, n in enumerate((0, 6))
    )
    distances = [
      _run('feddb', {'weights': 'uniform'}, elements=elements).metrics[
        'client_work'
      ]['train']['app_u_distance']
      for elements in ([without], [with_some], [without, with_some])
    ]
    assert np.isnan(distances[0])
    assert 0 < distances[1] < 1
    # A client without unlabelled examples does not count.
    np.testing.assert_allclose(distances[2], distances[1], rtol=1e-6)


def _setup(**values):
  weights = Weights((tf.TensorSpec([2]),), (), tf.TensorSpec([]))
  return base.Setup(0, weights, num_classes=3, **values)


class TestTrust:
  """What a client may send, and what protects it."""

  @pytest.mark.parametrize(
    'app_u, of_cohort, of_sums',
    [
      ([0.2, 0.3, 0.5], True, True),
      ([0.1, 0.1, 0.1], False, True),
      ([0.5, 0.6, 0], False, False),
      ([1.1, -0.1, 0], False, False),
      ([np.nan, 0, 0], False, False),
    ],
  )
  def test_app_u(self, app_u, of_cohort, of_sums):
    values = {'app_u': tf.constant(app_u, tf.float32)}
    for weights, expected in (('cohort', of_cohort), ('last_mean', of_sums)):
      more = {'change': tf.zeros([2])} if weights == 'cohort' else {}
      possible = tiny_rounds.is_possible(
        _make(weights=weights), {**values, **more}, _setup()
      )
      assert possible == expected

  def test_what_the_aggregator_cannot_change_is_refused(self):
    with pytest.raises(UsageError, match='weights=last_mean or uniform'):
      _make().uploads(_setup(plain_mean=False))
    assert _make(weights='last_mean').uploads(_setup(plain_mean=False))

  def test_a_process_with_such_an_aggregator_is_refused(self):
    aggregator = aggregator_hparams.AggregatorHparams('robust')
    with pytest.raises(UsageError, match='give --aggregator=mean'):
      tiny_task.build('feddb', _CLIENTS, norm='none', aggregator=aggregator)
