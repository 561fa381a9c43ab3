"""Local training: clients are on their own, in rounds and in evaluation."""

import csv
import os

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import local_training
from tff_fssl.algorithms import supervised
from tff_fssl.algorithms import uda
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import adapter
from tff_fssl.models import evaluate
from tff_fssl.models import statistics
from tff_fssl.models.weights import Weights
from tff_fssl.program import config
from tff_fssl.program import evaluation
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import train_main
from tff_fssl.rounds import process as process_lib

_CLIENTS = round_hparams.LABELS_AT_CLIENTS
_TRACKED = (('batch_norm_statistics', 'moving_average'),)
_SLOW = pytest.mark.slow


def _build(name='local_supervised', norm='none', hparams=(), **settings):
  settings = {'client_labeled_batch_size': 3, **settings}
  return tiny_task.build(name, _CLIENTS, norm=norm, hparams=hparams, **settings)


def _element(index, round_num, data_of=None):
  """A client's element, perhaps with the examples of another client."""
  element = tiny_task.client(
    index if data_of is None else data_of, round_num, labeled=4
  )
  element['seed'] = np.array([index, round_num], np.int32)
  return element


def _rounds(process, *cohorts):
  """The state after rounds with cohorts of elements, and the last metrics."""
  state, metrics = process.initialize(), None
  for cohort in cohorts:
    state, metrics = process.next(
      state, [tiny_task.dataset(element, process) for element in cohort]
    )
  return state, metrics


def _member(process, state, client_id):
  model, table = tf.nest.map_structure(
    tf.convert_to_tensor,
    (state.global_model_weights, state.distributor['table']),
  )
  return process.prediction.member(model, table, client_id)


def _by_hand(algorithm, norm, num_rounds, indices, **settings):
  """Clients' weights after rounds of `LocalTraining`, each from the last."""
  hparams = round_hparams.RoundHparams(scenario=_CLIENTS, **settings)
  tracked = hparams.batch_norm_statistics == 'moving_average'
  only_labels = base.UNLABELED not in algorithm.streams()
  network = adapter.Network(
    lambda: tiny_task.model_fn(norm), seed=5, track_moving_averages=tracked
  )
  local = training.LocalTraining(
    network,
    algorithm,
    tiny_task.VIEWS,
    training.LoopConfig(
      1,
      5,
      5 if only_labels else 3,
      optimizer.Sgd(
        hparams.momentum,
        hparams.nesterov,
        hparams.weight_decay,
        hparams.max_gradient_norm,
      ),
      hparams.proximal_strength,
    ),
  )

  @tf.function
  def run(weights, labeled, unlabeled, seed, round_num):
    result = local.run(
      weights,
      base.Examples(*labeled),
      base.Examples(*unlabeled),
      learning_rate=tf.constant(hparams.client_learning_rate),
      seed=seed,
      round_num=round_num,
    )
    trained = tuple(v.read_value() for v in network.trainable_variables)
    weights = Weights(trained, result.non_trainable, weights.statistics_count)
    if network.is_static:
      kind = hparams.batch_norm_statistics
      images = tf.concat([labeled[0], unlabeled[0]], axis=0)
      sums = statistics.gather(
        network, weights, images, tiny_task.VIEWS, kind=kind, batch_size=256
      )
      weights = statistics.put(network, weights, sums, kind=kind)
    return weights

  initial = network.initial_weights()
  result = []
  for index in indices:
    weights = initial
    for round_num in range(1, num_rounds + 1):
      element = _element(index, round_num)
      weights = run(
        weights,
        tuple(element['labeled'].values()),
        tuple(element['unlabeled'].values()),
        tf.constant(element['seed']),
        tf.constant(round_num),
      )
    result.append(weights)
  return result


_AT_CLIENTS = round_hparams.RoundHparams(scenario='labels_at_clients')
_ALGORITHMS = {
  'local_supervised': supervised.Supervised(round=_AT_CLIENTS),
  'local_uda': uda.Uda(
    confidence_threshold=0.3, tsa='exp', tsa_rounds=2, round=_AT_CLIENTS
  ),
  'local_fixmatch': fixmatch.FixMatch(
    confidence_threshold=0.3, round=_AT_CLIENTS
  ),
}


@pytest.mark.parametrize(
  'name, norm, settings',
  [
    pytest.param('local_supervised', 'none', {}, id='none'),
    pytest.param('local_supervised', 'bn', {}, id='sbn', marks=_SLOW),
    pytest.param('local_supervised', 'bn', dict(_TRACKED), id='bn'),
    # Its term refers to the client's own model.
    pytest.param(
      'local_supervised',
      'none',
      {'proximal_strength': 2.0},
      id='fedprox',
      marks=_SLOW,
    ),
    pytest.param('local_uda', 'none', {}, id='uda', marks=_SLOW),
    pytest.param('local_fixmatch', 'none', {}, id='fixmatch'),
  ],
)
def test_rounds_are_local_training_that_goes_on(name, norm, settings):
  process = _build(name, norm, **settings)
  cohorts = [[_element(i, r) for i in (0, 3)] for r in (1, 2, 3)]
  state, metrics = _rounds(process, *cohorts)
  algorithm = _ALGORITHMS[name]
  ours = [_member(process, state, index) for index in (0, 3)]
  expected = _by_hand(algorithm, norm, 3, (0, 3), **settings)
  # Keras rounds moving averages otherwise in the graphs of TFF.
  rtol = 2e-6 if settings == dict(_TRACKED) else 0
  for a, b in zip(
    tf.nest.flatten(ours), tf.nest.flatten(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=rtol)
  assert metrics['exchange']['num_rows'] == 2
  assert set(metrics['communication'].values()) == {0}
  # The common model stays what it was.
  initial = process.initialize().global_model_weights
  for a, b in zip(
    tf.nest.flatten(initial),
    tf.nest.flatten(state.global_model_weights),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_clients_do_not_influence_each_other():
  process = _build('local_fixmatch')
  both = [[_element(1, r), _element(2, r)] for r in (1, 2)]
  changed = [[_element(2, r, data_of=7), _element(1, r)] for r in (1, 2)]
  alone = [[_element(1, r)] for r in (1, 2)]
  rows = [
    _rounds(process, *cohorts)[0].distributor['table']['own_weights']
    for cohorts in (both, changed, alone)
  ]
  np.testing.assert_array_equal(rows[0][1], rows[1][1])
  np.testing.assert_array_equal(rows[0][1], rows[2][1])
  assert np.any(rows[0][2] != rows[1][2])


def _unusable(element):
  element['unlabeled']['y'][0] = tiny_task.NUM_CLASSES


def _empty(element):
  for kind in ('labeled', 'unlabeled'):
    for name, values in element[kind].items():
      element[kind][name] = values[:0]


@pytest.mark.parametrize('spoil', [_unusable, _empty])
def test_a_client_that_cannot_train_keeps_its_model(spoil):
  process = _build()
  state, _ = _rounds(process, [_element(0, 1), _element(1, 1)])
  bad = _element(1, 2)
  spoil(bad)
  after, _ = process.next(
    state, [tiny_task.dataset(e, process) for e in (_element(0, 2), bad)]
  )
  before, now = (s.distributor['table'] for s in (state, after))
  np.testing.assert_array_equal(before['own_weights'][1], now['own_weights'][1])
  assert np.any(before['own_weights'][0] != now['own_weights'][0])
  assert list(now['own_num_rounds'][:3]) == [2, 1, 0]


@pytest.mark.parametrize('norm', ['none', 'bn'])
def test_the_models_of_all_clients_are_evaluated(norm):
  process = _build(norm=norm)
  state, _ = _rounds(process, [_element(0, 1), _element(4, 1)])
  x, y = tiny_task.examples(40, 3)
  model_fn = lambda: tiny_task.model_fn(norm)
  model, table = state.global_model_weights, state.distributor['table']
  result = evaluate.build_evaluate_fn(
    model_fn, tiny_task.VIEWS, prediction=process.prediction
  )(model, x, y, table)
  evaluate_one = evaluate.build_evaluate_fn(model_fn, tiny_task.VIEWS)
  new = evaluate_one(model, x, y)  # They have the initial weights.
  each = [
    evaluate_one(_member(process, state, i), x, y) if i in (0, 4) else new
    for i in range(tiny_task.NUM_CLIENTS)
  ]
  accuracies = [one['accuracy'] for one in each]
  assert len(set(accuracies)) > 1
  assert result == pytest.approx(
    {
      'accuracy': np.mean(accuracies),
      'loss': np.mean([one['loss'] for one in each]),
      'accuracy_deviation': np.std(accuracies),
      'accuracy_worst_decile': min(accuracies),
    },
    abs=1e-6,
  )


@pytest.mark.parametrize('num, worst', [(1, 1), (10, 1), (11, 2), (30, 3)])
def test_the_worst_decile_is_of_whole_clients(num, worst):
  values = np.random.default_rng(0).permutation(num).astype(np.float32) / num
  result = evaluate.summarize_clients(tf.constant(values), tf.constant(values))
  expected = np.mean(np.arange(worst) / num)
  assert float(result['accuracy_worst_decile']) == pytest.approx(expected)


def test_what_it_cannot_do_is_refused():
  def build(num_clients, model_fn=tiny_task.model_fn):
    return process_lib.build_process(
      model_fn,
      local_training.LocalSupervised(),
      process_lib.DataSpec(
        tiny_task.clients.element_spec(tiny_task.IMAGE_SHAPE),
        tiny_task.VIEWS,
        num_clients=num_clients,
      ),
      seed=5,
    )

  with pytest.raises(UsageError, match='num_clients=None: the server of this'):
    build(None)
  # 36 + 15 weights, 8 of batch norm's averages, 4 + 4 + 1 more.
  with pytest.raises(UsageError, match=r'of 68 .* are 2.7 GB; .* 5514705 cl'):
    build(10**7)


@pytest.mark.parametrize(
  'flag, why',
  [
    (
      '--aggregator=robust',
      'has no effect with --algorithm=local_uda; omit it',
    ),
    (
      '--aggregator=dp',
      'has no effect with --algorithm=local_uda; omit it',
    ),
    ('--client_weighting=examples', 'has no effect with --algorithm=local_uda'),
    ('--server_optimizer=adam', 'has no effect with --algorithm=local_uda'),
    ('--average_decay=0.9', 'has no effect with --algorithm=local_uda'),
    ('--cross_device', 'keeps a state for each client by its identity'),
    ('--scenario=labels_at_server', 'runs with labels_at_clients only'),
    ('--uda.temperature=0', '--uda.temperature=0.0: must be'),
    (
      '--fixmatch.unlabeled_loss_weight=1',
      '--fixmatch.unlabeled_loss_weight: is a flag of --algorithm=fixmatch',
    ),
  ],
)
def test_flags_that_make_no_sense(flag, why):
  given = ['--algorithm=local_uda', f'--scenario={_CLIENTS}', flag]
  with pytest.raises(UsageError, match=why):
    config.parse_config(given)


def _rows(path):
  with open(path) as file:
    return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_program_continues_evaluates_and_exports_nothing(tmp_path, capsys):
  def train(folder, num_rounds, *flags):
    return main.run(
      train_main.train_main,
      [
        '--algorithm=local_supervised',
        f'--scenario={_CLIENTS}',
        '--dataset=digits',
        '--model=cnn',
        '--norm=gn',
        '--num_labels=10',
        '--num_validation=50',
        '--num_clients=6',
        '--clients_per_round=2',
        '--client_epochs=1',
        '--tensorboard=false',
        f'--total_rounds={num_rounds}',
        f'--output_dir={tmp_path / folder}',
        *flags,
      ],
    )

  for num_rounds in (1, 2):
    assert train('run', num_rounds) == main.DONE
  shown = ' '.join(capsys.readouterr().out.split())
  assert 'model none, since each client has its own' in shown
  assert train('run', 2) == main.DONE
  assert 'has finished its 2 rounds' in capsys.readouterr().out
  tree = output_tree.OutputTree(str(tmp_path / 'run'))
  last = _rows(tree.eval_csv)[-1]
  assert not os.path.exists(tree.model)
  assert main.run(evaluation.evaluate_main, [tree.path]) == main.DONE
  shown = ' '.join(capsys.readouterr().out.split())
  for name in ('accuracy', 'accuracy_deviation', 'accuracy_worst_decile'):
    value = float(last[f'test/{name}'])
    assert f'{name.replace("_", " ")} {value:.4f}' in shown
  assert train('new', 1, f'--init_from={tree.path}') == main.USAGE
  assert 'has a model of its own, so there is none' in capsys.readouterr().err
