"""Who is who among the nodes, and what becomes of their replies."""

import types

import fake_flwr
import numpy as np
import pytest

from tff_fssl.program.deploy import rounds


class _Grid:
  """Nodes that say that they are clients, and send their client's number.

  Attributes:
    clients: Node -> what it says to be.
    queries: The nodes that were asked who they are.
    seen: The clients that were sent work.
  """

  def __init__(self, clients):
    self.clients, self.queries, self.seen = clients, [], []
    self.wire = None
    self._said = {}

  def get_node_ids(self):
    return list(self.clients)

  def push_messages(self, messages):
    for message in messages:
      assert message.type == 'query'
      self.queries.append(message.node)
      client = self.clients[message.node]
      if client == 'error':
        reply = _error(message)
      else:
        record = fake_flwr.ConfigRecord({'client': client})
        content = {} if client == 'nothing' else {'who': record}
        reply = fake_flwr.Message(
          fake_flwr.RecordDict(content), reply_to=message
        )
      if client != 'silent':
        self._said[message.metadata.message_id] = reply
    return [message.metadata.message_id for message in messages]

  def pull_messages(self, ids):
    return [self._said.pop(i) for i in ids if i in self._said]

  def send_and_receive(self, messages, timeout):
    assert timeout
    replies = []
    for message in messages:
      client = self.clients[message.node]
      if client in (3, 4):
        # Flower's own error comes from the SuperLink, not from the node.
        replies.append(_error(message, node=1 if client == 4 else None))
        continue
      self.seen.append(client)
      about = self.wire.about_of(message.content)
      content = self.wire.encode(about, [np.float32(client)])
      replies.append(fake_flwr.Message(content, reply_to=message))
    return replies[::-1]


def _error(message, node=None):
  error = types.SimpleNamespace(code=2, reason='gone')
  reply = fake_flwr.Message(None, reply_to=message, error=error)
  reply.metadata.src_node_id = node or message.node
  return reply


def _ask(client_id):
  about = {'round': 1, 'phase': 0, 'client': client_id}
  return rounds.Ask(client_id, about, [np.float32(1)])


@pytest.fixture(name='clock', autouse=True)
def _clock(app, monkeypatch):
  """The pauses, which take no time here, and what to do in the next one."""
  clock = types.SimpleNamespace(now=0.0, events=[])

  def pause(seconds):
    clock.now += seconds
    if clock.events:
      clock.events.pop(0)()

  monkeypatch.setattr(app.server_app.time, 'monotonic', lambda: clock.now)
  monkeypatch.setattr(app.server_app.time, 'sleep', pause)
  return clock


@pytest.fixture(name='start')
def _start(app):
  """Makes a function that sends to clients of a grid."""
  program = types.SimpleNamespace(
    specs=lambda _: [{'dtype': 'float32', 'shape': []}]
  )

  def start(grid, patience=0.0):
    grid.wire = app.wire
    nodes = app.server_app.Nodes(grid, program, timeout=9, patience=patience)
    return lambda *wanted: {
      r.client_id: r for r in nodes.send([_ask(i) for i in wanted])
    }

  return start


def test_replies_by_client(start):
  grid = _Grid({17: 2, 11: 0, 13: 5, 19: 3, 21: 4})
  found = start(grid)(0, 2, 3, 4)
  assert sorted(found) == [0, 2, 3, 4] and 5 not in grid.seen
  assert found[2].values == [2] and found[2].about['client'] == 2
  assert found[3].error == found[4].error == '2: gone'
  assert found[3].values is found[4].values is None


def test_clients_that_are_missing_or_claimed_twice_are_left_out(start, caplog):
  grid = _Grid({11: 0, 12: 1, 13: 1, 14: 'nothing', 15: 'error', 16: 'x'})
  assert sorted(start(grid)(0, 1, 2)) == [0]
  assert 'client 1: two nodes claim to be it' in caplog.text
  assert not start(_Grid({}))(0)


def test_clients_of_a_round_are_waited_for(start, clock):
  grid = _Grid({11: 0})
  clock.events.append(lambda: grid.clients.update({12: 1}))
  assert sorted(start(grid, patience=60.0)(0, 1)) == [0, 1]
  assert clock.now <= 2.0 and grid.queries == [11, 12]


def test_what_is_missing_costs_the_patience_once(start, clock):
  grid = _Grid({11: 0, 12: 1, 13: 1, 14: 'silent'})
  send = start(grid, patience=60.0)
  assert sorted(send(0, 1, 2)) == [0]
  assert 60.0 <= clock.now < 63.0
  before = clock.now
  assert sorted(send(0, 1, 2)) == [0]
  assert clock.now == before and grid.queries == [11, 12, 13, 14]
  # Its SuperNode was started again; the other one has ended.
  del grid.clients[14], grid.clients[13]
  grid.clients[15] = 2
  assert sorted(send(0, 1, 2)) == [0, 1, 2]
  assert clock.now == before


def test_without_anybody_all_are_waited_for_again(start, clock):
  grid = _Grid({})
  send = start(grid, patience=60.0)
  assert not send(0, 1)
  clock.events += [
    lambda: grid.clients.update({11: 0}),
    lambda: grid.clients.update({12: 1}),
  ]
  assert sorted(send(0, 1)) == [0, 1]


def test_a_node_that_comes_back_is_asked_again(start):
  grid = _Grid({11: 0})
  send = start(grid)
  assert sorted(send(0)) == [0]
  node = grid.clients.pop(11)
  assert node == 0 and not send(0)
  grid.clients[11] = 1
  assert sorted(send(1)) == [1] and grid.queries == [11, 11]
