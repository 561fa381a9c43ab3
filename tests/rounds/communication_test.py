"""The bytes of a round, from types made by hand."""

import collections

import handmade
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_plan

from tff_fssl.algorithms import local_training
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.models import server_model
from tff_fssl.rounds import communication
from tff_fssl.rounds import messages

# Three trainable floats, two others, and the count of the statistics.
_MODEL = server_model.ServerModel(
  (np.zeros([3], np.float32),), (np.zeros([2], np.float32),), np.float32(0)
)
_MODEL_BYTES = 24


def _exchange(**changes):
  """Sends each client 5 floats, and gets rows of 7 and of 2 floats back."""
  exchange = exchange_lib.Exchange(
    initialize=lambda: (),
    message=lambda table, model, round_num: tf.zeros([10, 5]),
    receive=lambda message, client_id: {'received': message[0]},
    row_specs={'far': tf.TensorSpec([7]), 'near': tf.TensorSpec([2])},
    accept=lambda table, rows, model, round_num: table,
    num_clients=10,
  )
  return exchange._replace(**changes)


def _figures(
  update=None,
  exchange=None,
  row=None,
  networks=(),
  uploads=None,
  num_clients=1,
  head=None,
  report_type=None,
  statistics_up=0,
  is_static=False,
):
  """Figures of a round whose clients send `update`, by channel."""
  specs = collections.OrderedDict(
    sorted({'model': (tf.TensorSpec([3]),), **(update or {})}.items())
  )
  sent = tff.types.tensorflow_to_type(specs)
  if row is not None:
    sent = collections.OrderedDict(update=sent, row=row)
  uploaded = base.AuxiliaryNetwork(uploaded=True)
  algorithm = handmade.algorithm(
    uploads=lambda setup: uploads or {},
    networks=lambda: dict.fromkeys(networks, uploaded),
  )
  plan = tiny_plan.bare(algorithm, exchange=exchange, head=head)
  plan.networks.is_static = is_static
  computed = communication.build_communication(
    plan,
    tff.types.tensorflow_to_type(
      tf.nest.map_structure(tf.TensorSpec.from_tensor, _as_tensors())
    ),
    tff.to_type(tff.learning.templates.ClientResult(sent, np.float32)),
    report_type,
    statistics_up=statistics_up,
  )
  return computed(_MODEL, _MODEL, num_clients)


def _as_tensors():
  return tf.nest.map_structure(tf.convert_to_tensor, _MODEL)


def _parts(figures, way):
  prefix = f'bytes_{way}_'
  return {
    name.removeprefix(prefix): int(value)
    for name, value in figures.items()
    if name.startswith(prefix) and name != prefix + 'per_client'
  }


def test_a_model_down_and_an_update_with_its_weight_up():
  report_type = tff.to_type((np.float32, np.float32, np.bool_))
  figures = _figures(num_clients=10, report_type=report_type)
  # The number of the round goes down.
  assert _parts(figures, 'down') == {
    'model': _MODEL_BYTES,
    'statistics': 0,
    'scalars': 4,
  }
  assert _parts(figures, 'up') == {
    'model': 12 + 4,
    'statistics': 0,
    'scalars': 9,
  }
  assert figures['bytes_up_per_client'] == 25
  assert figures['bytes_up'] == 250
  assert figures['percent_of_model_up'] == pytest.approx(100 * 25 / 24)


def test_control_values_of_other_shapes_are_no_scalars(monkeypatch):
  control = {'mode': np.float32(1), 'thresholds': np.zeros([3], np.float32)}
  model = _MODEL._replace(control=collections.OrderedDict(control))
  monkeypatch.setitem(globals(), '_MODEL', model)
  down = _parts(_figures(), 'down')
  assert (down['scalars'], down['exchange']) == (4 + 4, 12)
  both = _parts(_figures(exchange=_exchange()), 'down')
  assert both['exchange'] == 12 + 20


def test_networks_and_places_of_clients():
  figures = _figures(
    {'teacher': (tf.TensorSpec([3]),), 'place': tf.TensorSpec([2])},
    networks=['teacher'],
  )
  parts = _parts(figures, 'up')
  assert parts['teacher'] == 12
  assert parts['model'] == 12 + 4 + 8


def test_weights_that_stay_and_further_phases():
  head = {0: tf.TensorSpec([2])}
  figures = _figures(head=head, is_static=True, statistics_up=20)
  down = _parts(figures, 'down')
  assert (down['model'], down['statistics']) == (16, 16)
  assert _parts(figures, 'up')['statistics'] == 20


@pytest.mark.parametrize(
  'changes, up, down',
  [
    # A row says whether it is valid, and whose it is.
    ({}, 28 + 8 + 1 + 4, 20),
    ({'not_counted': ('far', 'received')}, 8 + 1 + 4, 0),
    ({'is_clients_own': True}, 0, 0),
  ],
)
def test_rows_beside_the_update(changes, up, down):
  exchange = _exchange(**changes)
  figures = _figures(
    exchange=exchange, row=messages.row_type(exchange.row_specs)
  )
  assert _parts(figures, 'up')['model'] == 12 + 4
  assert _parts(figures, 'up')['exchange'] == up
  assert _parts(figures, 'down')['exchange'] == down


def test_uploads_in_the_sum_and_in_rows():
  uploads = {
    'report': channels.Upload(0.0, 1.0),
    'summed': channels.Upload(how=channels.SUM, spec=tf.TensorSpec([5])),
  }
  up = _parts(_figures({'summed': tf.TensorSpec([5])}, uploads=uploads), 'up')
  assert (up['model'], up['scalars'], up['exchange']) == (12 + 4, 0, 20)
  specs = {'row': tf.TensorSpec([7]), 'known': tf.TensorSpec([3])}
  uploads = {
    name: channels.Upload(
      how=channels.ROWS, spec=spec, is_known=name == 'known'
    )
    for name, spec in specs.items()
  }
  figures = _figures(row=messages.row_type(specs), uploads=uploads)
  # Beside it, as for an exchange.
  assert _parts(figures, 'up')['exchange'] == 28 + 1 + 4


def test_clients_that_train_alone_send_nothing():
  model_type = tff.types.tensorflow_to_type(
    tf.nest.map_structure(tf.TensorSpec.from_tensor, _as_tensors())
  )
  plan = tiny_plan.bare(local_training.LocalSupervised())
  figures = communication.build_communication(
    plan, model_type, model_type, None, statistics_up=0
  )(_MODEL, _MODEL, 9)
  assert figures['bytes_up'] == figures['bytes_down'] == 0
