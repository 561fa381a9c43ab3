"""`programs/runs.py`: lists runs and their status."""

from collections.abc import Sequence
import dataclasses
import json
import os

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import status

_USAGE = 'programs/runs.py [FOLDER ...] [--json]'
_ABOUT = (
  'Lists all runs in folders (runs if none is given), at any depth. Runs that'
  ' differ only in their seeds form a group, titled by the flags in which it'
  ' differs from the others. Groups with an active run come first.\n'
  'state: running (a process holds the folder), finished, or stopped before its'
  ' last round; its command continues it.'
  ' round: the last finished one; pre: of server pre-training. last, best: test'
  ' accuracy of the last evaluation, and of the one that validation selects.'
  ' left: until the last round. started: when its process began.\n'
  'Each unusable file is named in a warning.'
)
_FOLDER = 'runs'


@dataclasses.dataclass(frozen=True)
class RunsHparams:
  """Flags of `programs/runs.py`."""

  json: bool = hparam(
    False,
    'Print one JSON array with all facts about each run.',
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, RunsHparams)
def runs_main(settings: RunsHparams, parsed: flags.ParsedFlags) -> None:
  """Lists runs and their status."""
  folders = [os.path.normpath(path) for path in parsed.positional or [_FOLDER]]
  text, warnings = _listing(folders, settings.json)
  console.show(text)
  for warning in warnings:
    main_lib.warn(warning)


def _listing(
  folders: Sequence[str], as_json: bool = False
) -> tuple[str, list[str]]:
  """Lists runs: (text, warnings)."""
  statuses: list[status.Status] = []
  warnings: list[str] = []
  for path in status.find(folders, warnings.append):
    try:
      statuses.append(status.read(path, warnings.append))
    except UsageError as error:
      warnings.append(f'skipped: {error}')
  groups = status.group_statuses(statuses)
  if as_json:
    values = [s.json_values(group.label) for group, of in groups for s in of]
    return json.dumps(values, indent=2), warnings
  if not statuses:
    return f'There are no runs in {", ".join(folders)}.', warnings
  return '\n'.join(status.table_lines(groups)), warnings
