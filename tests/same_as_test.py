import os
import pathlib
import shlex
import sys

import numpy as np
import pytest
import same_as

from tff_fssl.algorithms import registry
from tff_fssl.models import networks
from tff_fssl.program import config


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
  # One tree may lack it, but both have the same.
  gone = {'metrics/train.csv exchange/num_rows': '3'}
  assert same_as._compare({**old, **gone}, old) == []
  assert same_as._compare({**old, **gone}, dict.fromkeys(gone, '4')) == [
    'a',
    'b',
    *gone,
  ]
  # Nothing was compared.
  assert same_as._compare({'error': 'x'}, {'error': 'x'}) == ['x | x']


def _values(**changed):
  table = b'round,loss,name\n1,2.0,a\n2,4.0,b\n'
  values = {
    'leaf x': np.array([1.0, -10.0], np.float32),
    'leaf y': np.array([1e-3, np.nan], np.float32),
    'leaf z': np.array(3, np.int64),
    'partition.json': np.frombuffer(b'{}', np.uint8),
    'metrics/train.csv': np.frombuffer(table, np.uint8),
  }
  return values | {name.replace('_', ' '): v for name, v in changed.items()}


def test_differences_of_two_environments_are_relative_to_a_leaf():
  found = same_as._differences(_values(), _values())
  assert found == {
    'leaf': (0, ''),
    'metrics/train.csv': (0, ''),
    'partition.json': (0, ''),
  }
  new = _values(
    leaf_x=np.array([1.5, -10.0], np.float32),
    leaf_y=np.array([2e-3, np.nan], np.float32),
  )
  table = b'round,loss,name\n1,2.0,a\n2,3.0,b\n'
  new['metrics/train.csv'] = np.frombuffer(table, np.uint8)
  found = same_as._differences(_values(), new)
  assert found['leaf'] == (pytest.approx(1), 'y')
  assert found['metrics/train.csv'] == (0.25, 'loss')


@pytest.mark.parametrize(
  'changed',
  [
    {'leaf_y': np.array([1e-3, 0], np.float32)},
    {'leaf_x': np.array([1.0, -10.0])},
    {'leaf_x': np.array([1.0], np.float32)},
    {'leaf_new': np.array([1.0], np.float32)},
  ],
)
def test_what_is_not_a_number_or_not_there_is_infinitely_far(changed):
  assert (
    same_as._differences(_values(), _values(**changed))['leaf'][0] == np.inf
  )


def test_an_error_is_a_difference():
  for pair in [({'error': 'x'}, _values()), ({'error': 'x'}, {'error': 'x'})]:
    is_close, about = same_as._report_close(*pair, 1.0)
    assert not is_close and about.startswith('error inf x')


def test_another_environment_runs_one_round_of_the_same_initial_weights(
  tmp_path,
):
  cases = same_as._close_cases(tmp_path / 'network.py')
  assert len(cases) > 80 and not any(map(' resumed'.endswith, cases))
  for (flags,) in cases.values():
    assert f'--model={tmp_path}/network.py:network ' in flags
    assert '--total_rounds=1 ' in flags
    config.parse_config(shlex.split(same_as._rename(flags)))
  for norm in ('bn', 'gn', 'none'):
    models = [
      networks.build_network(
        f'{tmp_path}/network.py:network', (8, 8, 1), 10, norm
      )
      for _ in range(2)
    ]
    for one, other in zip(*(m.get_weights() for m in models), strict=True):
      np.testing.assert_array_equal(one, other)


def test_a_tree_is_run_by_its_own_python(tmp_path):
  (tmp_path / 'python').write_text(
    '#!/bin/sh\necho "this is it: $1" >&2; exit 1'
  )
  os.chmod(tmp_path / 'python', 0o755)
  tree = same_as._Tree(tmp_path, str(tmp_path / 'python'), is_new=True)
  assert same_as._run(tree, ['']) == {'error': 'this is it: programs/train.py'}


def test_kept_results_are_not_computed_again(tmp_path):
  root = pathlib.Path(same_as.__file__).parents[1]
  runs = []

  def run_all(tree, names):
    assert (tree.path / 'programs').is_dir()
    runs.extend(names)
    return [
      (name, {'error': 'x'} if name == 'a' else _values()) for name in names
    ]

  def old_results(python, names):
    tree = same_as._Tree(tmp_path / 'tree', python, is_new=False)
    cases = {name: [f'--{name}'] for name in names}
    return same_as._old_results(tree, 'HEAD', cases, tmp_path, run_all)

  if not (root / '.git').exists():
    pytest.skip('needs a git checkout')
  for _ in range(2):
    found = old_results('python', 'ab')
    assert found['a'] == {'error': 'x'} and runs == ['a', 'b']
    assert same_as._differences(found['b'], _values())['leaf'] == (0, '')
  old_results('python', 'abc')
  old_results('another', 'a')
  assert runs == ['a', 'b', 'c', 'a'] and not (tmp_path / 'tree').exists()


@pytest.mark.parametrize('case', same_as._cases())
def test_no_case_is_refused(case):
  for flags in same_as._cases()[case]:
    config.parse_config(shlex.split(same_as._rename(flags)))


def test_a_tree_may_know_older_or_newer_names_of_flags(tmp_path):
  (tmp_path / 'programs').mkdir()
  program = tmp_path / 'programs' / 'train.py'
  tree = same_as._Tree(tmp_path, sys.executable, is_new=False)
  commands = ['--fedmatch.uploads=files']
  for known in ('--fedmatch.uploads=', '--fedmatch.uploads_in='):
    program.write_text(
      'import sys\n'
      f'if not sys.argv[1].startswith({known!r}):\n'
      "  sys.exit(f'error: unknown flag {sys.argv[1]}')\n"
      "sys.exit('trained')"
    )
    found = same_as._run(tree, commands)
    assert found == {'error': 'trained'}
  program.write_text("import sys; sys.exit('error: unknown flag --x')")
  found = same_as._run(tree, commands)
  assert found == {'error': 'error: unknown flag --x'}


@pytest.mark.slow
def test_a_tree_is_the_same_as_itself():
  case = 'supervised labels_at_clients gn'
  commands = same_as._cases()[case]
  root = pathlib.Path(same_as.__file__).parents[1]
  tree = same_as._Tree(root, sys.executable, is_new=True)

  def run(commands):
    return same_as._digests(same_as._run(tree, commands))

  first, second = run(commands), run(commands)
  assert 'error' not in first, first
  assert same_as._compare(first, second) == []
  table = 'metrics/train.csv client_work/train/num_clients'
  assert {table, 'partition.json', 'predictions'} <= set(first)
  commands = [commands[0].replace('--total_rounds=3', '--total_rounds=2')]
  shorter = run(commands)
  assert table in same_as._compare(first, shorter)
