"""The folder of a sweep.

sweep.json        the search; a sweep of other flags is refused
study.db          the trials, a study of Optuna
trials/N/seedS/   the run of trial N with seed S, a folder of a training run
trials/N/seedS.log    the output of that run
trials.csv        a row for each trial
trials.png        flags and validation accuracy of each trial, as lines
winner.flags      the flagfile of the best trial
"""

from collections.abc import Mapping
import json
import os
from typing import Any

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.storage import locked_folder

_SWEEP = 'sweep.json'
# Files that are replaced as a whole, and may leave temporary ones.
_NAMES = frozenset({_SWEEP, 'trials.csv', 'trials.png', 'winner.flags'})


class SweepFolder(locked_folder.LockedFolder):
  """A sweep's folder, with the paths in it."""

  sweep_json = locked_folder.PathInside(_SWEEP)
  study = locked_folder.PathInside('study.db')
  trials_csv = locked_folder.PathInside('trials.csv')
  picture = locked_folder.PathInside('trials.png')
  winner = locked_folder.PathInside('winner.flags')

  def run(self, trial: int, seed: int) -> str:
    """Returns the folder of a trial's run with a seed."""
    return os.path.join(self.path, 'trials', f'{trial:03}', f'seed{seed}')

  def log(self, trial: int, seed: int) -> str:
    """Returns the file with the output of that run."""
    return f'{self.run(trial, seed)}.log'

  def open(self, definition: Mapping[str, Mapping[str, str]]) -> None:
    """Makes the folder, locks it, and checks that it belongs to this sweep.

    Args:
      definition: What is searched, `Sweep.definition`.

    Raises:
      UsageError: If another program uses the folder, it belongs to another
        sweep, it is not the folder of a sweep, or it cannot be written to.
    """
    self.check_path()
    if not os.path.lexists(self.sweep_json):
      self._check_empty()
    durable.make_folder(self.path)
    self.lock()
    try:
      # Only under the lock: another sweep may be writing such a file.
      durable.remove_leftovers(self.path, lambda name: name in _NAMES)
      if os.path.lexists(self.sweep_json):
        self._compare(definition)
      else:
        text = json.dumps(definition, indent=2) + '\n'
        durable.write_file(self.sweep_json, [text.encode()])
    except BaseException:
      self.close()
      raise

  def _check_empty(self) -> None:
    """Refuses a folder with other files (`UsageError`)."""
    if not os.path.lexists(self.path):
      return
    with durable.storage_errors():
      names = sorted(n for n in os.listdir(self.path) if not n.startswith('.'))
    if names:
      raise UsageError(
        f'--output_dir={self.path}: the folder holds other files'
        f' ({names[0]!r}) but no sweep (there is no {_SWEEP}); choose another'
      )

  def _compare(self, new: Mapping[str, Mapping[str, str]]) -> None:
    """Refuses to resume another sweep."""
    old: dict[str, Any] = files.read_json(self.sweep_json)
    try:
      names = _differences(old, new)
      words = config_lib.describe_differences(names, _texts(old), _texts(new))
    except (AttributeError, KeyError, TypeError) as error:
      raise files.FileError(
        self.sweep_json, 'it is not the file of a sweep'
      ) from error
    if names:
      raise UsageError(
        f'--output_dir={self.path}: holds a sweep of another configuration'
        f' ({words}); choose another folder, or give the values of its {_SWEEP}'
      )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns the names in which two definitions differ."""
  names, _ = config_lib.differences(old['flags'], dict(new['flags']))
  # A larger --total_rounds continues a run, but not one that is over here.
  if old['flags']['total_rounds'] != new['flags']['total_rounds']:
    names.append('total_rounds')
  for part in ('varied', 'search'):
    both = sorted(old[part].keys() | new[part].keys())
    names += [n for n in both if old[part].get(n) != new[part].get(n)]
  return list(dict.fromkeys(names))


def _texts(definition: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
  """Joins the parts of a definition, the flags that vary last."""
  return {
    **definition['flags'],
    **definition['search'],
    **definition['varied'],
  }
