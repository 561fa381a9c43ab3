"""Of what clients hold, nothing is released but by the protected sum."""

import csv
import json
import os
import pathlib
import pickle

import client_files
import numpy as np
from PIL import Image
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import runtime
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment as experiment_lib
from tff_fssl.program import export
from tff_fssl.program import run_data
from tff_fssl.program import runs

_PRIVATE = (
  '--algorithm=fixmatch',
  '--norm=none',
  '--num_labels=8',
  '--num_clients=4',
  '--clients_per_round=2',
  '--num_pretraining_rounds=1',
  '--total_rounds=1',
  '--max_client_examples=60',
)
_NUM, _NUM_TEST, _CLIENT = 48, 8, 2
_WORDS = 'goal team match price bank shares'.split()
_NAMES = ('anna', 'ben', 'cyd', 'dan')


def _labels() -> np.ndarray:
  return np.arange(_NUM + _NUM_TEST) % 2


def _splits() -> np.ndarray:
  return np.array(['train'] * _NUM + ['test'] * _NUM_TEST)


# Each writes data, in which what `replaced` holds is of another kind.
def _features(replaced):
  x = np.random.default_rng(5).normal(size=(_NUM + _NUM_TEST, 3))
  chosen = np.isin(np.arange(len(x)), list(replaced))
  x[chosen] = 1e3 + 1e3 * x[chosen]
  np.savez('a.npz', x=x, y=_labels(), split=_splits())
  return ['--dataset=features:a.npz', '--model=mlp']


def _folder(replaced):
  rng = np.random.default_rng(5)
  rows = [('path', 'label', 'client', 'split')]
  folder = pathlib.Path('a')
  folder.mkdir(exist_ok=True)
  for i, (label, split) in enumerate(zip(_labels(), _splits())):
    pixels = rng.integers(0, 100, (8, 8, 3), np.uint8)
    pixels = 255 - pixels if i in replaced else pixels
    Image.fromarray(pixels).save(folder / f'{i}.png')
    rows.append((f'{i}.png', f'class {label}', '', split))
  with open(folder / 'manifest.csv', 'w', newline='') as file:
    csv.writer(file).writerows(rows)
  return ['--dataset=folder:a', '--image_size=8', '--model=cnn']


def _texts(replaced):
  rng = np.random.default_rng(5)
  with open('a.csv', 'w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(('text', 'label', 'split'))
    for i, (label, split) in enumerate(zip(_labels(), _splits())):
      words = rng.choice(_WORDS[::-1], 5).tolist()
      words = ['secret'] * 5 if i in replaced else words
      writer.writerow((' '.join(words), f'class {label}', split))
  return [
    '--dataset=text:a.csv',
    '--model=text_cnn',
    '--max_words=8',
    '--vocabulary_size=256',
  ]


def _client_data(replaced):
  rng = np.random.default_rng(5)
  held = {'train': {}, 'test': {}}
  for i, (label, split) in enumerate(zip(_labels(), _splits())):
    pixels = rng.random((8, 8), np.float32) / 4
    if i in replaced:  # They are also larger.
      pixels = np.kron(1 - pixels, np.ones((2, 2)))
    # The file mixes its rows.
    pixels[: len(pixels) // 8, : len(pixels) // 8] = i / 255
    client = held[split].setdefault(_NAMES[i // 12] if i < _NUM else 'x', [])
    client.append(
      client_files.example(pixels=pixels.astype(np.float32), label=label)
    )
  path = pathlib.Path('a.sqlite')
  path.unlink(missing_ok=True)
  client_files.sqlite(path, held)
  return [
    '--dataset=clientdata:a.sqlite',
    '--partition=iid',
    '--image_size=8',
    '--color=gray',
    '--flip=false',
    '--model=cnn',
  ]


_KINDS = {
  'features': _features,
  'folder': _folder,
  'texts': _texts,
  'clientdata': _client_data,
}


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  previous = tff.framework.get_context_stack().current
  settings = runtime.Settings(simulate_secure_aggregation=True)
  tff.framework.set_default_context(runtime.build_context(settings))
  yield
  tff.framework.set_default_context(previous)


def _config(flags, *more):
  return config_lib.parse_config([*_PRIVATE, *flags, *more])


def _released(task, folder):
  """All that is released before training, by name."""
  network = adapter.Network(task.model_fn, seed=0)
  model = server_model.ServerModel(
    *tf.nest.map_structure(lambda t: t.numpy(), network.initial_weights())
  )
  run = runs.Run(folder, {}, ([], [], []))
  export.export_model(task, model, folder, 0, run, is_best=False)
  released = {
    name: (pathlib.Path(folder) / name).read_bytes()
    for name in ('about.json', 'README.md')
  }
  x = task.data.test.x
  serve = tf.saved_model.load(folder).signatures['serving_default']
  ((name, spec),) = serve.structured_input_signature[1].items()
  inputs = ['goal bank secret'] if spec.dtype == tf.string else x
  inputs = inputs[:, 0] if name == 'features' else inputs
  seed = tf.constant([1, 2])
  for kind, value in {
    'served': serve(**{name: tf.constant(inputs, spec.dtype)})['probabilities'],
    'plain views': task.views.plain(tf.constant(x)),
    'weak views': task.views.weak(tf.constant(x), seed),
    'strong views': task.views.strong(tf.constant(x), seed),
  }.items():
    released[kind] = np.asarray(value).tobytes()
  return released


def _after_pretraining(task):
  """All that is released after round 0, in which there is no noise yet."""
  experiment = experiment_lib.build_experiment(task, 'data')
  output = experiment.process.next(experiment.process.initialize(), [])
  released = (
    output.state,
    output.metrics,
    experiment.evaluate_fn(output.state),
  )
  return [np.asarray(v).tobytes() for v in tf.nest.flatten(released)]


def _tasks(kind, *more):
  """Two tasks: in the second one, a client has other data."""
  write = _KINDS[kind]
  task = experiment_lib.build_task(_config(write(set()), *more))
  held = task.partition.client_unlabeled[_CLIENT]
  rows = task.data.train.x[held, 0, 0, 0] if kind == 'clientdata' else held
  other = experiment_lib.build_task(_config(write(set(rows)), *more))
  assert other.partition.has_same_examples(task.partition)
  changed = task.data.train.x != other.data.train.x
  np.testing.assert_array_equal(np.unique(np.nonzero(changed)[0]), held)
  return task, other


def _differing(kind, *more):
  """What depends on a client's data, among all that is released."""
  first, second = (
    _released(task, str(i)) for i, task in enumerate(_tasks(kind, *more))
  )
  assert first.keys() == second.keys()
  return {name for name in first if first[name] != second[name]}


_SECURE = ('--aggregator=secure', '--simulate_secure_aggregation')


@pytest.mark.parametrize('kind', list(_KINDS))
def test_nothing_depends_on_a_client_before_training(kind):
  assert not _differing(kind, '--aggregator=dp')


def test_nor_with_secure_sums():
  assert not _differing('features', *_SECURE)


def test_without_protection_all_of_it_does():
  assert _differing('features') == {
    'about.json',
    'served',
    'plain views',
    'weak views',
    'strong views',
  }


@pytest.mark.slow
# Otherwise the clipping norm is noised in each round.
@pytest.mark.parametrize(
  'aggregator', [('--aggregator=dp', '--dp_clipping_norm=1'), _SECURE]
)
def test_nor_does_what_the_server_learns_first(aggregator):
  first, second = map(_after_pretraining, _tasks('features', *aggregator))
  assert first == second


def test_classes_that_only_clients_show_are_refused():
  x = np.random.default_rng(5).normal(size=(_NUM + _NUM_TEST, 3))
  y = np.where(np.arange(len(x)) % 12, _labels(), 2)
  y[_splits() == 'test'] %= 2
  np.savez('a.npz', x=x, y=y, split=_splits())
  flags = ['--dataset=features:a.npz', '--model=mlp', '--num_labels=8']
  flags += ['--scenario=labels_at_clients', '--client_labels=own', '--mean=0']
  flags += ['--std=1', '--num_pretraining_rounds=0']
  flags = [f for f in (*_PRIVATE, *flags) if 'pretraining' not in f]
  task = experiment_lib.build_task(config_lib.parse_config(flags))
  assert task.data.num_classes == 3
  with pytest.raises(
    UsageError, match='only examples of clients are of 2, but'
  ):
    experiment_lib.build_task(
      config_lib.parse_config([*flags, '--aggregator=dp'])
    )


@pytest.mark.parametrize(
  'flags, formula, mean, std',
  [
    ([], '(image / 255 - mean) / std', 0.3058, 0.3761),
    (['--normalization=none'], 'image', 0, 1 / 255),
  ],
)
def test_what_networks_see_of_images(flags, formula, mean, std):
  flags = ['--dataset=digits', '--model=mlp', *flags]
  task = experiment_lib.build_task(_config([*flags, '--num_labels=20']))
  x = task.data.test.x[:5]
  seen = (x / 255 - mean) / std
  np.testing.assert_allclose(task.views.plain(tf.constant(x)), seen, atol=1e-4)
  released = _released(task, 'a')
  served = np.frombuffer(released['served'], np.float32).reshape([-1, 10])
  about = json.loads(released['about.json'])
  inputs = about['inputs_of_model.keras']
  assert inputs['formula'] == formula
  assert inputs.get('mean', [mean]) == [mean]
  logits = tf.keras.models.load_model('a/model.keras')(seen)
  np.testing.assert_allclose(served[:5], tf.nn.softmax(logits), atol=1e-5)


_FLAGS = [
  '--dataset=digits',
  '--num_clients=10',
  '--partition=dirichlet',
  '--alpha=0.3',
  '--min_client_examples=2',
  '--streaming_steps=2',
  '--client_test_fraction=0.2',
  '--seed=3',
]


@pytest.fixture(scope='module', name='held')
def _held():
  config = config_lib.parse_config([*_FLAGS, '--algorithm=fixmatch'])
  data = sources.load_found(config.info, None)
  partition = run_data.load_partition(config, data)
  return run_data.Held(config, data, partition)


def test_gives_what_the_program_has(held):
  loader = run_data.Loader(held, run_data.training_examples)
  sent = pickle.dumps(loader)
  assert len(sent) < 10_000
  here, there = loader(), pickle.loads(sent)()
  for round_num in (1, 2):
    for client_id in range(10):
      for ours, theirs in zip(
        here(round_num, client_id), there(round_num, client_id)
      ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
          np.testing.assert_array_equal(ours[0], theirs[0])
          np.testing.assert_array_equal(ours[1], theirs[1])


def test_gives_what_clients_hold_out(held):
  loader = run_data.Loader(held, run_data.test_examples)
  here, there = loader(), pickle.loads(pickle.dumps(loader))()
  sizes = []
  for client_id in range(10):
    (x, y), _ = here(0, client_id)
    np.testing.assert_array_equal(x, there(0, client_id)[0][0])
    sizes.append(len(y))
  assert min(sizes) > 0


def test_other_data_are_refused(held, monkeypatch):
  loader = pickle.dumps(run_data.Loader(held, run_data.training_examples))
  load = sources.load_found

  def load_others(*args):
    others = load(*args)
    others.train.x[5, 0, 0] ^= 1
    return others

  monkeypatch.setattr(sources, 'load_found', load_others)
  with pytest.raises(UsageError, match='copy the same files'):
    pickle.loads(loader)()


def test_relative_paths_begin_at_the_programs_folder(
  held, tmp_path, monkeypatch
):
  folder = os.getcwd()
  loader = pickle.dumps(run_data.Loader(held, run_data.training_examples))
  monkeypatch.chdir(tmp_path)
  pickle.loads(loader)()
  assert os.getcwd() == folder


def test_validation_of_other_clients(tmp_path):
  rng = np.random.default_rng(0)
  lines = ['a,b,label,client,split']
  for i in range(90):
    x, y = rng.normal(size=2), i % 2
    split = 'test' if i >= 80 else 'train'
    lines.append(f'{x[0]:.3f},{x[1]:.3f},{"xy"[y]},c{i % 8},{split}')
  path = tmp_path / 'a.csv'
  path.write_text('\n'.join(lines))
  flags = (
    f'--dataset=features:{path}',
    '--partition=natural',
    '--num_labels=10',
    '--clients_per_round=2',
    '--model=mlp',
    '--norm=none',
  )

  def find(*more):
    config = config_lib.parse_config([*flags, *more])
    data = sources.load_found(config.info, None)
    partition = run_data.load_partition(config, data)
    problems = run_data.find_problems(config, data, partition)
    return [p.brief for p in problems if 'in training and' in p.brief]

  (testing,) = find()
  assert testing == '8 clients in training and testing'
  assert find('--num_validation=12') == [
    testing,
    '7 clients in training and validation',
  ]
  # The test examples are given.
  assert find('--num_validation=12', '--split_by=client') == [testing]
  with pytest.raises(UsageError, match='--split_by=client: the data say'):
    find('--split_by=client')
