"""The results of a run: its summary, its compute, and whether it is finished.

compute.json has the compute of clients and server in a round.
"""

import contextlib
import dataclasses
import json
import math
import os
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import csv_table
from tff_fssl.program import exported
from tff_fssl.program import output_tree

# Rounds are selected by this figure, or another one, never of test data.
ACCURACY = 'accuracy'
VALIDATION_ACCURACY = f'validation/{ACCURACY}'
_COMPUTE_FORMAT = 'tff_fssl.compute'
_PREFIXES = ((1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'))


def selecting(best_by: str) -> str:
  """Returns the column that `--best_by` selects rounds by."""
  return f'validation/{best_by}'


def best_round(
  rows: list[dict[str, str]], best_by: str = ACCURACY
) -> dict[str, str] | None:
  """Returns the first row with the largest figure on validation examples.

  Args:
    rows: Rows of eval.csv.
    best_by: The figure.

  Returns:
    The row, or None if no row has a value.
  """

  def figure(row: dict[str, str]) -> float:
    return csv_table.number(row, selecting(best_by))

  # NaN is not larger, so rows without a value are skipped.
  known = [row for row in rows if figure(row) > -math.inf]
  return max(known, key=figure) if known else None


def best_round_num(eval_csv: str, best_by: str = ACCURACY) -> int | None:
  """Returns the round that is best on validation examples, or None.

  Args:
    eval_csv: The evaluation table.
    best_by: The figure.

  Returns:
    The first round with its largest value.

  Raises:
    UsageError: If the table cannot be read.
  """
  best = best_round(csv_table.read(eval_csv)[1], best_by)
  return None if best is None else int(best[csv_table.KEY])


def summarize(
  tree: output_tree.OutputTree, best_by: str = ACCURACY
) -> dict[str, Any]:
  """Reads the main results of a run.

  Args:
    tree: The run's folder.
    best_by: The figure on validation examples that selects.

  Returns:
    'rounds', the last finished round, 'last', the columns of the last
    evaluation, and 'best_validation', the columns of the first round with the
    largest figure, if any. Both include the test accuracy of their round, which
    selects nothing.
  """
  _, rows = csv_table.read(tree.eval_csv)
  best, result = best_round(rows, best_by), dict[str, Any]()
  rounds = csv_table.last_key(tree.train_csv)
  if rounds is not None:
    result['rounds'] = rounds
  if rows:
    result['last'] = _numbers(rows[-1])
  if best is not None:
    result['best_validation'] = _numbers(best)
  return result


def write(
  tree: output_tree.OutputTree, best_by: str = ACCURACY
) -> dict[str, Any]:
  """Writes `summary.json`, and returns its content."""
  result = summarize(tree, best_by)
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


@dataclasses.dataclass(frozen=True)
class Compute:
  """FLOPs, or numbers of forward passes that cost as much.

  Attributes:
    forward_flops: FLOPs of a forward pass over one example: one
      forward-equivalent.
    client: The most forward-equivalents of a client of mean size in a round.
    client_least: The least, if it keeps all its examples.
    server: Forward-equivalents of the server in a round.
  """

  forward_flops: float
  client: float
  client_least: float
  server: float

  def flops(self, forward_equivalents: float) -> float:
    """Converts a number of forward passes to FLOPs."""
    return self.forward_flops * forward_equivalents

  def describe(self) -> str:
    """Describes it in a sentence, for the start of a run."""
    parts = []
    if self.client:
      parts.append(
        f'at most {flops_text(self.flops(self.client))} a client and round'
        f' ({self.client:,.0f} forward-equivalents)'
      )
    if self.server:
      flops = flops_text(self.flops(self.server))
      parts.append(f'server {flops} a round ({self.server:,.0f})')
    return ', '.join(parts)


def write_compute(path: str, compute: Compute) -> None:
  """Writes the file, or raises `UsageError` if the disk refuses."""
  content = {'format': _COMPUTE_FORMAT, **dataclasses.asdict(compute)}
  durable.write_file(path, [(json.dumps(content, indent=2) + '\n').encode()])


def read_compute(path: str) -> Compute | None:
  """Reads the file.

  Args:
    path: The file.

  Returns:
    The content. None if there is no file, as in runs of older versions.

  Raises:
    FileError: If it is not such a file.
  """
  values = files.read_record(path, _COMPUTE_FORMAT)
  if values is None:
    return None
  # Versions before 0.6 also counted what the authors' code spends.
  values.pop('client_authors', None)
  try:
    return Compute(**values)
  except TypeError as error:
    raise files.FileError(path, 'it is of another version') from error


def flops_text(number: float) -> str:
  """Formats FLOPs: '4.2 GFLOP'."""
  for factor, prefix in _PREFIXES:
    if number >= factor:
      return f'{number / factor:.3g} {prefix}FLOP'
  return f'{number:,.0f} FLOP'


def is_finished(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> bool:
  """Returns whether all rounds are saved, and all models exported.

  Where each client trains alone, there is no model to export.
  """
  last = config.run.total_rounds
  # The cheap test first: most runs that are started are not finished.
  if checkpoint.versions(tree.checkpoints)[-1:] != [last]:
    return False
  path = checkpoint.path_of(tree.checkpoints, last)
  try:
    checkpoint.read_own(path, checkpoint.run_owner(config))
  except checkpoint.CheckpointError:
    return False
  models = {} if config.trains_alone else {tree.model: last}
  best = best_round_num(tree.eval_csv, config.run.best_by)
  if best is not None and models:
    models[tree.model_best] = best
  files = [exported.TFLITE_FILE] * config.run.export_tflite
  return summarize(tree).get('rounds') == last and not any(
    exported.problem(folder, of_round)
    or any(not os.path.lexists(os.path.join(folder, name)) for name in files)
    for folder, of_round in models.items()
  )


def check_outputs(
  config: config_lib.Config, tree: output_tree.OutputTree
) -> None:
  """Refuses, before loading, files that would be refused at the end.

  Raises:
    UsageError: If a table is damaged, a model's folder holds other files,
      the checkpoints of a finished run are gone, or the last one belongs to
      another run or to a round after the last.
  """
  for path in (tree.train_csv, tree.eval_csv, tree.timing_csv):
    csv_table.read(path)
  if os.path.lexists(tree.summary_json) and not checkpoint.versions(
    tree.checkpoints, set_aside=True
  ):
    raise UsageError(
      f'{tree.checkpoints}: the checkpoints of this finished run are gone; put'
      ' them back, or give --restart, which keeps its files in another folder'
      ' and begins again'
    )
  for folder in (tree.model, tree.model_best):
    exported.check_replaceable(folder)
  later = checkpoint.versions(tree.checkpoints)[-1:]
  if not later:
    return
  path = checkpoint.path_of(tree.checkpoints, later[0])
  with contextlib.suppress(checkpoint.DamagedError):
    try:
      # A program that uses the library without flags writes such ones.
      if checkpoint.read_header(path).owner != checkpoint.NOBODY:
        checkpoint.check_owner(path, checkpoint.run_owner(config))
    except checkpoint.ForeignError as error:
      raise UsageError(
        f'{path} cannot be used: {error}. Move it away, or choose another'
        ' --output_dir'
      ) from error
  if later[0] > config.run.total_rounds:
    raise UsageError(
      f'{path}: its round is after --total_rounds={config.run.total_rounds};'
      f' give --total_rounds={later[0]} or more, or move the file away'
    )
