import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program.storage import sweep_folder

_DEFINITION = {
  'flags': {'total_rounds': '9', 'momentum': '0.5'},
  'varied': {'norm': 'gn, none'},
  'search': {'sampler': 'grid'},
}


def _open(path, **parts):
  with sweep_folder.SweepFolder(str(path)) as folder:
    folder.open({**_DEFINITION, **parts})
    return folder


def test_the_same_sweep_is_resumed(tmp_path):
  folder = _open(tmp_path / 'sweep')
  assert _open(tmp_path / 'sweep').sweep_json == folder.sweep_json
  assert folder.run(7, 1).endswith('trials/007/seed1')
  assert folder.log(7, 1).endswith('trials/007/seed1.log')


@pytest.mark.parametrize(
  'parts, word',
  [
    ({'flags': {'total_rounds': '10', 'momentum': '0.5'}}, 'total_rounds'),
    ({'varied': {'norm': 'gn'}}, 'norm'),
    ({'search': {'sampler': 'tpe'}}, 'sampler'),
  ],
)
def test_another_sweep_is_refused(tmp_path, parts, word):
  _open(tmp_path)
  with pytest.raises(UsageError, match=f'another configuration .*{word}'):
    _open(tmp_path, **parts)


def test_other_files_are_refused(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(UsageError, match='thesis.tex'):
    _open(tmp_path)
