"""Exported models: what is in them, and that they predict as the run's."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.hparams import UsageError
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment
from tff_fssl.program import export
from tff_fssl.program import exported
from tff_fssl.program import runs


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


def _export(task, folder, seed=0, round_num=4):
  run = runs.Run(str(folder), {}, ([], [], []))
  export.export_model(
    task, _model(task, seed), str(folder), round_num, run, is_best=False
  )
  return str(folder)


def test_both_files_predict_as_the_model(task, tmp_path):
  folder = _export(task, tmp_path / 'model')
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


def test_a_new_export_replaces_the_old_one(task, tmp_path):
  folder = _export(task, tmp_path / 'model')
  _export(task, folder, seed=1, round_num=5)
  assert exported.problem(folder, 5) == '' and os.listdir(tmp_path) == ['model']


def test_files_of_somebody_else_are_kept(task, tmp_path):
  (tmp_path / 'model').mkdir()
  (tmp_path / 'model' / 'thesis.tex').write_text('all of it')
  with pytest.raises(UsageError, match='thesis.tex'):
    _export(task, tmp_path / 'model')
  assert (tmp_path / 'model' / 'thesis.tex').read_text() == 'all of it'


def test_a_full_disk_is_one_line(task, tmp_path, monkeypatch):
  def save(*args):
    raise tf.errors.ResourceExhaustedError(None, None, 'no space left')

  monkeypatch.setattr(tf.saved_model, 'save', save)
  with pytest.raises(UsageError, match='no space left.*fix this') as error:
    _export(task, tmp_path / 'model')
  assert '\n' not in str(error.value)
