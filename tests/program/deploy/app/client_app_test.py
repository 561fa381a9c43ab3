"""The client trains on what it loads, and keeps values for one round."""

import json
import types

import fake_flwr
import numpy as np
import pytest

_SLOTS = {
  0: {'dtype': 'float32', 'shape': [2]},
  3: {'dtype': 'float32', 'shape': []},
}
_PHASES = [{'sent': [0]}, {'sent': [0]}]
_NODE = {'client': '5', 'program': 'folder'}


class _Program:
  """Adds what was sent, and what an earlier phase kept."""

  digest, data = 'p', ['labeled/x']

  def __init__(self):
    spec = {'shape': [None, 1], 'dtype': 'float32'}
    names = ('labeled/x', 'unlabeled/x')
    self.description = {
      'phases': _PHASES,
      'slots': _SLOTS,
      'data': [{'name': name, **spec} for name in names],
    }

  def read(self, name):
    return json.dumps(
      {
        'class_names': ['a', 'b'],
        'max_examples': 9,
        'labeled_also_unlabeled': False,
        'labels_at_server': False,
      }
    ).encode()

  def work(self, phase, sent, data, kept):
    total = np.float32(data[0].sum() + sent[0].sum() + kept.get(3, 0.0))
    return [total], {3: total}


@pytest.fixture(name='client')
def _client(app, monkeypatch):
  """Calls the app with a message in a round's phase: the reply's value."""
  asked = []

  def load_program(folder):
    asked.append(folder)
    return _Program()

  monkeypatch.setattr(app.work, 'load_program', load_program)
  examples = (np.ones([2, 1], np.float32), [0, 1]), None
  monkeypatch.setattr(app.load_client, 'load_client', lambda node: examples)
  context = types.SimpleNamespace(node_config=_NODE, state={})

  def call(round_num, phase, values=(np.float32([1, 2]),), **changed):
    about = {
      'program': 'p',
      'phase': phase,
      'round': round_num,
      'client': 5,
      'slot': 0,
      'share': 1.0,
      'seed': [1, 2],
      **changed,
    }
    message = fake_flwr.Message(app.wire.encode(about, values), 7)
    reply = app.client_app.train(message, context)
    assert asked[-1] == 'folder'
    assert reply.metadata.src_node_id == 7
    named = app.wire.about_of(reply.content)
    assert named == {
      n: about[n] for n in ('round', 'phase', 'client', 'program')
    }
    (value,) = app.wire.decode(reply.content, [_SLOTS[3]])
    return float(value)

  return call


def test_who_it_is(app):
  message = fake_flwr.Message(None, 7)
  context = types.SimpleNamespace(node_config=_NODE)
  reply = app.client_app.who(message, context)
  assert reply.content['who'] == {'client': 5}
  assert reply.metadata.src_node_id == 7


def test_it_keeps_values_for_one_round(client):
  assert client(1, 0) == 5.0
  assert client(1, 1) == 10.0
  assert client(2, 1) == 5.0


def test_messages_that_are_not_of_this_app(app, client):
  for wrong in (
    {'values': ()},
    {'values': (np.float32([1, 2, 3]),)},
    {'program': 'q'},
    {'seed': 'none'},
  ):
    with pytest.raises(app.work.WorkError, match='this app|of the app'):
      client(1, 0, **wrong)
  with pytest.raises(app.work.WorkError, match='this app'):
    client(1, 7)
