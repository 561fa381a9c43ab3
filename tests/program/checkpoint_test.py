"""The files of checkpoints; tests of the manager have those of folders."""

import io
import os
import zipfile

import hypothesis
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from tff_fssl import hparams
from tff_fssl.program import checkpoint

_LEAVES = {'a': np.arange(3), 'b/c': b'x\0', 'd': np.float32(2)}


def _assert_equal(leaves, expected):
  assert leaves.keys() == expected.keys()
  for name, value in expected.items():
    assert type(leaves[name]) is type(value) or np.ndim(value) == 0
    np.testing.assert_array_equal(leaves[name], value)


@hypothesis.given(st.data())
@hypothesis.settings(
  max_examples=150, deadline=None, derandomize=True, database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_of_whatever_damage_a_checkpoint_is_refused(tmp_path, data):
  """No damage changes a leaf, and none raises something else."""
  path = tmp_path / 'x.ckpt'
  content = b''.join(checkpoint.encode(_LEAVES))
  start = data.draw(st.integers(0, len(content)))
  end = data.draw(st.integers(start, min(start + 60, len(content))))
  new = data.draw(st.one_of(st.binary(max_size=9), st.just(content[:end] * 2)))
  path.write_bytes(content[:start] + new + content[end:])
  try:
    _assert_equal(checkpoint.read(str(path)), _LEAVES)
  except checkpoint.CheckpointError as error:
    assert '\n' not in str(error)


def test_leaves_keep_their_values_dtypes_and_bytes(tmp_path):
  leaves = {
    **_LEAVES,
    'half': np.array([1.5, -2], ml_dtypes.bfloat16),
    'empty': np.zeros([0, 3], np.int64),
    'flag': np.True_,
  }
  path = str(tmp_path / 'round_1.ckpt')
  checkpoint.write(path, leaves)
  read = checkpoint.read(path)
  _assert_equal(read, leaves)
  for name, value in leaves.items():
    if not isinstance(value, bytes):
      assert read[name].dtype == value.dtype
  with open(path, 'rb') as file:
    assert file.read() == b''.join(
      checkpoint.encode(leaves, name='round_1.ckpt')
    )


def test_objects_are_not_unpickled(tmp_path):
  path = tmp_path / 'x.ckpt'
  content = b''.join(checkpoint.encode({'a': np.arange(3)}))
  path.write_bytes(content)
  with zipfile.ZipFile(path, 'a') as archive:
    text = io.BytesIO()
    np.save(text, np.array([{}], object), allow_pickle=True)
    archive.writestr('b.npy', text.getvalue())
  with pytest.raises(checkpoint.DamagedError, match='allow_pickle=False'):
    checkpoint.read(str(path))


def test_a_checkpoint_of_the_former_format_is_refused_in_one_line(tmp_path):
  path = tmp_path / 'round_4.ckpt'
  path.write_bytes(b'tff_fssl checkpoint 2\n' + bytes(99))
  for read in (checkpoint.read, checkpoint.read_header):
    with pytest.raises(
      checkpoint.ForeignError, match='0.5.0 and older;.*--rest'
    ):
      read(str(path))


def test_what_a_checkpoint_cannot_hold(tmp_path):
  with pytest.raises(TypeError, match='x: a checkpoint cannot hold'):
    checkpoint.write(str(tmp_path / 'a.ckpt'), {'x': 'text'})
  assert not list(tmp_path.iterdir())


def test_the_weights_of_models_are_compared():
  here = {'trainable': ['a float32 [1]', 'b'], 'non_trainable': []}
  there = {'trainable': ['a float32 [2]', 'b'], 'non_trainable': ['c']}
  assert not checkpoint.model_differences(here, here)
  assert checkpoint.model_differences(there, here) == (
    'a float32 [2] there, a float32 [1] here;'
    ' 1 non_trainable_variables there, 0 here'
  )


_MODEL = {'trainable': ['w float32 [2]'], 'non_trainable': []}


def _row(client_id, round_num):
  return {
    'psi': np.array([client_id, round_num], np.float32),
    'sigma': np.array([[round_num]], np.float32),
  }


def _assert_is(row, client_id, round_num):
  expected = _row(client_id, round_num)
  assert row.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(row[name], value)
    assert row[name].dtype == value.dtype


@pytest.fixture(name='rows')
def _rows(tmp_path):
  return checkpoint.RowFiles(str(tmp_path / 'rows'))


def test_a_row_of_each_round(rows):
  rows.drop_after(0)
  rows.retain_versions([1, 2])
  for round_num in (1, 3):
    rows.write(7, round_num, _row(7, round_num))
  for round_num in (1, 3):
    _assert_is(rows.read(7, round_num), 7, round_num)


def test_the_row_of_another_client_is_refused(rows, tmp_path):
  rows.write(7, 1, _row(7, 1))
  folder = tmp_path / 'rows'
  os.rename(folder / 'client_7_round_1.row', folder / 'client_8_round_1.row')
  with pytest.raises(hparams.UsageError, match="as 'client_7_round_1.row'"):
    rows.read(8, 1)


def test_rounds_that_are_repeated_have_no_rows(rows, tmp_path):
  for round_num in (1, 2, 3):
    rows.write(0, round_num, _row(0, round_num))
  (tmp_path / 'rows' / '.writing_client_0_round_4.row').write_bytes(b'torn')
  (tmp_path / 'rows' / 'mine.txt').write_text('stays')
  rows.drop_after(2)
  assert sorted(os.listdir(tmp_path / 'rows')) == [
    'client_0_round_1.row',
    'client_0_round_2.row',
    'mine.txt',
  ]


# For each round, the clients that take part, and whether its state is saved.
_ROUNDS = st.lists(
  st.tuples(st.sets(st.integers(0, 4)), st.booleans()), max_size=12
)


@hypothesis.given(_ROUNDS, st.integers(1, 3))
def test_every_kept_checkpoint_finds_its_rows(tmp_path_factory, rounds, total):
  folder = str(tmp_path_factory.mktemp('rows'))
  rows = checkpoint.RowFiles(folder)
  last, of_version = {}, {}
  for round_num, (cohort, is_saved) in enumerate(rounds, 1):
    for client_id in cohort:
      rows.write(client_id, round_num, _row(client_id, round_num))
      last[client_id] = round_num
    if is_saved:
      of_version[round_num] = dict(last)
      kept = sorted(of_version)[-total:]
      rows.retain_versions(kept)
      for version in kept:
        for client_id, of_round in of_version[version].items():
          _assert_is(rows.read(client_id, of_round), client_id, of_round)
      # Nothing else is left.
      needed = {item for v in kept for item in of_version[v].items()}
      assert len(os.listdir(folder)) == len(needed)


@pytest.mark.parametrize(
  'damage',
  [
    lambda path: os.unlink(path),
    lambda path: os.truncate(path, 40),
    lambda path: os.truncate(path, 0),
    lambda path: path.write_bytes(path.read_bytes()[:-40] + bytes(40)),
    lambda path: (os.unlink(path), os.mkdir(path)),
    lambda path: (os.unlink(path), os.mkfifo(path)),
    lambda path: (os.unlink(path), os.symlink(path, path)),
  ],
)
def test_what_is_not_a_row_is_one_line(rows, tmp_path, damage):
  rows.write(3, 5, _row(3, 5))
  damage(tmp_path / 'rows' / 'client_3_round_5.row')
  with pytest.raises(hparams.UsageError) as error:
    rows.read(3, 5)
  message = str(error.value)
  assert 'client_3_round_5.row' in message and '--output_dir' in message
  assert '\n' not in message


def test_rows_of_others_are_refused(tmp_path):
  mine, theirs = (
    checkpoint.RowFiles(
      str(tmp_path), checkpoint.Owner({'seed': seed, 'algorithm': 'x'}, _MODEL)
    )
    for seed in '12'
  )
  theirs.write(0, 1, _row(0, 1))
  with pytest.raises(hparams.UsageError, match='another run .*--seed=2'):
    mine.read(0, 1)


def test_a_part_is_no_larger_than_the_file(tmp_path):
  """A stranger's file takes no more memory than its size, whatever it says."""
  path = tmp_path / 'round_1.ckpt'
  checkpoint.write(str(path), {'a': np.zeros([0, 2], np.float32)})
  np.testing.assert_equal(
    checkpoint.read(str(path)), {'a': np.zeros([0, 2], np.float32)}
  )
  with zipfile.ZipFile(path) as archive:
    header = archive.read('header.json')
  vast = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    vast, {'descr': '<f4', 'fortran_order': False, 'shape': (2**40,)}
  )
  for content, method in (
    (vast.getvalue(), zipfile.ZIP_STORED),
    (vast.getvalue() + bytes(10**6), zipfile.ZIP_DEFLATED),
  ):
    with zipfile.ZipFile(path, 'w') as archive:
      archive.writestr('header.json', header)
      archive.writestr('a.npy', content, method)
    with pytest.raises(checkpoint.DamagedError):
      checkpoint.read(str(path))
