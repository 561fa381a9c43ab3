"""Weights in Keras files that anybody may have made."""

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
from tff_fssl.models import networks
from tff_fssl.program import keras_weights
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
    values = keras_weights.read(
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
