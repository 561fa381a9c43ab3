"""compute.json: what is written is read; nothing else is."""

import dataclasses
import json

import pytest

from tff_fssl import files
from tff_fssl.program.storage import compute

_COMPUTE = compute.Compute(20.5e6, 20_421.4, 8_278.0, 27_771.4, 635.7)


def test_what_is_written_is_read(tmp_path):
  path = str(tmp_path / 'compute.json')
  assert compute.read(path) is None
  for written in (_COMPUTE, dataclasses.replace(_COMPUTE, client_authors=None)):
    compute.write(path, written)
    assert compute.read(path) == written


def test_in_words():
  assert _COMPUTE.describe() == (
    'at most 419 GFLOP a client and round (20,421 forward-equivalents; the'
    " authors' code 27,771), server 13 GFLOP a round (636)"
  )
  only_server = compute.Compute(5.0, 0.0, 0.0, None, 100.0)
  assert only_server.describe() == 'server 500 FLOP a round (100)'
  unknown = dataclasses.replace(_COMPUTE, client_authors=None, server=0.0)
  assert unknown.describe().endswith('(20,421 forward-equivalents)')


@pytest.mark.parametrize(
  'changed',
  [
    {'format': 'tff_fssl.partition'},
    {'client': -1.0},
    {'client': float('nan')},
    {'server': True},
    {'server': None},
    {'forward_flops': '1'},
    {'more': 1.0},
  ],
)
def test_other_files_are_refused(tmp_path, changed):
  path = tmp_path / 'compute.json'
  compute.write(str(path), _COMPUTE)
  path.write_text(json.dumps(json.loads(path.read_text()) | changed))
  with pytest.raises(files.FileError, match=str(path)):
    compute.read(str(path))
