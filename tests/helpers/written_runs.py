"""Folders of runs, written without training."""

import numpy as np

from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.data import sources
from tff_fssl.program import csv_table
from tff_fssl.program import inputs
from tff_fssl.program import output_tree

TRAIN = 'client_work/train'
_SPLITS, _PARTS = ('training', 'validation', 'test'), ('images', 'labels')


def write(
  folder,
  algorithm='fixmatch',
  seed=0,
  rounds=12,
  columns=None,
  evaluation=None,
  **flags,
):
  """A run of so many rounds.

  Args:
    folder: The run's.
    algorithm: Its algorithm.
    seed: Its seed.
    rounds: The number of rounds.
    columns: Column of train.csv -> its value, or a function of the round.
    evaluation: The same of eval.csv.
    **flags: Further flags.

  Returns:
    The folder.
  """
  tree = output_tree.OutputTree(str(folder))
  (folder / 'metrics').mkdir(parents=True)
  values = {
    'algorithm': algorithm,
    'seed': seed,
    'dataset': 'digits',
    'num_validation': 200,
    'total_rounds': rounds,
    **flags,
  }
  with open(tree.flags_file, 'w') as file:
    file.writelines(f'--{name}={value}\n' for name, value in values.items())
  usual = {
    f'{TRAIN}/num_clients': 5,
    f'{TRAIN}/num_rejected_clients': 0,
    f'{TRAIN}/num_non_finite_clients': 0,
    f'{TRAIN}/aggregation_weight_max': 0.3,
    f'{TRAIN}/loss_pseudo_label': lambda r: 1 / r,
    f'{TRAIN}/pseudo_label_ratio': lambda r: 0.5 + r / 100,
    f'{TRAIN}/pseudo_label_accuracy': 0.9,
    'communication/bytes_up_per_client': 1_000,
    'communication/bytes_down_per_client': 1_000,
  }
  evaluated = {
    'test/accuracy': lambda r: 0.5 + r / 50 + seed / 100,
    'validation/accuracy': lambda r: 0.5 + r / 50,
  }
  for path, shown in (
    (tree.train_csv, {**usual, **(columns or {})}),
    (tree.eval_csv, {**evaluated, **(evaluation or {})}),
    (tree.timing_csv, {'seconds/round': 2.0, 'seconds/clients': 1.5}),
  ):
    table = csv_table.CsvTable(path)
    for r in range(1, rounds + 1):
      table.log(r, {k: v(r) if callable(v) else v for k, v in shown.items()})
  if rounds == values['total_rounds']:
    # As a run does that has finished.
    with open(tree.summary_json, 'w') as file:
      file.write('{}')
  return str(folder)


def write_inputs(path, digests=None, partition='p', made_by=None):
  """Writes the digests of a run."""
  usual = {f'{split} {part}': 'd' for split in _SPLITS for part in _PARTS}
  inputs.Inputs(
    ('a', 'b'), {**usual, **(digests or {})}, partition, made_by or {}
  ).write(output_tree.OutputTree(path).inputs_json)


def write_partition(path, **settings):
  """The partition of digits that flags give, over 5 clients."""
  partition = draw(**settings)
  partition.save_json(output_tree.OutputTree(path).partition_json)
  return partition


def draw(**settings):
  """A partition of digits over 5 clients."""
  given = {'num_labels': 40, 'num_validation': 200, **settings}
  return partition_draw.build_partition(
    sources.load('digits').train.y,
    partition_settings.PartitionSettings(10, 5, **given),
  )


def write_short(folder, seed, algorithm='fl2', rounds=4, offset=0.0, **flags):
  """A run with a curve of pseudo-labels, and an accuracy every other round."""
  tree = output_tree.OutputTree(str(folder))
  (folder / 'metrics').mkdir(parents=True)
  values = {'algorithm': algorithm, 'seed': seed, 'output_dir': folder, **flags}
  with open(tree.flags_file, 'w') as file:
    file.writelines(f'--{name}={value}\n' for name, value in values.items())
  train = csv_table.CsvTable(tree.train_csv)
  evaluation = csv_table.CsvTable(tree.eval_csv)
  for r in range(1, rounds + 1):
    kept = np.nan if r == 1 else 0.1 * r
    train.log(r, {f'{TRAIN}/pseudo_label_ratio': kept})
    if r % 2 == 0:
      evaluation.log(r, {'test/accuracy': 0.1 * r + offset})
  return str(folder)
