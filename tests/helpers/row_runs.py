"""Folders of runs of rows of the papers' tables, for tests."""

from collections.abc import Mapping
import os
from typing import Any

from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import papers_main


def write(
  runs_dir: str | os.PathLike[str],
  name: str,
  budget: str,
  seed: int,
  accuracies: Mapping[int, tuple[float, float]],
  **changed: Any,
) -> None:
  """Writes a run of a row.

  Args:
    runs_dir: The folder of all of them.
    name: The row's.
    budget: The name of its budget.
    seed: Its seed.
    accuracies: Evaluated round -> (test, validation accuracy).
    **changed: Flags that the run has, and the row has not.
  """
  row = papers_main.find(name)
  more = {'seed': seed, 'total_rounds': max(accuracies, default=1), **changed}
  config = row.config(more)
  tree = output_tree.OutputTree(row.folder(str(runs_dir), budget, seed))
  with tree:
    tree.open(config)
    tree.record(config)
    train = csv_table.CsvTable(tree.train_csv)
    evaluation = csv_table.CsvTable(tree.eval_csv)
    train.log(1, {'bad_round': 0})
    for round_num, (test, validation) in accuracies.items():
      evaluation.log(
        round_num, {'test/accuracy': test, 'validation/accuracy': validation}
      )
