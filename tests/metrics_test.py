"""Declarations of metrics. algorithms/metrics_test.py has the real ones."""

import pytest

from tff_fssl import metrics
from tff_fssl.program import catalogue


def test_columns_of_a_metric():
  metric = metrics.client_range('x', 'What x is.')
  assert metric.columns() == {
    f'client_work/train/x_{kind}': kind for kind in ('mean', 'min', 'max')
  }
  assert metrics.Metric('{a,b}/{c,d}', 'Two by two.').columns() == {
    'a/c': 'c',
    'a/d': 'd',
    'b/c': 'c',
    'b/d': 'd',
  }
  with pytest.raises(ValueError, match="unit 'percent'"):
    metrics.Metric('x', 'What x is.', 'percent')
  with pytest.raises(ValueError, match='better'):
    metrics.Metric('x', 'What x is.', better='more')
  with pytest.raises(ValueError, match='has no meaning'):
    metrics.Metric('x', '')


def test_an_algorithm_adds_its_own_diagram_and_figure():
  added = metrics.client_metric(
    'divergence',
    'What it is.',
    metrics.NATS,
    metrics.LOWER,
    curve=metrics.Curve('Divergence'),
    figure='divergence',
  )
  known = catalogue.all_metrics()
  before, after = metrics.panels(known), metrics.panels([*known, added])
  assert after[:-1] == before
  assert after[-1] == metrics.Panel(
    'Divergence',
    (metrics.Line('client_work/train/divergence', '', '-'),),
    False,
    metrics.LOWER,
  )
  assert metrics.figures([*known, added])['divergence'] == {
    'client_work/train/divergence': added
  }


def test_numbered_columns():
  columns = ['a_10_x', 'a_9_x', 'a__x', 'a_1_y', 'b']
  assert metrics.numbered('a_..._x', columns) == {9: 'a_9_x', 10: 'a_10_x'}
  assert not metrics.numbered('a_9_x', columns)


def test_lines_of_one_metric_differ_in_style():
  shown = metrics.client_range('x', 'What x is.', curve=metrics.Curve('X'))
  (panel,) = metrics.panels([shown])
  assert panel.is_share
  assert [(line.label, line.dashes) for line in panel.lines] == [
    ('mean', metrics.SOLID),
    ('min', metrics.DASHED),
    ('max', metrics.DOTTED),
  ]


def test_columns_are_indexed():
  both = metrics.client_metric('{a,b}', 'Both.', metrics.NATS)
  assert metrics.index_columns([both]) == {
    'client_work/train/a': both,
    'client_work/train/b': both,
  }
