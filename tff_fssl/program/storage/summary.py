"""Summarizes a run's results from its tables."""

import json
import math
from typing import Any

from tff_fssl import durable
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import output_tree

# Rounds are selected by this column, never by test data.
VALIDATION_ACCURACY = 'validation/accuracy'


def best_round(
  rows: list[dict[str, str]], name: str = VALIDATION_ACCURACY
) -> dict[str, str] | None:
  """Returns the first row with the largest value in a column.

  Args:
    rows: Rows of eval.csv.
    name: The column to select by, never one of test data.

  Returns:
    The row, or None if there is no value in that column.
  """
  best, best_value = None, -math.inf
  for row in rows:
    value = csv_table.number(row, name)
    # NaN is never larger, so rows without a value are skipped.
    if value > best_value:
      best, best_value = row, value
  return best


def best_round_num(eval_csv: str) -> int | None:
  """Returns the round with the best validation accuracy, or None.

  Args:
    eval_csv: The evaluation table.

  Returns:
    The first round with the largest validation accuracy.

  Raises:
    UsageError: If the table cannot be read.
  """
  best = best_round(csv_table.read(eval_csv)[1])
  return None if best is None else int(best[csv_table.KEY])


def summarize(tree: output_tree.OutputTree) -> dict[str, Any]:
  """Reads the main results of a run.

  Args:
    tree: The run's folder.

  Returns:
    'rounds', the last finished round, 'last', the columns of the last
    evaluation, and 'best_validation', the columns of the first round with the
    largest validation accuracy, if any. Both include the test accuracy of their
    round, which selects nothing.
  """
  _, rounds = csv_table.read(tree.train_csv)
  _, rows = csv_table.read(tree.eval_csv)
  result: dict[str, Any] = {}
  if rounds:
    result['rounds'] = int(rounds[-1][csv_table.KEY])
  if rows:
    result['last'] = _numbers(rows[-1])
  best = best_round(rows)
  if best is not None:
    result['best_validation'] = _numbers(best)
  return result


def write(tree: output_tree.OutputTree) -> dict[str, Any]:
  """Writes `summary.json`, and returns its content."""
  result = summarize(tree)
  text = json.dumps(result, indent=2) + '\n'
  durable.write_file(tree.summary_json, [text.encode()])
  return result


def _numbers(row: dict[str, str]) -> dict[str, Any]:
  values = {
    name: csv_table.number(row, name)
    for name, text in row.items()
    if text and name != csv_table.KEY
  }
  # JSON has no NaN.
  known = {name: v for name, v in values.items() if math.isfinite(v)}
  return {csv_table.KEY: int(row[csv_table.KEY]), **known}
