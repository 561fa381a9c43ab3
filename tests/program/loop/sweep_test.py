"""Trials as processes; `sweep_main_test.py` has whole sweeps."""

import asyncio
import os
import sys

import pytest

from tff_fssl.program import training_types
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import sweeps
from tff_fssl.program.loop import sweep as sweep_lib
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import trials as trials_lib


@pytest.fixture(name='run')
def _run(repository, tmp_path, monkeypatch):
  """Makes the trials of a grid: (records, messages, the folder)."""
  monkeypatch.setattr(sweep_lib, '_POLL_SECS', 0.01)
  script = str(repository / 'tests' / 'helpers' / 'fake_train.py')

  def call(rates='0.5,0.8', stop=None, **settings):
    groups = [flags.Group(sweeps.SearchHparams), *config_lib.groups()]
    parsed = flags.parse(
      [
        '--dataset=digits',
        '--num_validation=100',
        '--num_clients=20',
        '--total_rounds=10',
        f'--output_dir={tmp_path / "sweep"}',
      ],
      groups,
    )
    sweep = sweeps.build(parsed, '', [f'client_learning_rate={rates}'])
    said = []
    with output_tree.SweepFolder(sweep.folder) as folder:
      folder.open(sweep.definition())
      trials = trials_lib.Trials(folder.study, sweep, 1)
      sweeper = sweep_lib.Sweeper(
        sweep,
        folder,
        trials,
        sweep_lib.Settings([sys.executable, script], 3, **settings),
        stop or training_types.StopRequest(),
        said.append,
      )
      asyncio.run(sweeper.run())
      return trials.records(), said, folder

  return call


def test_every_trial_is_made_and_told(run):
  records, said, folder = run()
  assert [r.state for r in records] == [trials_lib.COMPLETE] * 2
  assert [r.scores for r in records] == [{0: 0.5}, {0: 0.8}]
  assert any('trial 1: complete, validation 80.0 %' in line for line in said)
  assert os.path.exists(folder.trials_csv)
  with open(folder.log(1, 0)) as log:
    assert log.read().splitlines()[-1] == 'round 10'


def test_a_stop_request_starts_no_trial(run):
  stop = training_types.StopRequest()
  stop.set(15)
  assert run(stop=stop)[0] == []


def test_the_last_error_of_a_failed_run_is_its_note(run, monkeypatch):
  monkeypatch.setenv('FAKE_FAILURES', '{"0.5": 9}')
  records, _, folder = run('0.5', retries=0)
  assert records[0].state == trials_lib.FAILED
  log = folder.log(0, 0)
  assert records[0].note == (
    f'seed 0: exit code 1: the disk is full; see {log}'
  )


@pytest.mark.parametrize(
  'content, begin, expected',
  [
    ('', 0, ''),
    ('one\ntwo\n\n', 0, 'two'),
    ('error: why\nmore\n', 0, 'why'),
    ('error: old\nnew\n', 11, 'new'),
  ],
)
def test_the_last_words_of_a_log(content, begin, expected, tmp_path):
  log = tmp_path / 'log'
  log.write_text(content)
  assert sweep_lib._last_words(str(log), begin) == expected
