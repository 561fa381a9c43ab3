import contextlib
import dataclasses
import functools
import io
import itertools
import pathlib
import re

import pytest

from tff_fssl import hparams
from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.interface import entry as entry_lib
from tff_fssl.program import algorithms_main
from tff_fssl.program import config
from tff_fssl.program import flags
from tff_fssl.program import main
from tff_fssl.program import papers_main
from tff_fssl.program import run_hparams


@pytest.fixture(name='shown')
def _shown(capsys):
  """Calls the program: its exit code and lines."""

  def shown(*argv):
    code = main.run(algorithms_main.algorithms_main, argv)
    captured = capsys.readouterr()
    lines = (captured.out or captured.err).splitlines()
    return code, lines

  return shown


@functools.cache
def _lines(*argv):
  """What the program prints of the registry as it is."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main.run(algorithms_main.algorithms_main, argv) == main.DONE
  return out.getvalue().splitlines()


@functools.cache
def _configs():
  """The algorithm of each flagfile, whose data need not be there."""
  default = run_hparams.RunHparams.algorithm
  algorithms = {}
  for path in flags.list_configs():
    content = pathlib.Path(flags.find_config(path)).read_text()
    found = re.search(r'(?m)^--algorithm=(\w+)$', content)
    algorithms[path] = found[1] if found else default
  return algorithms


@pytest.fixture(name='demanding')
def _demanding(monkeypatch):
  """Registers an algorithm that few deployments can run."""
  fixmatch = registry.REGISTRY['fixmatch']
  entry = dataclasses.replace(
    fixmatch,
    name='demanding_and_its_name_is_far_too_long',
    hparams=type(
      'Demanding', (fixmatch.hparams,), {'exchange': lambda self: 1}
    ),
    round_defaults={'client_epochs': 3},
    capabilities=entry_lib.Capabilities(
      extra_uploads=('its shoe size', 'its age')
    ),
  )
  monkeypatch.setitem(registry.REGISTRY, entry.name, entry)
  return entry


def test_the_table():
  lines = _lines()
  assert max(map(len, lines)) <= 80
  rows = [line.split() for line in lines[2 : 2 + len(registry.REGISTRY)]]
  assert [row[0] for row in rows] == list(registry.REGISTRY)
  cells = {row[0]: row[1:] for row in rows}
  same = ['no', '1', 'yes']
  assert cells['fixmatch'] == ['both', *same, 'yes', 'yes']
  assert cells['fl2'] == ['both', *same, 'no', 'yes']
  assert cells['semifl'] == ['server', *same, 'yes', 'yes']


def test_the_table_of_an_algorithm_with_demands(shown, demanding):
  _, lines = shown()
  assert max(map(len, lines)) <= 80
  row = lines[lines.index(demanding.name) + 1].split()
  assert row == ['both', 'yes', '1', 'no', 'no', 'no']


@pytest.mark.parametrize('name', registry.REGISTRY)
def test_papers_are_those_of_the_docstrings(name):
  page = ' '.join(_lines(name))
  for source in registry.REGISTRY[name].paper.split('; '):
    author, venue, year = re.match(
      r'(\w+) (?:et al\.|and \w+), ([A-Za-z ]+) (\d+)', source
    ).groups()
    assert re.search(rf'{author}.*{venue}\s+{year}', page), source
  assert f'{name} ' in '\n'.join(_lines())


def test_what_the_legend_says_of_norms_is_so():
  no_statistics = ('gn', 'none')
  accepted = {
    'secure': (*no_statistics, 'bn'),
    'dp': no_statistics,
    'cross-device': (*no_statistics, 'bn'),
  }
  for asked, norm in itertools.product(
    algorithms_main._ASKED, ('sbn', 'bn', 'gn', 'none')
  ):
    argv = [
      '--algorithm=fixmatch',
      f'--norm={norm}',
      '--max_client_examples=60000',
      *algorithms_main._ASKED[asked],
    ]
    try:
      config.parse_config(argv)
      is_accepted = True
    except UsageError:
      is_accepted = False
    assert is_accepted == (norm in accepted[asked]), (asked, norm)


@pytest.mark.parametrize('name', registry.REGISTRY)
def test_a_page(name):
  lines = _lines(name)
  assert max(map(len, lines)) <= 80
  entry, text = registry.REGISTRY[name], '\n'.join(lines)
  for field in hparams.documented_fields(entry.hparams):
    assert f'\n  --{entry.prefix}{field.name}=' in text
  for path, algorithm in _configs().items():
    assert (f'  {path}' in lines) == (algorithm == name), path
  for row in papers_main.rows().values():
    if row.flags.get('algorithm') == name:
      assert f'  {row.table}' in lines
  assert ('  fl2/figure4' in lines) == (name == 'fl2')


def test_pages_have_docstrings_and_what_is_refused():
  lines = _lines('fl2')
  assert lines[0].startswith('(FL)^2: Overcoming Few Labels')
  text = ' '.join(' '.join(lines).split())
  assert (
    '--aggregator=secure with --norm=gn --aggregator=dp no: clients' in text
  )


def test_a_page_of_a_user_s_algorithm(shown, demanding, monkeypatch):

  class Own(fixmatch.FixMatch):
    pass

  entry = dataclasses.replace(demanding, hparams=Own)
  monkeypatch.setitem(registry.REGISTRY, entry.name, entry)
  code, lines = shown(entry.name)
  assert code == main.DONE
  assert lines[0] == f'{__name__}: it has no docstring.'
  assert '  Unless given: --client_epochs=3.' in lines
  assert not any('configs/' in line for line in lines)
  assert 'its shoe size, its age' in ' '.join(lines)
  Own.uploads = lambda self, setup: {'age': 1}
  entry = dataclasses.replace(entry, capabilities=entry_lib.Capabilities())
  monkeypatch.setitem(registry.REGISTRY, entry.name, entry)
  _, lines = shown(entry.name)
  text = ' '.join(' '.join(lines).split())
  assert 'also sent the values of `uploads`' in text
  Own.__module__ = 'nowhere'
  code, lines = shown(entry.name)
  assert code == main.DONE
  assert lines[0] == 'nowhere: its source is not there.'


@pytest.mark.parametrize(
  'argv, words',
  [
    (['f2'], "'f2' is not an algorithm; there are supervised"),
    (['f2'], "did you mean 'fl2'?"),
    (['fl2', 'fixmatch'], "'fixmatch': give one name only"),
    (['--seed=1'], '--seed'),
  ],
)
def test_mistakes_are_one_line(argv, words, shown):
  code, lines = shown(*argv)
  assert code == main.USAGE
  assert len(lines) == 1 and words in lines[0]
