"""The server: finds the clients, and runs the rounds that are left."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
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
  folder = str(config['server'])
  nodes = Nodes(
    grid,
    work.load_program(folder),
    timeout=float(config['timeout']),
    patience=float(config['patience']),
  )
  server.serve(
    folder, work.load_program, nodes.send, output_dir=str(config['output-dir'])
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
    self._client_of: dict[int, int] = {}

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
    found = []
    for reply in self._grid.send_and_receive(messages, timeout=self._timeout):
      client_id = client_at.get(reply.metadata.src_node_id, -1)
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

    Returns:
      Client -> node. Clients that two nodes claim to be are left out.
    """
    end = time.monotonic() + self._patience
    asked: set[int] = set()
    while True:
      present = set(self._grid.get_node_ids())
      # A node that is silent must not hold up every look.
      self._ask(sorted(present - set(self._client_of) - asked))
      asked |= present
      claims: dict[int, list[int]] = {}
      for node, client_id in self._client_of.items():
        if node in present:
          claims.setdefault(client_id, []).append(node)
      found = {
        client_id: nodes[0]
        for client_id, nodes in claims.items()
        if len(nodes) == 1 and client_id in wanted
      }
      if len(found) == len(wanted) or time.monotonic() > end:
        for client_id in sorted(wanted & set(claims) - set(found)):
          _LOG.warning('client %d: two nodes claim to be it', client_id)
        return found
      time.sleep(_PAUSE_SECS)

  def _ask(self, nodes: Sequence[int]) -> None:
    """Asks nodes which clients they are."""
    messages = [
      Message(RecordDict(), dst_node_id=node, message_type='query')
      for node in nodes
    ]
    if not messages:
      return
    # Starting a client's process takes seconds, whatever the patience is.
    timeout = max(self._patience, _QUERY_SECS)
    for reply in self._grid.send_and_receive(messages, timeout=timeout):
      if reply.has_error():
        continue
      record = reply.content.get('who')
      if isinstance(record, ConfigRecord):
        client_id = record.get('client')
        # Only a number can name a client; a node may say anything.
        if isinstance(client_id, int):
          self._client_of[reply.metadata.src_node_id] = client_id
