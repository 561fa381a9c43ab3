"""Every column is declared, and the declarations are what is shown."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
import tiny_local
import tiny_task
import update_metrics

from tff_fssl import metrics
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.client import batches
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.program import catalogue
from tff_fssl.rounds import participation
from tff_fssl.runtime import in_process

_PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'metrics.md'
_SERVER, _CLIENTS = 'labels_at_server', 'labels_at_clients'
# The last two only where each client has its own model.
_EVALUATED = (
  'accuracy',
  'loss',
  'accuracy_deviation',
  'accuracy_worst_decile',
)
# Declared as `communication/bytes_..._...`.
_OF_SETS = {
  f'communication/bytes_{way}_{name}'
  for way in ('down', 'up')
  for name in ('exchange', 'psi', 'teacher')
}
# What `programs/train.py` adds to the metrics of a process, by table.
_ADDED = {
  'train.csv': {
    'round',
    'bad_round',
    # Sets and rows, by their names.
    *(f'communication/bytes_{way}_...' for way in ('down', 'up')),
    metrics.NUM_KNOWN,
    # Of the data source.
    *participation.NOBODY.counts(),
  },
  'eval.csv': {
    'round',
    *(
      f'{s}/{m}'
      for s in ('test', 'validation')
      for m in (*_EVALUATED, *metrics.FIGURES)
    ),
    # With --average_decay, a teacher (see skeleton_test.py), or
    # --fedmatch.evaluate_sets (see fedmatch_test.py).
    *(
      f'{s}/{also}/{m}'
      for s in ('test', 'validation')
      for also in ('average', 'teacher', 'sigma', 'psi')
      for m in _EVALUATED[:2]
    ),
  },
  'timing.csv': {
    'round',
    'seconds/round',
    'seconds/evaluation',
    'peak_memory_mb',
    *(f'seconds/{f.name}' for f in dataclasses.fields(in_process.Timing)),
  },
}


def _regularized():
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      tf.keras.Input(tiny_task.IMAGE_SHAPE),
      layers.Flatten(),
      layers.Dense(tiny_task.NUM_CLASSES, kernel_regularizer='l2'),
    ]
  )


def _own(entry):
  return set(metrics.index_columns(entry.metrics))


def _fl2(consistency):
  return tiny_task.build(
    'fl2',
    model=_regularized,
    hparams=(
      ('consistency', consistency),
      ('diagnostics', True),
    ),
  )


def _processes():
  """Processes that together have every column that is no algorithm's own.

  Whether algorithms have theirs, conformance_test.py asks the processes that it
  builds anyway.
  """
  yield tiny_task.build('fedmatch', norm='none')
  yield tiny_task.build('supervised', norm='none', min_clients=1)
  yield tiny_task.build('fixmatch')
  yield from map(_fl2, ('sacr', 'sam'))
  yield tiny_task.build(
    'supervised',
    _CLIENTS,
    norm='none',
    aggregator=aggregator_hparams.AggregatorHparams('dp'),
  )


def test_the_page_is_made_from_the_declarations():
  page = update_metrics.page()
  assert _PAGE.read_text() == page, 'run: python tools/update_metrics.py'
  for metric in catalogue.all_metrics():
    assert f'| `{metric.column}` |' in page


@pytest.mark.parametrize('table', ['train.csv', 'eval.csv', 'timing.csv'])
def test_every_column_is_declared_and_exists(table):
  declared = metrics.index_columns(catalogue.tables()[table])
  own = {c for e in registry.REGISTRY.values() for c in _own(e)}
  actual = set(_ADDED[table])
  if table == 'train.csv':
    for process in _processes():
      actual |= {
        'aggregator/inner/...'
        if c.startswith('aggregator/inner/') and c not in declared
        else re.sub(r'class_threshold_\d+_', 'class_threshold_..._', c)
        for c in tiny_task.metric_columns(process)
        if c not in _OF_SETS
      }
    assert _own(registry.REGISTRY['fl2']) <= actual
  assert set(declared) - own == actual - own


def test_thresholds_of_classes():
  process = _fl2('sacr')
  state = process.next(process.initialize(), []).state  # Pre-training.
  cohort = [tiny_task.dataset(e) for e in tiny_task.cohort(_SERVER)]

  def round_of(clients):
    figures = process.next(state, clients).metrics['client_work']['train']
    classes = range(tiny_task.NUM_CLASSES)
    return figures, {
      kind: [figures[f'class_threshold_{c}_{kind}'] for c in classes]
      for kind in ('mean', 'min', 'max')
    }

  of_one = []
  for client in cohort:
    figures, of_class = round_of([client])
    np.testing.assert_allclose(
      [f(of_class['mean']) for f in (min, np.mean, max)],
      [
        figures['lowest_class_threshold_mean'],
        figures['mean_class_threshold_mean'],
        figures['learning_status_mean'],
      ],
      rtol=1e-6,
    )
    of_one.append(of_class['mean'])
  assert np.ptp(of_one) > 1e-3
  of_all = round_of(cohort)[1]
  for kind, reduce in (('mean', np.mean), ('min', np.min), ('max', np.max)):
    np.testing.assert_allclose(of_all[kind], reduce(of_one, 0), rtol=1e-6)


def test_an_algorithm_declares_only_its_own_metrics():
  """Those that clients report are those of its steps and its preparation."""
  declarations = {}
  for entry in registry.REGISTRY.values():
    own = metrics.index_columns(entry.metrics)
    for column, metric in own.items():
      # One name, one meaning.
      assert declarations.setdefault(column, metric) == metric, column
    assert set(own) <= set(
      metrics.index_columns(catalogue.tables()['train.csv'])
    )
    for column in own:
      assert column.startswith(
        (metrics.CLIENTS, 'finalizer/', 'aggregator/inner/')
      )


# With labels where clients may have them, whose batches count most.
@pytest.mark.parametrize(
  'name, scenario',
  [(name, entry.scenarios[-1]) for name, entry in registry.REGISTRY.items()],
)
def test_no_metric_counts_more_than_the_server_allows(name, scenario):
  """It rejects clients that report more than they can have processed."""
  config = training.LoopConfig(2, 5, 5, optimizer.Sgd(0.0, False, 0.0, 0.0))
  element = tiny_task.client(0, labeled=4 if scenario == _CLIENTS else 0)
  algorithm, result = tiny_local.train(
    name, scenario, element, config, learning_rate=0.01
  )
  # Two epochs of three batches: five unlabelled examples, five labelled ones.
  streams = algorithm.streams()
  used = [batches.trains_on(streams, labeled=kind) for kind in (False, True)]
  most = 2 * 3 * 5 * sum(used)
  assert result.num_examples <= most
  for _, count in result.metrics.values():
    assert count <= most
