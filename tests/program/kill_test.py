"""A run that is killed anywhere goes on as if it had not been."""

import os

import pytest

from tests.program import fakes
from tff_fssl import durable
from tff_fssl.hparams import UsageError

_SHORT = {'total_rounds': 2, 'rounds_per_evaluation': 1, 'keep': 1}


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
  """(results, names of the disk calls) of a run that is not stopped."""
  folder = tmp_path_factory.mktemp('reference') / 'run'
  with pytest.MonkeyPatch.context() as patch:
    with fakes.Disk().installed(patch) as disk:
      fakes.run(folder, **_SHORT)
  assert set(disk.calls) == set(fakes.Disk.CALLS)
  return fakes.results(folder), disk.calls


@pytest.mark.parametrize('how', ['kill', 'tear', 'full'])
def test_stopped_at_every_disk_call(how, reference, tmp_path, monkeypatch):
  expected, calls = reference
  assert len(calls) > 60
  for stop_at, name in enumerate(calls):
    if how == 'tear' and name != 'write':
      continue
    folder = tmp_path / str(stop_at)
    first, second = fakes.FakeProcess(), fakes.FakeProcess()
    with fakes.Disk(stop_at, how).installed(monkeypatch):
      with pytest.raises(UsageError if how == 'full' else fakes.Killed):
        fakes.run(folder, first, **_SHORT)
    fakes.run(folder, second, **_SHORT)
    assert fakes.results(folder) == expected, stop_at
    # Rounds 0 to 2: at most one is repeated.
    assert len(first.rounds) + len(second.rounds) <= 4, stop_at
    for path, _, names in os.walk(folder):
      assert not [n for n in names if n.startswith('.writing')], (stop_at, path)


def test_killed_again_and_again(reference, tmp_path, monkeypatch):
  expected, _ = reference
  for calls in range(9, 60, 3):
    with fakes.Disk(calls, 'tear').installed(monkeypatch):
      try:
        fakes.run(tmp_path / 'run', **_SHORT)
      except fakes.Killed:
        continue
      break
  fakes.run(tmp_path / 'run', **_SHORT)
  assert fakes.results(tmp_path / 'run') == expected


def test_rare_checkpoints(reference, tmp_path, monkeypatch):
  expected, calls = reference
  settings = {**_SHORT, 'rounds_per_checkpoint': 2}
  for stop_at in range(0, len(calls), 3):
    folder = tmp_path / str(stop_at)
    with fakes.Disk(stop_at).installed(monkeypatch):
      try:
        fakes.run(folder, **settings)
      except fakes.Killed:
        pass
    fakes.run(folder, **settings)
    assert fakes.results(folder) == expected, stop_at


def test_a_file_is_flushed_before_its_name_and_its_name_after(
  tmp_path, monkeypatch
):
  with fakes.Disk().installed(monkeypatch) as disk:
    durable.write_file(str(tmp_path / 'a'), [b'1', b'2'])
  assert disk.calls == ['write', 'write', 'fsync', 'replace', 'fsync']
  with fakes.Disk().installed(monkeypatch) as disk:
    durable.append(str(tmp_path / 'a'), b'3')
  assert disk.calls == ['write', 'fsync']
  assert (tmp_path / 'a').read_bytes() == b'123'


def test_a_full_disk_leaves_the_old_file_and_frees_the_new(
  tmp_path, monkeypatch
):
  path = tmp_path / 'a'
  path.write_bytes(b'old')
  for write in (
    lambda: durable.write_file(str(path), [b'new', b'er']),
    lambda: durable.append(str(path), b'more'),
  ):
    for stop_at in range(2):
      with fakes.Disk(stop_at, 'full').installed(monkeypatch):
        with pytest.raises(UsageError, match='disk is full.*same|disk is full'):
          write()
      assert path.read_bytes() == b'old'
      assert os.listdir(tmp_path) == ['a']
