"""README.md: its example runs, its table is complete, its claims are true."""

import os
import re
import shlex

import page_code
import pytest

from tff_fssl.algorithms import registry
from tff_fssl.interface import round_hparams
from tff_fssl.program import config
from tff_fssl.program import console
from tff_fssl.program import output_tree
from tff_fssl.program import train_main

_PLACES = {
  'server': round_hparams.LABELS_AT_SERVER,
  'clients': round_hparams.LABELS_AT_CLIENTS,
}
_MAX_WORDS = 700
_MAX_LINES = 15
# Convolutions sum in another order on another number of cores.
_TOLERANCE = {'accuracy': 0.03, 'loss': 0.1}


@pytest.fixture(name='readme')
def _readme(repository):
  return (repository / 'README.md').read_text(encoding='utf-8')


def _block(readme, language):
  (block,) = re.findall(rf'```{language}\n(.*?)```', readme, re.DOTALL)
  return block


def _figures(text):
  """The numbers of a printed evaluation, by name."""
  # Python 3.12 prints an OrderedDict in another form.
  found = re.findall(r"'(\w+)'[,:] ([\d.]+)", text)
  return {name: float(value) for name, value in found}


def _closing(page):
  """The lines of a page that end a run, without indentation."""
  found = re.search(r'(?m)^ *last round .*\n(?: +\S.*\n)*', page)[0]
  return [' '.join(line.split()) for line in found.splitlines()]


def test_it_is_short(readme):
  assert len(readme.split()) <= _MAX_WORDS


def test_its_example_prints_what_it_says(readme, repository, tmp_path):
  code = _block(readme, 'python')
  assert len([line for line in code.splitlines() if line]) <= _MAX_LINES
  printed = page_code.run(code, repository, tmp_path)
  expected = _figures(_block(readme, 'text'))
  assert expected.keys() == _TOLERANCE.keys()
  assert _figures(printed).keys() == expected.keys()
  for name, value in _figures(printed).items():
    assert value == pytest.approx(expected[name], abs=_TOLERANCE[name])


@pytest.mark.slow
def test_labels_alone_give_what_it_says(readme, repository, tmp_path):
  code = _block(readme, 'python').replace('fssl.Fl2()', 'fssl.Supervised()')
  stated = re.search(
    r'With `fssl.Supervised\(\)`.*accuracy is (0\.\d+)', readme
  )
  printed = page_code.run(code, repository, tmp_path)
  accuracy = _figures(printed)['accuracy']
  assert accuracy == pytest.approx(float(stated[1]), abs=_TOLERANCE['accuracy'])


@pytest.mark.parametrize('page', ['README.md', 'docs/algorithms/index.md'])
def test_tables_have_every_algorithm(page, repository):
  text = (repository / page).read_text(encoding='utf-8')
  rows = [
    [cell.strip() for cell in line.split('|')[1:-1]]
    for line in text.splitlines()
    if re.match(r'\| \[?`\w+`', line)
  ]
  names = [re.findall(r'`(\w+)`', row[0]) for row in rows]
  assert sorted(sum(names, [])) == sorted(registry.REGISTRY)
  labels = 2 if page == 'README.md' else 1
  for row, of_row in zip(rows, names, strict=True):
    places = {_PLACES[place.split()[0]] for place in row[labels].split(', ')}
    for name in of_row:
      algorithm = registry.REGISTRY[name]
      assert places == set(algorithm.scenarios), name
      if page == 'README.md':
        # Without remarks, and without the papers of options.
        paper = re.split(r';| \(', algorithm.paper)[0]
        assert f'({paper})' in row[1]


def test_its_badges_are_true(readme, repository):
  project = (repository / 'pyproject.toml').read_text()
  assert 'requires-python = ">=3.11,<3.14"' in project
  assert '[![Python 3.11 | 3.12 | 3.13]' in readme
  (version,) = re.findall(r'"tensorflow==([\d.]+)\.\*"', project)
  assert f'[![TensorFlow {version}]' in readme
  assert 'Apache-2.0' in project and '[![Licence: Apache 2.0]' in readme
  (workflow,) = set(re.findall(r'actions/(workflows/[\w.]+\.yml)', readme))
  assert (repository / '.github' / workflow).is_file()


def test_its_commands_exist(readme, repository, tmp_path, monkeypatch):
  makefile = (repository / 'Makefile').read_text()
  for target in re.findall(r'make ([a-z-]+)', readme):
    assert re.search(rf'(?m)^{target}:', makefile), target
  (train,) = re.findall(
    r'(?m)^train: setup\n\t\$\(BIN\)/python programs/train.py (.*)$', makefile
  )
  assert train == '--flagfile=$(FLAGFILE) $(ARGS)'
  (file,) = re.findall(r'(?m)^FLAGFILE \?= (.*)$', makefile)
  folder = config.parse_config([f'--flagfile={file}']).run.output_dir
  commands = re.findall(r'\.venv/bin/python (programs/\w+\.py.*)', readme)
  assert len(commands) == 2
  for command in commands:
    program, run = shlex.split(command)
    assert (repository / program).is_file() and run == folder


@pytest.mark.parametrize(
  'page', ['README.md', 'docs/getting_started.md', 'docs/runs.md']
)
def test_training_ends_with_the_lines_it_shows(
  page, repository, tmp_path, monkeypatch
):
  shown = _closing((repository / page).read_text(encoding='utf-8'))
  given = config.parse_config(['--flagfile=configs/quickstart.flags'])
  folder = shown[2].split()[1].rpartition('/')[0] if len(shown) > 2 else 'runs'
  tree = output_tree.OutputTree(folder)
  monkeypatch.chdir(tmp_path)
  for path in (tree.model, tree.model_best):
    os.makedirs(path)
  monkeypatch.setattr(console.processes, 'python', lambda: '.venv/bin/python')
  monkeypatch.setattr(
    console.processes, 'shorter', lambda path: os.path.relpath(path, repository)
  )
  results = {}
  for name, line in zip(('last', 'best_validation'), shown):
    line = re.sub(r' \(.*?\)', '', line)  # The interval.
    number, test, validation = re.findall(r'[\d.]+', line)
    results[name] = {
      'round': int(number),
      'test/accuracy': float(test) / 100,
      'validation/accuracy': float(validation) / 100,
    }
  lines = train_main.closing(given, tree, results).splitlines()
  lines = [' '.join(line.split()) for line in lines]
  assert shown == lines[: len(shown)]
  assert len(shown) in (2, len(lines))
