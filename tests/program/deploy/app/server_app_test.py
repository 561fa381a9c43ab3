"""Who is who among the nodes, and what becomes of their replies."""

import types

import fake_flwr
import numpy as np
import pytest

from tff_fssl.program.deploy import rounds


class _Grid:
  """Nodes that say that they are clients, and send their client's number."""

  def __init__(self, clients):
    self.clients, self.queries = clients, 0
    self.seen = []
    self.wire = None

  def get_node_ids(self):
    return list(self.clients)

  def send_and_receive(self, messages, timeout):
    assert timeout
    replies = []
    for message in messages:
      client = self.clients.get(message.node)
      if message.type == 'query':
        self.queries += 1
        if client == 'error':
          replies.append(_error(message))
          continue
        record = fake_flwr.ConfigRecord({'client': client})
        content = fake_flwr.RecordDict({'who': record})
        if client == 'nothing':
          content = fake_flwr.RecordDict()
      elif client == 3:
        replies.append(_error(message))
        continue
      else:
        self.seen.append(client)
        about = self.wire.about_of(message.content)
        content = self.wire.encode(about, [np.float32(client)])
      replies.append(fake_flwr.Message(content, reply_to=message))
    return replies[::-1]


def _error(message):
  error = types.SimpleNamespace(code=2, reason='gone')
  return fake_flwr.Message(None, reply_to=message, error=error)


def _ask(client_id):
  about = {'round': 1, 'phase': 0, 'client': client_id}
  return rounds.Ask(client_id, about, [np.float32(1)])


@pytest.fixture(name='send')
def _send(app):
  program = types.SimpleNamespace(
    specs=lambda _: [{'dtype': 'float32', 'shape': []}]
  )

  def send(grid, *wanted, patience=0.0):
    grid.wire = app.wire
    nodes = app.server_app.Nodes(grid, program, timeout=9, patience=patience)
    return {r.client_id: r for r in nodes.send([_ask(i) for i in wanted])}

  return send


def test_replies_by_client(send):
  grid = _Grid({17: 2, 11: 0, 13: 5, 19: 3})
  found = send(grid, 0, 2, 3)
  assert sorted(found) == [0, 2, 3] and 5 not in grid.seen
  assert found[2].values == [2] and found[2].about['client'] == 2
  assert found[3].error == '2: gone' and found[3].values is None


def test_clients_that_are_missing_or_claimed_twice_are_left_out(send, caplog):
  grid = _Grid({11: 0, 12: 1, 13: 1, 14: 'nothing', 15: 'error', 16: 'x'})
  assert sorted(send(grid, 0, 1, 2)) == [0]
  assert 'client 1: two nodes claim to be it' in caplog.text
  assert not send(_Grid({}), 0)


def test_clients_of_a_round_are_waited_for(send, app, monkeypatch):
  grid = _Grid({11: 0})
  pauses = []

  def pause(seconds):
    pauses.append(seconds)
    grid.clients[12] = 1

  monkeypatch.setattr(app.server_app.time, 'sleep', pause)
  assert sorted(send(grid, 0, 1, patience=60.0)) == [0, 1]
  assert len(pauses) == 1 and grid.queries == 2
