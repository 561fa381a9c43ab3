import json
import math
import os
import zipfile

import h5py
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.models import model_fns
from tff_fssl.models import networks
from tff_fssl.program import checkpoint
from tff_fssl.program import exported
from tff_fssl.program import warm_start


def _model(norm='bn', classes=10, fill=None):
  model = networks.build_network('cnn', (8, 8, 1), classes, norm)
  if fill is not None:
    rng = np.random.default_rng(fill)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  return model


def _assert_equal(weights, model, count):
  for value, variable in zip(
    weights.trainable + weights.non_trainable,
    model.trainable_weights + model.non_trainable_weights,
    strict=True,
  ):
    np.testing.assert_array_equal(value, variable)
  assert weights.statistics_count == count


def _command(model, folder):
  """A layer that runs a command when Keras builds it."""
  lambda_layer = tf.keras.layers.Lambda(
    lambda x: (__import__('os').mkdir(folder), x)[1]
  )
  inputs = tf.keras.Input([8, 8, 1])
  return tf.keras.Model(inputs, model(lambda_layer(inputs)))


@pytest.mark.parametrize('name', ['a.keras', 'a.h5'])
def test_no_code_of_a_file_is_run(tmp_path, name):
  evil, mark = _command(_model(), str(tmp_path / 'ran')), tmp_path / 'ran'
  mark.rmdir()  # Keras has built it once.
  evil.save(tmp_path / name)
  if mark.exists():
    mark.rmdir()
  with pytest.raises(UsageError, match='another model'):
    warm_start.load(warm_start.find(str(tmp_path / name)), _model())
  assert not mark.exists()


def _rewritten(source, target, **members):
  """A copy of a zip archive with other contents of some members."""
  with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, 'w') as new:
    for name in old.namelist():
      new.writestr(name, members.get(name.partition('.')[0], old.read(name)))


def test_a_crafted_description_is_data_only(tmp_path):
  """Classes by module and name, which Keras would import and call."""
  _model(fill=1).save(tmp_path / 'a.keras')
  with zipfile.ZipFile(tmp_path / 'a.keras') as archive:
    config = json.loads(archive.read('config.json'))
  config['config']['layers'][0] |= {
    'module': 'os', 'class_name': 'mkdir', 'registered_name': None,
  }  # fmt: skip
  config['module'], config['class_name'] = 'builtins', 'exec'
  # Keras itself writes such arguments of layers.
  config['config']['layers'][1]['config']['max_value'] = math.inf
  _rewritten(
    tmp_path / 'a.keras', tmp_path / 'b.keras', config=json.dumps(config)
  )
  source = warm_start.find(str(tmp_path / 'b.keras'))
  _assert_equal(warm_start.load(source, _model()).weights, _model(fill=1), 1)


def _bomb(path, what):
  """Files that say that they hold more than they do."""
  model = _model()
  if what == 'zip':
    model.save(path)
    other = path.with_name('bomb')
    with (
      zipfile.ZipFile(path) as old,
      zipfile.ZipFile(other, 'w', zipfile.ZIP_DEFLATED) as new,
    ):
      new.writestr('config.json', old.read('config.json'))
      new.writestr('model.weights.h5', bytes(200 * 2**20))
    os.replace(other, path)
    return
  model.save_weights(path)
  with h5py.File(path, 'r+') as file:
    group = file['layers/conv2d/vars']
    del group['0']
    shape = (3, 3, 1, 32)
    if what == 'shape':
      group.create_dataset('0', (2**30, 2**10), np.float32, chunks=(1, 8))
    if what == 'external':
      group.create_dataset(
        '0', shape, np.float32, external=[('/etc/hostname', 0, 3 * 3 * 32 * 4)]
      )
    if what == 'link':
      group['0'] = h5py.ExternalLink('/etc/hostname', '/x')
    if what == 'soft':
      group['0'] = h5py.SoftLink('/layers/conv2d_1/vars/0')
    if what == 'text':
      group.create_dataset('0', data=np.array([b'x'] * 9))


@pytest.mark.parametrize(
  'what, words',
  [
    ('zip', 'cannot be read'),
    ('shape', 'bomb'),
    ('external', 'external Dataset'),
    ('link', 'ExternalLink'),
    ('soft', 'SoftLink'),
    ('text', 'another model'),
  ],
)
def test_bombs_and_links(tmp_path, what, words):
  """Keras refuses these; a version that does not must not be taken."""
  path = tmp_path / ('a.keras' if what == 'zip' else 'a.weights.h5')
  _bomb(path, what)
  with pytest.raises(UsageError) as error:
    warm_start.load(warm_start.find(str(path)), _model())
  assert words in str(error.value) and '\n' not in str(error.value)


@pytest.fixture(scope='module')
def keras_files(tmp_path_factory):
  """The bytes of a model in the two formats, and a model."""
  folder = tmp_path_factory.mktemp('keras')
  model, contents = _model(fill=1), []
  for name in ('a.keras', 'a.h5'):
    model.save(folder / name)
    contents.append((folder / name).read_bytes())
  return contents, _model()


@hypothesis.given(st.data())
@hypothesis.settings(
  max_examples=80, deadline=None, derandomize=True, database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_whatever_is_in_a_file_it_is_one_line(tmp_path, keras_files, data):
  contents, model = keras_files
  content = data.draw(st.sampled_from(contents))
  start = data.draw(st.integers(0, 4096))
  if data.draw(st.booleans()):
    start = len(content) - start
  content = data.draw(
    st.sampled_from(
      [
        content[:start],
        content[:start] + data.draw(st.binary(min_size=1, max_size=8))
        + content[start + 8 :],
      ]
    )
  )  # fmt: skip
  (tmp_path / 'x').write_bytes(content)
  try:
    values = warm_start.read_keras(
      str(tmp_path / 'x'), model, new_head=data.draw(st.booleans())
    )
  except files.FileError as error:
    assert '\n' not in str(error)
  else:
    *others, kernel, bias = values
    *specs, kernel_spec, bias_spec = model.weights
    assert [v.shape for v in others] == [tuple(v.shape) for v in specs]
    assert (kernel is None) == (bias is None)
    if kernel is not None:
      assert (kernel.shape, bias.shape) == (kernel_spec.shape, bias_spec.shape)


def _run(folder, model, rounds=(1,)):
  """The folder of a run, with checkpoints of a model."""
  os.makedirs(folder / 'checkpoints')
  (folder / 'flags.txt').write_text('--model=cnn\n--dataset=digits\n')
  prefix = 'process/global_model_weights'
  leaves = {f'{prefix}/statistics_count': np.float32(40)}
  for kind in ('trainable', 'non_trainable'):
    for index, variable in enumerate(getattr(model, f'{kind}_variables')):
      leaves[f'{prefix}/{kind}/{index}'] = variable.numpy()
  owner = checkpoint.model_owner(
    checkpoint.flags_owner({'model': 'cnn', 'dataset': 'digits'}), model
  )
  for round_num in rounds:
    path = checkpoint.path_of(str(folder / 'checkpoints'), round_num)
    with open(path, 'wb') as file:
      file.writelines(checkpoint.encode(leaves, owner))
  return str(folder)


def test_a_run_gives_its_last_whole_checkpoint(tmp_path):
  model = _model(fill=1)
  folder = _run(tmp_path / 'run', model, rounds=(2, 10))
  (tmp_path / 'run' / 'checkpoints' / 'round_11.ckpt').write_bytes(b'torn')
  source = warm_start.find(folder)
  assert source.about == f'{folder}, round 10 (--model=cnn --dataset=digits)'
  _assert_equal(warm_start.load(source, _model()).weights, model, 40)


def _run_of_fedmatch(folder, model):
  """A run whose weights are sigma + psi, psi a fourth of sigma."""
  path = _run(folder, model)
  flags = '--algorithm=fedmatch\n--model=cnn\n--dataset=digits\n'
  (folder / 'flags.txt').write_text(f'{flags}--num_labels=10\n')
  file = checkpoint.path_of(str(folder / 'checkpoints'), 1)
  leaves = checkpoint.read(file)
  prefix = 'process/global_model_weights'
  for name, value in list(leaves.items()):
    below = name.removeprefix(f'{prefix}/')
    if below != name:
      leaves[f'{prefix}/sets/psi/{below}'] = np.float32(0.25) * value
  given = {
    'model': 'cnn',
    'dataset': 'digits',
    'algorithm': 'fedmatch',
    'num_labels': '10',
  }
  owner = checkpoint.model_owner(checkpoint.flags_owner(given), model)
  with open(file, 'wb') as opened:
    opened.writelines(checkpoint.encode(leaves, owner))
  return path


def test_a_run_gives_the_weights_that_predict(tmp_path):
  model = _model('none', fill=1)
  source = warm_start.find(_run_of_fedmatch(tmp_path / 'run', model))
  weights = warm_start.load(source, model).weights
  for value, variable in zip(
    weights.trainable, model.trainable_variables, strict=True
  ):
    np.testing.assert_allclose(value, 1.25 * variable, atol=1e-5)
  assert isinstance(weights.trainable[0], np.ndarray)


@pytest.mark.parametrize('norm', ['bn', 'gn'])
@pytest.mark.parametrize(
  'name', ['a.keras', 'a.h5', 'x', 'w.h5', 'w.weights.h5']
)
def test_a_keras_file(tmp_path, name, norm):
  model = _model(norm, fill=2)
  if name == 'w.weights.h5':
    model.save_weights(tmp_path / name)
  else:
    model.save(tmp_path / 'a.h5' if name in ('x', 'w.h5') else tmp_path / name)
  if name == 'x':
    (tmp_path / 'a.h5').rename(tmp_path / 'x')
  if name == 'w.h5':
    # As `save_weights` of Keras 2 writes it.
    with (
      h5py.File(tmp_path / 'a.h5') as whole,
      h5py.File(tmp_path / name, 'w') as weights,
    ):
      for key in whole['model_weights']:
        whole.copy(f'model_weights/{key}', weights)
      for key, value in whole['model_weights'].attrs.items():
        weights.attrs[key] = value
  source = warm_start.find(str(tmp_path / name))
  _assert_equal(warm_start.load(source, _model(norm)).weights, model, 1)


@pytest.mark.parametrize('name', ['resnet9', 'wrn28_2'])
def test_networks_of_many_layers(tmp_path, name):
  build = lambda: networks.build_network(name, (32, 32, 3), 10, 'bn')
  model, path = build(), str(tmp_path / 'a.keras')
  rng = np.random.default_rng(0)
  model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  model.save(path)
  loaded = warm_start.load(warm_start.find(path), build())
  _assert_equal(loaded.weights, model, 1)


def _export(folder, model):
  os.makedirs(folder)
  model.save(folder / 'model.keras')
  (folder / 'about.json').write_text('{}')
  exported.write_manifest(str(folder), 3)
  return str(folder)


@pytest.mark.parametrize(
  'name', ['other_classes.h5', 'other_classes.keras', 'without.h5']
)
def test_a_file_with_another_last_layer(tmp_path, name):
  """That of pre-trained weights, for other classes, or without any."""
  there = _model(classes=7, fill=1)
  path = str(tmp_path / name)
  if name == 'without.h5':
    without = tf.keras.Model(there.inputs, there.layers[-1].input)
    without.save(path)
  else:
    there.save(path)
  source, model = warm_start.find(path), _model(fill=2)
  loaded = warm_start.load(source, model, new_weights=model.get_weights)
  assert loaded.new_layer == 'logits'
  *first, kernel, bias = loaded.weights.trainable
  for value, variable in zip(first, there.trainable_variables[:-2]):
    np.testing.assert_array_equal(value, variable)
  np.testing.assert_array_equal(kernel, model.trainable_variables[-2])
  np.testing.assert_array_equal(bias, model.trainable_variables[-1])
  for value, variable in zip(
    loaded.weights.non_trainable, there.non_trainable_variables, strict=True
  ):
    np.testing.assert_array_equal(value, variable)
  # Not where the whole model is needed, as for an evaluation.
  with pytest.raises(UsageError, match='it belongs to another model'):
    warm_start.load(source, model)


def test_only_the_last_layer_may_differ(tmp_path):
  path = str(tmp_path / 'other.h5')
  networks.build_network('cnn', (8, 8, 3), 7, 'bn').save(path)
  model = _model()
  with pytest.raises(UsageError, match='conv1/kernel'):
    warm_start.load(warm_start.find(path), model, new_weights=model.get_weights)


def test_weights_that_do_not_train_are_apart(tmp_path):
  there = _model(fill=1)
  there.save(tmp_path / 'model.h5')
  model = _model()
  model_fns.freeze(model, 'conv4|norm4|logits')
  loaded = warm_start.load(
    warm_start.find(str(tmp_path / 'model.h5')),
    model,
    frozen=model_fns.frozen_variables(model),
  )
  assert len(loaded.weights.trainable) == 5
  assert len(loaded.weights.non_trainable) == 2
  for name, value in loaded.frozen.items():
    layer, index = name.split('/')
    expected = there.get_layer(layer).weights[int(index)]
    np.testing.assert_array_equal(value, expected)


def test_an_exported_model(tmp_path):
  model = _model(fill=3)
  source = warm_start.find(_export(tmp_path / 'model', model))
  _assert_equal(warm_start.load(source, _model()).weights, model, 1)
  os.truncate(tmp_path / 'model' / 'model.keras', 100)
  with pytest.raises(UsageError, match='not a whole exported model'):
    warm_start.find(str(tmp_path / 'model'))


@pytest.mark.parametrize(
  'make, words',
  [
    (lambda path: None, ['does not exist']),
    (lambda path: path.write_text(''), ['it is none', 'flags.txt', '.keras']),
    (os.mkdir, ['it is none']),
    (os.mkfifo, ['it is not a regular file']),
    (lambda path: path.symlink_to(path), ['a link that leads back to itself']),
    (lambda path: path.symlink_to('/dev/zero'), ['not a regular file']),
    (
      lambda path: tf.saved_model.save(tf.Module(), str(path)),
      ['it is a SavedModel, which is not loaded'],
    ),
    (
      lambda path: tf.saved_model.save(_model(), str(path)),
      ['it is a SavedModel, which is not loaded'],
    ),
    (
      lambda path: _write_another_run(path),
      ['belongs to another run (--norm=(its default) there, gn here)'],
    ),
    (
      lambda path: _run(path, _model(), rounds=()),
      ['no checkpoint', 'there is none', 'given/model'],
    ),
  ],
)
def test_what_has_no_weights_is_refused_at_once(tmp_path, make, words):
  make(tmp_path / 'given')
  with pytest.raises(UsageError) as error:
    warm_start.find(str(tmp_path / 'given'))
  for word in (f'--init_from={tmp_path}/given', *words):
    assert word in str(error.value)


@pytest.mark.parametrize(
  'name, make, words',
  [
    (
      'a.keras',
      lambda p: _model(classes=4).save(p),
      [
        'name=logits',
        'value.shape=(128, 4)',
        'variable.shape=(128, 10)',
        '--model, --norm, --dataset and --train_layers',
      ],
    ),
    (
      'run',
      lambda p: _run(p, _model(classes=4)),
      ['round 1 (--model=cnn', 'logits/kernel float32 [128, 4] there'],
    ),
    (
      'run',
      lambda p: _run(p, _model('gn')),
      ['0 non_trainable_variables there, 8 here'],
    ),
    ('a.keras', lambda p: _model('gn').save(p), ['name=norm1']),
    ('a.h5', lambda p: _model('gn').save(p), ['norm1']),
    (
      'w.weights.h5',
      lambda p: _model(classes=4).save_weights(p),
      ['name=logits', 'value.shape=(128, 4)'],
    ),
    ('run', lambda p: _run(p, _infinite()), ['not all finite']),
  ],
)
def test_weights_that_will_not_do(tmp_path, name, make, words):
  make(tmp_path / name)
  with pytest.raises(UsageError) as error:
    warm_start.load(warm_start.find(str(tmp_path / name)), _model())
  for word in ('--init_from', str(tmp_path), *words):
    assert word in str(error.value)


def _write_another_run(folder):
  _run(folder, _model())
  (folder / 'flags.txt').write_text(
    '--model=cnn\n--dataset=digits\n--norm=gn\n'
  )


def _infinite():
  model = _model()
  model.non_trainable_variables[0].assign(np.full([32], np.inf))
  return model
