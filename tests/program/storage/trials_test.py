"""A study that somebody has changed."""

import shutil
import sqlite3

import hypothesis
from hypothesis import strategies as st
import optuna
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import sweeps
from tff_fssl.program.storage import trials as trials_lib

_GRID = ('momentum=0.1,0.2,0.3', 'client_epochs=1,2')


def _sweep():
  groups = [flags.Group(sweeps.SearchHparams), *config_lib.groups()]
  base = ['--dataset=digits', '--num_validation=100', '--num_clients=20']
  parsed = flags.parse([*base, '--seeds=0,1', '--momentum=0.1'], groups)
  return sweeps.build(parsed, '', _GRID)


@pytest.fixture(name='study', scope='module')
def _study(tmp_path_factory):
  """A study with trials of several states."""
  path = str(tmp_path_factory.mktemp('study') / 'study.db')
  trials = trials_lib.Trials(path, _sweep(), 1)
  for state, scores in (
    (trials_lib.COMPLETE, {0: 0.5, 1: 0.25}),
    (trials_lib.FAILED, {0: 0.5}),
    (trials_lib.PRUNED, {0: 0.125}),
  ):
    trial = trials.take()
    trial.is_bad({1: 0.125})
    trial.end(state, scores, 'why')
  return path


def _read(path):
  trials = trials_lib.Trials(path, _sweep(), 1)
  return trials.take(), trials.records()


def _assert_read_or_refused(path):
  try:
    _read(path)
  except UsageError as error:
    assert 'the study cannot be used' in str(error)
    assert len(str(error).splitlines()) == 1
    return False
  return True


def test_what_was_written_is_read(study, tmp_path):
  path = shutil.copy(study, tmp_path / 'study.db')
  trial, records = _read(str(path))
  states = {record.number: record.state for record in records}
  assert states == {0: 'complete', 1: 'open', 2: 'pruned'}
  assert trial.number == 1  # Again, since it failed.
  assert records[0].scores == {0: 0.5, 1: 0.25}


@pytest.mark.parametrize(
  'edit',
  [
    'DELETE FROM trial_user_attributes',
    "UPDATE trial_user_attributes SET value_json = 'x'",
    "UPDATE trial_user_attributes SET value_json = '7'",
    "UPDATE trial_user_attributes SET value_json = '-1' WHERE key = 'number'",
    "UPDATE trial_user_attributes SET value_json = '{}' WHERE key = 'scores'",
    'UPDATE trial_user_attributes SET value_json = \'{"0": 1, "1": 1}\''
    " WHERE key = 'scores'",
    'UPDATE trial_user_attributes SET value_json = \'{"0": 2, "1": -1.25}\''
    " WHERE key = 'scores'",
    "UPDATE trials SET state = 'NONE'",
    "UPDATE trials SET number = 'x'",
    'UPDATE trial_values SET value = 1',
    'DELETE FROM trial_values',
    'DELETE FROM trial_params',
    'UPDATE trial_params SET param_value = 99',
    "UPDATE trial_params SET param_value = 'x'",
    "UPDATE trial_params SET param_name = 'norm' WHERE param_name = 'momentum'",
    "UPDATE trial_params SET distribution_json = '{}'",
    "UPDATE study_directions SET direction = 'MINIMIZE'",
    'DROP TABLE study_directions',
  ],
)
def test_an_edited_study(study, tmp_path, edit):
  path = str(shutil.copy(study, tmp_path / 'study.db'))
  data_base = sqlite3.connect(path)
  data_base.execute(edit)
  data_base.commit()
  data_base.close()
  assert not _assert_read_or_refused(path)


@hypothesis.given(st.data())
@hypothesis.settings(
  max_examples=30, deadline=None, derandomize=True, database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_whatever_bytes_a_study_has(study, tmp_path, data):
  with open(study, 'rb') as file:
    content = bytearray(file.read())
  start = data.draw(st.integers(0, len(content) - 1))
  new = data.draw(st.binary(min_size=1, max_size=200))
  content[start : start + len(new)] = new
  path = tmp_path / 'study.db'
  path.write_bytes(content[: data.draw(st.integers(1, 2)) * len(content) // 2])
  _assert_read_or_refused(str(path))


def test_samplers_learn_of_what_diverged(tmp_path):
  trials = trials_lib.Trials(str(tmp_path / 'study.db'), _sweep(), 1)
  trials.take().end(trials_lib.DIVERGED, {}, 'why')
  # Optuna's samplers ignore failed trials.
  (trial,) = trials.study.get_trials()
  assert trial.state == optuna.trial.TrialState.PRUNED
  assert [record.state for record in trials.records()] == ['diverged']
