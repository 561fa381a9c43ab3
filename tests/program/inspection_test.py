"""A model and its data, looked over."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.data import sources
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment
from tff_fssl.program import inspection
from tff_fssl.program import predictions

_FLAGS = (
  '--dataset=digits',
  '--model=cnn',
  '--norm=none',
  '--num_labels=40',
  '--num_clients=20',
  '--client_test_fraction=0.2',
)


def _build_task(*flags):
  return experiment.build_task(config_lib.parse_config([*_FLAGS, *flags]))


@pytest.fixture(scope='module')
def task():
  return _build_task()


@pytest.fixture(scope='module')
def model(task):
  network = adapter.Network(task.model_fn, seed=0)
  return server_model.ServerModel(
    *tf.nest.map_structure(lambda t: t.numpy(), network.initial_weights())
  )


@pytest.fixture(scope='module')
def figures(task, model):
  return inspection.look_over('x', task, model, None)


def _predicted(task, model, x):
  network = task.model_fn()
  network.set_weights([*model.trainable, *model.non_trainable])
  logits = network.predict(task.views.plain(x), verbose=0)
  return tf.nn.softmax(logits).numpy()


def test_predictions_are_the_networks(task, model, figures):
  expected = _predicted(task, model, task.data.test.x)
  np.testing.assert_allclose(figures.test.probs, expected, atol=1e-5)
  np.testing.assert_array_equal(figures.test.labels, task.data.test.y)


def test_clients_are_measured_on_what_they_hold_out(task, model, figures):
  train = task.data.train
  expected = [
    np.mean(_predicted(task, model, train.x[held]).argmax(1) == train.y[held])
    for held in task.partition.client_test
  ]
  np.testing.assert_allclose(figures.clients, expected)
  assert 'holds out' in figures.about_clients


def test_without_held_out_examples_accuracy_is_expected_by_class(model):
  task = _build_task('--client_test_fraction=0')
  figures = inspection.look_over('x', task, model, None)
  counts = task.partition.class_counts
  right = figures.test.classes == figures.test.labels
  recall = [right[figures.test.labels == c].mean() for c in range(10)]
  np.testing.assert_allclose(figures.clients, counts @ recall / counts.sum(1))
  assert figures.about_clients.startswith('expected')


def test_pseudo_labels_and_their_views(task, figures):
  unlabeled = np.concatenate(task.partition.client_unlabeled)
  assert len(figures.pseudo.labels) == len(unlabeled)
  for examples, is_right in ((figures.right, True), (figures.wrong, False)):
    assert len(examples) == 6
    confidences = [example.confidence for example in examples]
    assert confidences == sorted(confidences, reverse=True)
    for example in examples:
      assert (example.label == example.predicted) == is_right
      assert example.weak.shape == example.strong.shape == (8, 8, 1)
      assert example.weak.dtype == np.uint8 and example.weak.max() > 150


def test_an_untrained_model_has_collapsed(figures):
  assert [text.split(' have ')[0] for text in figures.doubts] == [
    'predictions for test examples',
    'pseudo-labels of the last model',
  ]


def test_strong_views_that_are_weak_ones(task, model):
  views = task.views._replace(strong=task.views.weak)
  planted = dataclasses.replace(task, views=views)
  doubts = inspection.look_over('x', planted, model, None).doubts
  (found,) = [text for text in doubts if 'views' in text]
  assert found.startswith('strong views equal weak ones: --algorithm=fl2')
  # Labels only: there are no strong views.
  alone = _build_task('--algorithm=supervised')
  alone = dataclasses.replace(alone, views=views)
  doubts = inspection.look_over('x', alone, model, None).doubts
  assert not [text for text in doubts if 'views' in text]


@pytest.mark.parametrize('noise, is_found', [('0.1', True), ('0.5', False)])
def test_strong_noise_that_is_weak_noise(tmp_path, noise, is_found):
  x = np.random.default_rng(0).normal(size=(99, 5))
  split = np.repeat(['train', 'test'], [90, 9])
  np.savez(tmp_path / 'a.npz', x=x, y=np.arange(99) % 2, split=split)
  flags = [f'--dataset=features:{tmp_path}/a.npz', '--model=mlp', '--norm=none']
  flags += [f'--strong_noise={noise}', '--strong_dropout=0']
  flags += ['--num_labels=4', '--num_clients=2', '--clients_per_round=2']
  task = experiment.build_task(config_lib.parse_config(flags))
  assert bool(inspection._equal_views(task)) == is_found


def test_labels_of_another_meaning(task):
  labels = task.data.test.y
  right = predictions.Predictions(labels, np.eye(10)[labels])
  rolled = right._replace(labels=(labels + 1) % 10)
  assert not inspection._doubt(right, 'x', task.data.class_names)
  assert 'do not mean the same' in (
    inspection._doubt(rolled, 'x', task.data.class_names)
  )


def test_changed_data_are_named(task, model):
  changed = ['test images', 'test labels']
  doubts = inspection.look_over('x', task, model, None, changed).doubts
  text = 'data: the test images and test labels are not those of the run'
  assert text in doubts


def test_test_images_among_training_ones(task, model):
  x = task.data.train.x.copy()
  x[5], x[9] = task.data.test.x[3], task.data.test.x[4]
  data = dataclasses.replace(
    task.data, train=sources.Examples(x, task.data.train.y)
  )
  planted = dataclasses.replace(task, data=data)
  doubts = inspection.look_over('x', planted, model, None).doubts
  (found,) = [text for text in doubts if 'for training, too' in text]
  assert (
    found.startswith('data: 2 test examples') and 'test 3 = train 5' in found
  )


@pytest.mark.parametrize('aggregator', ['secure', 'dp'])
def test_nothing_of_clients_is_shown_where_it_is_private(model, aggregator):
  flags = [f'--aggregator={aggregator}', '--max_client_examples=60000']
  if aggregator == 'dp':
    flags += ['--dp_noise_multiplier=1', '--client_test_fraction=0']
    flags += ['--algorithm=fixmatch']
  else:
    flags += ['--simulate_secure_aggregation']
  private = _build_task(*flags)
  figures = inspection.look_over('x', private, model, None)
  assert figures.test is not None and figures.pseudo is None
  assert not len(figures.clients) and not figures.right and not figures.wrong
  assert 'nothing of single clients' in figures.about_clients


@pytest.mark.parametrize('protects', [False, True])
def test_duplicates_of_protected_clients_are_not_looked_for(model, protects):
  flags = ['--algorithm=fixmatch', '--client_test_fraction=0']
  flags += ['--aggregator=dp', '--max_client_examples=60000'] * protects
  task = _build_task(*flags)
  (at_client, *_), *_ = task.partition.client_unlabeled
  at_server = task.partition.server_labeled[0]
  x = task.data.train.x.copy()
  x[at_client], x[at_server] = task.data.test.x[3], task.data.test.x[4]
  data = dataclasses.replace(
    task.data, train=sources.Examples(x, task.data.train.y)
  )
  planted = dataclasses.replace(task, data=data)
  doubts = inspection.look_over('x', planted, model, None).doubts
  (found,) = [text for text in doubts if 'for training, too' in text]
  assert found.startswith(f'data: {2 - protects} test examples')
  assert f'test 4 = train {at_server}' in found
  assert (f'test 3 = train {at_client}' in found) != protects


def test_clients_with_own_models_have_no_one_model(task, model):
  alone = server_model.Prediction(member=lambda *_: None)
  figures = inspection.look_over('x', task, model, alone)
  assert figures.test is None and 'model of its own' in figures.about_clients


def test_a_model_that_is_not_finite(task, model):
  *others, last = model.trainable
  broken = model._replace(trainable=(*others, last * np.nan))
  figures = inspection.look_over('x', task, broken, None)
  assert figures.test is None
  assert figures.doubts == ['predictions for test examples are not finite']
