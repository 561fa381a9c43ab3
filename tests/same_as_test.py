import pathlib
import shlex

import pytest
import same_as

from tff_fssl.algorithms import registry
from tff_fssl.program.configuration import config


def test_every_algorithm_and_scenario_is_run():
  cases = same_as._cases()
  for name, entry in registry.REGISTRY.items():
    for scenario in entry.scenarios:
      for norm in ('sbn', 'gn'):
        (flags,) = cases[f'{name} {scenario} {norm}']
        assert f'--algorithm={name} --scenario={scenario}' in flags
    first, second = cases[f'{name} {scenario} resumed']
    assert '--total_rounds=2' in first and '--total_rounds=3' in second


def test_differences_are_named():
  old = {'a': '1', 'b': '2'}
  assert same_as._compare(old, dict(old)) == []
  assert same_as._compare(old, {'a': '1', 'b': '3'}) == ['b']
  assert same_as._compare(old, {'a': '1', 'c': '2'}) == ['b', 'c']
  assert same_as._compare(old, {'error': 'x'}) == ['None | x']
  # Nothing was compared.
  assert same_as._compare({'error': 'x'}, {'error': 'x'}) == ['x | x']


@pytest.mark.parametrize('case', same_as._cases())
def test_no_case_is_refused(case):
  for flags in same_as._cases()[case]:
    config.parse_config(shlex.split(same_as._rename(flags)))


def test_a_tree_may_know_older_or_newer_names_of_flags(tmp_path):
  (tmp_path / 'programs').mkdir()
  program = tmp_path / 'programs' / 'train.py'
  commands = ['--fedmatch.uploads=files']
  for known in ('--fedmatch.uploads=', '--fedmatch.uploads_in='):
    program.write_text(
      'import sys\n'
      f'if not sys.argv[1].startswith({known!r}):\n'
      "  sys.exit(f'error: unknown flag {sys.argv[1]}')\n"
      "sys.exit('trained')"
    )
    found = same_as._run(tmp_path, commands, is_new=False)
    assert found == {'error': 'trained'}
  program.write_text("import sys; sys.exit('error: unknown flag --x')")
  found = same_as._run(tmp_path, commands, is_new=False)
  assert found == {'error': 'error: unknown flag --x'}


@pytest.mark.slow
def test_a_tree_is_the_same_as_itself():
  case = 'supervised labels_at_clients gn'
  commands = same_as._cases()[case]
  root = pathlib.Path(same_as.__file__).parents[1]
  first, second = (same_as._run(root, commands, True) for _ in range(2))
  assert 'error' not in first, first
  assert same_as._compare(first, second) == []
  assert {'metrics/train.csv', 'partition.json', 'predictions'} <= set(first)
  commands = [commands[0].replace('--total_rounds=3', '--total_rounds=2')]
  shorter = same_as._run(root, commands, True)
  assert 'metrics/train.csv' in same_as._compare(first, shorter)
