import os

import pytest

from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.hparams import UsageError


@pytest.mark.parametrize(
  'given,stored,shape',
  [
    ({}, (), (32, 32, 3)),
    ({}, (28, 24, 1), (28, 24, 1)),
    ({}, (-1, -1, 1), (32, 32, 1)),
    ({}, (9, 9, 4), (9, 9, 3)),
    ({'image_size': '48'}, (28, 24, 1), (48, 48, 1)),
    ({'image_size': '48x64', 'color': 'gray'}, (), (48, 64, 1)),
    ({'color': 'rgb'}, (28, 24, 1), (28, 24, 3)),
  ],
)
def test_shape(given, stored, shape):
  assert DataHparams(**given).image_shape(stored) == shape


@pytest.mark.parametrize('text', ['0', '-3', '32x', 'x32', '3.5', '12345', '٣'])
def test_wrong_sizes_are_refused(text):
  with pytest.raises(UsageError, match='--image_size=.* such as 32'):
    DataHparams(image_size=text)


def test_cache_folder(monkeypatch):
  monkeypatch.setenv('HOME', '/home/me')
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  assert DataHparams().cache_folder == '/home/me/.cache/tff_fssl'
  monkeypatch.setenv('XDG_CACHE_HOME', 'relative')
  assert DataHparams().cache_folder == '/home/me/.cache/tff_fssl'
  monkeypatch.setenv('XDG_CACHE_HOME', '/caches')
  assert DataHparams().cache_folder == '/caches/tff_fssl'
  assert DataHparams(cache_dir='a').cache_folder == os.path.abspath('a')
  assert DataHparams(cache_dir='~/b').cache_folder == '/home/me/b'
