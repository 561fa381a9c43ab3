import io
import math
import re
import shlex
import subprocess
import time

from tff_fssl import metrics
from tff_fssl import processes
from tff_fssl.program import catalogue
from tff_fssl.program import console
from tff_fssl.program import training_types

_TRAIN = metrics.CLIENTS
_800 = training_types.Settings(total_rounds=800)
_9 = training_types.Settings(total_rounds=9)


def _report(round_num=700, is_bad=False, evaluation=None, **metrics):
  named = {f'{_TRAIN}/{name}': value for name, value in metrics.items()}
  return training_types.RoundReport(
    round_num, named, {'seconds/round': 83.4}, evaluation or {}, is_bad
  )


def _full():
  report = _report(
    loss_pseudo_label=1.2345,
    pseudo_label_ratio=0.8311,
    pseudo_label_accuracy=0.9,
    evaluation={'test/accuracy': 0.81, 'validation/accuracy': 0.79, 'x': 1},
  )
  report.metrics['finalizer/server_loss_labeled'] = 0.5
  return report


def test_a_round_on_one_line_of_80_columns():
  line = console.round_line(_full(), _800)
  assert len(line) <= 80
  for text in ('round  700/800', 'loss 1.234', 'PL rate 83.1%', 'test 81.0%'):
    assert text in line
  assert 'val 79.0%' in line


def test_what_is_left_is_the_last_to_go():
  line = console.round_line(_report(5), _800, 7500)
  assert line == 'round    5/800  1 min 23 s  2 h 05 min left'
  assert 'left' not in console.round_line(_report(5), _800, 9)
  # A full line loses losses and seconds first.
  line = console.round_line(_full(), _800, 500_000)
  assert len(line) <= 80 and line.endswith('val 79.0%  5 d 18 h left')
  assert 'PL rate 83.1%' in line and 'PL acc' not in line


def test_abbreviations_are_explained_once():
  stream = io.StringIO()
  view = console.Console('lines', stream)
  view.begin(0, _800)
  view.round_done(_report(1))
  assert 'PL rate' not in stream.getvalue()
  view.round_done(_full())
  view.round_done(_full())
  assert stream.getvalue().count('PL rate: pseudo-labels trained on') == 1


def test_an_accuracy_of_few_pseudo_labels_is_a_count_as_wide():
  def line(known, right=0.5, wrong=0.25, accuracy=2 / 3):
    report = _report(
      pseudo_label_ratio=0.75,
      pseudo_label_accuracy=accuracy,
      pseudo_label_correct_ratio=right,
      pseudo_label_wrong_ratio=wrong,
    )
    report.metrics[metrics.NUM_KNOWN] = known
    return console.round_line(report, _800)

  shown = [line(4), line(20), line(40), line(0, *[math.nan] * 3)]
  for text, found in zip(('  2/3', '10/15', '66.7%', '  0/0'), shown):
    assert f'  PL rate 75.0%  PL acc {text}  1 min' in found
  stream = io.StringIO()
  view = console.Console('lines', stream)
  view.begin(0, _800)
  for known in (40, 4, 4):
    report = _report(
      pseudo_label_ratio=0.75,
      pseudo_label_accuracy=2 / 3,
      pseudo_label_correct_ratio=0.5,
      pseudo_label_wrong_ratio=0.25,
    )
    report.metrics[metrics.NUM_KNOWN] = known
    view.round_done(report)
    assert ('true class is known' in stream.getvalue()) == (known == 4)
  assert stream.getvalue().count('true class is known') == 1


def test_rounds_of_pretraining_are_called_so():
  settings = training_types.Settings(first_round=-11, total_rounds=60)
  line = console.round_line(_report(-4), settings)
  assert line == 'pre-training   8/12  1 min 23 s'
  assert console.round_name(0, settings) == 'pre-training 12/12'
  assert console.round_line(_report(1), settings).startswith('round   1/60  ')
  assert console.round_name(0, _9) == 'round 0/9'


def test_unknown_figures_are_left_out():
  line = console.round_line(_report(1, pseudo_label_ratio=math.nan), _9)
  assert line == 'round  1/9  1 min 23 s'
  bad = console.round_line(_report(1, is_bad=True), _9)
  assert 'BAD' in bad
  some = console.round_line(_report(1, num_non_finite_clients=2), _9)
  assert '2 not finite' in some


def test_a_round_with_too_few_clients():
  report = _report(3, num_non_finite_clients=2, loss_pseudo_label=1.0)
  report.metrics['participation/too_few_clients'] = 1
  line = console.round_line(report, _9)
  assert line == 'round  3/9  too few clients: nothing changed  1 min 23 s'
  report.metrics['participation/too_few_clients'] = 0
  assert 'loss 1.000' in console.round_line(report, _9)


def test_the_losses_of_other_algorithms():
  for name in ('loss_soft_pseudo_label', 'loss_guess'):
    line = console.round_line(_report(**{name: 0.0312}), _800)
    assert '  loss 0.031  ' in line
  line = console.round_line(_report(loss_mixed_labeled=1.5), _800)
  assert '  label loss 1.500  ' in line
  # The mean of squared errors over 100 classes.
  line = console.round_line(_report(loss_guess=0.00123), _800)
  assert '  loss 0.0012  ' in line


def test_a_figure_of_several_columns_is_the_first_that_has_a_value(monkeypatch):
  both = metrics.client_metric('{a,b}', 'A loss.', metrics.NATS, figure='both')
  monkeypatch.setattr(catalogue, 'all_metrics', lambda: [both])
  assert console.figures(_report(b=0.5)) == ['both 0.500']
  assert console.figures(_report(a=0.25, b=0.5)) == ['both 0.250']


def test_lines_in_a_file():
  stream = io.StringIO()
  view = console.Console('auto', stream)
  view.begin(0, _800)
  view.round_done(_full())
  view.say('word ' * 40)
  view.end()
  lines = stream.getvalue().splitlines()
  assert max(map(len, lines)) <= 80
  assert lines[2] == console.round_line(_full(), _800)
  assert '\r' not in stream.getvalue()


def test_a_bar_on_a_terminal():
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  stream = Terminal()
  view = console.Console('auto', stream)
  view.begin(-1, training_types.Settings(first_round=0, total_rounds=800))
  view.round_done(_full())
  view.end()
  parts = stream.getvalue().replace('\r', '\n').splitlines()
  assert max(map(len, parts)) <= 80
  assert any(
    p.startswith('round 700/800 |') and 'PL rate 83.1%' in p for p in parts
  )


def test_what_takes_long_is_announced(monkeypatch):
  monkeypatch.setattr(console, '_LONG_SECS', 0.01)
  stream = io.StringIO()
  view = console.Console('lines', stream)
  settings = training_types.Settings(total_rounds=9, evaluated_on='5 examples')
  view.begin(0, settings)
  view.round_done(_report(1))

  def wait(name, until):
    with view.phase(name, 2):
      deadline = time.monotonic() + 10
      while until not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)

  wait(training_types.EVALUATING, 'Evaluating on 5 examples ...\n')
  wait(training_types.EXPORTING, 'Exporting the model of round 2 ...\n')
  # From the second evaluation on, it is a part of what is left.
  before = stream.getvalue()
  with view.phase(training_types.EVALUATING, 3):
    time.sleep(0.1)
  assert stream.getvalue() == before


def test_control_characters_are_escaped(capsys):
  bad, shown = 'a\x1b[31m\x07\u202e', r'a\x1b[31m\x07\u202e'
  console.show(f'{bad}\n{bad}')
  assert capsys.readouterr().out == f'{shown}\n{shown}\n'
  console.Console('lines').say(f'{bad}\n{bad}')
  assert capsys.readouterr().out == f'{shown}\n{shown}\n'
  assert console.table({bad: f'{bad}\n{bad}'}) == f'  {shown}  {shown} {shown}'


def test_a_command_runs_as_it_stands(tmp_path, monkeypatch):
  folder = tmp_path / "a 'b' $c"
  folder.mkdir()
  monkeypatch.chdir(folder)
  (folder / 'd e').write_text('{}')
  command = console.command_line('partition', 'd e')
  assert len(command.splitlines()) == 1
  done = subprocess.run(
    command, shell=True, capture_output=True, text=True, check=False
  )
  assert done.returncode == 2 and done.stderr.startswith('error: d e: ')


def test_programs_are_called_as_this_one_was(monkeypatch, tmp_path):
  previous = console.command('{}')
  monkeypatch.setattr('shutil.which', lambda name: f'/bin/{name}')
  monkeypatch.setattr('os.path.samefile', lambda *_: False)
  try:
    for script, template, words in (
      ('/x/my alg.py', 'python {}', [processes.python(), '/x/my alg.py']),
      ('/bin/tff-fssl', 'tff-fssl {}', ['tff-fssl']),
    ):
      monkeypatch.setattr('sys.argv', [script])
      console.name_programs(template)
      command = console.command_line('train', '--a=b c')
      assert shlex.split(command) == [*words, 'train', '--a=b c']
  finally:
    console.name_programs(previous)


def test_commands_are_never_wrapped(capsys):
  command = console.Command(f'python x.py {"folder/" * 20} --flag')
  console.Console('lines').say(f'{"words " * 20}:\n  {command}')
  assert capsys.readouterr().out.endswith(f':\n  {command}\n')
  text = console.table({'long': 'words ' * 20, 'evaluate': command})
  assert text.endswith(f'\n  evaluate  {command}')


def test_silence():
  stream = io.StringIO()
  view = console.Console('none', stream)
  view.begin(0, training_types.Settings(total_rounds=2))
  view.round_done(_report())
  view.end()
  assert stream.getvalue() == ''


def test_the_line_says_how_the_worst_clients_are():
  evaluation = {'test/accuracy': 0.8, 'test/accuracy_worst_decile': 0.61}
  line = console.round_line(_report(evaluation=evaluation), _800)
  assert '  test 80.0% (worst 61.0%)  ' in line


def test_formats():
  seconds = [0.4234, 12.34, 184, 7500]
  texts = [console.format_seconds(s) for s in seconds]
  assert texts == ['0.42 s', '12.3 s', '3 min 04 s', '2 h 05 min']
  left = [console.format_left(s) for s in (0, 59.4, 59.6, 3580, 7500, 273_600)]
  assert left == ['0 s', '59 s', '1 min', '1 h 00 min', '2 h 05 min', '3 d 4 h']
  assert console.format_percent('') == console.format_percent(None) == '-'
  assert console.format_percent('0.25') == '25.0%'
  table = console.table({'a': 'x ' * 60, 'bcd': 'y', 'e': '/p' * 60})
  assert table.splitlines()[0].startswith('  a    x x')
  assert '/p' * 60 in table


def test_the_summary_says_how_clients_with_own_models_differ():
  row = {
    'round': 9,
    'test/accuracy': 0.5,
    'test/loss': 1.0,
    'validation/accuracy': 0.61,
  }
  assert console.summary_rows({'last': row}) == {
    'last round': '9: test accuracy 50.0%, validation accuracy 61.0%'
  }
  row['test/accuracy_deviation'] = 0.123
  row['test/accuracy_worst_decile'] = 0.2
  rows = console.summary_rows({'last': row, 'best_validation': row})
  assert rows == dict.fromkeys(
    ('last round', 'best validation'),
    '9: test accuracy 50.0% (mean over clients; deviation 12.3%, worst decile'
    ' 20.0%), validation accuracy 61.0%',
  )


def test_the_summary_has_an_interval_of_few_examples_and_further_figures():
  row = {
    'round': 900,
    'test/accuracy': 0.947,
    'validation/accuracy': 0.93,
  }
  (line,) = console.table(
    {'best validation': console.summary_rows({'last': row}, 360)['last round']}
  ).splitlines()
  assert '900: test accuracy 94.7% (92-97%), validation accuracy' in line
  row['test/macro_f1'] = 0.5
  (text,) = console.summary_rows({'last': row}, 1_000).values()
  assert text.startswith('900: test accuracy 94.7%, validation accuracy 93.0%')
  assert text.endswith('93.0%, test macro F1 50.0%')


def test_what_is_left_is_of_the_last_rounds(monkeypatch):
  now = [100.0]
  monkeypatch.setattr('time.monotonic', lambda: now[0])
  stream = io.StringIO()
  view = console.Console('lines', stream)
  view.begin(-2, training_types.Settings(first_round=-1, total_rounds=100))

  def left(round_num, seconds):
    now[0] += seconds
    stream.truncate(stream.seek(0))
    report = training_types.RoundReport(
      round_num, {}, {'seconds/round': 1.0}, {}, False
    )
    view.round_done(report)
    found = re.search('  (.*) left', stream.getvalue())
    return found and found[1].split('  ')[-1]

  # The first round of pre-training, and of clients, also compiles.
  assert left(-1, 60) is left(0, 20) is left(1, 40) is None
  assert left(2, 10) == '16 min'
  assert left(3, 30) == '32 min'
  for round_num in range(4, 24):
    said = left(round_num, 60)
  assert said == '1 h 17 min'
