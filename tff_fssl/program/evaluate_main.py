"""`programs/evaluate.py`: accuracy of checkpoints or of exported models."""

from collections.abc import Mapping
import itertools
import json
import math
import os
from typing import Any

from tff_fssl import durable
from tff_fssl.hparams import UsageError
from tff_fssl.program import console
from tff_fssl.program import evaluation
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import runs

_USAGE = 'programs/evaluate.py RUN|MODEL [RUN|MODEL ...] [--FLAG=VALUE ...]'
_ABOUT = (
  'Evaluates checkpoints of runs (RUN is the --output_dir of programs/train.py)'
  ' or exported models (MODEL is a folder model/ or model_best/, or a copy of'
  ' it), on the data set that they were trained for. With --federated, at the'
  ' clients, on their held-out examples: mean, spread and deciles of their'
  ' accuracies. With --local_models, the models that clients train from it. A'
  ' path that is neither, or a run without a checkpoint, is skipped with a'
  ' warning. Only numbers are read from these files: they are safe to open.'
)


@main_lib.command(
  _USAGE,
  _ABOUT,
  evaluation.EvaluateHparams,
  missing='no folder was given; give one, a run or an exported model',
)
def evaluate_main(
  settings: evaluation.EvaluateHparams, parsed: flags.ParsedFlags
) -> None:
  """Measures the accuracy of a run or of an exported model."""
  _check(settings, parsed)
  main_lib.quiet(settings.verbose)
  # An empty line between two tables, none before the first.
  breaks = itertools.chain([''], itertools.repeat('\n'))

  def evaluate(path: str) -> dict[str, Any]:
    done = evaluation.evaluate(
      os.path.normpath(path), settings, parsed.is_set('round'), main_lib.warn
    )
    console.show(next(breaks) + console.table(done.rows), flush=True)
    return {'model': done.rows['model'], **_plain(done.figures)}

  records = runs.read_each(parsed.positional, evaluate, main_lib.warn)
  if settings.output:
    content = f'{json.dumps(records, indent=2)}\n'.encode()
    with durable.storage_errors('--output'):
      durable.write_file(settings.output, [content])


def _check(
  settings: evaluation.EvaluateHparams, parsed: flags.ParsedFlags
) -> None:
  """Refuses flags that do not fit together (`UsageError`)."""
  if settings.federated and 'examples' in parsed.command_line:
    raise UsageError(
      f'--examples={settings.examples}: with --federated, the examples are'
      ' those that clients hold out; omit one of the two'
    )
  folder = os.path.dirname(os.path.abspath(settings.output))
  if settings.output and (
    os.path.isdir(settings.output) or not os.path.isdir(folder)
  ):
    raise UsageError(
      f'--output={settings.output}: is a folder, or in none that exists; give'
      ' the name of a file'
    )


def _plain(figures: Mapping[str, Any]) -> dict[str, Any]:
  """Converts figures to JSON's types, with None for NaN."""
  plain: dict[str, Any] = {}
  for name, value in figures.items():
    if isinstance(value, Mapping):
      plain[name] = _plain(value)
    elif name.startswith('num_'):
      plain[name] = int(value)
    else:
      # Standard JSON has no NaN, and NumPy's scalars are not serializable.
      plain[name] = None if math.isnan(value) else float(value)
  return plain
