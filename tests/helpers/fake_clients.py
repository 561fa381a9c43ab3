"""Clients of a federation that reply within this process, honestly or not."""

from tff_fssl.program.deploy import rounds
from tff_fssl.program.deploy.app import work


class Clients:
  """Clients that run an exported program.

  Attributes:
    asked: (phase, client) of all messages.
    change: Called with (ask, reply) before a reply is sent; returns replies.
    is_reversed: Whether replies arrive in the reverse order.
  """

  def __init__(self, program, load_client):
    self.asked = []
    self.change = lambda ask, reply: [reply]
    self.is_reversed = False
    self._program, self._load_client = program, load_client
    self._kept = {}

  def send(self, asks):
    """Sends messages: a `rounds.Send`."""
    replies = []
    for ask in asks[::-1] if self.is_reversed else asks:
      phase, client_id = ask.about['phase'], ask.client_id
      self.asked.append((phase, client_id))
      work.check_about(self._program, ask.about)
      done = work.run(
        self._program,
        ask.about,
        ask.values,
        self._load_client(client_id),
        self._kept.get(client_id, {}) if phase else {},
      )
      self._kept[client_id] = done.kept
      reply = rounds.Reply(client_id, done.about, done.values)
      replies += self.change(ask, reply)
    return replies
