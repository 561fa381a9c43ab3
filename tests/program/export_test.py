"""Exported models: what is in them, and that they predict as the run's."""

import dataclasses
import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf
import written_runs

from tff_fssl.data import partition_draw
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment
from tff_fssl.program import export
from tff_fssl.program import exported
from tff_fssl.program import output_tree
from tff_fssl.program import runs

_FLAGS = (
  '--dataset=digits',
  '--algorithm=fixmatch',
  '--model=cnn',
  '--num_labels=40',
  '--num_validation=200',
  '--num_clients=5',
  '--clients_per_round=5',
  '--total_rounds=12',
  '--num_pretraining_rounds=0',
  '--seed=3',
)


@pytest.fixture(name='subject')
def _subject(tmp_path):
  """Makes the subject of a run's model."""

  def make(*flags, round_num=12, is_best=False, **given):
    config = config_lib.parse_config([*_FLAGS, *flags])
    data = given.pop('data', None) or sources.load('digits')
    path = written_runs.write(tmp_path / str(len(given)), seed=3, **given)
    return export.Subject(
      config,
      data,
      partition_draw.build_partition(data.train.y, config.partition_settings),
      runs.read_tree(output_tree.OutputTree(path)),
      round_num,
      is_best,
      1_234,
      'image / 255',
    )

  return make


def _rows(card):
  """Label -> text of all tables with two columns, without the escapes."""
  rows = re.findall(r'^\| ([^|]+?) \| (.*?) \|$', card, re.MULTILINE)
  return {label: text.replace('\\', '') for label, text in rows}


def test_figures_are_those_of_the_run(subject):
  card = export.render(subject())
  # 0.5 + 12 / 50 + 3 / 100 of 360 digits are right; Wilson's interval by hand.
  p, n, z = round(0.77 * 360) / 360, 360, 1.959964
  middle = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  interval = f'{100 * (middle - half):.1f}% to {100 * (middle + half):.1f}%'
  assert f'| test | 360 | 77.0% | {interval} |' in card
  assert 'after round 12, the last round of its run.' in card
  rows = _rows(card)
  assert '1,437 for training, 360 for testing' in rows['examples']
  assert 'every fifth of a class is for testing' in rows['note']
  assert '40 labelled at the server' in rows['of the training examples']
  assert '1,234 weights that train' in rows['network']
  assert rows['paper'] == 'Sohn et al., NeurIPS 2020'
  flags = re.search(r'```\n(--.*?)```', card, re.DOTALL)[1].split()
  assert '--model=cnn' in flags and '--seed=3' in flags
  # At its default, or about the machine.
  assert not [f for f in flags if f.startswith(('--num_labels', '--output_'))]
  assert 'no privacy guarantee' in card


def test_the_round_that_validation_selects(subject):
  card = export.render(subject(round_num=5, is_best=True))
  assert '| test | 360 | 63.0% |' in card
  assert 'after round 5, the round that is best on validation' in card


def test_of_a_run_without_tables(subject):
  one = subject()
  run = dataclasses.replace(one.run, rows=([], [], []))
  card = export.render(dataclasses.replace(one, run=run))
  assert 'no test accuracy of this round' in card
  assert 'model-index' not in card


def test_front_matter_is_what_hubs_read(subject):
  yaml = pytest.importorskip('yaml')
  card = export.render(subject())
  front = yaml.safe_load(card.split('---\n')[1])
  assert front['pipeline_tag'] == 'image-classification'
  assert 'fixmatch' in front['tags'] and 'datasets' not in front
  (result,) = front['model-index'][0]['results']
  assert result['dataset'] == {
    'name': 'digits',
    'type': 'digits',
    'split': 'test',
  }
  assert result['metrics'][0]['value'] == pytest.approx(0.77)


def test_nothing_of_the_machine_and_no_markup(subject, tmp_path):
  network = tmp_path / 'net.py'
  network.write_text('def build(images, num_classes, norm):\n  pass\n')
  data = dataclasses.replace(
    sources.load('digits'), class_names=('<b>|', *'123456789')
  )
  one = subject(f'--model={network}:build', f'--data_dir={tmp_path}', data=data)
  card = export.render(one)
  assert str(tmp_path) not in card
  assert (
    '--model=net.py:build' in card and _rows(card)['network'][:6] == 'net.py'
  )
  assert r'\<b\>\|, 1, 2' in card


def test_control_characters_are_escaped(subject):
  data = dataclasses.replace(
    sources.load('digits'), class_names=('a\x1b[31m\u202e', *'123456789')
  )
  card = export.render(subject(data=data))
  assert r'a\x1b' in card
  assert all(line.isprintable() for line in card.split('\n'))


def test_privacy(subject):
  private = (
    '--aggregator=dp',
    '--max_client_examples=60000',
    '--norm=gn',
    '--client_weighting=uniform',
    '--num_clients=50',
  )
  columns = {'aggregator/epsilon': 3.25}
  card = export.render(subject(*private, columns=columns))
  assert 'with epsilon 3.25 at delta 1e-05' in card
  assert 'not against readers of this card' in card
  assert 'no privacy guarantee' not in card


@pytest.mark.parametrize('scenario', ['labels_at_server', 'labels_at_clients'])
def test_nothing_of_protected_clients(subject, scenario):
  private = (
    '--aggregator=dp',
    '--max_client_examples=60000',
    '--norm=gn',
    '--num_clients=50',
    '--label_noise=0.1',
    f'--scenario={scenario}',
    *(['--num_labels=10'] if scenario == 'labels_at_clients' else []),
  )
  private = [f for f in (*_FLAGS, *private) if 'pretraining' not in f]
  config = config_lib.parse_config(private)
  one = dataclasses.replace(subject(), config=config)
  labels = one.data.train.y
  partition = partition_draw.build_partition(labels, config.partition_settings)
  one = dataclasses.replace(one, partition=partition)
  # The first client has hardly anything now.
  unlabeled = [partition.client_unlabeled[0][:1]]
  unlabeled += partition.client_unlabeled[1:]
  counts = partition.class_counts.copy()
  counts[0] = np.arange(10)
  data = dataclasses.replace(
    one.data, train=sources.Examples(one.data.train.x[1:], labels[1:])
  )
  other = dataclasses.replace(
    one,
    data=data,
    partition=dataclasses.replace(
      partition,
      client_unlabeled=unlabeled,
      class_counts=counts,
      client_labeled=[a[:1] for a in partition.client_labeled],
      wrong_examples=partition.wrong_examples[:0],
      wrong_labels=partition.wrong_labels[:0],
    ),
  )
  card = export.render(one)
  assert card == export.render(other)
  assert (
    'the data of clients are not shown' in card and 'unevenness' not in card
  )
  assert 'unevenness' in export.render(subject(columns={}))


def test_labels_only_is_not_called_semi_supervised(subject):
  card = export.render(subject())
  assert 'federated semi-supervised learning' in card
  flags = ('--algorithm=supervised',)
  card = export.render(subject(*flags, columns={}))
  assert 'semi-supervised' not in card


@pytest.fixture(name='task', scope='module')
def _task():
  return experiment.build_task(
    config_lib.parse_config(
      [
        '--algorithm=fixmatch',
        '--dataset=digits',
        '--model=linear',
        '--norm=none',
        '--num_labels=20',
        '--num_clients=5',
        '--clients_per_round=2',
        '--total_rounds=4',
      ]
    )
  )


def _model(task, seed):
  network = adapter.Network(task.model_fn, seed=seed)
  return server_model.ServerModel(
    *tf.nest.map_structure(lambda t: t.numpy(), network.initial_weights())
  )


def _export(task, folder):
  """Exports with a file for devices: (folder, what is said)."""
  run = dataclasses.replace(task.config.run, export_tflite=True)
  config = dataclasses.replace(task.config, run=run)
  said = export.export_model(
    dataclasses.replace(task, config=config),
    _model(task, seed=0),
    str(folder),
    4,
    runs.Run(str(folder), {}, ([], [], [])),
    is_best=False,
  )
  return str(folder), said


@pytest.fixture(name='whole', scope='module')
def _whole(task, tmp_path_factory):
  return _export(task, tmp_path_factory.mktemp('exported') / 'model')


def test_both_files_predict_as_the_model(task, whole):
  folder, _ = whole
  assert exported.problem(folder, 4) == ''
  images = task.data.test.x[:5]
  serve = tf.saved_model.load(folder).signatures['serving_default']
  probabilities = serve(images=tf.constant(images))['probabilities'].numpy()
  np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
  network = tf.keras.models.load_model(os.path.join(folder, 'model.keras'))
  logits = network(task.views.plain(tf.constant(images)))
  np.testing.assert_allclose(
    tf.nn.softmax(logits).numpy(), probabilities, atol=1e-6
  )
  with open(os.path.join(folder, 'about.json')) as file:
    about = json.load(file)
  assert about['round'] == 4 and about['flags']['dataset'] == 'digits'
  assert about['inputs_of_model.keras'].keys() == {'formula', 'mean', 'std'}
  assert about['classes'] == list(task.data.class_names)


def test_the_file_for_devices_predicts_as_the_model(task, whole):
  folder, said = whole
  assert 'on 180 test examples its probabilities differ' in said
  with open(os.path.join(folder, 'model.tflite'), 'rb') as file:
    content = file.read()
  images = task.data.test.x[:5]
  serve = tf.saved_model.load(folder).signatures['serving_default']
  np.testing.assert_allclose(
    export._run_tflite(content, images),
    serve(images=tf.constant(images))['probabilities'].numpy(),
    atol=1e-6,
  )
  with open(os.path.join(folder, 'README.md')) as file:
    assert 'takes the same as the SavedModel and gives' in file.read()


def _fail(*_):
  raise ValueError('no such operation\nTraceback')


@pytest.mark.parametrize(
  'run, words',
  [
    (_fail, 'not written, since no such operation'),
    (lambda _, x: np.full([len(x), 10], np.nan), 'by up to nan'),
  ],
)
def test_a_wrong_file_for_devices_leaves_the_others(
  task, tmp_path, monkeypatch, run, words
):
  monkeypatch.setattr(export, '_run_tflite', run)
  folder, said = _export(task, tmp_path / 'model')
  assert words in said and '\n' not in said
  assert exported.problem(folder, 4) == ''
  assert 'model.tflite' not in os.listdir(folder)
  with open(os.path.join(folder, 'README.md')) as file:
    assert 'tflite' not in file.read()


def test_a_full_disk_is_one_line(task, tmp_path, monkeypatch):
  def save(*args):
    raise tf.errors.ResourceExhaustedError(None, None, 'no space left')

  monkeypatch.setattr(tf.saved_model, 'save', save)
  with pytest.raises(UsageError, match='no space left.*fix this') as error:
    _export(task, tmp_path / 'model')
  assert '\n' not in str(error.value)
