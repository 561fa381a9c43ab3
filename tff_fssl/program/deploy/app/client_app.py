"""The client: says who it is, and trains on its own examples."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
# pylint: disable=wrong-import-position

from flwr.app import ConfigRecord
from flwr.app import Context
from flwr.app import Message
from flwr.app import RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

_KEPT, _KEPT_AT = 'kept', 'kept_at'


@app.query()
def who(message: Message, context: Context) -> Message:
  """Tells the number of this client."""
  from fssl_app import work

  client_id = work.count(context.node_config, 'client')
  about = ConfigRecord({'client': client_id})
  return Message(RecordDict({'who': about}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
  """Runs a phase of a round."""
  # Slow: only where something is computed.
  from fssl_app import load_client
  from fssl_app import wire
  from fssl_app import work
  import tensorflow as tf

  if threads := work.count(context.node_config, 'threads', '0'):
    tf.config.threading.set_intra_op_parallelism_threads(threads)
  program = work.load_program(work.setting(context.node_config, 'program', ''))
  about = wire.about_of(message.content)
  phase = work.check_about(program, about)
  slots = program.description['slots']
  sent = wire.decode(message.content, [slots[slot] for slot in phase['sent']])
  if sent is None:
    raise work.WorkError('the message is not one of this app')
  done = work.run(
    program,
    about,
    sent,
    load_client.load_client(context.node_config),
    _kept(context, about['round'], slots),
  )
  _keep(context, about['round'], done.kept)
  content = wire.encode(done.about, done.values)
  return Message(content, reply_to=message)


def _kept(context, round_num, slots):
  """Reads what an earlier phase of this round has kept."""
  from fssl_app import wire

  if not isinstance(context.state.get(_KEPT_AT), ConfigRecord):
    return {}
  at = context.state[_KEPT_AT]
  # Those of a round that broke off belong to other weights.
  if at['round'] != round_num:
    return {}
  names = list(at['slots'])
  content = RecordDict({'values': context.state[_KEPT]})
  values = wire.decode(content, [slots[name] for name in names])
  return dict(zip(names, values or []))


def _keep(context, round_num, kept):
  """Keeps values for later phases of this round."""
  from fssl_app import wire

  if kept:
    content = wire.encode({}, list(kept.values()))
    context.state[_KEPT] = content['values']
    context.state[_KEPT_AT] = ConfigRecord(
      {'round': round_num, 'slots': list(kept)}
    )
