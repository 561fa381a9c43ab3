"""Writes docs/metrics.md from the declarations of the metrics."""

from collections.abc import Sequence
import pathlib

from tff_fssl import metrics
from tff_fssl.program import catalogue

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'metrics.md'

_INTRODUCTION = """\
# Metrics

With this page you look up each column of a run's CSV files.

    cut -d, -f1,2,4 runs/quickstart/metrics/eval.csv | tail -n 1

prints a round, and the test and the validation accuracy after it:

    60,0.9333333373069763,0.9300000071525574

An empty cell or `nan` means that there was nothing to measure. Figures of \
clients are over the clients of the round whose report was accepted \
([what is checked](privacy.md#what-a-client-can-lie-about)). Means over \
examples weigh every example alike, whichever client and batch it was in. \
Under `--aggregator=secure` and `dp`, clients report nothing: of the columns \
`client_work/train/...`, only `num_clients` is there.

This page is made from the declarations of the metrics, by `python \
tools/update_metrics.py`. [A metric of your own](extending.md#a-metric) \
is declared in the same way.
"""
_HEADINGS = {
  'train': '## metrics/train.csv: one row a round\n',
  'eval': '## metrics/eval.csv: one row an evaluation\n',
  'timing': (
    '## metrics/timing.csv: one row a round\n\n'
    'These figures differ from run to run, also of one seed.\n'
  ),
}


def page() -> str:
  """Makes docs/metrics.md."""
  units = ', '.join(f'`{name}`: {text}' for name, text in metrics.UNITS.items())
  parts = [_INTRODUCTION, f'Units: {units}.\n']
  for name, columns in catalogue.declared().items():
    parts += [_HEADINGS[name], _markdown(columns)]
    if name == 'train':
      # One heading for all algorithms that report the same columns.
      grouped: dict[tuple[str, ...], list[metrics.Metric]] = {}
      for metric, names in catalogue.algorithms_metrics().items():
        grouped.setdefault(tuple(names), []).append(metric)
      for users, own in grouped.items():
        heading = ', '.join(f'`{user}`' for user in users)
        parts += [f'### Only {heading}\n', _markdown(own)]
  return '\n'.join(parts)


def _markdown(members: Sequence[metrics.Metric]) -> str:
  """Makes a table, with arrows where higher or lower values are better."""
  lines = ['| column | unit | better | meaning |', '|---|---|---|---|']
  lines += [
    f'| `{m.column}` | {m.unit} | {metrics.ARROWS[m.better]} | {m.meaning} |'
    for m in members
  ]
  return '\n'.join(lines) + '\n'


if __name__ == '__main__':
  PAGE.write_text(page())
