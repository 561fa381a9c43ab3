import asyncio
import collections
import os

import numpy as np
import pytest
import tensorflow_federated as tff

from tests.program import fakes
from tff_fssl.hparams import UsageError
from tff_fssl.program import checkpoint
from tff_fssl.program import csv_table
from tff_fssl.program import managers

_STATE = collections.OrderedDict(
  weights=(np.arange(6, dtype=np.float32).reshape(2, 3), np.float64(0.1)),
  count=np.int32(3),
  flag=np.bool_(True),
  nothing=(),
  empty=np.zeros([0, 4], np.float32),
  iterator=fakes.data_source().iterator(),
)


def _manager(tmp_path, **kwargs):
  return managers.DurableProgramStateManager(str(tmp_path), **kwargs)


def _save(manager, *versions):
  for version in versions:
    asyncio.run(manager.save(_STATE, version))


def _damage(tmp_path, version, keep):
  path = checkpoint.path_of(str(tmp_path), version)
  with open(path, 'rb') as file:
    content = file.read()
  with open(path, 'wb') as file:
    file.write(keep(content))


def test_what_is_loaded_is_what_was_saved(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, -3)
  loaded, version = asyncio.run(manager.load_latest(_STATE))
  assert version == -3
  assert type(loaded) is type(_STATE)
  assert loaded['iterator'] == _STATE['iterator']
  for new, old in zip(loaded['weights'], _STATE['weights']):
    np.testing.assert_array_equal(new, old)
    assert new.dtype == old.dtype and new.shape == old.shape
  assert loaded['empty'].shape == (0, 4)
  assert loaded['count'] == 3 and loaded['flag'].dtype == bool


def test_nothing_saved(tmp_path):
  manager = _manager(tmp_path)
  assert asyncio.run(manager.get_versions()) is None
  assert asyncio.run(manager.load_latest(_STATE)) == (None, 0)
  with pytest.raises(tff.program.ProgramStateNotFoundError):
    asyncio.run(manager.load(1, _STATE))


def test_the_last_ones_are_kept(tmp_path):
  manager = _manager(tmp_path, keep_total=2)
  _save(manager, -1, 0, 1, 10)
  assert asyncio.run(manager.get_versions()) == [1, 10]
  with pytest.raises(tff.program.ProgramStateExistsError):
    _save(manager, 10)
  with pytest.raises(ValueError, match='keep_total'):
    _manager(tmp_path, keep_total=0)


@pytest.mark.parametrize(
  'keep, reason',
  [
    (lambda c: c[:-1], 'truncated or damaged'),
    (lambda c: c[:100], 'truncated or damaged'),
    (lambda c: c[:10], 'truncated'),
    (lambda c: b'', 'truncated'),
    (lambda c: c.replace(b'NUMPY', b'NUMPX', 1), 'Bad CRC-32'),
    (lambda c: b'text', 'not a zip file'),
  ],
)
def test_a_damaged_one_falls_back_and_says_so(tmp_path, keep, reason):
  said = []
  manager = _manager(tmp_path, warn=said.append)
  _save(manager, 1, 2)
  _damage(tmp_path, 2, keep)
  _, version = asyncio.run(manager.load_latest(_STATE))
  assert version == 1
  assert len(said) == 1 and reason in said[0] and 'round_2.ckpt' in said[0]
  # Out of the way: the version can be saved again.
  _save(manager, 2)
  assert asyncio.run(manager.load_latest(_STATE))[1] == 2


def test_one_of_another_program_is_refused_and_stays(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 1)
  for version, state, word in (
    (2, {**_STATE, 'count': np.int64(3)}, "'count' is int64"),
    (3, {**_STATE, 'more': np.int32(3)}, "'more'"),
    (4, {**_STATE, 'iterator': b'x'}, "'iterator'"),
  ):
    asyncio.run(manager.save(state, version))
    with pytest.raises(UsageError, match=f'round_{version}.*{word}.*[Mm]ove'):
      asyncio.run(manager.load_latest(_STATE))
  assert asyncio.run(manager.get_versions()) == [2, 3, 4]


_OWNER = checkpoint.Owner(
  {'seed': '1'}, {'trainable': ['w'], 'non_trainable': []}
)


@pytest.mark.parametrize(
  'other, words',
  [
    (checkpoint.NOBODY, 'which run it belongs to'),
    (_OWNER.__class__({'seed': '2'}, _OWNER.model), '--seed=2 there, 1 here'),
    (_OWNER.__class__({}), '--seed=.its default. there, 1 here'),
    (
      _OWNER.__class__(
        {'seed': '1'}, {'trainable': ['v'], 'non_trainable': []}
      ),
      'v there, w here',
    ),
    (
      _OWNER.__class__(
        {'seed': '1'}, {'trainable': ['w'], 'non_trainable': ['m']}
      ),
      '1 non_trainable_variables there, 0 here',
    ),
  ],
)
def test_a_checkpoint_belongs_to_its_owner(other, words, tmp_path):
  _save(_manager(tmp_path, owner=other), 1)
  content = (tmp_path / 'round_1.ckpt').read_bytes()
  ours = _manager(tmp_path, owner=_OWNER, keep_total=1)
  with pytest.raises(UsageError, match=words):
    asyncio.run(ours.load_latest(_STATE))
  # Nor is it removed.
  _save(ours, 2, 3)
  assert asyncio.run(ours.get_versions()) == [1, 3]
  assert (tmp_path / 'round_1.ckpt').read_bytes() == content
  assert asyncio.run(ours.load_latest(_STATE))[1] == 3


def test_of_an_older_format(tmp_path):
  content = b'tff_fssl checkpoint 1\n' + bytes(100)
  (tmp_path / 'round_1.ckpt').write_bytes(content)
  with pytest.raises(UsageError, match='former format'):
    asyncio.run(_manager(tmp_path).load_latest(_STATE))


def test_names_that_no_save_gives(tmp_path):
  names = ['round_01.ckpt', 'round_-0.ckpt', 'round_1.ckpt.bak', 'my_1.ckpt',
           '.writing_thesis', 'round_\u0661.ckpt', 'round_+1.ckpt']  # fmt: skip
  for name in names:
    (tmp_path / name).write_text('mine')
  manager = _manager(tmp_path, keep_total=1)
  assert asyncio.run(manager.get_versions()) is None
  _save(manager, 1, 2, 3)
  assert sorted(os.listdir(tmp_path)) == sorted([*names, 'round_3.ckpt'])


def test_one_more_is_kept(tmp_path):
  kept = []
  manager = _manager(
    tmp_path, keep_total=1, keep_also_fn=lambda: kept[-1] if kept else None
  )
  for version, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3)):
    kept.append(best)
    _save(manager, version)
  assert asyncio.run(manager.get_versions()) == [3, 5]


def test_a_renamed_checkpoint_is_refused_and_stays(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 3, 4)
  renamed = checkpoint.path_of(str(tmp_path), 9)
  os.rename(checkpoint.path_of(str(tmp_path), 4), renamed)
  words = "round_9.ckpt cannot be used: it was written as 'round_4.ckpt', and"
  with pytest.raises(UsageError, match=words):
    asyncio.run(manager.load_latest(_STATE))
  with pytest.raises(checkpoint.ForeignError, match='written as'):
    checkpoint.read_latest(str(tmp_path))
  assert asyncio.run(manager.get_versions()) == [3, 9]
  os.rename(renamed, checkpoint.path_of(str(tmp_path), 4))
  assert asyncio.run(manager.load_latest(_STATE))[1] == 4


def test_if_none_is_whole_nothing_is_begun_anew(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 1, 2)
  for version in (1, 2):
    _damage(tmp_path, version, lambda c: c[:50])
  with pytest.raises(UsageError, match='none of the 2 checkpoints'):
    asyncio.run(manager.load_latest(_STATE))
  assert asyncio.run(manager.get_versions()) == [1, 2]


def test_leftovers_of_killed_saves_are_removed(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 1)
  (tmp_path / '.writing_round_2.ckpt').write_bytes(b'half')
  _manager(tmp_path)
  assert os.listdir(tmp_path) == ['round_1.ckpt']


def test_metrics_are_logged_flat_and_in_order(tmp_path):
  table = csv_table.CsvTable(str(tmp_path / 'a.csv'))
  manager = managers.LoggerReleaseManager(table, 'It', print)
  nested = collections.OrderedDict(
    z=collections.OrderedDict(b=1, a=np.float32(2)), c=(3, ()), d=()
  )
  asyncio.run(manager.release(nested, 5))
  assert table.columns == ['round', 'z/b', 'z/a', 'c/0']


def test_a_logger_that_fails_is_reported_once():
  class Failing:
    calls = 0

    def log(self, round_num, metrics):
      Failing.calls += 1
      raise OSError('no')

  said = []
  manager = managers.LoggerReleaseManager(Failing(), 'It', said.append)
  for _ in range(3):
    asyncio.run(manager.release({}, 1))
  assert Failing.calls == 1 and said == ['It stops: OSError: no']
