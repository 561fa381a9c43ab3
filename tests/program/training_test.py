import asyncio
import collections
import contextlib
import csv
import os
import signal

import faulty_disk
import numpy as np
import pytest
import tensorflow_federated as tff

from tests.program import fakes
from tff_fssl.hparams import UsageError
from tff_fssl.models.weights import Weights
from tff_fssl.program import checkpoint
from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import summary
from tff_fssl.program import training
from tff_fssl.program import training_types
from tff_fssl.rounds import sampling

_STATE = collections.OrderedDict(
  weights=(np.arange(6, dtype=np.float32).reshape(2, 3), np.float64(0.1)),
  count=np.int32(3),
  flag=np.bool_(True),
  nothing=(),
  empty=np.zeros([0, 4], np.float32),
  iterator=fakes.data_source().iterator(),
)


def _manager(tmp_path, **kwargs):
  return training.DurableProgramStateManager(str(tmp_path), **kwargs)


def _save(manager, *versions):
  for version in versions:
    asyncio.run(manager.save(_STATE, version))


def _damage(tmp_path, version, keep):
  path = checkpoint.path_of(str(tmp_path), version)
  with open(path, 'rb') as file:
    content = file.read()
  with open(path, 'wb') as file:
    file.write(keep(content))


def test_what_is_loaded_is_what_was_saved(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, -3)
  loaded, version = asyncio.run(manager.load_latest(_STATE))
  assert version == -3
  assert type(loaded) is type(_STATE)
  assert loaded['iterator'] == _STATE['iterator']
  for new, old in zip(loaded['weights'], _STATE['weights']):
    np.testing.assert_array_equal(new, old)
    assert new.dtype == old.dtype and new.shape == old.shape
  assert loaded['empty'].shape == (0, 4)
  assert loaded['count'] == 3 and loaded['flag'].dtype == bool


def test_nothing_saved(tmp_path):
  manager = _manager(tmp_path)
  assert asyncio.run(manager.get_versions()) is None
  assert asyncio.run(manager.load_latest(_STATE)) == (None, 0)
  with pytest.raises(tff.program.ProgramStateNotFoundError):
    asyncio.run(manager.load(1, _STATE))


def test_the_last_ones_are_kept(tmp_path):
  manager = _manager(tmp_path, keep_total=2)
  _save(manager, -1, 0, 1, 10)
  assert asyncio.run(manager.get_versions()) == [1, 10]
  with pytest.raises(tff.program.ProgramStateExistsError):
    _save(manager, 10)
  with pytest.raises(ValueError, match='keep_total'):
    _manager(tmp_path, keep_total=0)


@pytest.mark.parametrize(
  'keep, reason',
  [
    (lambda c: c[:-1], 'truncated or damaged'),
    (lambda c: c[:100], 'truncated or damaged'),
    (lambda c: c[:10], 'truncated'),
    (lambda c: b'', 'truncated'),
    (lambda c: c.replace(b'NUMPY', b'NUMPX', 1), 'Bad CRC-32'),
    (lambda c: b'text', 'not a zip file'),
  ],
)
def test_a_damaged_one_falls_back_and_says_so(tmp_path, keep, reason):
  said = []
  manager = _manager(tmp_path, warn=said.append)
  _save(manager, 1, 2)
  _damage(tmp_path, 2, keep)
  _, version = asyncio.run(manager.load_latest(_STATE))
  assert version == 1
  assert len(said) == 1 and reason in said[0] and 'round_2.ckpt' in said[0]
  # Out of the way: the version can be saved again.
  _save(manager, 2)
  assert asyncio.run(manager.load_latest(_STATE))[1] == 2


def test_one_of_another_program_is_refused_and_stays(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 1)
  for version, state, word in (
    (2, {**_STATE, 'count': np.int64(3)}, "'count' is int64"),
    (3, {**_STATE, 'more': np.int32(3)}, "'more'"),
    (4, {**_STATE, 'iterator': b'x'}, "'iterator'"),
  ):
    asyncio.run(manager.save(state, version))
    with pytest.raises(UsageError, match=f'round_{version}.*{word}.*[Mm]ove'):
      asyncio.run(manager.load_latest(_STATE))
  assert asyncio.run(manager.get_versions()) == [2, 3, 4]


_OWNER = checkpoint.Owner(
  {'seed': '1'}, {'trainable': ['w'], 'non_trainable': []}
)


@pytest.mark.parametrize(
  'other, words',
  [
    (checkpoint.NOBODY, 'which run it belongs to'),
    (_OWNER.__class__({'seed': '2'}, _OWNER.model), '--seed=2 there, 1 here'),
    (_OWNER.__class__({}), '--seed=.its default. there, 1 here'),
    (
      _OWNER.__class__(
        {'seed': '1'}, {'trainable': ['v'], 'non_trainable': []}
      ),
      'v there, w here',
    ),
    (
      _OWNER.__class__(
        {'seed': '1'}, {'trainable': ['w'], 'non_trainable': ['m']}
      ),
      '1 non_trainable_variables there, 0 here',
    ),
  ],
)
def test_a_checkpoint_belongs_to_its_owner(other, words, tmp_path):
  _save(_manager(tmp_path, owner=other), 1)
  content = (tmp_path / 'round_1.ckpt').read_bytes()
  ours = _manager(tmp_path, owner=_OWNER, keep_total=1)
  with pytest.raises(UsageError, match=words):
    asyncio.run(ours.load_latest(_STATE))
  # Nor is it removed.
  _save(ours, 2, 3)
  assert asyncio.run(ours.get_versions()) == [1, 3]
  assert (tmp_path / 'round_1.ckpt').read_bytes() == content
  assert asyncio.run(ours.load_latest(_STATE))[1] == 3


def test_names_that_no_save_gives(tmp_path):
  names = ['round_01.ckpt', 'round_-0.ckpt', 'round_1.ckpt.bak', 'my_1.ckpt',
           '.writing_thesis', 'round_\u0661.ckpt', 'round_+1.ckpt']  # fmt: skip
  for name in names:
    (tmp_path / name).write_text('mine')
  manager = _manager(tmp_path, keep_total=1)
  assert asyncio.run(manager.get_versions()) is None
  _save(manager, 1, 2, 3)
  assert sorted(os.listdir(tmp_path)) == sorted([*names, 'round_3.ckpt'])


def test_one_more_is_kept(tmp_path):
  kept = []
  manager = _manager(
    tmp_path, keep_total=1, keep_also_fn=lambda: kept[-1] if kept else None
  )
  for version, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3)):
    kept.append(best)
    _save(manager, version)
  assert asyncio.run(manager.get_versions()) == [3, 5]


def test_a_renamed_checkpoint_is_refused_and_stays(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 3, 4)
  renamed = checkpoint.path_of(str(tmp_path), 9)
  os.rename(checkpoint.path_of(str(tmp_path), 4), renamed)
  words = "round_9.ckpt cannot be used: it was written as 'round_4.ckpt', and"
  with pytest.raises(UsageError, match=words):
    asyncio.run(manager.load_latest(_STATE))
  with pytest.raises(checkpoint.ForeignError, match='written as'):
    checkpoint.read_latest(str(tmp_path))
  assert asyncio.run(manager.get_versions()) == [3, 9]
  os.rename(renamed, checkpoint.path_of(str(tmp_path), 4))
  assert asyncio.run(manager.load_latest(_STATE))[1] == 4


def test_if_none_is_whole_nothing_is_begun_anew(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 1, 2)
  for version in (1, 2):
    _damage(tmp_path, version, lambda c: c[:50])
  with pytest.raises(UsageError, match='none of the 2 checkpoints'):
    asyncio.run(manager.load_latest(_STATE))
  assert asyncio.run(manager.get_versions()) == [1, 2]


def test_leftovers_of_killed_saves_are_removed(tmp_path):
  manager = _manager(tmp_path)
  _save(manager, 1)
  (tmp_path / '.writing_round_2.ckpt').write_bytes(b'half')
  _manager(tmp_path)
  assert os.listdir(tmp_path) == ['round_1.ckpt']


def test_metrics_are_logged_flat_and_in_order(tmp_path):
  table = csv_table.CsvTable(str(tmp_path / 'a.csv'))
  manager = training.LoggerReleaseManager(table, 'It', print)
  nested = collections.OrderedDict(
    z=collections.OrderedDict(b=1, a=np.float32(2)), c=(3, ()), d=()
  )
  asyncio.run(manager.release(nested, 5))
  assert table.columns == ['round', 'z/b', 'z/a', 'c/0']


def test_a_logger_that_fails_is_reported_once():
  class Failing:
    calls = 0

    def log(self, round_num, metrics):
      Failing.calls += 1
      raise OSError('no')

  said = []
  manager = training.LoggerReleaseManager(Failing(), 'It', said.append)
  for _ in range(3):
    asyncio.run(manager.release({}, 1))
  assert Failing.calls == 1 and said == ['It stops: OSError: no']


def _rows(folder, name):
  with open(os.path.join(folder, 'metrics', name)) as file:
    return list(csv.DictReader(file))


def test_a_run_from_start_to_end(tmp_path):
  reporter = fakes.Reporter()
  result = fakes.run(tmp_path / 'run', reporter=reporter)
  assert (result.round_num, result.num_rounds) == (4, 5)
  assert result.stopped_by is None
  rows = _rows(tmp_path / 'run', 'train.csv')
  assert [row['round'] for row in rows] == ['0', '1', '2', '3', '4']
  clients = [row['client_work/train/num_clients'] for row in rows]
  assert clients == ['0', '2', '2', '2', '2']
  assert rows[1]['client_work/train/pseudo_label_accuracy'] == 'nan'
  assert {row['bad_round'] for row in rows} == {'0'}
  evaluated = _rows(tmp_path / 'run', 'eval.csv')
  assert [row['round'] for row in evaluated] == ['0', '2', '4']
  timing = _rows(tmp_path / 'run', 'timing.csv')
  assert float(timing[4]['peak_memory_mb']) > 10
  assert float(timing[4]['seconds/round']) > 0
  assert [bool(r.evaluation) for r in reporter.reports] == [1, 0, 1, 0, 1]
  assert reporter.phases[:5] == [
    ('round', 0),
    ('evaluating', 0),
    ('saving', 0),
    ('round', 1),
    ('saving', 1),
  ]


def test_the_last_round_is_evaluated_and_saved_whatever_its_number(tmp_path):
  fakes.run(
    tmp_path / 'run',
    total_rounds=3,
    rounds_per_evaluation=10,
    rounds_per_checkpoint=10,
  )
  rows = _rows(tmp_path / 'run', 'eval.csv')
  assert [row['round'] for row in rows] == ['0', '3']
  names = sorted(os.listdir(tmp_path / 'run' / 'checkpoints'))
  assert names == ['round_0.ckpt', 'round_3.ckpt']


def test_a_finished_run_does_nothing_and_more_rounds_go_on(tmp_path):
  fakes.run(tmp_path / 'a')
  fakes.run(tmp_path / 'b', total_rounds=2)
  process = fakes.FakeProcess()
  assert fakes.run(tmp_path / 'a', process).num_rounds == 0
  assert process.rounds == []
  assert fakes.run(tmp_path / 'b').num_rounds == 2
  assert fakes.results(tmp_path / 'a') == fakes.results(tmp_path / 'b')


def _weights(value):
  return Weights(
    (np.full([3], value, np.float32), np.float32(value)), (), np.float32(7)
  )


def test_a_warm_start_is_evaluated_and_saved_before_the_first_round(tmp_path):
  warm = {'initial_model': _weights(0.5)}
  reporter = fakes.Reporter()
  fakes.run(tmp_path / 'a', reporter=reporter, options=warm, keep=9)
  rows = _rows(tmp_path / 'a', 'eval.csv')
  assert [row['round'] for row in rows] == ['-1', '0', '2', '4']
  assert float(rows[0]['test/accuracy']) == 1 / 3
  assert reporter.messages == ['At the start: test 33.3%  val 20.0%']
  tree = output_tree.OutputTree(str(tmp_path / 'a'))
  saved = checkpoint.read(checkpoint.path_of(tree.checkpoints, -1))
  weights = {k: v for k, v in saved.items() if 'global_model_weights' in k}
  np.testing.assert_array_equal(
    np.concatenate([np.ravel(w) for w in weights.values()]), [0.5] * 4 + [7.0]
  )
  assert not saved['process/finalizer/momentum'].any()
  fakes.run(tmp_path / 'b')
  assert fakes.results(tmp_path / 'a') != fakes.results(tmp_path / 'b')


def test_a_warm_start_that_is_killed_goes_on_without_its_weights(tmp_path):
  warm = {'initial_model': _weights(0.5)}
  with faulty_disk.FaultyDisk().installed() as disk:
    fakes.run(tmp_path / 'whole', options=warm, total_rounds=1)
  for stop_at in range(0, len(disk.calls), 2):
    folder = tmp_path / str(stop_at)
    with faulty_disk.FaultyDisk(stop_at).installed():
      with pytest.raises(faulty_disk.Killed):
        fakes.run(folder, options=warm, total_rounds=1)
    # Others by now, which must not matter once there is a checkpoint.
    is_saved = bool(checkpoint.versions(str(folder / 'checkpoints')))
    options = {'initial_model': _weights(9.0)} if is_saved else warm
    reporter = fakes.Reporter()
    fakes.run(folder, reporter=reporter, options=options, total_rounds=1)
    assert fakes.results(folder) == fakes.results(tmp_path / 'whole'), stop_at


def test_who_took_part_is_in_the_table_and_the_same_when_resumed(tmp_path):
  make = lambda: fakes.data_source(
    participation=sampling.ParticipationHparams(dropout_probability=0.5)
  )
  fakes.run(tmp_path / 'whole', source=make(), total_rounds=9)
  rows = _rows(tmp_path / 'whole', 'train.csv')
  numbers = [
    [int(row[f'participation/num_{name}']) for row in rows]
    for name in ('drawn', 'dropped_out', 'reported')
  ]
  assert numbers[0] == [0] + 9 * [2]
  assert set(numbers[1]) == {0, 1, 2}
  assert [d - o for d, o, _ in zip(*numbers)] == numbers[2]
  clients = [row['client_work/train/num_clients'] for row in rows]
  assert clients == list(map(str, numbers[2]))
  for total in (2, 5, 9):
    fakes.run(tmp_path / 'parts', source=make(), total_rounds=total)
  for path in ('train.csv', 'round_9.ckpt'):
    whole, parts = (
      fakes.results(tmp_path / name)[path] for name in ('whole', 'parts')
    )
    assert whole == parts


def test_a_stop_request_saves_after_the_round(tmp_path):
  stop, number = training_types.StopRequest(), signal.SIGTERM

  def count_round(report):
    if report.round_num == 1:
      stop.set(number)

  result = fakes.run(
    tmp_path / 'a',
    reporter=fakes.Reporter(count_round),
    stop=stop,
    rounds_per_checkpoint=10,
  )
  assert (result.round_num, result.stopped_by) == (1, number)
  process = fakes.FakeProcess()
  assert fakes.run(tmp_path / 'a', process).round_num == 4
  assert process.rounds == [2, 3, 4]
  fakes.run(tmp_path / 'b')
  assert fakes.results(tmp_path / 'a') == fakes.results(tmp_path / 'b')


def test_bad_rounds_are_marked_and_stop_the_program(tmp_path):
  reporter = fakes.Reporter()
  with pytest.raises(training.TrainingStoppedError, match='2 rounds in a row'):
    fakes.run(
      tmp_path / 'run',
      fakes.FakeProcess(bad_rounds=[1, 2, 3]),
      reporter,
      max_bad_rounds=2,
      rounds_per_checkpoint=10,
    )
  rows = _rows(tmp_path / 'run', 'train.csv')
  assert [row['bad_round'] for row in rows] == ['0', '1', '1']
  assert [report.is_bad for report in reporter.reports] == [False, True, True]
  # The same command says so at once; a larger number lets it go on.
  process = fakes.FakeProcess()
  with pytest.raises(training.TrainingStoppedError):
    fakes.run(tmp_path / 'run', process, max_bad_rounds=2)
  assert process.rounds == []
  assert fakes.run(tmp_path / 'run', max_bad_rounds=3).round_num == 4


def test_one_bad_round_among_good_ones_does_not_stop(tmp_path):
  process = fakes.FakeProcess(bad_rounds=[1, 3])
  assert fakes.run(tmp_path / 'run', process, max_bad_rounds=2).round_num == 4


def test_the_first_rejection_is_explained(tmp_path):
  asked = []

  class Explain(training.Hooks):
    def explain_rejected(self, state, round_num):
      asked.append((int(state.client_work), round_num))
      return ['client 7: rejected: its weight']

  class Rejects(fakes.FakeProcess):
    def _next(self, state, cohort):
      output = super()._next(state, cohort)
      rejects = int(output.state.client_work) > 1
      output.metrics['client_work']['train']['num_rejected_clients'] = rejects
      return output

  reporter = fakes.Reporter()
  options = {'hooks': Explain()}
  fakes.run(tmp_path, Rejects(), reporter, options=options, total_rounds=4)
  assert asked == [(1, 2)]
  said = [m for m in reporter.messages if 'rejected: its weight' in m]
  assert said == ['round 2: client 7: rejected: its weight']


def test_who_was_not_finite_is_said_and_kept(tmp_path):
  asked = []

  class Explain(training.Hooks):
    def explain_non_finite(self, state, round_num, num_clients):
      # Of the state before the round.
      asked.append((int(state.client_work), round_num, num_clients))
      return ['client 7: not finite', 'client 9: not finite']

  def run(name, last, process=None):
    reporter = fakes.Reporter()
    fakes.run(
      tmp_path / name,
      process or fakes.FakeProcess(bad_rounds=[1, 3, 4]),
      reporter,
      options={'hooks': Explain()},
      total_rounds=last,
      max_bad_rounds=9,
    )
    return reporter.messages

  said = run('run', 4)
  assert asked == [(0, 1, 2), (2, 3, 2), (3, 4, 2)]
  path = tmp_path / 'run' / 'metrics' / 'non_finite.txt'
  lines = path.read_text().splitlines()
  assert said == lines
  assert lines[:3] == [
    'round 1: client 7: not finite',
    'round 1: client 9: not finite',
    'round 3: client 7: not finite',
  ]
  # A round that is repeated after a kill is there once.
  (tmp_path / 'run' / 'checkpoints' / 'round_4.ckpt').unlink()
  assert run('run', 4)[1:] == lines[4:]
  assert path.read_text().splitlines() == lines
  # None otherwise.
  assert run('good', 4, fakes.FakeProcess()) == []
  assert not (tmp_path / 'good' / 'metrics' / 'non_finite.txt').exists()


def test_a_damaged_checkpoint_repeats_the_rounds_after_the_last_whole_one(
  tmp_path,
):
  fakes.run(tmp_path / 'a')
  fakes.run(tmp_path / 'b')
  path = tmp_path / 'b' / 'checkpoints' / 'round_4.ckpt'
  path.write_bytes(path.read_bytes()[:-5])
  reporter, process = fakes.Reporter(), fakes.FakeProcess()
  fakes.run(tmp_path / 'b', process, reporter)
  assert process.rounds == [4]
  assert 'round_4.ckpt cannot be used' in reporter.messages[0]
  assert fakes.results(tmp_path / 'a') == fakes.results(tmp_path / 'b')


@pytest.mark.parametrize(
  'missing, where, repeated',
  [
    ([4], 'after round 3', [4]),
    ([3, 4], 'at the start', [0, 1, 2, 3, 4]),
  ],
)
def test_missing_checkpoints_are_said(tmp_path, missing, where, repeated):
  fakes.run(tmp_path / 'a')
  fakes.run(tmp_path / 'b')
  for version in missing:
    (tmp_path / 'b' / 'checkpoints' / f'round_{version}.ckpt').unlink()
  reporter, process = fakes.Reporter(), fakes.FakeProcess()
  fakes.run(tmp_path / 'b', process, reporter)
  assert process.rounds == repeated
  [message] = reporter.messages
  assert message.startswith(f'Training continues {where}: there is no later')
  assert fakes.results(tmp_path / 'a') == fakes.results(tmp_path / 'b')


def test_a_full_disk_in_the_middle_is_one_message(tmp_path):
  with faulty_disk.FaultyDisk(40, faulty_disk.FULL).installed():
    with pytest.raises(UsageError, match='the disk is full'):
      fakes.run(tmp_path / 'run')


def test_types_must_fit(tmp_path):
  process = fakes.FakeProcess()
  process.next.type_signature.parameter = (
    None,
    process.initialize.type_signature.result,
  )
  with pytest.raises(ValueError, match='takes client data of type'):
    fakes.run(tmp_path / 'run', process)


def test_the_summary_selects_on_validation_only(tmp_path):
  tree = output_tree.OutputTree(str(tmp_path))
  os.mkdir(tree.metrics)
  table = csv_table.CsvTable(tree.eval_csv)
  for key, test, validation in ((1, 0.9, 0.1), (2, 0.5, 0.7), (3, 0.8, 0.7)):
    table.log(key, {'test/accuracy': test, 'validation/accuracy': validation})
  table.log(4, {'test/accuracy': 0.6, 'validation/accuracy': np.nan})
  csv_table.CsvTable(tree.train_csv).log(4, {'x': 1})
  result = summary.write(tree)
  assert result['rounds'] == 4
  assert result['last'] == {'round': 4, 'test/accuracy': 0.6}
  assert result['best_validation']['round'] == 2
  assert result['best_validation']['test/accuracy'] == 0.5
  assert summary.best_round([{'round': '1', 'test/accuracy': '1'}]) is None


def test_the_round_that_is_best_by_another_figure_is_kept(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(
    fakes,
    'evaluate',
    lambda state: {
      'validation/accuracy': float(state.client_work),
      'validation/macro_f1': -abs(int(state.client_work) - 2),
    },
  )
  every = {'rounds_per_evaluation': 1, 'rounds_per_checkpoint': 9}
  for total in (3, 4):  # A resumed run keeps it, too.
    fakes.run(tmp_path, keep=1, best_by='macro_f1', total_rounds=total, **every)
    there = checkpoint.versions(str(tmp_path / 'checkpoints'))
    assert there == [2, total]


class _LeftOut(training.Hooks):
  """Hooks that name clients as left out, by round."""

  def __init__(self, failures):
    self._failures = failures

  def left_out_clients(self, round_num):
    return self._failures.get(round_num, [])


def test_clients_whose_data_cannot_be_used_are_named(tmp_path):
  reporter = fakes.Reporter()
  failures = {2: [(3, 'OSError: gone'), (4, 'no')]}
  options = {'hooks': _LeftOut(failures)}
  fakes.run(tmp_path / 'run', reporter=reporter, options=options)
  assert reporter.messages == [
    'round 2: client 3 is skipped: OSError: gone',
    'round 2: client 4 is skipped: no',
  ]
  assert len(_rows(tmp_path / 'run', 'train.csv')) == 5


def test_strict_clients_stop_before_the_round_is_released(tmp_path):
  failures = {2: [(3, 'OSError: gone')]}
  options = {'hooks': _LeftOut(failures)}
  with pytest.raises(
    UsageError, match='round 2: client 3 .*gone.*--strict_clients'
  ):
    fakes.run(tmp_path / 'run', options=options, strict_clients=True)
  assert len(_rows(tmp_path / 'run', 'train.csv')) == 2  # Rounds 0 and 1.
  failures.clear()
  fakes.run(tmp_path / 'run', options=options, strict_clients=True)
  fakes.run(tmp_path / 'other')
  assert fakes.results(tmp_path / 'run') == fakes.results(tmp_path / 'other')


_VALIDATION = {0: 0.1, 1: 0.7, 2: 0.3, 3: 0.7, 4: 0.5, 5: 0.9, 6: 0.2}


def _validate(state):
  return {
    'test/accuracy': 0.5,
    'validation/accuracy': _VALIDATION[int(state.client_work)],
  }


def test_the_best_validation_round_is_saved_and_kept(tmp_path, monkeypatch):
  """Whatever is saved besides, and wherever the run is killed."""
  monkeypatch.setattr(fakes, 'evaluate', _validate)
  settings = {
    'rounds_per_evaluation': 1,
    'rounds_per_checkpoint': 3,
    'keep': 1,
    'total_rounds': 4,
  }
  with faulty_disk.FaultyDisk().installed() as disk:
    fakes.run(tmp_path / 'whole', **settings)
  # The first of two equal ones.
  assert checkpoint.versions(str(tmp_path / 'whole' / 'checkpoints')) == [1, 4]
  for stop_at in range(0, len(disk.calls), 3):
    folder = tmp_path / str(stop_at)
    with faulty_disk.FaultyDisk(stop_at).installed():
      with pytest.raises(faulty_disk.Killed):
        fakes.run(folder, **settings)
    fakes.run(folder, **settings)
    assert fakes.results(folder) == fakes.results(tmp_path / 'whole'), stop_at
    # A kill between the last save and the removal of others leaves one more.
    there = checkpoint.versions(str(folder / 'checkpoints'))
    assert {1, 4} <= set(there) and len(there) <= 3, stop_at
    best = summary.best_round_num(str(folder / 'metrics' / 'eval.csv'))
    assert best == 1
  fakes.run(tmp_path / 'whole', **{**settings, 'total_rounds': 6})
  assert checkpoint.versions(str(tmp_path / 'whole' / 'checkpoints')) == [5, 6]


class _Recorder(training.Hooks):
  """Remembers what it is told, with the states; may fail at one call."""

  def __init__(self, fails_at=None):
    self.calls, self.states = [], {}
    self._fails_at = fails_at

  def _note(self, *call):
    self.calls.append(call)
    if call == self._fails_at:
      raise LookupError(*call)

  def begin(self, done, settings):
    self._note('begin', done, settings.total_rounds)

  @contextlib.contextmanager
  def round_context(self, round_num):
    self._note('enter', round_num)
    try:
      yield
    finally:
      self._note('leave', round_num)

  def left_out_clients(self, round_num):
    self._note('left_out_clients', round_num)
    return []

  def seconds(self):
    self._note('seconds')
    return {'device': 1.5}

  def explain_non_finite(self, state, round_num, num_clients):
    del state
    self._note('explain_non_finite', round_num, num_clients)
    return ['the reason']

  def round_done(self, state, report):
    self.states[report.round_num] = int(state.client_work)
    self._note('round_done', report.round_num, bool(report.evaluation))

  def end(self):
    self._note('end')


def _calls_of_round(round_num, *, bad=False, evaluated=False):
  return [
    ('enter', round_num),
    ('left_out_clients', round_num),
    ('seconds',),
    ('leave', round_num),
    *([('explain_non_finite', round_num, 2)] if bad else []),
    ('round_done', round_num, evaluated),
  ]


def test_hooks_are_called_in_order(tmp_path):
  hooks = _Recorder()
  process = fakes.FakeProcess(bad_rounds=[1])
  fakes.run(tmp_path / 'run', process, options={'hooks': hooks}, total_rounds=2)
  assert hooks.calls == [
    ('begin', -1, 2),
    *_calls_of_round(0, evaluated=True),
    *_calls_of_round(1, bad=True),
    *_calls_of_round(2, evaluated=True),
    ('end',),
  ]
  assert hooks.states == {0: 0, 1: 1, 2: 2}  # After the round.
  timing = _rows(tmp_path / 'run', 'timing.csv')
  assert [row['seconds/device'] for row in timing] == ['1.5'] * 3
  # They change no result.
  fakes.run(
    tmp_path / 'other', fakes.FakeProcess(bad_rounds=[1]), total_rounds=2
  )
  assert fakes.results(tmp_path / 'run') == fakes.results(tmp_path / 'other')


def test_a_resumed_run_begins_after_its_saved_round(tmp_path):
  fakes.run(tmp_path / 'run', total_rounds=2)
  hooks = _Recorder()
  fakes.run(tmp_path / 'run', options={'hooks': hooks}, total_rounds=3)
  assert hooks.calls == [
    ('begin', 2, 3),
    *_calls_of_round(3, evaluated=True),
    ('end',),
  ]


def test_hooks_find_what_is_written(tmp_path):
  """The rows when `round_context` is left, the state at `round_done`."""
  found = []

  class Look(training.Hooks):
    @contextlib.contextmanager
    def round_context(self, round_num):
      yield
      rows = _rows(tmp_path / 'run', 'train.csv')
      found.append(('rows', round_num, len(rows)))

    def round_done(self, state, report):
      del state
      versions = checkpoint.versions(str(tmp_path / 'run' / 'checkpoints'))
      found.append(('saved', report.round_num, versions[-1]))

  fakes.run(tmp_path / 'run', options={'hooks': Look()}, total_rounds=1)
  assert found == [
    ('rows', 0, 1),
    ('saved', 0, 0),
    ('rows', 1, 2),
    ('saved', 1, 1),
  ]


@pytest.mark.parametrize(
  'call, saved',
  [
    (('begin', -1, 3), []),
    (('enter', 1), [0]),
    (('left_out_clients', 1), [0]),
    (('leave', 1), [0]),
    (('explain_non_finite', 1, 2), [0]),
    (('round_done', 1, False), [0, 1]),
    (('end',), [2, 3]),
  ],
)
def test_an_exception_in_a_hook_ends_the_run_which_can_be_continued(
  tmp_path, call, saved
):
  process = lambda: fakes.FakeProcess(bad_rounds=[1])
  hooks, ended = _Recorder(fails_at=call), []
  reporter = fakes.Reporter()
  reporter.end = lambda: ended.append(True)
  with pytest.raises(LookupError) as error:
    fakes.run(
      tmp_path / 'run',
      process(),
      reporter,
      options={'hooks': hooks},
      total_rounds=3,
    )
  assert error.value.args == call
  assert hooks.calls[-1] == ('end',) and ended == [True]
  entered = [c for c in hooks.calls if c[0] == 'enter' and c != call]
  assert len([c for c in hooks.calls if c[0] == 'leave']) == len(entered)
  checkpoints = str(tmp_path / 'run' / 'checkpoints')
  # Nothing else is there: no half-written state.
  assert sorted(os.listdir(checkpoints)) == [
    f'round_{version}.ckpt' for version in saved
  ]
  for version in saved:
    checkpoint.read(checkpoint.path_of(checkpoints, version))
  fakes.run(tmp_path / 'run', process(), total_rounds=3)
  fakes.run(tmp_path / 'other', process(), total_rounds=3)
  assert fakes.results(tmp_path / 'run') == fakes.results(tmp_path / 'other')
