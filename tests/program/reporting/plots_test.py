from matplotlib import figure
import numpy as np
import pytest

from tff_fssl import metrics
from tff_fssl.hparams import UsageError
from tff_fssl.program.commands import main
from tff_fssl.program.commands import plot_main
from tff_fssl.program.reporting import plots
from tff_fssl.program.reporting import runs
from tff_fssl.program.storage import csv_table
from tff_fssl.program.storage import output_tree

_TRAIN = 'client_work/train'


def _run(folder, seed, algorithm='fl2', rounds=4, offset=0.0, **flags):
  tree = output_tree.OutputTree(str(folder))
  (folder / 'metrics').mkdir(parents=True)
  values = {'algorithm': algorithm, 'seed': seed, 'output_dir': folder, **flags}
  with open(tree.flags_file, 'w') as file:
    file.writelines(f'--{name}={value}\n' for name, value in values.items())
  train = csv_table.CsvTable(tree.train_csv)
  evaluation = csv_table.CsvTable(tree.eval_csv)
  for r in range(1, rounds + 1):
    kept = np.nan if r == 1 else 0.1 * r
    train.log(r, {f'{_TRAIN}/pseudo_label_ratio': kept})
    if r % 2 == 0:
      evaluation.log(r, {'test/accuracy': 0.1 * r + offset})
  return str(folder)


def test_runs_that_differ_by_seed_are_one_group(tmp_path):
  paths = [
    _run(tmp_path / 'a', 0, client_threads=1),
    _run(tmp_path / 'b', 1, offset=0.2, client_threads=2),
    _run(tmp_path / 'c', 0, 'fixmatch', alpha=0.3),
    _run(tmp_path / 'd', 0, 'fixmatch', alpha=0.1),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [len(group.runs) for group in groups] == [2, 1, 1]
  assert groups[0].label == 'fl2 (2 seeds)'
  assert groups[1].label == 'fixmatch alpha=0.3'
  assert groups[2].label == 'fixmatch'  # Its alpha is the default.
  rounds, mean, spread = groups[0].curve('test/accuracy')
  np.testing.assert_array_equal(rounds, [2, 4])
  np.testing.assert_allclose(mean, [0.3, 0.5])
  np.testing.assert_allclose(spread, [0.2 / np.sqrt(2)] * 2)
  rounds, _, _ = groups[0].curve(f'{_TRAIN}/pseudo_label_ratio')
  np.testing.assert_array_equal(rounds, [2, 3, 4])
  assert groups[0].curve('unknown') is None


def test_an_algorithm_at_its_own_defaults_is_no_variant(tmp_path):
  own = {'client_batch_size': 10, 'learning_rate_schedule': 'cosine'}
  paths = [
    _run(tmp_path / 'a', 0, 'semifl', **own),
    _run(tmp_path / 'b', 0, 'semifl', **{**own, 'client_batch_size': 32}),
    _run(tmp_path / 'c', 0, 'fixmatch', client_batch_size=32),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [group.label for group in groups] == [
    'semifl',
    'semifl client_batch_size=32',
    'fixmatch',
  ]


def test_no_diagram_is_empty(tmp_path, monkeypatch):
  """Three panels are in two rows: the fourth place stays blank."""
  drawn = []
  monkeypatch.setattr(
    figure.Figure, 'savefig', lambda self, *_, **__: drawn.append(self)
  )
  path = _run(tmp_path / 'a', 0)
  table = csv_table.CsvTable(output_tree.OutputTree(path).train_csv)
  table.log(5, {f'{_TRAIN}/loss_guess': 0.1})
  (group,) = runs.group_runs([runs.read_run(path)])
  assert len(plots.plot([group], str(tmp_path / 'x.png'))) == 3
  assert [a.get_visible() for a in drawn[0].axes] == [True] * 3 + [False]


def test_a_flag_that_a_run_does_not_know_is_at_its_default(tmp_path):
  paths = [
    _run(tmp_path / 'old', 0),
    _run(tmp_path / 'new', 1, compute_dtype='float32'),
    _run(tmp_path / 'other', 0, compute_dtype='bfloat16'),
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  assert [group.label for group in groups] == [
    'fl2 (2 seeds)',
    'fl2 compute_dtype=bfloat16',
  ]


def test_runs_of_different_length_meet_where_all_have_rounds(tmp_path):
  paths = [_run(tmp_path / 'a', 0, rounds=8), _run(tmp_path / 'b', 1)]
  (group,) = runs.group_runs([runs.read_run(path) for path in paths])
  np.testing.assert_array_equal(group.curve('test/accuracy')[0], [2, 4])


def test_the_program(tmp_path, capsys):
  paths = [_run(tmp_path / 'a', 0), _run(tmp_path / 'b', 1, 'fixmatch')]
  assert main.run(plot_main.plot_main, paths) == 0
  output = capsys.readouterr().out
  assert 'Test accuracy' in output and 'Pseudo-labels kept' in output
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert main.run(plot_main.plot_main, paths[:1]) == 0
  assert (tmp_path / 'a' / 'report' / 'curves.png').exists()
  named = tmp_path / 'new' / 'x.png'
  assert main.run(plot_main.plot_main, [*paths, f'--output={named}']) == 0
  assert named.exists()


def test_what_cannot_be_drawn(tmp_path, capsys):
  assert main.run(plot_main.plot_main, []) == 2
  assert main.run(plot_main.plot_main, [str(tmp_path)]) == 2
  assert 'is not a run' in capsys.readouterr().err
  empty = _run(tmp_path / 'empty', 0, rounds=0)
  with pytest.raises(UsageError, match='no round'):
    runs.read_run(empty)


def test_ticks_are_true():
  for value, text in (
    (0.025, '2.5%'),
    (0.3 + 1e-17, '30%'),
    (0.1 + 0.2, '30%'),
    (1.0, '100%'),
    (0.0001, '0.01%'),
    (-0.0, '0%'),
  ):
    assert plots._percent(value).replace('-0%', '0%') == text


def _group(algorithm, variant=''):
  return runs.RunGroup(f'{algorithm} {variant}', (), algorithm, variant)


def test_a_method_has_one_style_in_every_figure():
  (alone,) = plots.styles([_group('fl2')])
  first, second = plots.styles([_group('fixmatch'), _group('fl2')])
  assert second == alone and first.color != alone.color
  (variant,) = plots.styles([_group('fl2', 'rho=0.2')])
  many = [_group('fl2', f'rho={i}') for i in range(8)]
  styles = plots.styles([_group('fl2'), _group('fl2', 'rho=0.2'), *many])
  assert styles[:2] == [alone, variant]
  assert variant.marker == alone.marker
  assert len({s.color for s in styles}) == len(styles)


def test_bytes_and_hours(tmp_path, capsys):
  path = tmp_path / 'a'
  tree = output_tree.OutputTree(_run(path, 0))
  train, timing = (
    csv_table.CsvTable(p) for p in (tree.train_csv, tree.timing_csv)
  )
  train.truncate_after(0)
  for r, clients in ((0, 0), (1, 5), (2, 5), (3, 5), (4, 5)):
    train.log(
      r,
      {
        f'{_TRAIN}/num_clients': clients,
        f'{_TRAIN}/pseudo_label_ratio': 0.1 * r,
        'communication/bytes_up_per_client': 10,
        'communication/bytes_down_per_client': 30,
      },
    )
    timing.log(r, {'seconds/round': 2 * r})
  (group,) = runs.group_runs([runs.read_run(str(path))])
  rounds, used = group.positions('bytes')
  np.testing.assert_array_equal(rounds, range(5))
  np.testing.assert_array_equal(used, [0, 200, 400, 600, 800])
  np.testing.assert_array_equal(group.positions('hours')[1], [0, 2, 6, 12, 20])
  x, mean, _ = plots._values(
    group, metrics.Line('test/accuracy', '', '-'), 'hours'
  )
  np.testing.assert_allclose(x, np.array([6, 20]) / 3600)
  np.testing.assert_allclose(mean, [0.2, 0.4])
  for axis in ('bytes', 'hours'):
    argv = [str(path), f'--x={axis}', f'--output={tmp_path / axis}.png']
    assert main.run(plot_main.plot_main, argv) == 0
  assert main.run(plot_main.plot_main, [str(path), '--x=miles']) == 2
  other = _run(tmp_path / 'b', 0)
  assert main.run(plot_main.plot_main, [other, '--x=hours']) == 2
  assert 'nothing to draw over hours' in capsys.readouterr().err


def test_lines_of_pages_are_not_pale(tmp_path):
  paths = [
    _run(tmp_path / str(i), 0, 'fixmatch', alpha=i / 10) for i in range(1, 13)
  ]
  groups = runs.group_runs([runs.read_run(path) for path in paths])
  pages = [style.color for style in plots.page_styles(groups)]
  assert len(set(pages)) == len(groups)
  for color in pages:
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    assert min(channels) + max(channels) <= 2 * 0.6 * 255
