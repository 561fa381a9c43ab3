import base64
import dataclasses
from xml.etree import ElementTree

from matplotlib import figure
import numpy as np
import pytest
import written_runs

from tff_fssl import metrics
from tff_fssl.hparams import UsageError
from tff_fssl.program import csv_table
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import plots
from tff_fssl.program import runs

_TRAIN = 'client_work/train'


def test_the_program(tmp_path, capsys):
  paths = [
    written_runs.write_short(tmp_path / 'a', 0),
    written_runs.write_short(tmp_path / 'b', 1, 'fixmatch'),
  ]
  assert main.run(plots.plot_main, paths) == 0
  output = capsys.readouterr().out
  assert 'Test accuracy' in output and 'Pseudo-label rate' in output
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert main.run(plots.plot_main, paths[:1]) == 0
  assert (tmp_path / 'a' / 'report' / 'curves.png').exists()
  named = tmp_path / 'new' / 'x.PDF'
  assert main.run(plots.plot_main, [*paths, f'--output={named}']) == 0
  assert named.read_bytes().startswith(b'%PDF')


def test_some_diagrams(tmp_path, capsys):
  paths = [
    written_runs.write_short(tmp_path / 'a', 0),
    f'--output={tmp_path / "x.png"}',
  ]
  assert main.run(plots.plot_main, [*paths, '--diagrams=ACCURACY, x']) == 2
  assert "no diagram has 'x' in its title; there are: Test accuracy" in (
    capsys.readouterr().err
  )
  assert not (tmp_path / 'x.png').exists()
  assert main.run(plots.plot_main, [*paths, '--diagrams=TEST acc']) == 0
  assert capsys.readouterr().out.endswith('x.png: Test accuracy\n')


def test_what_cannot_be_drawn(tmp_path, capsys):
  assert main.run(plots.plot_main, []) == 2
  assert main.run(plots.plot_main, [str(tmp_path)]) == 2
  assert 'is not a run' in capsys.readouterr().err
  empty = written_runs.write_short(tmp_path / 'empty', 0, rounds=0)
  with pytest.raises(UsageError, match='no round'):
    runs.read_run(empty)


def test_no_diagram_is_empty(tmp_path, monkeypatch):
  """Three panels are in two rows: the fourth place stays blank."""
  drawn = []
  monkeypatch.setattr(
    figure.Figure, 'savefig', lambda self, *_, **__: drawn.append(self)
  )
  path = written_runs.write_short(tmp_path / 'a', 0)
  table = csv_table.CsvTable(output_tree.OutputTree(path).train_csv)
  table.log(5, {f'{_TRAIN}/loss_guess': 0.1})
  (group,) = runs.group_runs([runs.read_run(path)])
  assert len(plots.plot([group], str(tmp_path / 'x.png'))) == 3
  assert [a.get_visible() for a in drawn[0].axes] == [True] * 3 + [False]


def test_long_names_are_not_cut_off(tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(
    figure.Figure, 'savefig', lambda self, *_, **__: drawn.append(self)
  )
  path = written_runs.write_short(tmp_path / 'a', 0)
  (group,) = runs.group_runs([runs.read_run(path)])
  label = 'fixmatch ' + 'server_learning_rate=0.1 ' * 8
  group = dataclasses.replace(group, label=label)
  plots.plot([group], str(tmp_path / 'x.png'), words=['test'])
  canvas = drawn[0]
  canvas.draw_without_rendering()
  box = canvas.legends[0].get_window_extent()
  assert 0 <= box.x0 < box.x1 <= canvas.bbox.width


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


def test_bytes_and_hours(tmp_path, capsys):
  path = tmp_path / 'a'
  tree = output_tree.OutputTree(written_runs.write_short(path, 0))
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
    assert main.run(plots.plot_main, argv) == 0
  assert main.run(plots.plot_main, [str(path), '--x=miles']) == 2
  other = written_runs.write_short(tmp_path / 'b', 0)
  assert main.run(plots.plot_main, [other, '--x=hours']) == 2
  assert 'nothing to draw over hours' in capsys.readouterr().err


def test_a_group_has_a_style_of_its_own():
  groups = [runs.RunGroup(str(i), ()) for i in range(12)]
  assert len(set(plots.styles(groups))) == len(groups)


def test_a_picture_of_a_page_is_the_same_every_time():
  counts = np.eye(3, dtype=int)
  names = ('$x <script>', 'a\x1b[31m', 'b')
  draw = lambda: plots.draw_confusion(counts, names)
  url = plots.svg_url(draw, 'a')
  assert url == plots.svg_url(draw, 'a')
  content = base64.b64decode(url.removeprefix('data:image/svg+xml;base64,'))
  texts = {e.text for e in ElementTree.fromstring(content).iter() if e.text}
  assert {'$x <script>', 'a\\x1b[31m'} <= texts
