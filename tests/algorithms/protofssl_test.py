"""ProtoFSSL's rounds: bytes, hostile clients, what is refused.

Ids (I13) are those of the specification of FedMatch and ProtoFSSL.
"""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_plan
import tiny_rounds
import tiny_task

from tff_fssl.algorithms import protofssl
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import evaluate
from tff_fssl.models import model_fns
from tff_fssl.models import networks
from tff_fssl.models.weights import Weights
from tff_fssl.program import config
from tff_fssl.rounds import communication
from tff_fssl.rounds import messages

_CLIENTS = tiny_rounds.CLIENTS
_AT_CLIENTS = round_hparams.RoundHparams(scenario=_CLIENTS)
_KINDS = ('helpers', 'global')


def _build(kind='helpers', norm='none', own=(), **settings):
  own = {'prototypes': kind, **dict(own)} if kind == 'global' else own
  return tiny_rounds.build('protofssl', _CLIENTS, norm, own, **settings)


def _cohort(num=3):
  return tiny_task.cohort(_CLIENTS, num)


def _next(process, state, elements):
  return process.next(state, [tiny_task.dataset(e) for e in elements])


def _sets(output, prefix=''):
  """The sets that predict, or those that are `sent_`."""
  model = output.state.global_model_weights
  memory = {**model.sets, **model.control}
  return collections.OrderedDict(
    (name, memory[f'{prefix}{name}']) for name in ('exists', 'prototypes')
  )


def _with_sets(model, found):
  """The model of a process that sends the sets that predict."""
  return model._replace(sets=collections.OrderedDict(), control=found)


class TestRounds:
  @pytest.mark.parametrize('kind', _KINDS)
  def test_prototypes_are_kept_sent_and_predict(self, kind):
    process = _build(kind)
    start = process.initialize().global_model_weights.control
    assert not np.any(start['exists'])
    outputs = tiny_rounds.run(process, _CLIENTS, 3)
    losses = [
      o.metrics['client_work']['train']['loss_prototype_label'] for o in outputs
    ]
    # Before the second round there are none.
    assert np.isnan(losses[0]) and np.all(np.isfinite(losses[1:]))
    found = _sets(outputs[-1])
    assert found['prototypes'].shape[0] == (5 if kind == 'helpers' else 1)
    assert found['exists'].any(1).sum() == (3 if kind == 'helpers' else 1)
    x, y = tiny_task.examples(60, 3)
    evaluate_fn = evaluate.build_evaluate_fn(
      tiny_task.network_fn('protofssl', 'none'),
      tiny_task.VIEWS,
      prediction=process.prediction,
    )
    model = tiny_rounds.model(outputs[-1])
    assert evaluate_fn(model, x, y)['accuracy'] > 0.8
    # Without them, all classes are equally probable.
    result = evaluate_fn(model._replace(control=start), x, y)
    assert result['accuracy'] == pytest.approx(np.mean(y == 0))
    assert result['loss'] == pytest.approx(np.log(3), abs=1e-4)

  def test_global_prototypes_are_the_mean_of_the_clients_own(self):
    """In the first round both kinds train alike."""
    own = (('prototypes', 'global'), ('sum_norm', 0.0))
    process = tiny_rounds.build('protofssl', _CLIENTS, own=own)
    (theirs,) = tiny_rounds.run(process, _CLIENTS, 1)
    (ours,) = tiny_rounds.run(_build(), _CLIENTS, 1)
    tiny_rounds.assert_same(
      tiny_rounds.model(ours).weights, tiny_rounds.model(theirs).weights, 1e-6
    )
    # Weighed by examples: which client keeps which place is drawn, but how many
    # examples of a class each has can be told from its prototypes.
    kept = _sets(ours)
    mean = _sets(theirs)['prototypes'][0]
    for label in range(3):
      of_class = kept['prototypes'][:, label][kept['exists'][:, label]]
      assert np.all(mean[label] >= of_class.min(0) - 1e-5)
      assert np.all(mean[label] <= of_class.max(0) + 1e-5)

  def test_helpers_that_stay_for_two_rounds(self):
    """Rounds 3 and 4 have those of round 2; who predicts is of the round."""
    held, plain = _build(own={'helper_interval': 2}), _build()
    outputs = tiny_rounds.run(held, _CLIENTS, 4)
    losses = [
      o.metrics['client_work']['train']['loss_prototype_label'] for o in outputs
    ]
    assert np.all(np.isnan(losses[:2])) and np.all(np.isfinite(losses[2:]))
    x, y = tiny_task.examples(60, 3)
    own, others = (
      evaluate.build_evaluate_fn(
        tiny_task.network_fn('protofssl', 'none'),
        tiny_task.VIEWS,
        prediction=process.prediction,
      )
      for process in (held, plain)
    )
    latest = [_sets(o) for o in outputs]
    sent = [_sets(o, 'sent_') for o in outputs]
    tiny_rounds.assert_same(sent[1], latest[1])
    tiny_rounds.assert_same(sent[2], latest[1])
    tiny_rounds.assert_same(sent[3], latest[3])
    assert tiny_rounds.differ(latest[2], latest[1])
    for before, after, found, used in zip(
      outputs[1:], outputs[2:], latest[2:], (sent[1], sent[2])
    ):
      # A client cannot tell from which round its helpers are.
      state = before.state._replace(
        global_model_weights=_with_sets(tiny_rounds.model(before), used)
      )
      round_num = int(before.state.client_work)
      cohort = tiny_task.cohort(_CLIENTS, round_num=round_num)
      expected = _next(plain, state, cohort)
      tiny_rounds.assert_same(
        tiny_rounds.model(after).weights, tiny_rounds.model(expected).weights
      )
      tiny_rounds.assert_same(found, _sets(expected))
      model = tiny_rounds.model(after)
      result = own(model, x, y)
      assert result == others(_with_sets(model, found), x, y)
      assert result['accuracy'] > 0.8

  def test_a_discarded_round_sends_what_is_due(self):
    process = _build(own={'helper_interval': 2}, min_clients=2)
    first = _next(process, process.initialize(), _cohort())
    assert not np.any(_sets(first, 'sent_')['exists'])
    second = _next(process, first.state, _cohort(1))
    assert second.metrics['participation']['too_few_clients'] == 1
    tiny_rounds.assert_same(_sets(second, 'sent_'), _sets(first))
    tiny_rounds.assert_same(_sets(second), _sets(first))
    tiny_rounds.assert_same(
      tiny_rounds.model(second).weights, tiny_rounds.model(first).weights
    )

  @pytest.mark.parametrize('kind', _KINDS)
  def test_global_support_is_used_as_soon_as_there_are_prototypes(self, kind):
    outputs, own = (
      tiny_rounds.run(_build(kind, own={'support': support}), _CLIENTS, 2)
      for support in ('global', 'own')
    )
    first, second = zip(outputs, own)
    tiny_rounds.assert_same(*(tiny_task.flat(o.state) for o in first))
    trained, expected = (
      o.metrics['client_work']['train']['loss_labeled'] for o in second
    )
    assert np.isfinite(trained) and trained != expected
    assert tiny_rounds.differ(*(tiny_rounds.model(o).weights for o in second))

  @pytest.mark.parametrize('kind', _KINDS)
  def test_clients_without_labels_or_classes(self, kind):
    process = _build(kind)
    state = process.initialize()
    cohort = _cohort()
    without = tiny_task.client(5)  # No labels.
    expected = _next(process, state, cohort)
    actual = _next(process, state, [*cohort, without])
    tiny_rounds.assert_same(
      tiny_task.flat(expected.state), tiny_task.flat(actual.state), 1e-6
    )
    train = actual.metrics['client_work']['train']
    assert train['num_rejected_clients'] == train['num_non_finite_clients'] == 0
    assert train['aggregation_weight_max'] == pytest.approx(1 / 3)
    # Alone, it changes nothing.
    tiny_rounds.assert_same(
      tiny_task.flat(_next(process, expected.state, [without]).state),
      tiny_task.flat(expected.state),
    )
    for element in cohort:  # Nobody has class 0.
      keep = element['labeled']['y'] != 0
      element['labeled'] = collections.OrderedDict(
        (k, v[keep]) for k, v in element['labeled'].items()
      )
    output = _next(process, state, cohort)
    output = _next(process, output.state, cohort)
    assert not np.any(_sets(output)['exists'][:, 0])
    assert np.all(np.isfinite(tiny_rounds.model(output).trainable[0]))
    loss = output.metrics['client_work']['train']['loss_prototype_label']
    assert np.isfinite(loss)

  def test_weights_by_examples_are_those_that_clients_have(self):
    process = _build(client_weighting='examples', max_client_examples=40)
    cohort = [
      tiny_task.client(i, labeled=4 + i, unlabeled=6 + 8 * i) for i in range(2)
    ]
    output = _next(process, process.initialize(), cohort)
    train = output.metrics['client_work']['train']
    assert train['aggregation_weight_min'] == pytest.approx(10 / 29)
    assert train['aggregation_weight_max'] == pytest.approx(19 / 29)


class TestBytes:
  """I13; table 1: 2 models and C (1 + h) k."""

  @pytest.mark.parametrize(
    'num_helpers, expected', [(2, 52_569_600), (5, 52_631_040)]
  )
  def test_resnet_8_on_cifar10(self, num_helpers, expected):
    model_fn = model_fns.remove_classifier(
      functools.partial(
        networks.build_network, 'resnet9', (32, 32, 3), 10, 'none'
      )
    )
    with tf.Graph().as_default():
      model = model_fn()
      assert model.count_params() == 6_563_520
      specs = [tf.TensorSpec(v.shape) for v in model.trainable_variables]
    weights = Weights(tuple(specs), (), tf.TensorSpec([]))
    algorithm = protofssl.ProtoFssl(num_helpers=num_helpers, round=_AT_CLIENTS)
    setup = base.Setup(0, weights, num_classes=10, num_outputs=512)
    figures = _figures(algorithm, setup)
    # Also sent: a byte for each prototype, which says whether it exists; a
    # weight, a count and a round number; whether a row is valid, and an id.
    assert figures['bytes_down_exchange'] == num_helpers * 10 * (4 * 512 + 1)
    assert figures['bytes_up_exchange'] == 10 * (4 * 512 + 1) + 5
    beside = 10 * (num_helpers + 1) + 5 + 4 + 4 + 4
    total = figures['bytes_down_per_client'] + figures['bytes_up_per_client']
    assert total - beside == expected


def _figures(algorithm, setup):
  """What travels in a round, without metrics."""
  weights, plan = setup.weights, tiny_plan.bare(algorithm, setup)
  model = plan.states.start(
    tf.nest.map_structure(lambda s: np.zeros(s.shape, np.float32), weights)
  )
  model = tf.nest.map_structure(np.asarray, model)
  model_type = tff.types.tensorflow_to_type(
    tf.nest.map_structure(tf.type_spec_from_value, model)
  )
  update_type = tff.types.tensorflow_to_type(
    collections.OrderedDict(model=tuple(weights.trainable))
  )
  upload_type = tff.to_type(
    tff.learning.templates.ClientResult(
      collections.OrderedDict(
        update=update_type,
        row=messages.row_type(plan.row_specs),
      ),
      np.float32,
    )
  )
  computed = communication.build_communication(
    plan, model_type, upload_type, None, statistics_up=0
  )
  return computed(model, model, 1)


_DEPLOYED = (
  '--algorithm=protofssl',
  '--scenario=labels_at_clients',
  '--norm=gn',
  '--num_labels=30',
  '--max_client_examples=60000',
)


@pytest.mark.parametrize(
  'given, message',
  [
    (('--scenario=labels_at_server',), 'labels_at_clients only'),
    (('--protofssl.sum_norm=2',), 'has no effect'),
    (('--protofssl.prototypes=global', '--protofssl.num_helpers=3'), 'effect'),
    (
      ('--protofssl.prototypes=global', '--protofssl.helper_interval=3'),
      'effect',
    ),
    (('--protofssl.support=others',), 'allowed are own, global'),
    (
      (
        '--protofssl.support=global',
        '--protofssl.prototypes=global',
        '--protofssl.temperature=1',
      ),
      'nothing is learnt',
    ),
    (('--protofssl.helper_interval=0',), 'at least 1'),
    (('--protofssl.helper_interval=10000001',), 'at most'),
    (
      ('--protofssl.prototypes=global', '--protofssl.prototype_noise=1'),
      'effect',
    ),
    (('--client_labeled_batch_size=5',), 'has no effect'),
    (('--momentum=0.5',), 'has no effect with --client_optimizer=rmsprop'),
    (('--num_labels=10',), 'at least 20'),
    (('--protofssl.num_support=5',), 'at least 60'),
    (('--protofssl.variant=both',), 'allowed are ours, paper, code'),
    (('--protofssl.temperature=0',), 'at least'),
    (('--protofssl.num_query=0',), 'at least 1'),
  ],
  ids=str,
)
def test_what_is_refused(given, message):
  with pytest.raises(UsageError, match=message):
    config.parse_config([*_DEPLOYED, *given])


@pytest.mark.parametrize(
  'given',
  [
    ('--protofssl.temperature=1',),
    ('--protofssl.temperature=1', '--protofssl.variant=code'),
    ('--protofssl.prototypes=global',),
    ('--protofssl.helper_interval=3',),
  ],
  ids=str,
)
def test_global_support_goes_with_the_rest(given):
  config.parse_config([*_DEPLOYED, '--protofssl.support=global', *given])


def test_the_papers_settings_are_the_defaults():
  made = config.parse_config(_DEPLOYED)
  assert made.round.client_epochs == 10
  assert made.round.client_batch_size == 100
  assert made.round.client_optimizer == 'rmsprop'
  assert made.round.client_learning_rate == 0.001
  assert 'momentum' not in made.flags()
  own = made.algorithm
  assert (own.num_support, own.num_query, own.num_helpers) == (1, 2, 5)
  assert (own.support, own.helper_interval) == ('own', 1)
  assert (own.unlabeled_loss_weight, own.temperature) == (0.3, 0.5)
  # SGD stays possible, and the default of others.
  sgd = config.parse_config(
    [*_DEPLOYED, '--client_optimizer=sgd', '--momentum=0.5']
  )
  assert sgd.round.momentum == 0.5
  assert registry.REGISTRY['fixmatch'].round_defaults == {}
