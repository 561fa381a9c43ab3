"""The page of a report."""

import html.parser
import os
import pathlib
import shutil

import numpy as np
import pytest
import written_runs

from tff_fssl.program import compare
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import predictions
from tff_fssl.program import report
from tff_fssl.program import report_main
from tff_fssl.program import runs
from tff_fssl.program import summary

_TRAIN = written_runs.TRAIN
_VOID = {'meta', 'br', 'img'}


class _Page(html.parser.HTMLParser):
  """A page's elements; checks that all are closed."""

  def __init__(self, text):
    super().__init__()
    self.elements, self._open, self.text = [], [], ''
    self.feed(text)
    assert not self._open

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in _VOID:
      self._open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    if self._open and self._open[-1] not in ('style', 'text'):
      self.text += data

  def attributes(self, name):
    return [attrs[name] for _, attrs in self.elements if name in attrs]


def _groups(*paths):
  return runs.group_runs([runs.read_run(path) for path in paths])


def _page(*paths, models=()):
  return _Page(report.page(_groups(*paths), models))


def _figures():
  generator = np.random.default_rng(0)
  labels = generator.integers(0, 3, 90)
  probs = generator.dirichlet([1, 1, 1], 90)
  view = np.zeros([4, 4, 3], np.uint8)
  return predictions.ModelFigures(
    'run, round 4',
    ('cat', '$dog<b>', 'bird'),
    test=predictions.Predictions(labels, probs),
    pseudo=predictions.Predictions(labels, probs),
    clients=np.linspace(0, 1, 20),
    about_clients='on what they hold out',
    right=[predictions.ShownExample('cat', 'cat', 0.99, view, view)],
    wrong=[
      predictions.ShownExample('cat', '$dog<b>', 0.9, view[..., :1], view)
    ],
    doubts=['2 test examples are for training, too'],
  )


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs')
  result = [
    written_runs.write(folder / f'{name}{seed}', name, seed)
    for name in ('fl2', 'fixmatch')
    for seed in range(2)
  ]
  written_runs.write_partition(result[0])
  return result


@pytest.fixture(scope='module')
def page(paths):
  models = [
    report.Model(paths[0], _figures()),
    report.Model(paths[2], None, 'there is no checkpoint'),
  ]
  return _page(*paths, models=models)


def test_the_page_needs_no_network_and_runs_no_code(page):
  assert {'script', 'link', 'iframe'}.isdisjoint(t for t, _ in page.elements)
  for url in [*page.attributes('href'), *page.attributes('src')]:
    assert url.startswith(('#', 'data:image/png;base64,'))


def test_ids_are_unique_and_links_lead_somewhere(page):
  ids = page.attributes('id')
  assert len(ids) == len(set(ids))
  links = [a['href'] for tag, a in page.elements if tag == 'a']
  assert len(links) == 7
  assert {link[1:] for link in links} <= set(ids)
  assert set(page.attributes('aria-labelledby')) <= set(ids)


def test_all_can_be_reached_by_keyboard_and_read_aloud(page):
  boxes = [a for _, a in page.elements if a.get('class') == 'scroll']
  assert len(boxes) >= 3
  assert all(a['tabindex'] == '0' and a['aria-label'] for a in boxes)
  others = [
    (tag, a)
    for tag, a in page.elements
    if 'tabindex' in a and a.get('class') != 'scroll'
  ]
  # A figure's name is its caption.
  assert {tag for tag, _ in others} == {'figure', 'pre'}
  assert all(a['aria-label'] for tag, a in others if tag == 'pre')
  pictures = [a for tag, a in page.elements if tag == 'svg']
  assert len(pictures) > 5
  assert all(a['role'] == 'img' and a['aria-label'] for a in pictures)
  assert all(a['alt'] for tag, a in page.elements if tag == 'img')


def test_equal_partitions_are_drawn_once(tmp_path):
  paths = [
    written_runs.write(tmp_path / name, name)
    for name in ('fixmatch', 'fl2', 'uda')
  ]
  for path, alpha in zip(paths, (0.7, 0.7, 0.3)):
    written_runs.write_partition(path, alpha=alpha)
  page = _page(*paths)
  titles = page.text.count('fixmatch: '), page.text.count('; fl2: ')
  assert titles == (1, 1)
  labels = [a.get('aria-label', '') for tag, a in page.elements if tag == 'svg']
  drawn = [label for label in labels if label.startswith('examples of each')]
  assert len(drawn) == 2


@pytest.mark.parametrize('aggregator', ['dp', 'secure', 'mean'])
def test_nothing_of_protected_clients(tmp_path, aggregator):
  pages = []
  for alpha in (0.7, 0.3):
    folder = tmp_path / 'run'
    shutil.rmtree(folder, ignore_errors=True)
    path = written_runs.write(folder, 'fixmatch', aggregator=aggregator)
    written_runs.write_partition(path, partition='dirichlet', alpha=alpha)
    # As if it were of the same flags.
    partition = output_tree.OutputTree(path).partition_json
    text = pathlib.Path(partition).read_text()
    pathlib.Path(partition).write_text(
      text.replace('"alpha": 0.3', '"alpha": 0.7')
    )
    compute = summary.Compute(1e6, 10 * alpha, 10.0, 5.0)
    summary.write_compute(output_tree.OutputTree(path).compute_json, compute)
    timing = output_tree.OutputTree(path).timing_csv
    text = pathlib.Path(timing).read_text()
    pathlib.Path(timing).write_text(text.replace('2.0', f'{alpha}'))
    pages.append(report.page(_groups(path)))
  assert (pages[0] == pages[1]) == (aggregator != 'mean')


def test_tables_are_those_of_compare(paths, page):
  groups = _groups(*paths)
  tables = compare.tables(groups, 12)
  assert len(tables) == 2
  for table in tables:
    for row in table.rows:
      assert all(cell in page.text for cell in row)


def test_all_sections_are_there(page):
  for text in (
    'Test accuracy ↑',
    'Pseudo-label rate',
    'Time of a round, s ↓',
    'Classes at clients',
    'there is no partition.json that can be read',
    'macro-F1',
    'expected calibration error',
    'Accuracy at 20 clients',
    'there is no checkpoint',
    'that are correct',
    'that are wrong',
    'sent and received, MB',
    'train.py --flagfile=',
    'this report',
  ):
    assert text in page.text, text


def test_doubts_of_models_are_in_the_box(page):
  assert 'Looks wrong: 1' in page.text
  assert '2 test examples are for training, too' in page.text


def test_planted_mistakes_are_in_the_box(tmp_path):
  """The fifth, test images among training ones, is in inspection_test."""
  path = written_runs.write(
    tmp_path / 'a',
    columns={
      f'{_TRAIN}/pseudo_label_accuracy': 0.1,
      f'{_TRAIN}/aggregation_weight_max': 0.9,
    },
    **{'fixmatch.unlabeled_loss_weight': '0.0', 'alpha': 0.3},
  )
  written_runs.write_partition(path, alpha=0.7)
  text = report.page(_groups(path))
  box = text[text.index('class="doubts"') : text.index('id="results"')]
  assert 'Looks wrong: 4' in box and box.count('<li>') == 4
  for planted in ('switches this part', 'collapsed', 'may lie', 'alpha 0.7'):
    assert planted in box, planted


def test_curves_say_their_ends(page):
  labels = [a['aria-label'] for tag, a in page.elements if tag == 'svg']
  (found,) = [label for label in labels if label.startswith('Test accuracy')]
  assert 'higher is better' in found
  assert 'fl2 (2 seeds) from 0.525 to 0.745' in found


def test_thresholds_of_classes_are_one_diagram_of_a_group(tmp_path):
  column = f'{written_runs.TRAIN}/class_threshold_{{}}_{{}}'
  columns = {
    column.format(c, kind): lambda r, c=c: (r + c) / 30
    for c in (0, 1, 2, 10)
    for kind in ('mean', 'min', 'max')
  }
  for name, has in (('fl2', columns), ('fixmatch', {})):
    written_runs.write(tmp_path / name, name, columns=has)
  page = _page(str(tmp_path / 'fl2'), str(tmp_path / 'fixmatch'))
  labels = [a['aria-label'] for tag, a in page.elements if tag == 'svg']
  (found,) = [label for label in labels if 'Class thresholds' in label]
  title = 'Class thresholds: fl2 over rounds'
  assert found.startswith(f'{title}: class 0 from 0.03333 to 0.4;')
  assert found.endswith('class 10 from 0.3667 to 0.7333')
  assert 'class_threshold' not in page.text


def test_thresholds_without_a_value_are_left_out(tmp_path):
  column = f'{written_runs.TRAIN}/class_threshold_{{}}_mean'
  columns = {column.format(0): float('nan'), column.format(1): 0.5}
  for name, has in (('a', columns), ('b', {column.format(0): float('nan')})):
    path = written_runs.write(tmp_path / name, 'fl2', columns=has)
    labels = [a['aria-label'] for t, a in _page(path).elements if t == 'svg']
    found = [label for label in labels if label.startswith('Class thresholds')]
    assert [label.rpartition(': ')[2] for label in found] == (
      ['class 1 from 0.5 to 0.5'] if name == 'a' else []
    )


def test_what_others_wrote_is_escaped(tmp_path):
  bad = '<script>alert(1)</script>'
  path = written_runs.write(tmp_path / '<img src=x>', dataset=bad)
  other = written_runs.write(tmp_path / 'b', 'fl2')
  text = report.page(_groups(path, other))
  assert bad not in text and '<img src=x>' not in text
  assert '&lt;script&gt;alert(1)' in text and '&lt;img src=x&gt;' in text


def test_control_characters_are_escaped(tmp_path):
  path = written_runs.write(tmp_path / 'a', dataset='b\x01\x1b[31m')
  other = written_runs.write(tmp_path / 'b', 'fl2')
  text = report.page(_groups(path, other))
  assert r'b\x01\x1b[31m' in text
  assert all(line.isprintable() for line in text.split('\n'))


def test_a_run_of_one_round_without_clients_reports(tmp_path):
  path = written_runs.write(tmp_path / 'a', 'supervised', rounds=1)
  table = output_tree.OutputTree(path).train_csv
  with open(table, 'w') as file:
    file.write('round,finalizer/server_loss_labeled\n1,0.5\n')
  os.remove(output_tree.OutputTree(path).eval_csv)
  page = _page(path)
  assert 'this run has no evaluation yet' in page.text
  assert 'Loss at the server' in page.text


def test_groups_without_a_common_round_have_a_table_each(tmp_path):
  paths = [written_runs.write(tmp_path / 'a', 'fl2')]
  paths.append(written_runs.write(tmp_path / 'b', rounds=4))
  table = output_tree.OutputTree(paths[1]).eval_csv
  with open(table, 'w') as file:
    file.write('round,test/accuracy\n20,0.875\n')
  page = _page(*paths)
  assert 'no evaluated round in common' in page.text
  assert 'fl2: Rounds up to 12' in page.text
  assert 'fixmatch: Rounds up to 20' in page.text and '87.5' in page.text


def test_long_runs_stay_small(tmp_path):
  sizes = [
    len(report.page(_groups(written_runs.write(tmp_path / str(n), rounds=n))))
    for n in (150, 450)
  ]
  assert sizes[1] < 1.1 * sizes[0]


def _report(capsys, *argv):
  code = main.run(report_main.report_main, list(argv))
  return code, *capsys.readouterr()


def test_a_table_that_holds_no_numbers_is_named(tmp_path, capsys):
  path = written_runs.write(tmp_path / 'a', evaluation={'test/loss': 'many'})
  code, _, err = _report(capsys, path, '--noevaluate')
  assert code == 2 and "'many', which is not a number" in err
