"""The programs end to end, on real digits."""

import csv
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import leftovers
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import evaluation
from tff_fssl.program import experiment
from tff_fssl.program import exported
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import summary
from tff_fssl.program import train_main
from tff_fssl.program import training
from tff_fssl.program import warm_start

_ROOT = os.path.join(os.path.dirname(__file__), '..', '..')
_FLAGS = (
  '--algorithm=fl2',
  '--dataset=digits',
  '--model=cnn',
  '--num_labels=40',
  '--num_validation=100',
  '--num_clients=20',
  '--clients_per_round=2',
  '--streaming_steps=2',
  '--streaming_rounds=1',
  '--client_epochs=1',
  '--server_epochs=1',
  '--num_pretraining_rounds=2',
  '--total_rounds=4',
  '--rounds_per_evaluation=2',
  '--rounds_per_checkpoint=2',
  '--keep_checkpoints=9',
)


def _train(folder, *flags):
  return main.run(
    train_main.train_main, [*_FLAGS, f'--output_dir={folder}', *flags]
  )


def _bytes(path):
  with open(path, 'rb') as file:
    return file.read()


def _assert_equal_runs(first, second):
  a, b = (output_tree.OutputTree(str(folder)) for folder in (first, second))
  assert _bytes(a.train_csv) == _bytes(b.train_csv)
  assert _bytes(a.eval_csv) == _bytes(b.eval_csv)
  assert _bytes(a.partition_json) == _bytes(b.partition_json)
  last = checkpoint.versions(a.checkpoints)[-1]
  assert _bytes(checkpoint.path_of(a.checkpoints, last)) == _bytes(
    checkpoint.path_of(b.checkpoints, last)
  )


def _rows(path):
  with open(path) as file:
    return list(csv.DictReader(file))


def _drop_last(tree, version):
  """Leaves what a kill before the checkpoint `version` leaves."""
  os.unlink(checkpoint.path_of(tree.checkpoints, version))
  shutil.rmtree(tree.model)
  shutil.rmtree(tree.model_best)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """(folder, standard output) of a finished run."""
  folder = str(tmp_path_factory.mktemp('runs') / 'finished')
  with pytest.MonkeyPatch.context() as patch:
    path = folder + '.log'
    with open(path, 'w') as log:
      patch.setattr(sys, 'stdout', log)
      assert _train(folder) == 0
  with open(path) as log:
    return folder, log.read()


@pytest.mark.slow
def test_a_partition_from_a_file_gives_the_same_run(finished, tmp_path):
  source = output_tree.OutputTree(finished[0]).partition_json
  file, folder = str(tmp_path / 'partition.json'), str(tmp_path / 'run')
  shutil.copy(source, file)
  assert _train(folder, f'--partition_file={file}') == 0
  _assert_equal_runs(finished[0], folder)
  # The run can do without the file.
  os.unlink(file)
  for examples in ('test', 'validation'):
    argv = [folder, f'--examples={examples}']
    assert main.run(evaluation.evaluate_main, argv) == 0
  model = os.path.join(folder, 'model')
  assert main.run(evaluation.evaluate_main, [model]) == 0
  argv = [model, '--examples=validation']
  assert main.run(evaluation.evaluate_main, argv) == main.USAGE
  assert _train(folder, f'--partition_file={file}') == main.USAGE
  own = output_tree.OutputTree(folder).partition_json
  assert _train(folder, f'--partition_file={own}') == 0


def test_what_it_prints(finished):
  _, output = finished
  lines = output.splitlines()
  assert max(map(len, lines)) <= 80 or '/' in max(lines, key=len)
  rounds = [line for line in lines if line.startswith(('pre-tr', 'round '))]
  assert [' '.join(line.split()[:2]) for line in rounds] == [
    *('pre-training 1/2', 'pre-training 2/2'),
    *(f'round {r}/4' for r in range(1, 5)),
  ]
  assert 'PL rate' in rounds[-1] and 'val' in rounds[-1]
  for words in (
    '40 at the server',
    '20, IID, 64 examples each',
    'cnn, norm sbn',
    'after 2 of server pre-training',
    'last round',
    'best validation',
    'programs/plot.py',
  ):
    assert words in output
  text = ' '.join(output.split())
  assert ' compute at most ' in text
  assert ' forward-equivalents)' in text


def test_what_it_writes(finished):
  tree = output_tree.OutputTree(finished[0])
  for path in (
    tree.flags_file,
    tree.partition_json,
    tree.partition_png,
    tree.compute_json,
    tree.timing_csv,
    tree.summary_json,
    os.path.join(tree.model, 'saved_model.pb'),
    os.path.join(tree.model, 'model.keras'),
    os.path.join(tree.model, 'README.md'),
  ):
    assert os.path.getsize(path) > 0, path
  assert os.listdir(tree.tensorboard)
  assert checkpoint.versions(tree.checkpoints) == [0, 2, 4]
  rows = _rows(tree.train_csv)
  assert [row['round'] for row in rows] == ['-1', '0', '1', '2', '3', '4']
  last = rows[-1]
  assert last['client_work/train/num_clients'] == '2'
  assert int(last['communication/bytes_up_per_client']) > 0
  assert 0 < float(last['client_work/train/pseudo_label_ratio']) <= 1
  timing = _rows(tree.timing_csv)[-1]
  for name in ('clients', 'aggregation', 'server', 'round', 'evaluation'):
    assert float(timing[f'seconds/{name}']) >= 0
  with open(tree.summary_json) as file:
    summary = json.load(file)
  assert summary['rounds'] == 4
  assert summary['last']['test/accuracy'] > 0.15


def test_what_tensorboard_shows(finished):
  tree = output_tree.OutputTree(finished[0])
  # One file: of several in a folder, TensorBoard follows the newest only.
  (file,) = os.listdir(tree.tensorboard)
  found = event_accumulator.EventAccumulator(
    os.path.join(tree.tensorboard, file), {'tensors': 0}
  ).Reload()
  values = {
    tag: {event.step: tf.make_ndarray(event.tensor_proto) for event in events}
    for tag in found.Tags()['tensors']
    for events in [found.Tensors(tag)]
  }
  for row in _rows(tree.eval_csv):
    shown = values['test/accuracy'][int(row['round'])]
    assert float(shown) == pytest.approx(float(row['test/accuracy']))
  # Buckets of confidences: left, right, count; none is below chance.
  evaluated = {int(row['round']) for row in _rows(tree.eval_csv)}
  assert set(values['test/confidence']) == evaluated
  for buckets in values['test/confidence'].values():
    assert buckets[:, 2].sum() == 360
    assert buckets[0, 0] >= 0.1 and buckets[-1, 1] <= 1.001
  for name, least in (('views', (3 * 64, 8 * 64)), ('partition', (200, 400))):
    (picture,) = values[f'pictures/{name}'].values()
    width, height, png = picture[0], picture[1], picture[2]
    pixels = tf.io.decode_png(png).numpy()
    assert pixels.shape[:2] == (int(height), int(width))
    assert int(height) >= least[0] and int(width) >= least[1]
    assert pixels.std() > 10
  with open(tree.summary_json) as summary_file:
    best = json.load(summary_file)['best_validation']
  (of_best,) = values['best_validation/test/accuracy'].values()
  assert float(of_best) == pytest.approx(best['test/accuracy'])
  plugin = {
    tag: plugin_data_pb2.HParamsPluginData.FromString(
      found.SummaryMetadata(tag).plugin_data.content
    )
    for tag in found.PluginTagToContent('hparams')
  }
  started = plugin['_hparams_/session_start_info'].session_start_info
  assert started.hparams['algorithm'].string_value == 'fl2'
  assert started.hparams['num_labels'].number_value == 40
  metrics = plugin['_hparams_/experiment'].experiment.metric_infos
  assert 'test/accuracy' in [metric.name.tag for metric in metrics]
  ended = plugin['_hparams_/session_end_info'].session_end_info
  assert ended.status == api_pb2.STATUS_SUCCESS


@pytest.mark.slow
def test_a_tracked_run_is_killed_and_goes_on(finished, tmp_path, monkeypatch):
  mlflow = pytest.importorskip('mlflow')
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  store, folder = str(tmp_path / 'mlruns'), str(tmp_path / 'run')
  track = f'--track=mlflow:{store},wandb:it'
  round_done = experiment.ExperimentHooks.round_done

  def die(self, state, report):
    round_done(self, state, report)
    if report.round_num == 3:
      raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(experiment.ExperimentHooks, 'round_done', die)
    assert _train(folder, track) == main.INTERRUPTED
  client = mlflow.MlflowClient(store)
  experiment_id = client.get_experiment_by_name('tff_fssl').experiment_id
  (run,) = client.search_runs([experiment_id])
  assert run.info.status == 'KILLED'
  assert _train(folder, track) == 0
  _assert_equal_runs(finished[0], folder)
  (run,) = client.search_runs([experiment_id])
  assert run.info.status == 'FINISHED'
  assert (
    run.data.params['algorithm'] == 'fl2' and 'track' not in run.data.params
  )
  history = client.get_metric_history(run.info.run_id, 'test/accuracy')
  tree = output_tree.OutputTree(folder)
  rows = _rows(tree.eval_csv)
  assert [metric.step for metric in history] == [int(r['round']) for r in rows]
  for metric, row in zip(history, rows):
    assert metric.value == pytest.approx(float(row['test/accuracy']))
  model = client.download_artifacts(run.info.run_id, 'model', str(tmp_path))
  assert exported.problem(model, 4) == ''
  listed = {item.path for item in client.list_artifacts(run.info.run_id)}
  assert {'model', 'model_best', 'pictures', 'flags.txt'} <= listed


@pytest.mark.parametrize('which', ['last', 'best_validation'])
def test_the_card_has_the_run_s_figures_and_its_code_runs(
  which, finished, monkeypatch, capsys
):
  tree = output_tree.OutputTree(finished[0])
  with open(tree.summary_json) as file:
    row = json.load(file)[which]
  folder = tree.model if which == 'last' else tree.model_best
  card = pathlib.Path(folder, 'README.md').read_text()
  accuracy = f'{100 * row["test/accuracy"]:.1f}%'
  assert f'| test | 360 | {accuracy} |' in card
  assert f'after round {row["round"]},' in card
  assert ('is best on validation' in card) == (which == 'best_validation')
  assert str(finished[0]) not in card
  assert exported.problem(folder, row['round']) == ''
  monkeypatch.chdir(folder)
  (code,) = re.findall('```python\n(.*?)```', card, re.DOTALL)
  exec(code, {})  # pylint: disable=exec-used
  shown = capsys.readouterr().out
  assert re.fullmatch(r"\['\d', '\d'\]\n", shown)


def test_the_same_command_again_says_that_it_is_finished(
  finished, capsys, monkeypatch
):
  monkeypatch.setattr(experiment, 'build_task', None)  # It builds nothing.
  assert _train(finished[0]) == 0
  assert 'has finished its 4 rounds' in capsys.readouterr().out


def test_a_killed_run_goes_on_to_the_same_results(finished, tmp_path, capsys):
  """What a kill in round 3 leaves: rows without a state, one of them torn."""
  folder = str(tmp_path / 'killed')
  shutil.copytree(finished[0], folder)
  tree = output_tree.OutputTree(folder)
  _drop_last(tree, 4)
  with open(tree.train_csv, 'r+b') as file:
    file.truncate(os.path.getsize(tree.train_csv) - 20)
  flags = f'--flagfile={tree.flags_file}'
  code = main.run(
    train_main.train_main,
    [
      flags,
      f'--output_dir={folder}',
      '--client_threads=1',
      '--profile=1,4',
      '--tensorboard=false',
    ],
  )
  assert code == 0
  output = capsys.readouterr().out
  assert 'round  3/4' in output and 'round  2/4' not in output
  _assert_equal_runs(finished[0], folder)
  # The profile of a round that was run, and of no other.
  profiles = pathlib.Path(tree.tensorboard).glob('round_*/**/*.xplane.pb')
  (profile,) = profiles
  assert profile.relative_to(tree.tensorboard).parts[0] == 'round_4'
  assert 'Profile of round 4:' in output
  space = xplane_pb2.XSpace.FromString(profile.read_bytes())
  (host,) = (p for p in space.planes if p.name == '/host:CPU')
  names = {event.name for event in host.event_metadata.values()}
  assert 'round' in names and any('Conv2D' in name for name in names)


@pytest.mark.slow
def test_the_best_round_is_kept_and_exported_whatever_happens(
  tmp_path, monkeypatch, capsys
):
  """Killed after each of its rounds, with one checkpoint kept."""
  flags = ('--keep_checkpoints=1', '--rounds_per_checkpoint=9')
  flags += ('--rounds_per_evaluation=1', '--server_learning_rate=0.2')
  whole, killed = str(tmp_path / 'whole'), str(tmp_path / 'killed')
  assert _train(whole, *flags) == 0
  save = training.DurableProgramStateManager.save

  async def die(self, state, version):
    await save(self, state, version)
    raise KeyboardInterrupt

  while not os.path.exists(os.path.join(killed, 'summary.json')):
    with monkeypatch.context() as patch:
      patch.setattr(training.DurableProgramStateManager, 'save', die)
      assert _train(killed, *flags) in (0, 130)
  a, b = output_tree.OutputTree(whole), output_tree.OutputTree(killed)
  best = summary.best_round_num(a.eval_csv)
  assert set(checkpoint.versions(a.checkpoints)) == {best, 4}
  assert set(checkpoint.versions(b.checkpoints)) == {best, 4}
  assert _bytes(a.eval_csv) == _bytes(b.eval_csv)
  assert _bytes(os.path.join(a.model_best, 'model.keras'))
  for tree in (a, b):
    assert exported.problem(tree.model_best, best) == ''
    leaves = checkpoint.read(checkpoint.path_of(tree.checkpoints, best))
    weights = warm_start.extract_model(leaves)
    task = experiment.build_task(
      config_lib.parse_config([f'--flagfile={tree.flags_file}'])
    )
    source = warm_start.find(tree.model_best)
    loaded = warm_start.load(source, task.model_fn()).weights
    for x, y in zip(
      weights[0] + weights[1], loaded[0] + loaded[1], strict=True
    ):
      np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('what', ['old', 'torn', 'best', 'csv'])
def test_what_is_not_finished(what, finished, tmp_path, monkeypatch):
  folder = str(tmp_path / 'run')
  shutil.copytree(finished[0], folder)
  tree = output_tree.OutputTree(folder)
  if what == 'old':
    # As a run that was extended and killed before its export has it.
    exported.write_manifest(tree.model, 3)
  elif what == 'torn':
    os.truncate(os.path.join(tree.model, 'saved_model.pb'), 1000)
  elif what == 'csv':
    os.unlink(tree.train_csv)
  else:
    os.unlink(os.path.join(tree.model_best, 'model.keras'))
  monkeypatch.setattr(train_main, '_train', lambda *args: 'continues')
  assert _train(tree.path) == 'continues'


@pytest.mark.slow
@pytest.mark.parametrize('what', ['extended', 'torn', 'missing', 'best'])
def test_finished_means_that_the_last_model_is_exported(
  what, finished, tmp_path, capsys
):
  folder = str(tmp_path / 'run')
  shutil.copytree(finished[0], folder)
  tree = output_tree.OutputTree(folder)
  damaged = tree.model_best if what == 'best' else tree.model
  last = 4
  if what == 'extended':
    # Killed after the last round, before its export.
    older = str(tmp_path / 'older')
    shutil.copytree(tree.model, older)
    assert _train(folder, '--total_rounds=5') == 0
    shutil.rmtree(tree.model)
    shutil.copytree(older, tree.model)
    last = 5
  elif what == 'torn':
    os.truncate(os.path.join(damaged, 'saved_model.pb'), 1000)
  else:
    os.unlink(os.path.join(damaged, 'model.keras'))
  capsys.readouterr()
  assert _train(folder, f'--total_rounds={last}') == 0
  assert 'has finished' not in capsys.readouterr().out
  best = summary.best_round_num(tree.eval_csv)
  assert exported.problem(tree.model, last) == ''
  assert exported.problem(tree.model_best, best) == ''
  assert _train(folder, f'--total_rounds={last}') == 0
  assert 'has finished' in capsys.readouterr().out


def test_the_checkpoint_of_another_model_is_refused(finished, tmp_path, capsys):
  """Its header says so; and so it does if the header lies about the run."""
  folder = str(tmp_path / 'run')
  shutil.copytree(finished[0], folder)
  tree = output_tree.OutputTree(folder)
  path = checkpoint.path_of(tree.checkpoints, 4)
  leaves, header = checkpoint.read(path), checkpoint.read_header(path)
  train = [*_FLAGS, f'--output_dir={folder}', '--total_rounds=5']
  of_other_flags = checkpoint.Owner({**header.owner.flags, 'norm': 'gn'})
  of_other_model = checkpoint.Owner(
    header.owner.flags, {**header.owner.model, 'non_trainable': []}
  )
  other_model = '0 non_trainable_variables there, 8 here'
  for owner, word, program, argv in (
    (of_other_flags, '--norm=gn there', evaluation.evaluate_main, [folder]),
    (of_other_model, other_model, evaluation.evaluate_main, [folder]),
    (of_other_model, other_model, train_main.train_main, train),
  ):
    with open(path, 'wb') as file:
      file.writelines(checkpoint.encode(leaves, owner))
    content = _bytes(path)
    assert main.run(program, argv) == 2
    error = capsys.readouterr().err
    assert word in error and error.count('\n') == 1, error
    assert _bytes(path) == content


def test_evaluations_agree(finished, capsys):
  tree = output_tree.OutputTree(finished[0])
  rows = {row['round']: row for row in _rows(tree.eval_csv)}
  best = str(summary.best_round_num(tree.eval_csv))
  for argv, row, split in (
    ([tree.path], '4', 'test'),
    ([tree.path, '--round=2', '--examples=validation'], '2', 'validation'),
    ([tree.path, '--round=best', '--examples=validation'], best, 'validation'),
    ([tree.model], '4', 'test'),
    ([tree.model_best], best, 'test'),
  ):
    assert main.run(evaluation.evaluate_main, argv) == 0
    words = capsys.readouterr().out.split()
    accuracy = float(words[words.index('accuracy') + 1])
    expected = float(rows[row][f'{split}/accuracy'])
    np.testing.assert_allclose(accuracy, expected, atol=6e-5)


@pytest.mark.parametrize(
  'argv, word',
  [
    ([], 'give one'),
    (['/nowhere'], 'is neither a run'),
    (['RUN', '--round=3'], 'there are: 0, 2, 4'),
    (['RUN', '--round=latest'], 'allowed are last, best and the number'),
    (['RUN/model', '--round=3'], 'has one round only'),
  ],
)
def test_evaluations_that_cannot_be(finished, argv, word, capsys):
  argv = [argument.replace('RUN', finished[0]) for argument in argv]
  assert main.run(evaluation.evaluate_main, argv) == 2
  assert word in capsys.readouterr().err


@pytest.mark.slow
def test_a_warm_start(finished, tmp_path, capsys):
  source, warm = str(tmp_path / 'source'), str(tmp_path / 'warm')
  shutil.copytree(finished[0], source)
  flags = [f'--init_from={source}', '--num_pretraining_rounds=0', '--seed=1']
  flags += ['--total_rounds=2', '--rounds_per_evaluation=1']
  assert _train(warm, *flags) == 0
  output = ' '.join(capsys.readouterr().out.split())  # It may be wrapped.
  assert f'starts from {source}, round 4' in output
  tree, of_source = (output_tree.OutputTree(path) for path in (warm, source))
  # The test set does not depend on the seed.
  first, last = (_rows(t.eval_csv)[i] for t, i in ((tree, 0), (of_source, -1)))
  assert (first['round'], last['round']) == ('0', '4')
  assert first['test/accuracy'] == last['test/accuracy']
  assert first['test/loss'] == last['test/loss']
  new, old = (
    warm_start.extract_model(
      checkpoint.read(checkpoint.path_of(folder, version))
    )
    for folder, version in ((tree.checkpoints, 0), (of_source.checkpoints, 4))
  )
  assert new.statistics_count == old.statistics_count > 1
  for a, b in zip(new[0] + new[1], old[0] + old[1], strict=True):
    np.testing.assert_array_equal(a, b)
  # Killed and continued when its source has gone: as if it had not been.
  killed = str(tmp_path / 'killed')
  shutil.copytree(warm, killed)
  _drop_last(output_tree.OutputTree(killed), 2)
  shutil.rmtree(source)
  assert _train(killed, *flags) == 0
  _assert_equal_runs(warm, killed)
  capsys.readouterr()
  assert _train(killed, *flags[1:]) == 2
  assert '--init_from' in capsys.readouterr().err


@pytest.mark.slow
def test_layers_that_do_not_train(finished, tmp_path, capsys):
  """They stay to the bit, travel nowhere, and are needed to go on."""
  source, folder = finished[0], str(tmp_path / 'run')
  flags = [f'--init_from={source}/model', '--train_layers=conv4|norm4|logits']
  flags += ['--num_pretraining_rounds=0']
  assert _train(folder, *flags, '--total_rounds=1') == 0
  assert _train(folder, *flags, '--total_rounds=2') == 0
  tree, of_source = (output_tree.OutputTree(x) for x in (folder, source))
  output = ' '.join(capsys.readouterr().out.split())
  assert '112,138 weights that train (75,040 others do not)' in output
  first, last = _rows(tree.eval_csv)[0], _rows(tree.eval_csv)[-1]
  before = _rows(of_source.eval_csv)[-1]
  assert first['test/loss'] == before['test/loss'] != last['test/loss']
  sent = {
    float(row['communication/bytes_up_model']) for row in _rows(tree.train_csv)
  }
  assert sent == {4 * 112_138 + 4}  # And the count of the statistics.
  exported_models = [
    tf.keras.models.load_model(f'{path}/model/model.keras')
    for path in (source, folder)
  ]
  stays, changes = (
    [model.get_layer(name).get_weights() for model in exported_models]
    for name in ('conv3', 'logits')
  )
  np.testing.assert_array_equal(*stays)
  assert np.any(changes[0][0] != changes[1][0])
  for what in (folder, f'{folder}/model'):
    assert main.run(evaluation.evaluate_main, [what]) == 0
    words = capsys.readouterr().out.split()
    accuracy = float(words[words.index('accuracy') + 1])
    np.testing.assert_allclose(
      accuracy, float(last['test/accuracy']), atol=6e-5
    )
  # The weights of another run, a torn file, and none at all.
  content = _bytes(tree.frozen)
  leaves = checkpoint.read(tree.frozen)
  other = b''.join(checkpoint.encode(leaves, checkpoint.Owner({})))
  for damaged, word in (
    (other, 'another run'),
    (content[:-9], 'truncated'),
    (None, 'No such file'),
  ):
    os.remove(tree.frozen)
    if damaged is not None:
      pathlib.Path(tree.frozen).write_bytes(damaged)
    for program, argv in (
      (evaluation.evaluate_main, [folder]),
      (train_main.train_main, [*_FLAGS, f'--output_dir={folder}', *flags]),
      (
        train_main.train_main,
        [*_FLAGS, f'--output_dir={tmp_path}/new', f'--init_from={folder}'],
      ),
    ):
      assert main.run(program, argv) == 2
      error = capsys.readouterr().err
      assert 'frozen.ckpt' in error and word in error, error
      assert error.count('\n') == 1


@pytest.mark.parametrize(
  'flags, word',
  [
    (['--client_devices=gpu:77'], 'gpu:77'),
    (['--init_from=/nowhere'], 'does not exist'),
    (['--train_layers=logits'], 'would stay random'),
    (['--init_from=FINISHED', '--model=resnet9'], '16 here'),
    (['--num_clients=1400', '--num_labels=400'], '--num_clients=1400'),
  ],
)
def test_refusals_leave_the_folder_free(
  finished, tmp_path, flags, word, capsys
):
  flags = [flag.replace('FINISHED', finished[0]) for flag in flags]
  folder = tmp_path / 'run'
  assert _train(folder, *flags) == 2
  error = capsys.readouterr().err
  assert word in error and 'Traceback' not in error
  assert leftovers.files_in(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
  'schedule',
  [
    ['--learning_rate_schedule=cosine', '--schedule_rounds=4'],
    # At such a rate the loss does not fall.
    [
      *('--learning_rate_schedule=plateau', '--schedule_patience=1'),
      *('--server_learning_rate=1e9', '--max_gradient_norm=1'),
    ],
  ],
)
def test_more_rounds_are_as_if_all_had_been_asked_for(
  schedule, tmp_path, capsys
):
  for name, totals in (('at_once', [4]), ('in_two', [2, 4])):
    for total in totals:
      assert _train(tmp_path / name, *schedule, f'--total_rounds={total}') == 0
  _assert_equal_runs(tmp_path / 'at_once', tmp_path / 'in_two')
  said = 'validation loss has stopped falling; learning rates are now 0.33 of'
  assert (said in capsys.readouterr().out) == ('plateau' in schedule[0])


@pytest.mark.parametrize('name', ['train', 'compare'])
def test_programs_start_from_anywhere_without_installation(name, tmp_path):
  program = os.path.abspath(os.path.join(_ROOT, 'programs', f'{name}.py'))
  environment = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  done = subprocess.run(
    [sys.executable, '-X', 'importtime', program, '--help'],
    capture_output=True,
    text=True,
    check=False,
    cwd=tmp_path,
    env=environment,
  )
  assert done.returncode == 0 and 'usage:' in done.stdout
  lines = done.stderr.splitlines()
  assert all(line.startswith('import time:') for line in lines)
  assert not any(line.endswith(' tensorflow') for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_resume(number, finished, tmp_path):
  folder = str(tmp_path / 'run')
  command = [
    sys.executable,
    os.path.join(_ROOT, 'programs', 'train.py'),
    *_FLAGS,
    f'--output_dir={folder}',
    '--rounds_per_checkpoint=50',
  ]
  program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  for line in program.stdout:
    if line.startswith('round  1/'):
      program.send_signal(number)
      break
  rest = program.stdout.read()
  assert program.wait() == 128 + number
  # The last line is the command that resumes.
  said, resume = rest.splitlines()[-2:]
  assert said.startswith('Stopped and saved. To continue after round ')
  assert subprocess.run(resume, shell=True, check=False).returncode == 0
  _assert_equal_runs(finished[0], folder)


@pytest.mark.slow
def test_the_model_loads_without_this_package(finished, tmp_path):
  code = """
import sys
import numpy as np
import tensorflow as tf
folder = sys.argv[1]
model = tf.saved_model.load(folder).signatures['serving_default']
images = np.random.default_rng(0).integers(0, 256, [3, 8, 8, 1], np.uint8)
probs = model(images=tf.constant(images))['probabilities'].numpy()
np.testing.assert_allclose(probs.sum(-1), 1.0, atol=1e-5)
import json
about = json.load(open(folder + '/about.json'))['inputs_of_model.keras']
inputs = (images / 255 - about['mean']) / about['std']
network = tf.keras.models.load_model(folder + '/model.keras')
logits = network(tf.constant(inputs, tf.float32), training=False)
np.testing.assert_allclose(tf.nn.softmax(logits), probs, atol=1e-5)
assert not [name for name in sys.modules if name.startswith('tff_fssl')]
"""
  model = output_tree.OutputTree(finished[0]).model
  subprocess.run([sys.executable, '-c', code, model], check=True, cwd=tmp_path)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path):
  folder = str(tmp_path / 'run')
  command = [
    sys.executable,
    os.path.join(_ROOT, 'programs', 'train.py'),
    *_FLAGS,
    f'--output_dir={folder}',
    '--client_epochs=1000',
  ]
  program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  for line in program.stdout:
    if line.startswith('pre-training  2/2'):
      time.sleep(1)
      program.send_signal(signal.SIGINT)
    elif line.startswith('SIGINT'):
      time.sleep(2.5)  # Signals within two seconds are one.
      program.send_signal(signal.SIGINT)
      break
  rest = program.stdout.read()
  assert program.wait() == 130
  assert 'Stopped at once. To continue after pre-training 2/2' in rest


@pytest.mark.slow
def test_sigkill_anywhere(finished, tmp_path):
  folder = str(tmp_path / 'run')
  command = [
    sys.executable,
    os.path.join(_ROOT, 'programs', 'train.py'),
    *_FLAGS,
    f'--output_dir={folder}',
  ]
  for delay in (0.0, 0.1, 0.35):
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in program.stdout:
      if line.startswith('round'):
        time.sleep(delay)
        program.kill()
        break
    assert program.wait() == -signal.SIGKILL
    program.stdout.close()
  assert subprocess.run(command, check=False).returncode == 0
  _assert_equal_runs(finished[0], folder)


@pytest.mark.slow
def test_a_worker_that_dies_in_a_round_changes_nothing(
  tmp_path, monkeypatch, capsys
):
  from tff_fssl.runtime import worker  # Imports TFF.

  whole, killed = str(tmp_path / 'whole'), str(tmp_path / 'killed')
  assert _train(whole, '--runtime=tff_worker') == 0
  invoke = worker._Worker.invoke
  invocations = iter(range(99))

  def invoke_and_kill(self, comp, arg):
    if next(invocations) % 3 == 2:
      threading.Timer(0.05, self._process.kill).start()
    return invoke(self, comp, arg)

  monkeypatch.setattr(worker._Worker, 'invoke', invoke_and_kill)
  capsys.readouterr()
  assert _train(killed, '--runtime=tff_worker') == 0
  output = ' '.join(capsys.readouterr().out.split())
  assert output.count('computation (repetition 1 of') >= 2
  assert output.count('without authentication') == 1
  _assert_equal_runs(whole, killed)


@pytest.mark.slow
def test_a_worker_that_is_always_late(finished, tmp_path, capsys):
  """Given up with one message; the run goes on with another runtime."""
  folder = str(tmp_path / 'run')
  shutil.copytree(finished[0], folder)
  flags = ['--total_rounds=5', '--runtime=tff_worker']
  assert _train(folder, *flags, '--call_timeout_secs=0.01') == main.FAILED
  error = capsys.readouterr().err
  assert error.startswith("error: TFF's worker took longer than"), error
  assert '--call_timeout_secs=0.01' in error and 'after round 4' in error
  assert _train(folder, '--total_rounds=5') == 0
