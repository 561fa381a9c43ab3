import os

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.hparams import UsageError
from tff_fssl.models import networks
from tff_fssl.program import checkpoint
from tff_fssl.program import warm_start


def _model(norm='bn', classes=10, fill=None):
  model = networks.build_network('cnn', (8, 8, 1), classes, norm)
  if fill is not None:
    rng = np.random.default_rng(fill)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  return model


def _run(folder, model, rounds=(1,)):
  """The folder of a run, with checkpoints of a model."""
  os.makedirs(folder / 'checkpoints')
  (folder / 'flags.txt').write_text('--model=cnn\n--dataset=digits\n')
  prefix = 'process/global_model_weights'
  leaves = {f'{prefix}/statistics_count': np.float32(40)}
  for kind in ('trainable', 'non_trainable'):
    for index, variable in enumerate(getattr(model, f'{kind}_variables')):
      leaves[f'{prefix}/{kind}/{index}'] = variable.numpy()
  for round_num in rounds:
    path = checkpoint.path_of(str(folder / 'checkpoints'), round_num)
    with open(path, 'wb') as file:
      file.writelines(checkpoint.to_chunks(leaves))
  return str(folder)


def _assert_equal(weights, model, count):
  for value, variable in zip(
    weights.trainable + weights.non_trainable,
    model.trainable_variables + model.non_trainable_variables,
    strict=True,
  ):
    np.testing.assert_array_equal(value, variable)
  assert weights.statistics_count == count


def test_a_run_gives_its_last_whole_checkpoint(tmp_path):
  model = _model(fill=1)
  folder = _run(tmp_path / 'run', model, rounds=(2, 10))
  (tmp_path / 'run' / 'checkpoints' / 'round_11.ckpt').write_bytes(b'torn')
  source = warm_start.find(folder)
  assert source.about == f'{folder}, round 10 (--model=cnn --dataset=digits)'
  _assert_equal(warm_start.load(source, _model()), model, 40)


@pytest.mark.parametrize(
  'name, given', [('a.keras', 'a.keras'), ('a.h5', 'a.h5'), ('sm', 'sm'),
                  ('model/model.keras', 'model')]
)  # fmt: skip
def test_a_keras_model(tmp_path, name, given):
  model = _model(fill=2)
  os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
  model.save(tmp_path / name)
  source = warm_start.find(str(tmp_path / given))
  _assert_equal(warm_start.load(source, _model()), model, 1)


def _foreign(folder):
  tf.saved_model.save(tf.Module(), str(folder))


@pytest.mark.parametrize(
  'make, words',
  [
    (lambda path: None, ['does not exist']),
    (lambda path: path.write_text(''), ['it is none', 'flags.txt', '.keras']),
    (os.mkdir, ['it is none']),
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
    ('a.keras', lambda p: p.write_text('no'), ['Keras cannot load it']),
    (
      'a.h5',
      lambda p: _model().save_weights(p),
      ['Keras cannot load it as a whole model', 'model.save'],
    ),
    ('sm', _foreign, ['SavedModel that Keras did not write']),
    (
      'a.keras',
      lambda p: _model(classes=4).save(p),
      [
        'logits/kernel float32 [128, 4] there, logits/kernel float32 [128, 10]'
        ' here; logits/bias',
        '--model, --norm and --dataset',
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
    (
      'a.keras',
      lambda p: _renamed().save(p),
      ['first/kernel float32 [3, 3, 1, 32] there, conv1/kernel'],
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


def _renamed():
  """The same shapes under another name."""

  def clone(layer):
    config = layer.get_config()
    if layer.name == 'conv1':
      config['name'] = 'first'
    return type(layer).from_config(config)

  return tf.keras.models.clone_model(_model(), clone_function=clone)


def _infinite():
  model = _model()
  model.non_trainable_variables[0].assign(np.full([32], np.inf))
  return model
