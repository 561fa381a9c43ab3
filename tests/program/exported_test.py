import hashlib
import json
import os

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import exported


def _export(folder, round_num=3, text='weights'):
  """Writes what `export.export_model` does, without TensorFlow."""
  new = exported.new_folder(str(folder))
  os.makedirs(os.path.join(new, 'variables'))
  for name in ('saved_model.pb', 'variables/variables.index', 'model.keras'):
    with open(os.path.join(new, name), 'w') as file:
      file.write(f'{text} {name}')
  with open(os.path.join(new, 'about.json'), 'w') as file:
    json.dump({'round': round_num}, file)
  exported.write_manifest(new, round_num)
  exported.replace(str(folder))
  return str(folder)


def test_a_whole_one(tmp_path):
  folder = _export(tmp_path / 'model')
  assert exported.problem(folder) == exported.problem(folder, 3) == ''
  assert exported.problem(folder, 4) == 'it was exported after round 3'
  assert exported.read_about(folder) == {'round': 3}
  _export(tmp_path / 'model', 4, 'other')
  assert exported.problem(folder, 4) == ''
  assert os.listdir(tmp_path) == ['model']


@pytest.mark.parametrize(
  'name', ['saved_model.pb', 'variables/variables.index', 'model.keras',
           'about.json', 'manifest.json']
)  # fmt: skip
@pytest.mark.parametrize('how', ['missing', 'torn', 'empty', 'folder', 'fifo'])
def test_what_is_not_whole(name, how, tmp_path):
  folder = _export(tmp_path / 'model')
  path = os.path.join(folder, name)
  if how in ('torn', 'empty'):
    os.truncate(path, 5 if how == 'torn' else 0)
  else:
    os.unlink(path)
  if how == 'folder':
    os.mkdir(path)
  if how == 'fifo':
    os.mkfifo(path)
  assert os.path.basename(name) in exported.problem(folder, 3)
  # It is ours all the same, and repaired.
  _export(tmp_path / 'model')
  assert exported.problem(folder, 3) == ''


@pytest.mark.parametrize(
  'manifest',
  ['[]', '{}', '{"format": 2}', '{"format": 1, "round": 3, "files": []}',
   '{"format": 1, "round": 3, "files": {"../../x": {"size": 1}}}', '[' * 99999,
   '{"format": 1, "round": Infinity, "files": {}}'],
)  # fmt: skip
def test_manifests_from_elsewhere(manifest, tmp_path):
  folder = _export(tmp_path / 'model')
  with open(os.path.join(folder, 'manifest.json'), 'w') as file:
    file.write(manifest)
  assert exported.problem(folder)


def test_files_of_others_are_not_replaced(tmp_path):
  folder = _export(tmp_path / 'model')
  exported.check_replaceable(folder)
  exported.check_replaceable(str(tmp_path / 'none'))
  (tmp_path / 'model' / 'thesis.tex').write_text('years of work')
  with pytest.raises(UsageError, match='thesis.tex.*move it away'):
    exported.check_replaceable(folder)


def test_a_manifest_names_no_file_outside_of_the_folder(tmp_path):
  folder = _export(tmp_path / 'model')
  (tmp_path / 'secret').write_text('s')
  path = os.path.join(folder, exported.MANIFEST)
  with open(path) as file:
    manifest = json.load(file)
  for name in ('variables/variables_temp/../../../secret', '../secret'):
    digest = hashlib.sha256(b's').hexdigest()
    manifest['files'][name] = {'size': 1, 'sha256': digest}
    with open(path, 'w') as file:
      json.dump(manifest, file)
    assert 'secret' in exported.problem(folder)
    del manifest['files'][name]


def test_names_that_only_look_alike_are_left_alone(tmp_path):
  for name in ('model.old', 'model.new'):
    (tmp_path / name).write_text('mine')
  folder = _export(tmp_path / 'model')
  exported.remove_leftovers(folder)
  assert sorted(os.listdir(tmp_path)) == ['model', 'model.new', 'model.old']


@pytest.mark.parametrize(
  'before, kept',
  [
    ([], []),
    (['.writing_model'], []),  # Killed while it wrote the first one,
    (['model', '.writing_model'], ['model']),  # or a later one,
    # or between two renames,
    (['.replaced_model', '.writing_model'], ['.replaced_model']),
    (['.replaced_model', 'model'], ['model']),  # or before the last removal.
  ],
)
def test_what_a_killed_export_left_is_put_right(before, kept, tmp_path):
  for name in before:
    (tmp_path / name).mkdir()
    (tmp_path / name / 'saved_model.pb').write_text(name)
  exported.remove_leftovers(str(tmp_path / 'model'))
  assert os.listdir(tmp_path) == ['model'] * len(kept)
  for name in kept:
    assert (tmp_path / 'model' / 'saved_model.pb').read_text() == name


_ABOUT = {
  'classes': ['ill', 'well'],
  'example_shape': [1, 3],
  'inputs_of_model.keras': {'mean': [0.0, 1.0, 2], 'std': [1.0, 1.0, 0.5]},
  'prepared': {
    'columns': [
      ['age', 'number', 40.0, True, []],
      ['sex', 'category', 0.0, False, ['f']],
    ]
  },
  'flags': {'dataset': 'features:a.csv', 'seed': 1},
  'something': {'of': 'a newer version'},
}


def _read_about(folder, changed):
  content = {k: v for k, v in {**_ABOUT, **changed}.items() if v is not None}
  (folder / 'about.json').write_text(json.dumps(content))
  return exported.read_checked_about(str(folder))


def test_a_record_with_keys_of_a_newer_version(tmp_path):
  about = _read_about(tmp_path, {})
  assert about['classes'] == ['ill', 'well']
  assert _read_about(tmp_path, {'prepared': None})['prepared'] == {}


@pytest.mark.parametrize(
  'changed, words',
  [
    ({'classes': None}, "'classes' is missing"),
    ({'classes': 'ab'}, 'its classes is not'),
    ({'classes': ['a', 'a']}, 'its classes is not'),
    ({'classes': [0, 1]}, 'its classes is not'),
    ({'example_shape': [1, True]}, 'its example_shape is not'),
    ({'example_shape': [10**6, 10**6]}, 'its example_shape is not'),
    ({'example_shape': [0, 3]}, 'its example_shape is not'),
    ({'inputs_of_model.keras': []}, 'its inputs_of_model.keras is not'),
    ({'inputs_of_model.keras': {'mean': [0, 0, 0]}}, 'inputs_of_model.keras'),
    (
      {'inputs_of_model.keras': {'mean': [0, 0, 0], 'std': [1, 1, 0]}},
      'its std is not',
    ),
    (
      {'inputs_of_model.keras': {'mean': [0, 0, 1e39], 'std': [1] * 3}},
      'its mean is not',
    ),
    ({'prepared': {'bit_depth': 99}}, 'its bit_depth is not'),
    ({'prepared': {'columns': [['a', 'number']]}}, 'its columns is not'),
    (
      {'prepared': {'columns': [['a', 'number', 0.0, False, []]]}},
      'its columns is not',
    ),
    ({'flags': {'dataset': 'digits', 'seed': []}}, 'its flags is not'),
    ({'flags': {}}, 'its flags is not'),
  ],
)
def test_a_record_that_no_export_writes(tmp_path, changed, words):
  with pytest.raises(UsageError, match='about.json: ') as caught:
    _read_about(tmp_path, changed)
  assert words in str(caught.value) and '\n' not in str(caught.value)
