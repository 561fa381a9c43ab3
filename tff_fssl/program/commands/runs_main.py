"""`programs/runs.py`: lists runs and their status."""

from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time

from tff_fssl import hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.program import console
from tff_fssl.program.commands import main as main_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.reporting import status

_USAGE = 'programs/runs.py [FOLDER ...] [--watch=SECONDS] [--json]'
_ABOUT = (
  'Lists all runs in folders (runs if none is given), at any depth. Runs that'
  ' differ only in their seeds form a group, titled by the flags in which it'
  ' differs from the others. Groups with an active run come first.\n'
  'state: running; dead (running by its heartbeat.json, but its process is'
  ' gone, or is on another machine and silent for a minute); failed; stopped;'
  ' finished; unknown (unfinished, and of a version without a heartbeat).'
  ' round: the last finished one; pre: of server pre-training. last, best: test'
  ' accuracy of the last evaluation, and of the one that validation selects.'
  ' left: until the last round, or the end of pre-training. started: when its'
  ' last process began.\n'
  'Each unusable file is named in a warning.'
)
_FOLDER = 'runs'
# A day; the system cannot wait for more than some hundred years.
_LONGEST_WATCH = 86_400
# Moves to the upper left corner, and clears from there on.
_CLEAR = '\x1b[H\x1b[J'


@dataclasses.dataclass(frozen=True)
class RunsHparams:
  """Flags of `programs/runs.py`."""

  watch: float = hparam(
    0.0,
    'Seconds until the list is renewed, until Ctrl-C. 0: list once.',
    minimum=0,
    maximum=_LONGEST_WATCH,
  )
  json: bool = hparam(
    False,
    'Print one JSON array with all facts about each run.',
    when=lambda runs: not runs.watch,
  )

  def __post_init__(self):
    hparams.validate(self)


@main_lib.command(_USAGE, _ABOUT, RunsHparams)
def runs_main(settings: RunsHparams, parsed: flags.ParsedFlags) -> None:
  """Lists runs and their status."""
  folders = [os.path.normpath(path) for path in parsed.positional or [_FOLDER]]
  if not settings.watch:
    text, warnings = _listing(folders, settings.json)
    console.show(text)
    for warning in warnings:
      main_lib.warn(warning)
    return
  with contextlib.suppress(KeyboardInterrupt):
    while True:
      text, warnings = _listing(folders)
      _show([*text.splitlines(), *(f'warning: {w}' for w in warnings)])
      time.sleep(settings.watch)


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


def _show(lines: list[str]) -> None:
  """Prints lines. A terminal gets as many as fit, over the previous ones."""
  if not sys.stdout.isatty():
    console.show('\n'.join([*lines, '']), flush=True)
    return
  # The last line stays free for the cursor.
  height = shutil.get_terminal_size().lines - 1
  if len(lines) > height:
    lines = [*lines[: height - 1], f'... and {len(lines) - height + 1} more']
  print(_CLEAR, end='')
  console.show('\n'.join(lines), flush=True)
