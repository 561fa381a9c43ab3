"""A client refuses what does not fit, in one sentence."""

import json

import numpy as np
import pytest

_X = np.zeros([3, 4, 4, 1], np.uint8)
_ABOUT = {
  'program': 'p',
  'phase': 0,
  'round': 2,
  'client': 5,
  'slot': 1,
  'share': 0.5,
  'seed': [-3, 7],
}


class _Program:
  digest, also_unlabeled, at_server = 'p', False, False
  data = (
    'seed labeled/x labeled/y unlabeled/x unlabeled/y client_id slot share'
  ).split()

  def __init__(self):
    self.description = {
      'data': [
        {
          'name': name,
          'shape': [None, 4, 4, 1] if name.endswith('x') else [None],
          'dtype': 'uint8' if name.endswith('x') else 'int32',
        }
        for name in self.data
      ],
      'phases': [{'sent': []}],
    }

  def read(self, name):
    assert name == 'client.json'
    about = {
      'class_names': ['a', 'b', 'c'],
      'max_examples': 4,
      'labeled_also_unlabeled': self.also_unlabeled,
      'labels_at_server': self.at_server,
    }
    return json.dumps(about).encode()

  def work(self, phase, sent, data, kept):
    return [phase, sent, *data], {1: kept}


def test_what_the_graphs_get(app):
  done = app.work.run(_Program(), _ABOUT, ['s'], ((_X, [0, 1, 2]), _X[:1]), {})
  phase, sent, *data = done.values
  assert (phase, sent, done.kept) == (0, ['s'], {1: {}})
  assert done.about == {'round': 2, 'phase': 0, 'client': 5, 'program': 'p'}
  by_name = dict(zip(_Program.data, data, strict=True))
  assert by_name['seed'].dtype == by_name['labeled/y'].dtype == np.int32
  assert by_name['unlabeled/y'].tolist() == [-1]
  assert (by_name['client_id'], by_name['slot']) == (5, 1)
  assert by_name['share'] == np.float32(0.5)
  program = _Program()
  program.also_unlabeled = True
  data = app.work.make_data(program, _ABOUT, (_X[:1], [0]), _X[:1])
  assert [len(a) for a in data[1:5]] == [1, 1, 2, 2]
  nothing = app.work.make_data(_Program(), _ABOUT, None, None)
  assert [len(a) for a in nothing[1:5]] == [0, 0, 0, 0]


def test_labels_of_clients_serve_metrics_if_the_server_has_the_labels(app):
  program = _Program()
  program.at_server = True
  data = app.work.make_data(program, _ABOUT, (_X[:2], [0, 2]), _X[:1])
  assert [len(a) for a in data[1:5]] == [0, 0, 3, 3]
  assert data[4].tolist() == [-1, 0, 2] and data[4].dtype == np.int32
  with pytest.raises(app.work.WorkError, match='label 3; .* 0 to 2'):
    app.work.make_data(program, _ABOUT, (_X[:1], [3]), None)


@pytest.mark.parametrize(
  'labeled, unlabeled, words',
  [
    ((_X, [1]), None, '3 labeled examples and 1 labels'),
    ((_X[0], [1, 1]), None, r'labeled examples are uint8 \[4, 4, 1\]'),
    ((_X, [0, 0, 0]), _X, '6 examples; .* more than 4'),
    (None, _X.astype(np.float32), 'unlabeled examples are float32'),
    (None, np.zeros([2, 8, 8, 1], np.uint8), r'must be uint8 \[N, 4, 4, 1\]'),
  ],
)
def test_examples_that_do_not_fit(app, labeled, unlabeled, words):
  with pytest.raises(app.work.WorkError, match=words):
    app.work.make_data(_Program(), _ABOUT, labeled, unlabeled)


@pytest.mark.parametrize('label', [-1, 3, 2**32])
def test_labels_that_are_no_classes(app, label):
  with pytest.raises(app.work.WorkError, match=f'label {label}; .* 0 to 2'):
    app.work.make_data(_Program(), _ABOUT, (_X[:2], [1, label]), None)


@pytest.mark.parametrize('labels', [[0.0, 1.5], ['a', 'b'], [True, False]])
def test_labels_that_are_no_integers(app, labels):
  with pytest.raises(app.work.WorkError, match='must be integers'):
    app.work.make_data(_Program(), _ABOUT, (_X[:2], labels), None)


def test_messages_of_another_app(app):
  program = _Program()
  assert app.work.check_about(program, _ABOUT) == {'sent': []}
  wrong = [{**_ABOUT, name: None} for name in _ABOUT]
  wrong += [{}, {**_ABOUT, 'phase': -1}, {**_ABOUT, 'phase': 1}]
  wrong += [{**_ABOUT, 'program': 'q'}, {**_ABOUT, 'seed': [1, 2, 3]}]
  for about in wrong:
    with pytest.raises(app.work.WorkError, match='this app|another version'):
      app.work.check_about(program, about)


def test_settings_of_a_client(app, monkeypatch):
  work, config = app.work, {'client': 3, 'data': 'here'}
  monkeypatch.setenv('FSSL_DATA', 'there')
  assert work.setting(config, 'data') == 'here'
  assert work.setting({}, 'data') == 'there'
  assert work.setting({}, 'program', '') == ''
  assert (work.count(config, 'client'), work.count({}, 'threads', '0')) == (
    3,
    0,
  )
  with pytest.raises(work.WorkError, match='client=.* FSSL_CLIENT'):
    work.count({}, 'client')
  for wrong in ('-1', 'two', '1.5', ''):
    with pytest.raises(work.WorkError, match='client='):
      work.count({'client': wrong}, 'client')
