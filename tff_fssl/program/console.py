"""The view of a run: a bar on a terminal, lines in a file.

Everything fits in 80 columns.
"""

import collections
from collections.abc import Iterator, Mapping
import contextlib
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
from typing import Any, TextIO

import tqdm

from tff_fssl import files
from tff_fssl import metrics
from tff_fssl import processes
from tff_fssl.program import catalogue
from tff_fssl.program import training_types

WIDTH = 80

_TRAIN = metrics.CLIENTS
# Longer phases are announced, and longer remaining times are shown.
_LONG_SECS = 3.0
_LONG_WAIT_SECS = 10.0

# Explains figures of a round's line, which are too long for it -> those.
_ABBREVIATIONS = {
  'PL rate: pseudo-labels trained on; PL acc: those of them that are correct': (
    'PL '
  ),
  'PL acc 2/3: 2 are correct, of only 3 whose true class is known': (
    r'PL acc +\d+/'
  ),
}

_TOO_FEW = 'participation/too_few_clients'
# Clients whose updates did not count.
_TROUBLES = {
  'not finite': 'num_non_finite_clients',
  'rejected': 'num_rejected_clients',
}


_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
_OF_SOURCE = 'python programs/{}.py'
# The command that runs a program; `{}` stands for the program's name.
_program_template = _OF_SOURCE


def name_programs(template: str) -> None:
  """Sets the command that runs programs, such as 'tff-fssl {}'."""
  global _program_template
  _program_template = template


def command(program: str) -> str:
  """Returns the name of a program in usages and examples."""
  return _program_template.format(program)


class Command(str):
  """A command, which is never wrapped: its first line alone is another one."""


def command_line(program: str, *arguments: str) -> Command:
  """Writes the command that runs a program here, as a shell takes it.

  Args:
    program: The program, such as 'train'.
    *arguments: Its arguments, not quoted.

  Returns:
    One line, however long. It runs in the current folder, by this Python.
  """
  script = sys.argv[0]
  path = os.path.join(_ROOT, 'programs', f'{program}.py')
  if _program_template == _OF_SOURCE and os.path.isfile(path):
    words = [processes.python(), processes.shorter(path)]
  elif script.endswith('.py') and _program_template != _OF_SOURCE:
    # The user's algorithms are registered there.
    words = [processes.python(), script, program]
  else:
    # Installed, but perhaps in an environment that is not active.
    words = ['tff-fssl', program]
    if shutil.which(words[0]) is None:
      beside = os.path.join(os.path.dirname(sys.executable), words[0])
      words[0] = processes.shorter(beside)
  return Command(shlex.join([*words, *arguments]))


def format_seconds(seconds: float) -> str:
  """Writes '0.42 s', '12.3 s', '3 min 04 s', '2 h 05 min'."""
  if seconds < 10:
    return f'{seconds:.2f} s'
  if seconds < 60:
    return f'{seconds:.1f} s'
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f'{minutes} min {rest:02} s'
  return f'{minutes // 60} h {minutes % 60:02} min'


def format_left(seconds: float) -> str:
  """Writes an estimate: '45 s', '12 min', '2 h 05 min', '3 d 4 h'."""
  if seconds < 59.5:
    return f'{seconds:.0f} s'
  minutes = round(seconds / 60)
  if minutes < 60:
    return f'{minutes} min'
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return f'{hours} h {minutes:02} min'
  return f'{hours // 24} d {hours % 24} h'


def format_percent(value: float | str | None) -> str:
  """Writes '81.2%', or '-' if not known."""
  number = math.nan if value is None or value == '' else float(value)
  return '-' if math.isnan(number) else f'{100 * number:.1f}%'


def _format_loss(value: float) -> str:
  """Writes '1.234', '0.012', '0.0012': squared errors are small."""
  return f'{value:.3f}' if value >= 0.01 or not value else f'{value:.2g}'


def show(text: str = '', *, flush: bool = False) -> None:
  """Prints text, with unprintable characters escaped."""
  print(files.printable(text, lines=True), flush=flush)


def wrapped(text: str) -> list[str]:
  """Wraps at 80 columns all but words and commands that are longer.

  Args:
    text: The text. Its indented lines, which are commands or parts of a table,
      stay as they are.

  Returns:
    The lines.
  """
  lines = []
  for line in files.printable(text, lines=True).split('\n'):
    if len(line) <= WIDTH or line.startswith('  '):
      lines.append(line)
    else:
      lines += textwrap.wrap(
        line, WIDTH, break_long_words=False, break_on_hyphens=False
      )
  return lines


def table(rows: Mapping[str, str], indent: int = 2) -> str:
  """Writes labels and texts in two columns, wrapped but for commands."""
  commands = {label for label, v in rows.items() if isinstance(v, Command)}
  rows = {
    files.printable(label): files.printable(text.replace('\n', ' '))
    for label, text in rows.items()
  }
  width = max(map(len, rows), default=0) + indent + 2
  lines = []
  for label, text in rows.items():
    if label in commands:
      lines.append(f'{"":{indent}}{label}'.ljust(width) + text)
      continue
    lines += textwrap.wrap(
      text,
      WIDTH,
      initial_indent=f'{"":{indent}}{label}'.ljust(width),
      subsequent_indent=' ' * width,
      break_on_hyphens=False,
      # Paths stay in one piece, so that they can be copied.
      break_long_words=False,
    ) or [f'{"":{indent}}{label}']
  return '\n'.join(lines)


def figures(report: training_types.RoundReport) -> list[str]:
  """Writes a round's figures, most important first."""
  if report.metrics.get(_TOO_FEW, 0) and not report.is_bad:
    return ['too few clients: nothing changed']  # By what was not kept.
  parts = []
  for label, members in metrics.figures(catalogue.all_metrics()).items():
    for column, metric in members.items():
      value = float(report.metrics.get(column, math.nan))
      # Columns of one label are alternatives: the first that is known.
      if text := _format_figure(report, column, metric, value):
        parts.append(f'{label} {text}')
        break
  if report.is_bad:
    parts.append('BAD: no usable update')
  else:
    for label, name in _TROUBLES.items():
      count = int(report.metrics.get(f'{_TRAIN}/{name}', 0))
      if count:
        parts.append(f'{count} {label}')
  return parts


def _format_figure(
  report: training_types.RoundReport,
  column: str,
  metric: metrics.Metric,
  value: float,
) -> str:
  """Writes a figure, or '' if it is not known."""
  if column == metrics.PSEUDO_LABEL_ACCURACY_COLUMN:
    if counted := _count_pseudo_labels(report):
      return counted
  if not math.isfinite(value):
    return ''
  is_share = metric.unit == metrics.SHARE
  return format_percent(value) if is_share else _format_loss(value)


def _count_pseudo_labels(report: training_types.RoundReport) -> str:
  """Writes ' 2/3', as wide as a percentage, or '' if enough are known."""

  def get(column: str) -> float:
    return float(report.metrics.get(column, math.nan))

  correct, kept = metrics.count_judged(get)
  if kept >= metrics.FEWEST_JUDGED or math.isnan(get(metrics.NUM_KNOWN)):
    return ''
  if math.isnan(get(f'{_TRAIN}/pseudo_label_ratio')):
    return ''  # No clients have trained.
  if math.isnan(kept):
    correct = kept = 0.0  # Of no client of the round is a class known.
  return f'{f"{correct:.0f}/{kept:.0f}":>5}'


def evaluation_figures(evaluation: Mapping[str, float]) -> list[str]:
  """Writes 'test 81.2%', with 'worst 61.0%' if clients have own models."""
  parts = []
  for split, label in (('test', 'test'), ('validation', 'val')):
    accuracy, worst = (
      evaluation.get(f'{split}/{name}')
      for name in ('accuracy', 'accuracy_worst_decile')
    )
    if accuracy is not None:
      text = f'{label} {format_percent(accuracy)}'
      if worst is not None:
        text += f' (worst {format_percent(worst)})'
      parts.append(text)
  return parts


def round_name(round_num: int, settings: training_types.Settings) -> str:
  """Writes 'round 3/60', or before round 1 'pre-training 2/5'."""
  first, total = settings.first_round, settings.total_rounds
  if first < 1 and round_num < 1:
    return f'pre-training {round_num + 1 - first}/{1 - first}'
  return f'round {round_num}/{total}'


def describe_place(round_num: int, settings: training_types.Settings) -> str:
  """Writes 'after round 3', 'after pre-training 2/5', or 'at the start'."""
  if round_num < settings.first_round:
    return 'at the start'
  name = round_name(round_num, settings)
  return f'after {name if round_num < 1 else name.partition("/")[0]}'


def round_line(
  report: training_types.RoundReport,
  settings: training_types.Settings,
  seconds_left: float | None = None,
) -> str:
  """Writes one line about a round, without figures that do not fit.

  Args:
    report: The round.
    settings: Those of training.
    seconds_left: What is left of the rounds, or of pre-training, if known.

  Returns:
    A line of at most 80 columns.
  """
  # Numbers are aligned to the width of the last one.
  last = 0 if report.round_num < 1 else settings.total_rounds
  name = round_name(report.round_num, settings)
  label, _, number = name.rpartition(' ')
  width = len(round_name(last, settings)) - len(label) + 1
  took = format_seconds(report.timing.get('seconds/round', math.nan))
  left = []
  if seconds_left is not None and seconds_left >= _LONG_WAIT_SECS:
    left = [f'{format_left(seconds_left)} left']
  parts = [
    f'{label}{number:>{width}}',
    *figures(report),
    *evaluation_figures(report.evaluation),
    took,
    *left,
  ]
  server, pseudo_labels = (
    [part for part in parts if part.startswith(figure)]
    for figure in ('server ', 'PL acc ')
  )
  dispensable = [*server, took, *pseudo_labels, *left]
  # Accuracies are never dropped.
  while len('  '.join(parts)) > WIDTH and dispensable:
    parts.remove(dispensable.pop(0))
  return '  '.join(parts)


class Console:
  """A `training.Reporter` on a text stream."""

  def __init__(self, progress: str = 'auto', stream: TextIO | None = None):
    """Chooses the view.

    Args:
      progress: 'bar', 'lines', 'none', or 'auto': a bar if `stream` is a
        terminal, else lines.
      stream: The stream, by default standard output.
    """
    self._stream: TextIO = stream or sys.stdout
    if progress == 'auto':
      progress = 'bar' if self._stream.isatty() else 'lines'
    self._shown = progress
    self._bar: tqdm.tqdm | None = None
    self._explained = set[str]()
    self._has_evaluated = False
    self._settings: training_types.Settings | None = None
    # Seconds of the last rounds, without the first, which also compiles.
    self._seconds: collections.deque[float] = collections.deque(maxlen=20)
    self._last: float | None = None

  def say(self, message: str) -> None:
    """Prints a message, wrapped, above the bar if there is one."""
    self._print('\n'.join(wrapped(message)))

  def begin(self, done: int, settings: training_types.Settings) -> None:
    """Starts the bar."""
    self._settings = settings
    if self._shown == 'none' or done >= settings.total_rounds:
      return
    self.say('The first round takes longer: it compiles the computations.')
    if self._shown == 'bar':
      start = settings.first_round - 1
      self._bar = tqdm.tqdm(
        total=settings.total_rounds - start,
        initial=done - start,
        file=self._stream,
        ncols=min(WIDTH, _columns()),
        nrows=100,  # Else tqdm hides it in terminals of unknown height.
        bar_format='{desc} |{bar}| {elapsed}<{remaining}{postfix}',
        desc=round_name(done, settings),
        mininterval=0,
        dynamic_ncols=False,
      )

  @contextlib.contextmanager
  def phase(self, name: str, round_num: int) -> Iterator[None]:
    """Shows a phase, and announces it if it takes long the first time."""
    about = ''
    if name == training_types.EVALUATING and not self._has_evaluated:
      settings = self._settings or training_types.Settings()
      about = f'Evaluating on {settings.evaluated_on} ...'
      self._has_evaluated = True
    elif name == training_types.EXPORTING:
      about = f'Exporting the model of round {round_num} ...'
    elif self._bar is not None and name != training_types.ROUND:
      self._bar.set_postfix_str(name)
    timer = threading.Timer(_LONG_SECS, self.say, [about])
    # A program that ends does not wait for it.
    timer.daemon = True
    if about and self._shown != 'none':
      timer.start()
    try:
      yield
    finally:
      timer.cancel()

  def round_done(self, report: training_types.RoundReport) -> None:
    """Moves the bar, or prints a line."""
    settings = self._settings
    if settings is None or self._shown == 'none':
      return
    for about, pattern in _ABBREVIATIONS.items():
      if about not in self._explained and any(
        re.match(pattern, figure) for figure in figures(report)
      ):
        self.say(about)
        self._explained.add(about)
    if self._bar is not None:
      evaluated = evaluation_figures(report.evaluation)
      if evaluated or report.is_bad:
        self._print(round_line(report, settings))
      self._bar.set_description_str(
        round_name(report.round_num, settings), refresh=False
      )
      # A bar has less room than a line.
      shown = [f for f in figures(report) if not f.startswith('server')]
      self._bar.set_postfix_str(' '.join(shown), refresh=False)
      self._bar.update()
    else:
      left = self._seconds_left(report.round_num, settings)
      self._print(round_line(report, settings, left))

  def end(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None

  def _seconds_left(
    self, round_num: int, settings: training_types.Settings
  ) -> float | None:
    """Estimates the rest of the rounds, or of pre-training."""
    now, before = time.monotonic(), self._last
    self._last = now
    if before is not None:
      self._seconds.append(now - before)
    last = 0 if round_num < 1 else settings.total_rounds
    if round_num == 0:  # Other computations follow pre-training.
      self._seconds.clear()
      self._last = None
    if not self._seconds:
      return None
    mean = sum(self._seconds) / len(self._seconds)
    return mean * (last - round_num)

  def _print(self, text: str) -> None:
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      # One write: another thread may print, too.
      self._stream.write(f'{text}\n')
      self._stream.flush()


def _columns() -> int:
  try:
    return os.get_terminal_size().columns or WIDTH
  except OSError:
    return WIDTH


def summary_rows(
  summary: Mapping[str, Any], num_test: int = 0
) -> dict[str, str]:
  """Writes the lines of the closing summary.

  Args:
    summary: The content of `summary.json`.
    num_test: The number of test examples, or 0 for no intervals.

  Returns:
    Label -> text.
  """
  rows = {}
  last, best = summary.get('last'), summary.get('best_validation')
  for name, row in (('last round', last), ('best validation', best)):
    if row:
      rows[name] = f'{row["round"]}: {", ".join(_accuracies(row, num_test))}'
  return rows


def _accuracies(row: Mapping[str, Any], num_test: int) -> list[str]:
  """Writes 'test accuracy 94.7% (92-97%)', ..., then further figures."""
  parts = [
    f'{name.removesuffix("/accuracy")} accuracy {format_percent(value)}'
    + _spread(row, name)
    + (_interval(value, num_test) if name == 'test/accuracy' else '')
    for name, value in row.items()
    if name.endswith('/accuracy')
  ]
  for figure, title in metrics.FIGURES.items():
    value = row.get(f'test/{figure}')
    if value is not None:
      parts.append(f'test {title} {format_percent(value)}')
  return parts


def _interval(accuracy: float, num_examples: int) -> str:
  """Writes ' (92-97%)', the 95% interval, if examples are few."""
  found = metrics.interval_of_few(accuracy, num_examples)
  if found is None:
    return ''
  low, high = (f'{100 * end:.0f}' for end in found)
  return f' ({low}-{high}%)'


def _spread(row: Mapping[str, Any], name: str) -> str:
  """Writes how an accuracy varies over clients with own models."""
  deviation, worst = (
    row.get(f'{name}_{figure}') for figure in ('deviation', 'worst_decile')
  )
  if deviation is None or worst is None:
    return ''
  return (
    f' (mean over clients; deviation {format_percent(deviation)}, worst decile'
    f' {format_percent(worst)})'
  )
