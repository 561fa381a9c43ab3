"""The page of a report."""

import html.parser
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
import written_runs

from tff_fssl import metrics
from tff_fssl.program import compare
from tff_fssl.program import main
from tff_fssl.program import output_tree
from tff_fssl.program import predictions
from tff_fssl.program import report
from tff_fssl.program import runs
from tff_fssl.program import summary

_TRAIN = written_runs.TRAIN
_VOID = {'meta', 'br', 'img'}
_VIEWS = ('weak view', 'strong view')


def _find(*paths):
  found = report.find_troubles(
    runs.group_runs([runs.read_run(p) for p in paths])
  )
  return [doubt.text for doubt in found]


def test_nothing_looks_wrong_in_good_runs(tmp_path):
  paths = [
    written_runs.write(tmp_path / f'{name}{seed}', name, seed, num_clients=5)
    for name in ('fl2', 'fixmatch')
    for seed in range(2)
  ]
  for seed, path in enumerate(paths):
    written_runs.write_partition(path, seed=seed % 2)
  assert not _find(*paths)


def test_a_dead_loss_weight(tmp_path):
  flags = {'fixmatch.unlabeled_loss_weight': '0.0'}
  (text,) = _find(written_runs.write(tmp_path / 'a', **flags))
  assert '--fixmatch.unlabeled_loss_weight=0.0 switches' in text


@pytest.mark.parametrize(
  'value, text',
  [
    (0.0, 'loss_pseudo_label is 0 in rounds 1 to 12'),
    (lambda r: float(r < 9), 'loss_pseudo_label is 0 in rounds 9 to 12'),
    (0.7, 'loss_pseudo_label is 0.7 in rounds 1 to 12: a loss that never'),
  ],
)
def test_a_loss_that_is_0_or_never_changes(tmp_path, value, text):
  columns = {f'{_TRAIN}/loss_pseudo_label': value}
  (found,) = _find(written_runs.write(tmp_path / 'a', columns=columns))
  assert text in found


@pytest.mark.parametrize(
  'accuracy, more, words',
  [
    (0.12, {}, ['collapsed to few classes', '12.0% on average']),
    (0.007, {}, ['far less often than by chance', '0.7% on']),
    # Bad, but better than by chance.
    (0.14, {}, []),
    # 4 of about 1,200 examples are kept.
    (0.25, {'pseudo_label_ratio': 0.004}, ['not significantly better than']),
    # Cohorts see few of the clients.
    (0.14, {'num_clients': 0.01}, ['not significantly better than chance']),
  ],
)
def test_accuracies_of_pseudo_labels(tmp_path, accuracy, more, words):
  columns = {'pseudo_label_accuracy': accuracy, **more}
  columns = {f'{_TRAIN}/{name}': value for name, value in columns.items()}
  path = written_runs.write(tmp_path / 'a', columns=columns)
  written_runs.write_partition(path)
  found = _find(path)
  assert len(found) == bool(words)
  for word in words:
    assert word in found[0]


def test_a_sign_in_several_seeds_is_one_finding(tmp_path):
  paths = [
    written_runs.write(
      tmp_path / f'{seed}',
      seed=seed,
      columns={f'{_TRAIN}/pseudo_label_ratio': 0 if seed else 0.5},
    )
    for seed in range(3)
  ]
  (found,) = report.find_troubles(
    runs.group_runs([runs.read_run(path) for path in paths])
  )
  assert found.where.startswith('2 of 3 runs of fixmatch')
  assert found.where.endswith(f'this is {paths[1]}')


@pytest.mark.parametrize(
  'algorithm, ratio, text',
  [
    ('fixmatch', 0, 'no pseudo-label is kept in rounds 3 to 12'),
    ('fixmatch', 1, 'every pseudo-label is kept in rounds 3 to 12'),
    ('mixmatch', 1, ''),  # It has no threshold.
    ('protofssl', 1, ''),
  ],
)
def test_all_or_no_pseudo_labels_are_kept(tmp_path, algorithm, ratio, text):
  columns = {f'{_TRAIN}/pseudo_label_ratio': ratio}
  found = _find(written_runs.write(tmp_path / 'a', algorithm, columns=columns))
  assert [text in line for line in found] == [True] * bool(text)


def test_selection_that_misleads(tmp_path):
  high = {'validation/accuracy': 0.95, 'test/accuracy': 0.75}
  (found,) = _find(written_runs.write(tmp_path / 'a', evaluation=high))
  assert 'validation accuracy is 95.0% in round 1' in found
  usual = {'validation/accuracy': 0.85, 'test/accuracy': 0.80}
  assert not _find(written_runs.write(tmp_path / 'b', evaluation=usual))


def test_lying_clients(tmp_path):
  columns = {
    f'{_TRAIN}/num_rejected_clients': lambda r: int(r in (3, 4)),
    'aggregator/num_rejected_clients': lambda r: int(r in (3, 4)),
    f'{_TRAIN}/aggregation_weight_max': lambda r: 0.95 if r == 7 else 0.3,
  }
  rejected, heavy = _find(written_runs.write(tmp_path / 'a', columns=columns))
  assert rejected.startswith('2 clients were rejected')
  assert 'rounds 3 to 4' in rejected
  assert 'one client had 95%' in heavy and 'round 7' in heavy


def test_clients_that_are_not_finite(tmp_path):
  columns = {f'{_TRAIN}/num_non_finite_clients': lambda r: int(r > 6)}
  (found,) = _find(written_runs.write(tmp_path / 'a', columns=columns))
  assert found.startswith('6 clients had updates that are not finite')
  evaluation = {'test/accuracy': lambda r: float('nan') if r == 2 else 0.5}
  evaluation['test/loss'] = lambda r: float('inf') if r == 3 else 0.5 + r
  found = _find(written_runs.write(tmp_path / 'b', evaluation=evaluation))
  assert 'test/loss is not finite in round 3' in found
  assert 'test/accuracy is not finite in round 2' in found


def test_runs_of_different_budgets(tmp_path):
  paths = [
    written_runs.write(tmp_path / 'a', client_epochs=1),
    written_runs.write(
      tmp_path / 'b', 'fl2', rounds=4, total_rounds=9, client_epochs=5
    ),
  ]
  length, unfinished, budget = _find(*paths)
  assert 'b has 4 rounds' in length and 'a 12;' in length
  assert unfinished == 'it is not finished: 4 of 9 rounds'
  assert 'also differ in --client_epochs (1, 5)' in budget


def test_runs_of_other_software(tmp_path):
  paths = [written_runs.write(tmp_path / n, n) for n in ('fixmatch', 'fl2')]
  for path, cores in zip(paths, '28'):
    written_runs.write_inputs(path, made_by={'cores': cores, 'numpy': '1'})
  (found,) = _find(*paths)
  assert found.startswith('the groups also differ in cores (2, 8): diff')


@pytest.mark.parametrize(
  'seed, part', [(1, 'training images'), (0, 'test labels')]
)
def test_runs_of_other_data(tmp_path, seed, part):
  paths = [
    written_runs.write(tmp_path / 'a'),
    written_runs.write(tmp_path / 'b', 'fl2', seed),
  ]
  written_runs.write_inputs(paths[0])
  written_runs.write_inputs(paths[1], digests={part: 'x'})
  (found,) = _find(*paths)
  assert found.startswith(
    f'runs are of different data: {paths[1]} has other {part} than {paths[0]};'
  )


def test_another_seed_validates_on_other_examples(tmp_path):
  paths = [
    written_runs.write(tmp_path / f'{n}{seed}', n, seed)
    for n in ('fixmatch', 'fl2')
    for seed in (0, 1)
  ]
  for path in paths:
    digests = {'validation images': path[-1]}
    written_runs.write_inputs(path, digests=digests, partition=path[-1])
  assert not _find(*paths)


def test_seeds_of_protected_clients_validate_on_other_examples(tmp_path):
  paths = [
    written_runs.write(tmp_path / f'{s}', seed=s, aggregator='dp')
    for s in (0, 1)
  ]
  for path in paths:
    written_runs.write_inputs(path, {'validation images': path}, path)
  members = [runs.read_run(path).public for path in paths]
  assert not report.find_troubles(runs.group_runs(members))


def test_another_partition_across_algorithms(tmp_path):
  paths = [written_runs.write(tmp_path / n, n) for n in ('fixmatch', 'fl2')]
  for path in paths:
    written_runs.write_inputs(path, partition=path)
  (found,) = _find(*paths)
  assert found.startswith('runs of one seed of fixmatch and others are not')
  assert found.endswith('fl2 (other partition), seeds 0')


def test_a_run_that_counts_twice(tmp_path):
  paths = [written_runs.write(tmp_path / name) for name in 'ab']
  (found,) = _find(*paths)
  assert 'would count as two samples' in found


@pytest.mark.parametrize(
  'rounds, text',
  [
    ([3], 'round 3'),
    ([3, 4, 5], 'rounds 3 to 5'),
    ([3, 5, 9], '3 rounds from 3 to 9'),
  ],
)
def test_rounds_in_words(rounds, text):
  assert report.rounds_text(rounds) == text


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


def _report(capsys, *argv):
  code = main.run(report.report_main, list(argv))
  return code, *capsys.readouterr()


def test_the_program(paths, capsys, tmp_path):
  output = str(tmp_path / 'new' / 'x.html')
  arguments = [*paths, '--noevaluate', f'--output={output}']
  code, out, _ = _report(capsys, *arguments, str(tmp_path))
  assert code == 0 and out.strip() == output
  with open(output) as file:
    text = file.read()
  assert text.startswith('<!DOCTYPE html>')
  assert len(text) < 2_000_000
  _report(capsys, *arguments)
  with open(output) as file:
    assert file.read() == text
  assert not re.search('Models</', text)


def test_where_it_is_written(tmp_path, capsys):
  path = written_runs.write(tmp_path / 'a')
  assert _report(capsys, path, '--noevaluate')[0] == 0
  assert (tmp_path / 'a' / 'report' / 'report.html').exists()


def test_what_cannot_be_reported(paths, capsys, tmp_path):
  for arguments, text in (
    ([], 'no run was given'),
    ([str(tmp_path)], 'is not a run'),
    ([paths[0], f'--output={tmp_path}'], 'is a folder'),
    ([paths[0], '--noevaluate', '--data_dir=x'], '--data_dir: has no effect'),
  ):
    code, _, err = _report(capsys, *arguments)
    assert code == 2 and text in err


def test_a_model_that_cannot_be_looked_over_is_a_note(paths, capsys, tmp_path):
  output = tmp_path / 'x.html'
  code, _, err = _report(capsys, paths[0], f'--output={output}')
  assert code == 0 and 'not looked over' in err
  assert 'Models</' in output.read_text()


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


def _pictures(page):
  return [a for t, a in page.elements if t == 'img' and a['alt'] not in _VIEWS]


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
def page(paths):
  models = [
    report.Model(paths[0], _figures()),
    report.Model(paths[2], None, 'there is no checkpoint'),
  ]
  return _page(*paths, models=models)


def test_the_page_needs_no_network_and_runs_no_code(page):
  assert {'script', 'link', 'iframe'}.isdisjoint(t for t, _ in page.elements)
  for url in [*page.attributes('href'), *page.attributes('src')]:
    assert url.startswith(('#', 'data:image/'))


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
  assert len(_pictures(page)) > 5
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
  labels = [a['alt'] for a in _pictures(page)]
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


def test_further_columns_are_folded(tmp_path):
  more = {f'test/{name}': 0.5 for name in metrics.FIGURES}
  path = written_runs.write(tmp_path / 'a', evaluation=more)
  figures = compare.tables(_groups(path), 12)[0].header[2:]
  assert len(figures) > 5
  usual, _, others = _page(path).text.partition(f'All {len(figures)} columns')
  shown = [title for title in figures if title in usual]
  assert len(shown) == 5 and 'test AUROC, last round, %' in shown
  assert all(title in others for title in figures)


def test_all_sections_are_there(page):
  for text in (
    'Test accuracy ↑',
    'Pseudo-label rate',
    'Time of a round, s ↓',
    'Classes at clients',
    'there is no partition.json',
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
  """The fourth, test images among training ones, is in inspection_test."""
  path = written_runs.write(
    tmp_path / 'a',
    columns={
      f'{_TRAIN}/pseudo_label_accuracy': 0.1,
      f'{_TRAIN}/aggregation_weight_max': 0.9,
    },
    **{'fixmatch.unlabeled_loss_weight': '0.0'},
  )
  written_runs.write_partition(path)
  text = report.page(_groups(path))
  box = text[text.index('class="doubts"') : text.index('id="results"')]
  assert 'Looks wrong: 3' in box and box.count('<li>') == 3
  for planted in ('switches this part', 'collapsed', 'may lie'):
    assert planted in box, planted


@pytest.mark.parametrize('known, is_shown', [(40, True), (20, False)])
def test_an_accuracy_of_few_pseudo_labels_is_not_shown(
  tmp_path, known, is_shown
):
  columns = {
    metrics.NUM_KNOWN: known,
    f'{_TRAIN}/pseudo_label_correct_ratio': 0.7,
    f'{_TRAIN}/pseudo_label_wrong_ratio': 0.1,
  }
  text = report.page(
    _groups(written_runs.write(tmp_path / 'a', columns=columns))
  )
  assert ('pseudo-label accuracy, %' in text) == is_shown
  assert ('Pseudo-label accuracy over rounds' in text) == is_shown
  few = 'only 16 kept pseudo-labels of a round, at most, are of known class'
  assert (few in text) != is_shown


def test_curves_say_their_ends(page):
  labels = [a['alt'] for a in _pictures(page)]
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
  labels = [a['alt'] for a in _pictures(page)]
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
    labels = [a['alt'] for a in _pictures(_page(path))]
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


def test_long_runs_stay_small(tmp_path):
  sizes = [
    len(report.page(_groups(written_runs.write(tmp_path / str(n), rounds=n))))
    for n in (150, 450)
  ]
  assert sizes[1] < 1.1 * sizes[0]


def test_a_table_that_holds_no_numbers_is_named(tmp_path, capsys):
  path = written_runs.write(tmp_path / 'a', evaluation={'test/loss': 'many'})
  code, _, err = _report(capsys, path, '--noevaluate')
  assert code == 2 and "'many', which is not a number" in err
