"""What looks wrong is found, and what is right is not."""

import dataclasses

import numpy as np
import pytest
import written_runs

from tff_fssl.program import diagnostics
from tff_fssl.program import output_tree
from tff_fssl.program import runs

_TRAIN = written_runs.TRAIN


def _find(*paths):
  found = diagnostics.find(runs.group_runs([runs.read_run(p) for p in paths]))
  return [doubt.text for doubt in found]


def test_nothing_looks_wrong_in_good_runs(tmp_path):
  paths = [
    written_runs.write(tmp_path / f'{name}{seed}', name, seed, num_clients=5)
    for name in ('fl2', 'fixmatch')
    for seed in range(2)
  ]
  for seed, path in enumerate(paths):
    written_runs.write_partition(path, seed=seed % 2)
  assert not _find(*paths)


def test_a_dead_loss_weight(tmp_path):
  flags = {'fixmatch.unlabeled_loss_weight': '0.0'}
  (text,) = _find(written_runs.write(tmp_path / 'a', **flags))
  assert '--fixmatch.unlabeled_loss_weight=0.0 switches' in text


@pytest.mark.parametrize(
  'value, text',
  [
    (0.0, 'loss_pseudo_label is 0 in rounds 1 to 12'),
    (lambda r: float(r < 9), 'loss_pseudo_label is 0 in rounds 9 to 12'),
    (0.7, 'loss_pseudo_label is 0.7 in rounds 1 to 12: a loss that never'),
  ],
)
def test_a_loss_that_is_0_or_never_changes(tmp_path, value, text):
  columns = {f'{_TRAIN}/loss_pseudo_label': value}
  (found,) = _find(written_runs.write(tmp_path / 'a', columns=columns))
  assert text in found


def test_collapsed_pseudo_labels(tmp_path):
  columns = {f'{_TRAIN}/pseudo_label_accuracy': 0.12}
  path = written_runs.write(tmp_path / 'a', columns=columns)
  written_runs.write_partition(path)
  (found,) = _find(path)
  assert 'collapsed to few classes' in found and '12.0% on average' in found


def test_labels_that_were_not_learned(tmp_path):
  columns = {f'{_TRAIN}/pseudo_label_accuracy': 0.007}
  path = written_runs.write(tmp_path / 'a', columns=columns)
  written_runs.write_partition(path)
  (found,) = _find(path)
  assert 'far less often than by chance' in found and '0.7% on' in found
  assert 'collapsed' not in found


@pytest.mark.parametrize('accuracy', [0.14, 0.3])
def test_bad_pseudo_labels_that_are_better_than_chance(tmp_path, accuracy):
  columns = {f'{_TRAIN}/pseudo_label_accuracy': accuracy}
  path = written_runs.write(tmp_path / 'a', columns=columns)
  written_runs.write_partition(path)
  assert not _find(path)


@pytest.mark.parametrize(
  'accuracy, column, value',
  [
    # 4 of about 1,200 examples are kept.
    (0.25, 'pseudo_label_ratio', 0.004),
    # Cohorts see few of the clients.
    (0.14, 'num_clients', 0.01),
  ],
)
def test_few_pseudo_labels_tell_little(tmp_path, accuracy, column, value):
  columns = {
    f'{_TRAIN}/pseudo_label_accuracy': accuracy,
    f'{_TRAIN}/{column}': value,
  }
  path = written_runs.write(tmp_path / 'a', columns=columns)
  written_runs.write_partition(path)
  (found,) = _find(path)
  assert 'not significantly better than chance' in found


def test_a_sign_in_several_seeds_is_one_finding(tmp_path):
  paths = [
    written_runs.write(
      tmp_path / f'{seed}',
      seed=seed,
      columns={f'{_TRAIN}/pseudo_label_ratio': 0 if seed else 0.5},
    )
    for seed in range(3)
  ]
  (found,) = diagnostics.find(
    runs.group_runs([runs.read_run(path) for path in paths])
  )
  assert found.where.startswith('2 of 3 runs of fixmatch')
  assert found.where.endswith(f'this is {paths[1]}')


@pytest.mark.parametrize(
  'algorithm, ratio, text',
  [
    ('fixmatch', 0, 'no pseudo-label is kept in rounds 3 to 12'),
    ('fixmatch', 1, 'every pseudo-label is kept in rounds 3 to 12'),
    ('mixmatch', 1, ''),  # It has no threshold.
    ('protofssl', 1, ''),
  ],
)
def test_all_or_no_pseudo_labels_are_kept(tmp_path, algorithm, ratio, text):
  columns = {f'{_TRAIN}/pseudo_label_ratio': ratio}
  found = _find(written_runs.write(tmp_path / 'a', algorithm, columns=columns))
  assert [text in line for line in found] == [True] * bool(text)


def test_selection_that_misleads(tmp_path):
  high = {'validation/accuracy': 0.95, 'test/accuracy': 0.75}
  (found,) = _find(written_runs.write(tmp_path / 'a', evaluation=high))
  assert 'validation accuracy is 95.0% in round 1' in found
  usual = {'validation/accuracy': 0.85, 'test/accuracy': 0.80}
  assert not _find(written_runs.write(tmp_path / 'b', evaluation=usual))


def test_lying_clients(tmp_path):
  columns = {
    f'{_TRAIN}/num_rejected_clients': lambda r: int(r in (3, 4)),
    'aggregator/num_rejected_clients': lambda r: int(r in (3, 4)),
    f'{_TRAIN}/aggregation_weight_max': lambda r: 0.95 if r == 7 else 0.3,
  }
  rejected, heavy = _find(written_runs.write(tmp_path / 'a', columns=columns))
  assert rejected.startswith('2 clients were rejected')
  assert 'rounds 3 to 4' in rejected
  assert 'one client had 95%' in heavy and 'round 7' in heavy


def test_clients_that_are_not_finite(tmp_path):
  columns = {f'{_TRAIN}/num_non_finite_clients': lambda r: int(r > 6)}
  (found,) = _find(written_runs.write(tmp_path / 'a', columns=columns))
  assert found.startswith('6 clients had updates that are not finite')
  evaluation = {'test/accuracy': lambda r: float('nan') if r == 2 else 0.5}
  evaluation['test/loss'] = lambda r: float('inf') if r == 3 else 0.5 + r
  found = _find(written_runs.write(tmp_path / 'b', evaluation=evaluation))
  assert 'test/loss is not finite in round 3' in found
  assert 'test/accuracy is not finite in round 2' in found


def test_a_partition_of_other_flags(tmp_path):
  path = written_runs.write(
    tmp_path / 'a', partition='dirichlet', alpha=0.1, num_clients=5
  )
  written_runs.write_partition(path, partition='dirichlet', alpha=0.5)
  (found,) = _find(path)
  assert found == 'partition.json differs from the flags: alpha 0.5' + (
    ' instead of 0.1'
  )


def test_all_natural_clients_are_as_many_as_there_are(tmp_path):
  path = written_runs.write(tmp_path / 'a', partition='natural', num_clients=0)
  drawn = written_runs.draw()
  natural = dataclasses.replace(drawn.settings, partition='natural')
  written_runs.write_partition(path)
  written_runs.overwrite_partition(path, settings=natural)
  assert not _find(path)


def test_examples_with_two_holders(tmp_path):
  path = written_runs.write(tmp_path / 'a')
  partition = written_runs.write_partition(path)
  clients = list(partition.client_unlabeled)
  clients[1] = np.sort(np.append(clients[1], partition.validation[:3]))
  written_runs.overwrite_partition(path, client_unlabeled=clients)
  (found,) = _find(path)
  assert '3 examples have two holders' in found


def test_an_iid_partition_that_is_not(tmp_path):
  path = written_runs.write(tmp_path / 'a')
  written_runs.write_partition(path)
  uneven = written_runs.draw(partition='dirichlet', alpha=0.1)
  written_runs.overwrite_partition(
    path,
    class_counts=uneven.class_counts,
    client_unlabeled=uneven.client_unlabeled,
  )
  (found,) = _find(path)
  assert "clients' classes are uneven" in found


def test_a_partition_that_cannot_be_read(tmp_path):
  path = written_runs.write(tmp_path / 'a')
  with open(output_tree.OutputTree(path).partition_json, 'w') as file:
    file.write('{')
  (found,) = _find(path)
  assert 'not a partition of tff_fssl' in found


def test_runs_of_different_budgets(tmp_path):
  paths = [
    written_runs.write(tmp_path / 'a', client_epochs=1),
    written_runs.write(
      tmp_path / 'b', 'fl2', rounds=4, total_rounds=9, client_epochs=5
    ),
  ]
  length, unfinished, budget = _find(*paths)
  assert 'b has 4 rounds' in length and 'a 12;' in length
  assert unfinished == 'it is not finished: 4 of 9 rounds'
  assert 'also differ in --client_epochs (1, 5)' in budget


@pytest.mark.parametrize(
  'name', ['normalization', 'batch_norm_statistics', 'client_learning_rate',
           'intra_op_threads']
)  # fmt: skip
def test_all_flags_in_which_groups_differ(tmp_path, name):
  paths = [
    written_runs.write(tmp_path / 'a', **{name: '0.5'}),
    written_runs.write(tmp_path / 'b', 'fl2', **{name: '2'}),
  ]
  (found,) = _find(*paths)
  assert f'the groups also differ in --{name} (0.5, 2): diff' in found


def test_runs_of_other_software(tmp_path):
  paths = [written_runs.write(tmp_path / n, n) for n in ('fixmatch', 'fl2')]
  for path, cores in zip(paths, '28'):
    written_runs.write_inputs(path, made_by={'cores': cores, 'numpy': '1'})
  (found,) = _find(*paths)
  assert found.startswith('the groups also differ in cores (2, 8): diff')


@pytest.mark.parametrize(
  'seed, part', [(1, 'training images'), (0, 'test labels')]
)
def test_runs_of_other_data(tmp_path, seed, part):
  paths = [
    written_runs.write(tmp_path / 'a'),
    written_runs.write(tmp_path / 'b', 'fl2', seed),
  ]
  written_runs.write_inputs(paths[0])
  written_runs.write_inputs(paths[1], digests={part: 'x'})
  (found,) = _find(*paths)
  assert found.startswith(
    f'runs are of different data: {paths[1]} has other {part} than {paths[0]};'
  )


def test_another_seed_validates_on_other_examples(tmp_path):
  paths = [
    written_runs.write(tmp_path / f'{n}{seed}', n, seed)
    for n in ('fixmatch', 'fl2')
    for seed in (0, 1)
  ]
  for path in paths:
    digests = {'validation images': path[-1]}
    written_runs.write_inputs(path, digests=digests, partition=path[-1])
  assert not _find(*paths)


def test_seeds_of_protected_clients_validate_on_other_examples(tmp_path):
  paths = [
    written_runs.write(tmp_path / f'{s}', seed=s, aggregator='dp')
    for s in (0, 1)
  ]
  for path in paths:
    written_runs.write_inputs(path, {'validation images': path}, path)
  members = [runs.read_run(path).public for path in paths]
  assert not diagnostics.find(runs.group_runs(members))


def test_another_partition_across_algorithms(tmp_path):
  paths = [written_runs.write(tmp_path / n, n) for n in ('fixmatch', 'fl2')]
  for path in paths:
    written_runs.write_inputs(path, partition=path)
  (found,) = _find(*paths)
  assert found.startswith('runs of one seed are not paired')
  assert found.endswith('fixmatch and fl2, seed 0 (other partition)')


def test_a_run_that_counts_twice(tmp_path):
  paths = [written_runs.write(tmp_path / name) for name in 'ab']
  (found,) = _find(*paths)
  assert 'they are one sample' in found


def test_equal_commands_with_unequal_results(tmp_path):
  paths = [
    written_runs.write(tmp_path / 'a'),
    written_runs.write(tmp_path / 'b', evaluation={'test/accuracy': 0.75}),
  ]
  (found,) = _find(*paths)
  assert 'equal flags and --seed=0, but unequal results (test/accuracy in' in (
    found
  )
  assert 'other code or threads, or data, which' in found
  for path, cores in zip(paths, '28'):
    written_runs.write_inputs(path, made_by={'cores': cores})
  assert ' / 8; omit one' in _find(*paths)[-1]
  for path in paths:
    written_runs.write_inputs(path, digests={'test images': path})
  assert '--seed=0, but other test images; omit' in _find(*paths)[-1]


@pytest.mark.parametrize(
  'rounds, text',
  [
    ([3], 'round 3'),
    ([3, 4, 5], 'rounds 3 to 5'),
    ([3, 5, 9], '3 rounds from 3 to 9'),
  ],
)
def test_rounds_in_words(rounds, text):
  assert diagnostics.rounds_text(rounds) == text
