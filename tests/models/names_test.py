"""Names of networks: what is rejected before TensorFlow is loaded."""

import pytest

from tff_fssl import hparams
from tff_fssl.data import names as data_names
from tff_fssl.models import names


def _write(tmp_path, text):
  path = tmp_path / 'own.py'
  path.write_text(text)
  return str(path)


@pytest.mark.parametrize('model', ['cnn', 'keras:MobileNetV2'])
def test_known_models_pass(model):
  names.check_model(model)


@pytest.mark.parametrize(
  'model, message',
  [
    ('cn', "--model=cn: allowed are .*did you mean 'cnn'"),
    ('keras:', 'allowed are'),
    ('keras:a.b', 'allowed are'),
    ('nothing.py:build', 'it does not exist'),
  ],
)
def test_other_models_are_rejected(model, message):
  with pytest.raises(hparams.UsageError, match=message):
    names.check_model(model)


@pytest.mark.parametrize(
  'text',
  [
    'def build(images, num_classes, norm): pass',
    'def build(x, c, n, more=3, *, other=4): pass',
    'def build(*all): pass',
    # A decorator may change the parameters.
    'import functools\n@functools.cache\ndef build(x): pass',
  ],
)
def test_functions_of_a_file_pass(tmp_path, text):
  names.check_model(f'{_write(tmp_path, text)}:build')


@pytest.mark.parametrize(
  'text, message',
  [
    ('def bild(): pass', "no function 'build'; it has: bild; did you mean"),
    ('build = 3', "no function 'build'; it has: none"),
    ('def build(:', 'own.py is not Python'),
    ('\0', 'own.py is not Python'),
    (
      '\ndef build(x, c): pass',
      r'line 2: build\(x, c\) must take images, num_classes and norm',
    ),
    ('def build(x, c, n, more): pass', 'nothing else without a default'),
    ('def build(x, c, n, *, more): pass', 'nothing else without a default'),
  ],
)
def test_files_without_such_a_function_are_rejected(tmp_path, text, message):
  path = _write(tmp_path, text)
  with pytest.raises(hparams.UsageError, match=message) as error:
    names.check_model(f'{path}:build')
  assert '\n' not in str(error.value)


def test_a_file_does_not_run_when_its_name_is_checked(tmp_path):
  path = _write(tmp_path, '1 / 0\ndef build(x, c, n): pass')
  names.check_model(f'{path}:build')
  assert names.file_and_function(f'{path}:build') == (path, 'build')
  assert names.file_and_function('keras:MobileNetV2') is None


def test_kinds_of_examples():
  names.check_inputs('mlp', data_names.VECTORS)
  names.check_inputs('own.py:build', data_names.TEXTS)
  with pytest.raises(hparams.UsageError, match='takes texts, but .* images'):
    names.check_inputs('text_cnn', data_names.IMAGES)
  with pytest.raises(hparams.UsageError, match='allowed are linear, mlp and'):
    names.check_inputs('keras:MobileNetV2', data_names.VECTORS)


def test_layer_patterns_and_summaries():
  assert names.layer_pattern('conv[12]').fullmatch('conv2')
  with pytest.raises(hparams.UsageError, match='not a regular expression'):
    names.layer_pattern('conv[')
  assert all(f'{name}: ' in names.summaries() for name in names.MODELS)
