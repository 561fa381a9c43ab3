"""The server: finds the clients, and runs the rounds that are left."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
# pylint: disable=wrong-import-position

from collections.abc import Sequence
import logging
import time
from typing import Any

from flwr.app import ConfigRecord
from flwr.app import Context
from flwr.app import Message
from flwr.app import RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import ServerApp

app = ServerApp()

_LOG = logging.getLogger('flwr')  # What `flwr run --stream` shows.
# Seconds between two looks at the nodes that are there.
_PAUSE_SECS = 1.0
# Seconds, at least, until a node must have said who it is.
_QUERY_SECS = 10.0


@app.main()
def main(grid: Grid, context: Context) -> None:
  """Runs the server of the federation."""
  from fssl_app import work
  import tensorflow as tf

  from tff_fssl.program.deploy import server

  config = context.run_config
  if threads := int(config['threads']):
    tf.config.threading.set_intra_op_parallelism_threads(threads)
  # Not in the app: clients get that.
  folder = work.setting({}, 'server', 'server')
  if not os.path.isdir(folder):
    raise work.WorkError(
      f'{os.path.abspath(folder)}: there is no such folder; start the SuperLink'
      ' with FSSL_SERVER=PATH in its environment, the folder server/ that was'
      ' written with this app'
    )
  nodes = Nodes(
    grid,
    work.load_program(folder),
    timeout=float(config['timeout']),
    patience=float(config['patience']),
  )
  server.serve(
    folder,
    work.load_program,
    nodes.send,
    output_dir=str(config['output-dir']),
    wait_secs=float(config['wait']),
  )


class Nodes:
  """The nodes of the federation, which say which clients they are."""

  def __init__(
    self, grid: Grid, program: Any, *, timeout: float, patience: float
  ):
    """Knows no node yet.

    Args:
      grid: Flower's messages.
      program: The `artefact.Program`.
      timeout: Seconds until replies to a message must be there.
      patience: Seconds for which clients of a round are waited for.
    """
    self._grid, self._program = grid, program
    self._timeout, self._patience = timeout, patience
    # Of nodes that are there: the client that it says to be, or None.
    self._client_of: dict[int, int | None] = {}
    # Of those that have not said anything: when they were asked.
    self._asked: dict[int, float] = {}
    self._queries: dict[str, int] = {}  # The message -> the node.
    # Clients that were waited for, and did not come.
    self._missed: set[int] = set()
    self._disputed: set[int] = set()

  def send(self, asks: Sequence[Any]) -> list[Any]:
    """Sends messages, and returns the replies: a `rounds.Send`."""
    from fssl_app import wire

    from tff_fssl.program.deploy import rounds

    node_of = self._find({ask.client_id for ask in asks})
    messages = [
      Message(
        wire.encode(ask.about, ask.values),
        dst_node_id=node_of[ask.client_id],
        message_type='train',
        group_id=f'{ask.about["round"]}.{ask.about["phase"]}',
      )
      for ask in asks
      if ask.client_id in node_of
    ]
    if not messages:
      return []
    specs = self._program.specs(int(asks[0].about['phase']))
    client_at = {node: client_id for client_id, node in node_of.items()}
    replies = list(self._grid.send_and_receive(messages, timeout=self._timeout))
    # Flower's own errors come from no node, but name the message.
    asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
    found = []
    for reply in replies:
      node = reply.metadata.src_node_id
      if reply.has_error():
        node = asked.get(reply.metadata.reply_to_message_id, node)
      client_id = client_at.get(node, -1)
      if reply.has_error():
        error = f'{reply.error.code}: {reply.error.reason}'
        found.append(rounds.Reply(client_id, {}, None, error))
        continue
      about = wire.about_of(reply.content)
      values = wire.decode(reply.content, specs)
      found.append(rounds.Reply(client_id, about, values))
    return found

  def _find(self, wanted: set[int]) -> dict[int, int]:
    """Finds the nodes of clients, and waits for those that are not there.

    It waits once for a client that does not come, and for a node that does not
    say who it is.

    Returns:
      Client -> node. Clients that two nodes claim to be are left out.
    """
    end = time.monotonic() + self._patience
    while True:
      self._look()
      claims: dict[int | None, list[int]] = {}
      for node, client_id in self._client_of.items():
        claims.setdefault(client_id, []).append(node)
      found = {i: claims[i][0] for i in wanted if len(claims.get(i, ())) == 1}
      disputed = (wanted & set(claims)) - set(found)
      missing = wanted - set(found) - disputed
      now = time.monotonic()
      # Starting a client's process takes seconds, whatever the patience is.
      since = now - max(self._patience, _QUERY_SECS)
      is_asking = any(asked > since for asked in self._asked.values())
      if is_asking or (missing - self._missed and now < end):
        time.sleep(_PAUSE_SECS)
        continue
      # Without anybody, the next attempt waits for all again.
      self._missed = missing if found else set()
      for client_id in sorted(disputed - self._disputed):
        _LOG.warning('client %d: two nodes claim to be it', client_id)
      self._disputed |= disputed
      return found

  def _look(self) -> None:
    """Asks new nodes which clients they are, and hears what others say."""
    present = set(self._grid.get_node_ids())
    # A node that comes back may be another client.
    for node in {*self._client_of, *self._asked} - present:
      self._client_of.pop(node, None)
      self._asked.pop(node, None)
    new = sorted(present - set(self._client_of) - set(self._asked))
    messages = [
      Message(RecordDict(), dst_node_id=node, message_type='query')
      for node in new
    ]
    sent = list(self._grid.push_messages(messages)) if messages else []
    # Flower gives None for a message that it could not take.
    self._asked.update(dict.fromkeys(new, time.monotonic()))
    self._queries.update(
      (query, node) for query, node in zip(sent, new) if query
    )
    if not self._queries:
      return
    for reply in self._grid.pull_messages(list(self._queries)):
      node = self._queries.pop(reply.metadata.reply_to_message_id, -1)
      if node not in self._asked:
        continue
      del self._asked[node]
      record = None if reply.has_error() else reply.content.get('who')
      said = record.get('client') if isinstance(record, ConfigRecord) else None
      # Only a number can name a client; a node may say anything.
      self._client_of[node] = said if isinstance(said, int) else None
