import dataclasses
import json
import os
import subprocess
import sys

from matplotlib import image
import numpy as np
import pytest

from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError
from tff_fssl.program import config as config_lib
from tff_fssl.program import main
from tff_fssl.program import partitions
from tff_fssl.program import run_data

_DIGITS = ('--dataset=digits', '--num_clients=5')
_LABELS = np.arange(400) % 4


@pytest.fixture(name='call')
def _call(capsys):
  """Calls the program: (exit code, output, errors)."""

  def call(*argv):
    code = main.run(partitions.partition_main, argv)
    return code, *capsys.readouterr()

  return call


def test_control_characters_are_escaped(call, tmp_path):
  config = config_lib.parse_config([*_DIGITS, '--clients_per_round=5'])
  drawn = run_data.load_partition(config, sources.load('digits'))
  names = tuple(f'{i}\x1b[31m' for i in range(5))
  file = str(tmp_path / 'a.json')
  dataclasses.replace(drawn, client_names=names).save_json(file)
  code, text, _ = call(file)
  assert code == main.DONE and r'0\x1b[31m (' in text
  assert '\x1b' not in text


def test_draws_writes_and_describes(call, tmp_path):
  file, image = (
    str(tmp_path / 'deep' / 'a.json'),
    str(tmp_path / 'new' / 'a.png'),
  )
  flags = (*_DIGITS, '--partition=dirichlet', '--alpha=0.3', '--seed=2')
  code, drawn, _ = call(*flags, f'--output={file}', f'--plot={image}')
  assert code == main.DONE
  assert open(image, 'rb').read(4) == b'\x89PNG'
  # It is what training draws.
  config = config_lib.parse_config([*flags, '--clients_per_round=5'])
  wanted = run_data.load_partition(config, sources.load('digits'))
  assert open(file).read() == wanted.dump_json()
  code, read, _ = call(file)
  assert code == main.DONE
  shown = lambda text: [line.split()[0] for line in text.splitlines()]
  assert 'Dirichlet(0.3), seed 2' in read
  assert set(shown(drawn)) - set(shown(read)) == {'data', 'written', 'drawn'}
  for text in (drawn, read):
    assert all(len(line) <= 80 or '/' in line for line in text.splitlines())
  code, again, _ = call(file, f'--plot={image}')
  assert code == main.DONE and 'drawn' in again


def test_compares_and_reads_runs(call, tmp_path):
  (tmp_path / 'run').mkdir()
  for name, seed in (('a.json', 0), ('run/partition.json', 1)):
    assert (
      call(*_DIGITS, f'--seed={seed}', f'--output={tmp_path / name}')[0] == 0
    )
  code, output, _ = call(str(tmp_path / 'a.json'), str(tmp_path / 'run'))
  assert code == main.DONE
  assert 'seed 0 / 1' in output and 'have another holder' in output
  code, output, _ = call(str(tmp_path / 'a.json'), str(tmp_path / 'a.json'))
  assert 'none: everybody holds the same' in output


def test_partitions_stand_side_by_side(call, tmp_path):
  shapes = []
  for count in (1, 3):
    files = [str(tmp_path / 'a.json')] * count
    if count == 1:
      call(*_DIGITS, f'--output={files[0]}')
    picture = tmp_path / f'{count}.png'
    code, output, _ = call(*files, f'--plot={picture}')
    assert code == main.DONE and output.count('unevenness') == count
    shapes.append(image.imread(picture).shape)
  assert shapes[1][:2] == (shapes[0][0], 3 * shapes[0][1])


@pytest.mark.parametrize(
  'arguments, words',
  [
    (tuple('abcdefg'), "'g': give at most 6 names"),
    (('missing.json',), 'missing.json: it does not exist'),
    (('{folder}',), 'partition.json: it does not exist'),
    (('{file}', '--alpha=0.3'), '--alpha: has no effect on partitions'),
    (('{file}', '--output={file}_/x'), '--output: has no effect on partitions'),
    (('{text}',), 'not a partition of tff_fssl'),
    (('{pipe}',), 'not a regular file'),
    ((*_DIGITS, '--output={folder}'), 'is a folder; give the name of a file'),
    ((*_DIGITS, '--plot={folder}'), 'is a folder; give the name of a file'),
    ((*_DIGITS, '--output={text}/x'), 'a file is in the way'),
    (
      (*_DIGITS, '--output=a.png'),
      'written as .json, not as .png; give another',
    ),
    ((*_DIGITS, '--partition=natural'), 'does not record owners of examples'),
    ((*_DIGITS, '--alpha=0.3'), '--alpha: has no effect with --partition=iid'),
    (('--zzz',), 'unknown flag --zzz'),
  ],
)
def test_mistakes_are_one_line(call, tmp_path, arguments, words):
  paths = {name: tmp_path / name for name in ('folder', 'file', 'text', 'pipe')}
  paths['folder'].mkdir()
  paths['text'].write_text('{}')
  os.mkfifo(paths['pipe'])
  call(*_DIGITS, f'--output={paths["file"]}')
  code, output, errors = call(*(a.format(**paths) for a in arguments))
  assert code == main.USAGE and not output
  assert words in errors and errors.count('\n') == 1
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(paths)


def test_help_shows_what_decides_partitions(call):
  code, output, _ = call('--help')
  assert code == main.DONE
  for flag in ('output', 'plot', 'partition', 'alpha', 'scenario', 'seed'):
    assert f'  --{flag}=' in output
  assert '--total_rounds' not in output
  assert all(len(line) <= 80 for line in output.splitlines())


def test_it_needs_no_tensorflow(tmp_path):
  code = """
import sys
from tff_fssl.program import main, partitions
code = main.run(partitions.partition_main, sys.argv[1:])
assert not {'tensorflow', 'tensorflow_federated'} & set(sys.modules)
sys.exit(code)
"""
  done = subprocess.run(
    [sys.executable, '-c', code, *_DIGITS, f'--plot={tmp_path / "a.png"}'],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr


def _flagged(*argv):
  return config_lib.parse_config([*_DIGITS, '--clients_per_round=2', *argv])


def test_a_file_says_what_the_flags_are(call, tmp_path):
  file = tmp_path / 'a.json'
  made = ('--partition=shards', '--label_noise=0.1', '--num_validation=30')
  labels = ('--scenario=labels_at_clients', '--num_labels=10', '--seed=7')
  assert call(*_DIGITS, *made, *labels, f'--output={file}')[0] == 0
  given = f'--partition_file={file}'
  config = config_lib.parse_config(
    ['--dataset=digits', '--clients_per_round=2', given]
  )
  run = config.run
  assert (run.partition, run.num_validation, run.num_clients) == (
    'shards',
    30,
    5,
  )
  assert config.round.scenario == 'labels_at_clients' and run.seed == 0
  assert config.first_round == 1
  assert _flagged(given, *made).flags() == config.flags()
  partition = run_data.load_partition(config, sources.load('digits'))
  assert partition.dump_json() == file.read_text()
  assert partition.settings.seed == 7
  # All of it together, as flags.txt has it.
  typed = [f'--{n}={str(v)}' for n, v in config.flags().items()]
  assert config_lib.parse_config(typed) == config


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--alpha=0.3'], '--alpha=0.3: has no effect'),
    (
      ['--num_labels=50'],
      '--num_labels=50: has no effect with --',
    ),
    (['--partition=dirichlet'], 'was made with iid; omit it'),
    (
      ['--dataset=cifar100', '--num_labels=100'],
      'data with 10 classes, but --dataset=cifar100 has 100',
    ),
    (
      ['--partition_file=missing'],
      'a run that was made with it has a copy',
    ),
  ],
)
def test_flags_that_a_file_rules_out(call, tmp_path, argv, words):
  file = tmp_path / 'a.json'
  assert call(*_DIGITS, f'--output={file}')[0] == 0
  with pytest.raises(partitions.UsageError) as error:
    _flagged(f'--partition_file={file}', *argv)
  assert words in str(error.value) and '\n' not in str(error.value)


def test_a_file_of_other_data(call, tmp_path):
  file = tmp_path / 'a.json'
  assert call(*_DIGITS, f'--output={file}')[0] == 0
  fields = json.loads(file.read_text())
  fields['class_counts'][0] = fields['class_counts'][1]
  file.write_text(json.dumps(fields))
  config = _flagged(f'--partition_file={file}')
  with pytest.raises(partitions.UsageError, match='made for other data'):
    run_data.load_partition(config, sources.load('digits'))
  fields['settings']['num_clients'] = 6
  file.write_text(json.dumps(fields))
  with pytest.raises(partitions.UsageError, match='json: not a part'):
    _flagged(f'--partition_file={file}')


def _build(labels=_LABELS, **kwargs):
  defaults = {'num_clients': 4, 'num_labels': 8}
  settings = partition_settings.PartitionSettings(4, **(defaults | kwargs))
  return partition_draw.build_partition(
    labels, settings, np.arange(len(labels)) // 100, tuple('abcd')
  )


def test_unevenness():
  p = _build()
  for counts, distance in (
    ([[3, 3], [5, 5]], 0),
    ([[2, 0], [0, 2]], 0.5),
    # All: 1/4 and 3/4; clients are off by 1/4, 3/4 and 1/4.
    ([[0, 8], [4, 0], [0, 4]], 5 / 12),
    ([[2, 0], [0, 2], [0, 0]], 0.5),  # Nothing is known of the last one.
  ):
    of = dataclasses.replace(p, class_counts=np.array(counts))
    assert partitions.unevenness(of)[0] == pytest.approx(distance)
  most = dataclasses.replace(p, class_counts=np.array([[3, 0], *[[0, 3]] * 3]))
  assert partitions.unevenness(most) == pytest.approx((0.375, 0.375))
  nothing = dataclasses.replace(p, class_counts=np.zeros([3, 2], np.int64))
  assert partitions.unevenness(nothing) == (0, 0)


def test_description():
  rows = partitions.describe(_build(num_validation=20, seed=3))
  assert rows['partition'] == 'IID, seed 3'
  assert rows['examples'] == (
    '400: 8 labelled at the server, 20 for validation, 372 at clients'
  )
  assert rows['clients'] == '4, with 93 examples'
  assert rows['classes'] == '4 of 4 at a client'
  assert 'names' not in rows and 'labels' not in rows
  few = _build(
    scenario='labels_at_clients', client_label_classes=2, num_unlabeled=100
  )
  rows = partitions.describe(few)
  assert rows['examples'] == '400: 132 at clients, 268 not used'
  assert rows['labels'] == '8 at 4 of 4 clients, of 2 classes each'
  labels = _LABELS.copy()
  labels[300:] = -1
  rows = partitions.describe(
    _build(
      labels,
      partition='natural',
      scenario='labels_at_clients',
      client_labels='own',
      labeled_clients='2',
      num_clients=3,
      num_labels=5,
      label_noise=0.2,
      seed=1,
    )
  )
  assert rows['names'] == 'a (100), b (100), d (100)'
  assert rows['examples'] == (
    '400: 300 at clients, 100 of them of unknown class, 100 not used'
  )
  assert rows['labels'] == '5 at 2 of 3 clients'
  assert rows['wrong labels'] == '2 of 10'
  assert rows['classes'] == '0 to 4 (median 4) of 4 at a client'


def test_comparison():
  p = _build(label_noise=0.25)
  same = partition_lib.Partition.parse_json(p.dump_json())
  assert list(partitions.compare(p, same)) == ['differences']
  other = _build(num_clients=5, label_noise=0.25)
  rows = partitions.compare(p, other)
  assert rows['settings'] == 'num_clients 4 / 5'
  assert rows['labelled'] == 'the same 8 examples'
  assert rows['wrong labels'] == 'the same 2 examples'
  assert rows['validation'] == 'none'
  # 20, 40, 60 and 78 do not come to the client of the same number; the second
  # partition has no use for 2.
  assert rows['moved'].startswith('200 of 400 examples')
  server = partitions._holders(p) == 0
  np.testing.assert_array_equal(np.flatnonzero(server), p.server_labeled)
  rows = partitions.compare(p, _build(seed=1))
  assert rows['settings'] == 'label_noise 0.25 / 0.0, seed 0 / 1'
  assert rows['labelled'].startswith('8 / 8 examples, ')
  with pytest.raises(UsageError, match='400 examples, the other of 200'):
    partitions.compare(p, _build(_LABELS[:200]))


def test_held_out_examples():
  p = _build(client_test_fraction=0.25)
  rows = partitions.describe(p)
  count = sum(map(len, p.client_test))
  assert f', {count} held out at clients' in rows['examples']
  assert rows['held out'] == '24 at a client, for evaluation'
  moved = partitions.compare(p, _build())['moved']
  assert moved.startswith(f'{count} of 400 examples')
