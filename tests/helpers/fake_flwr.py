"""What the app uses of Flower, as far as its records and messages go."""

import dataclasses
import itertools
import sys
import types
from typing import Any

_NUMBERS = itertools.count()


@dataclasses.dataclass
class Array:
  dtype: str
  shape: tuple
  stype: str
  data: Any


class ArrayRecord(dict):
  pass


class ConfigRecord(dict):
  pass


class RecordDict(dict):
  pass


class Message:
  """A message, or with `reply_to` the reply to it."""

  def __init__(
    self,
    content=None,
    dst_node_id=0,
    message_type='',
    group_id='',
    *,
    reply_to=None,
    error=None,
  ):
    self.content, self.error, self.type = content, error, message_type
    self.node, self.group_id = dst_node_id, group_id
    self.metadata = types.SimpleNamespace(
      message_id=f'message {next(_NUMBERS)}',
      dst_node_id=dst_node_id,
      src_node_id=reply_to.node if reply_to else 0,
      reply_to_message_id=reply_to.metadata.message_id if reply_to else '',
    )

  def has_error(self):
    return self.error is not None


class App:
  """A ServerApp or a ClientApp."""

  def main(self):
    return lambda function: function

  query = train = main


def install(monkeypatch):
  """Makes it importable as flwr."""
  parts = {
    'flwr': {},
    'flwr.app': {
      'Array': Array,
      'ArrayRecord': ArrayRecord,
      'ConfigRecord': ConfigRecord,
      'Context': types.SimpleNamespace,
      'Message': Message,
      'RecordDict': RecordDict,
    },
    'flwr.clientapp': {'ClientApp': App},
    'flwr.serverapp': {'Grid': object, 'ServerApp': App},
  }
  for name, values in parts.items():
    module = types.ModuleType(name)
    vars(module).update(values)
    monkeypatch.setitem(sys.modules, name, module)
