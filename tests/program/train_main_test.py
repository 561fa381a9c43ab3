"""Mistakes and mishaps, given to the program: one message, nothing lost."""

import contextlib
import csv
import dataclasses
import errno
import os
import pathlib
import shlex
import signal
import sys
import time
import types

import numpy as np
import pytest
import tiny_tfds

from tests.program import fakes
from tff_fssl.algorithms import registry
from tff_fssl.data import partition_draw
from tff_fssl.hparams import UsageError
from tff_fssl.program import checkpoint
from tff_fssl.program import config
from tff_fssl.program import console
from tff_fssl.program import inputs
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import train_main
from tff_fssl.runtime import devices

_CLIENTS = '--scenario=labels_at_clients'
_SMALL = (
  '--dataset=digits',
  '--algorithm=supervised',
  _CLIENTS,
  '--model=linear',
  '--norm=none',
  '--num_labels=10',
  '--num_clients=20',
  '--clients_per_round=2',
  '--client_epochs=2',
  '--total_rounds=4',
  '--tensorboard=false',
)


def test_settings_say_what_is_evaluated():
  flags = ['--dataset=digits', '--num_validation=100', '--max_bad_rounds=7']
  task = types.SimpleNamespace(
    config=config.parse_config([*flags, '--num_labels=40']),
    data=types.SimpleNamespace(test=range(1_500)),
  )
  settings = train_main.build_settings(task)
  assert settings.evaluated_on == '1,500 test and 100 validation examples'
  assert settings.max_bad_rounds == 7 and settings.first_round == -9


def test_another_partition_is_refused(tmp_path):
  tree = output_tree.OutputTree(str(tmp_path))
  tasks = []
  for seed in (0, 1):
    given = ['--dataset=digits', '--num_labels=40', f'--seed={seed}']
    settings = config.parse_config(given).partition_settings
    partition = partition_draw.build_partition(np.arange(1_000) % 10, settings)
    data = types.SimpleNamespace(class_names=tuple('abcdefghij'))
    digests = inputs.Inputs(data.class_names, {}, str(seed), {})
    tasks.append(
      types.SimpleNamespace(partition=partition, data=data, inputs=digests)
    )
  train_main.check_data(tasks[1], tree)  # There is none yet.
  train_main.record_data(tasks[0], tree)
  train_main.check_data(tasks[0], tree)
  with pytest.raises(UsageError, match='made with other partition'):
    train_main.check_data(tasks[1], tree)


def test_the_banner_shows_the_values_of_the_paper(monkeypatch):
  entry = dataclasses.replace(
    registry.REGISTRY['supervised'],
    name='paper',
    # The second has no effect without clients' batch norm.
    round_defaults={'client_epochs': 3, 'batch_norm_statistics': 'batch_mean'},
  )
  monkeypatch.setitem(registry.REGISTRY, 'paper', entry)
  small = ['--algorithm=paper', *(f for f in _SMALL if 'algorithm' not in f)]
  for given, shown in ((small, '2'), (small[:-3], '3')):
    parsed = config.parse_config(given)
    task = types.SimpleNamespace(
      config=parsed,
      data=types.SimpleNamespace(
        name='digits',
        train=[],
        test=[],
        server=None,
        example_shape=(8, 8, 1),
        num_classes=10,
      ),
      partition=partition_draw.build_partition(
        np.arange(1_000) % 10, parsed.partition_settings
      ),
      network=types.SimpleNamespace(trainable_weights=[]),
    )
    lines = train_main.banner(task, None, None, None, None).splitlines()
    (line,) = [line for line in lines if line.startswith('  with ')]
    assert line.split() == ['with', f'--client_epochs={shown}']


def test_parts_that_are_not_reached():
  flags = ['--streaming_steps=10', '--streaming_rounds=5', '--total_rounds']
  for total, words in (
    (16, '--total_rounds=16: clients have 4 of --streaming_steps=10 parts'),
    (45, 'have 9 of --streaming_steps=10 parts of their examples; the last'),
    (46, ''),
  ):
    given = config.parse_config([*flags[:2], f'{flags[2]}={total}'])
    said = train_main.unreached_parts(given)
    assert words in said and bool(said) == bool(words)


def test_an_emulated_dtype_is_told(monkeypatch):
  monkeypatch.setattr(
    devices, 'is_bfloat16_emulated', lambda names: 'cpu' in names
  )
  half, single = (
    config.parse_config([*_SMALL, f'--compute_dtype={name}'])
    for name in ('bfloat16', 'float32')
  )

  def context(**attributes):
    return types.SimpleNamespace(context=types.SimpleNamespace(**attributes))

  for given, runtime, is_told in (
    (half, context(client_devices=['cpu']), True),
    (half, context(client_devices=['gpu']), False),
    (half, context(client_devices=['cpu'], about='2 workers'), False),
    (single, context(client_devices=['cpu']), False),
  ):
    said = train_main.emulated_dtype(given, runtime)
    assert bool(said) == is_told
    assert said.startswith('--compute_dtype=bfloat16: ' * is_told)


def test_the_command_that_resumes_pre_training(tmp_path):
  tree = output_tree.OutputTree(str(tmp_path / 'a run'))
  settings = fakes.settings(first_round=-4)
  command = console.command_line('train', f'--flagfile={tree.flags_file}')
  os.makedirs(tree.checkpoints)
  for saved, words in (
    (None, 'at the start'),
    (-5, 'at the start'),
    (-2, 'after pre-training 3/5'),
    (2, 'after round 2'),
  ):
    if saved is not None:
      pathlib.Path(checkpoint.path_of(tree.checkpoints, saved)).touch()
    text = train_main.how_to_resume(settings, tree)
    assert text == f'To continue {words}:\n  {command}'


def test_the_command_that_evaluates_trusts_the_run_s_own_model(tmp_path):
  file = tmp_path / 'net.py'
  file.write_text('def build(images, num_classes, norm): pass\n')
  tree = output_tree.OutputTree('a run')
  for model, more in (('cnn', []), (f'{file}:build', ['--run_model_file'])):
    given = config.parse_config(['--dataset=digits', f'--model={model}'])
    command = train_main.evaluate_command(given, tree)
    words = shlex.split(console.command_line('evaluate'))
    assert shlex.split(command) == [*words, 'a run', *more]


def _train(folder, *flags):
  return main.run(train_main.train_main, [*flags, f'--output_dir={folder}'])


# Of a run that protects its clients, what may be published.
_PUBLIC = {
  'checkpoints',
  'flags.txt',
  'metrics/eval.csv',
  'metrics/train.csv',
  'model',
  'private.txt',
  'summary.json',
}


@pytest.mark.slow
def test_every_file_of_a_run_that_protects_clients_is_accounted_for(tmp_path):
  private = ['--aggregator=dp', '--total_rounds=1', '--tensorboard=true']
  private += ['--max_client_examples=60000']
  assert _train(tmp_path / 'run', *_SMALL, *private) == main.DONE
  names = set()
  for path in (tmp_path / 'run').rglob('*'):
    name = path.relative_to(tmp_path / 'run').as_posix()
    if path.is_file() and not name.startswith('.'):
      first = name.partition('/')[0]
      names.add(name if first == 'metrics' else first)
  hidden = names & output_tree.PRIVATE_FILES.keys()
  assert names - hidden == _PUBLIC
  assert {'partition.json', 'compute.json', 'tensorboard'} <= hidden


def _files(folder):
  """Path -> (content, time of its last change) of all but the lock."""
  paths = [path for path in pathlib.Path(folder).rglob('*') if path.is_file()]
  return {
    path: (path.read_bytes(), path.stat().st_mtime_ns)
    for path in paths
    if path.name != '.lock'
  }


def _assert_refused(code, words, capsys):
  """Exit code 2, and one message that has the words."""
  error = capsys.readouterr().err
  assert code == main.USAGE
  assert error.startswith('error: ') and error.count('error: ') == 1, error
  assert 'Traceback' not in error
  for word in words:
    assert word in error, error


@pytest.fixture
def unfinished(tmp_path):
  """The folder of a run of the default flags, and what is in it."""
  folder = tmp_path / 'run'
  fakes.run(folder, total_rounds=2)
  files = _files(folder)
  assert len(files) > 4
  return folder, files


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--num_label=40'], ['--num_label', 'did you mean --num_labels,']),
    (['--num_labels=60000'], ['--num_labels=60000', '50000']),
    # Another configuration than the one that is there:
    (['--algorithm=fixmatch'], ['--algorithm=fl2 there, fixmatch now']),
  ],
)
def test_flags(unfinished, flags, words, capsys):
  folder, files = unfinished
  _assert_refused(_train(folder, *flags), words, capsys)
  assert _files(folder) == files
  if 'there' not in words[0]:
    new = folder.parent / 'new'
    _assert_refused(_train(new, *flags), words, capsys)
    assert not new.exists()


def test_a_run_begins_again_when_asked(unfinished, monkeypatch, capsys):
  folder, files = unfinished

  def record(config, tree, view, source):
    tree.record(config)
    return 0

  monkeypatch.setattr(train_main, '_train', record)
  assert _train(folder, '--restart') == 0
  old = folder.parent / 'run.old_1'
  assert f'is in {old} now' in ' '.join(capsys.readouterr().out.split())
  assert {old / path.relative_to(folder) for path in files} == set(_files(old))
  assert set(_files(folder)) == {folder / 'flags.txt'}
  assert 'restart' not in (folder / 'flags.txt').read_text()


@pytest.mark.parametrize('number', [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_to(
  unfinished, number, monkeypatch, capsys
):
  # Not by permissions, which do not bind root.
  folder, files = unfinished
  real_open, real_mkdir = os.open, os.mkdir

  def refuse(path):
    if str(path).startswith(str(folder.parent)):
      raise OSError(number, os.strerror(number), path)

  def open_(path, mode, *args, **kwargs):
    if mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
      refuse(path)
    return real_open(path, mode, *args, **kwargs)

  def mkdir(path, *args, **kwargs):
    refuse(path)
    return real_mkdir(path, *args, **kwargs)

  monkeypatch.setattr(os, 'open', open_)
  monkeypatch.setattr(os, 'mkdir', mkdir)
  reason = {errno.EROFS: 'is read-only', errno.EACCES: 'no permission'}[number]
  words = [str(folder), reason, 'choose another --output_dir']
  _assert_refused(_train(folder), words, capsys)
  words[0] = str(folder.parent / 'new')
  _assert_refused(_train(folder.parent / 'new'), words, capsys)
  monkeypatch.undo()
  assert _files(folder) == files


@pytest.mark.parametrize(
  'what, words',
  [
    ('missing', ["tfds.load('cifar10'"]),
    ('another', ['is not cifar10: it has 7 classes']),
  ],
)
def test_data(unfinished, what, words, capsys):
  folder, files = unfinished
  data = folder.parent / 'data'
  data.mkdir()
  if what != 'missing':
    tiny_tfds.write(data, 'cifar10', {'train': 300, 'test': 20}, 7)
  words = [*words, str(data)]
  _assert_refused(_train(folder, f'--data_dir={data}'), words, capsys)
  assert _files(folder) == files
  new = folder.parent / 'new'
  _assert_refused(_train(new, f'--data_dir={data}'), words, capsys)
  assert not _files(new)


def test_an_availability_file_that_is_wrong(unfinished, capsys):
  folder, files = unfinished
  path = folder.parent / 'availability.csv'
  new, flag = folder.parent / 'new', f'--availability_file={path}'
  _assert_refused(_train(new, flag), [flag, 'does not exist'], capsys)
  path.write_text('client,from,to\n100,1,5\n')
  words = [flag, 'line 2: client 100: clients are 0 to 99']
  _assert_refused(_train(new, flag), words, capsys)
  words = ['--availability_file= there', f'{path} now']
  _assert_refused(_train(folder, flag), words, capsys)
  assert _files(folder) == files


@pytest.mark.slow
def test_a_run_with_losses_is_the_same_when_resumed(tmp_path, capsys):
  path, rows = tmp_path / 'day.csv', ['client,from,to']
  rows += [f'{i},{1 + i % 2},{2 + i % 2}' for i in range(18)]
  path.write_text('\n'.join(rows) + '\n')
  flags = [
    *(flag for flag in _SMALL if 'clients_per_round' not in flag),
    f'--availability_file={path}',
    '--availability_period=2',
    '--clients_per_round=3',
    '--dropout_probability=0.5',
    '--straggler_probability=0.5',
    '--overselect=0.5',
    '--min_clients=2',
    '--total_rounds=6',
  ]
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert not _train(whole, *flags)
  for total in (1, 4, 6):
    assert not _train(parts, *flags, f'--total_rounds={total}')
  tables = [(f / 'metrics/train.csv').read_bytes() for f in (whole, parts)]
  assert tables[0] == tables[1]
  with open(whole / 'metrics/train.csv') as file:
    read = list(csv.DictReader(file))
  too_few = [int(row['participation/too_few_clients']) for row in read]
  assert set(too_few) == {0, 1}
  first, second = (
    checkpoint.read(checkpoint.path_of(str(folder / 'checkpoints'), 6))
    for folder in (whole, parts)
  )
  assert first.keys() == second.keys()
  for name, value in first.items():
    np.testing.assert_array_equal(value, second[name])
  # Its copy is compared.
  capsys.readouterr()
  path.write_text('client,from,to\n3,1,2\n')
  words = ['has changed since the run was made', 'parts/availability.csv']
  code = _train(parts, *flags, '--total_rounds=7')
  _assert_refused(code, words, capsys)


def test_a_dirichlet_split_that_cannot_reach_its_minimum(tmp_path, capsys):
  flags = ['--dataset=digits', '--partition=dirichlet', '--alpha=0.05']
  code = _train(tmp_path / 'run', *flags, '--num_clients=100')
  words = ['--min_client_examples=10', '--alpha', 'or less']
  _assert_refused(code, words, capsys)
  assert not _files(tmp_path / 'run')


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
  round_done = console.Console.round_done

  def interrupt(self, report):
    round_done(self, report)
    if report.round_num == 1:
      os.kill(os.getpid(), signal.SIGINT)

  monkeypatch.setattr(console.Console, 'round_done', interrupt)
  folder = tmp_path / 'run'
  code = _train(folder, *_SMALL, '--rounds_per_checkpoint=50')
  assert code == main.INTERRUPTED == 130
  tree = output_tree.OutputTree(str(folder))
  [saved] = checkpoint.versions(tree.checkpoints)
  assert capsys.readouterr().out.endswith(
    f'Stopped and saved. To continue after round {saved}:\n'
    f'  {console.command_line("train", f"--flagfile={tree.flags_file}")}\n'
  )
  with open(tree.train_csv) as file:
    assert list(csv.DictReader(file))[-1]['round'] == str(saved)


@pytest.mark.parametrize('restart', [(), ('--restart',)])
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signals_in_the_start_end_the_program(
  number, restart, tmp_path, monkeypatch, capsys
):
  folder = tmp_path / 'run'
  if restart:
    fakes.run(folder, total_rounds=2)

  def terminate(config, tree, view, source):
    assert tree.is_new and os.path.isdir(tree.checkpoints)
    with contextlib.suppress(KeyboardInterrupt):  # As imports do.
      os.kill(os.getpid(), number)
      time.sleep(9)

  monkeypatch.setattr(train_main, '_train', terminate)
  monkeypatch.setattr(main.os, '_exit', sys.exit)
  with pytest.raises(SystemExit) as end:
    _train(folder, *_SMALL, *restart)
  assert end.value.code == 128 + number
  how = 'terminated' if number == signal.SIGTERM else 'interrupted'
  assert capsys.readouterr().err == f'error: {how}\n'
  # The run that was there is kept.
  names = ['run', 'run.old_1'] if restart else ['run']
  assert sorted(os.listdir(tmp_path)) == names
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_pre_training_that_is_not_finite(tmp_path, capsys):
  code = _train(
    tmp_path / 'run',
    *_SMALL,
    '--scenario=labels_at_server',
    '--num_pretraining_rounds=3',
    '--server_learning_rate=1e38',
    '--max_bad_rounds=2',
  )
  message = capsys.readouterr().err
  assert code == main.NOT_FINITE
  assert 'pre-training was not finite in 2 rounds in a row' in message
  assert '--server_learning_rate' in message and 'robust' not in message


def test_rounds_without_a_finite_update(tmp_path, capsys):
  folder = tmp_path / 'run'
  code = _train(
    folder, *_SMALL, '--client_learning_rate=1e38', '--max_bad_rounds=2'
  )
  captured = capsys.readouterr()
  assert code == main.NOT_FINITE
  assert 'no update could be used in 2 rounds in a row' in captured.err
  assert '--debug_non_finite shows' in captured.err
  assert captured.out.count('BAD: no usable update') == 2
  tree = output_tree.OutputTree(str(folder))
  with open(tree.train_csv) as file:
    rows = list(csv.DictReader(file))
  assert [row['bad_round'] for row in rows] == ['1', '1']
  for row in rows:
    assert row['client_work/train/num_non_finite_clients'] == '2'
  state = checkpoint.read(checkpoint.path_of(tree.checkpoints, 2))
  weights = [v for k, v in state.items() if 'global_model_weights' in k]
  assert weights and all(np.all(np.isfinite(w)) for w in weights)
