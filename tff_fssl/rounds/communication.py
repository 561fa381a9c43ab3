"""The bytes that travel in a round, computed from the messages' types."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import np, tf, tff
from tff_fssl.models import server_model
from tff_fssl.rounds import plan as plan_lib


def build_communication(
  plan: plan_lib.Plan,
  model_type: tff.Type,
  upload_type: tff.Type,
  report_type: tff.Type | None,
  *,
  statistics_up: int,
) -> tff.Computation:
  """Builds `<ServerModel, ServerModel, number of clients> -> figures`.

  The first model is that of the round's message. The second is that whose
  static batch norm statistics are gathered at the round's end.

  If a client uses only its own rows of a table, only these rows count. The same
  holds for the rows from which groups start. A deployment with a federated
  select sends no more. `Exchange.not_counted` lists values that do not travel
  in a deployment.

  Args:
    plan: The plan.
    model_type: The type of the `ServerModel`.
    upload_type: The type of a `ClientResult`.
    report_type: The type of a client's report. None: none is sent.
    statistics_up: Bytes that a client sends for static batch norm statistics.

  Returns:
    The computation. Its result is an OrderedDict. For `down` and for `up`, it
    has the int64 scalars `bytes_down` (all clients together),
    `bytes_down_per_client`, and `bytes_down_PART` for each part of the latter.
    The float32 scalar `percent_of_model_down` is 100 for one dense model to a
    client.
  """
  if plan.algorithm.alone:
    return _build_no_communication(model_type)
  dense = _weights_bytes(model_type)
  one = dense - sum(map(_spec_bytes, plan.kept.values()))
  round_num, states, exchange = tf.int32.size, plan.states, plan.exchange
  up = _up(plan, upload_type)
  up |= collections.OrderedDict(
    statistics=statistics_up,
    scalars=0 if report_type is None else num_bytes(report_type),
  )
  control = tff.types.type_to_tf_tensor_specs(model_type.control).values()
  tensors = sum(_spec_bytes(spec) for spec in control if spec.shape.rank)

  @tff.tensorflow.computation(model_type, model_type, np.int32)
  def communication(
    model: server_model.ServerModel,
    after: server_model.ServerModel,
    num_clients: tf.Tensor,
  ) -> collections.OrderedDict[str, tf.Tensor]:
    model = server_model.ServerModel(*model)
    after = server_model.ServerModel(*after)
    num_phases = tf.constant(0, tf.int64)
    if plan.has_last_phases:
      num_phases += 1 + len(states.statistics_of)
      for name in states.statistics_if_sent:
        num_phases += tf.cast(states.is_sent(name, after), tf.int64)
    down = collections.OrderedDict(model=one, statistics=one * num_phases)
    for name, is_sent in states.sent(model).items():
      size = num_bytes(model_type.sets[name])
      down[name] = tf.where(is_sent, tf.constant(size, tf.int64), 0)
    if 'exchange' in up or tensors:
      down['exchange'] = tensors
    # A table may be on the clients' own disks in a deployment.
    if exchange is not None and not exchange.is_clients_own:
      down['exchange'] += _received_bytes(exchange, model)
    down['scalars'] = round_num + num_bytes(model_type.control) - tensors
    return _figures(
      collections.OrderedDict(down=down, up=up), num_clients, dense
    )

  return communication


def _up(
  plan: plan_lib.Plan, upload_type: tff.Type
) -> collections.OrderedDict[str, int]:
  """Computes the bytes of a client's upload: name of part -> bytes."""
  size, sent, beside = num_bytes, upload_type.update, 0
  exchange = plan.exchange
  if not tff.structure.has_field(sent, channels.MODEL):
    beside = size(sent.row.is_valid) + size(sent.row.client_id)
    sent = sent.update
  up = collections.OrderedDict(
    model=size(sent[channels.MODEL]) + size(upload_type.update_weight),
    statistics=0,
    **{name: size(sent[name]) for name in plan.sent_networks},
  )
  if tff.structure.has_field(sent, channels.PLACE):
    up['model'] += size(sent[channels.PLACE])
  # Those in the mean are a part of the report.
  others = [u for u in plan.uploads.values() if u.how != channels.MEAN]
  specs = [upload.spec for upload in others if not upload.is_known]
  if exchange is not None:
    counted = set(exchange.row_specs) - set(exchange.not_counted)
    specs += [exchange.row_specs[name] for name in counted]
  if others or exchange is not None:
    up['exchange'] = beside + sum(map(_spec_bytes, specs))
  if exchange is not None and exchange.is_clients_own:
    up['exchange'] = 0
  return up


def _build_no_communication(model_type: tff.Type) -> tff.Computation:
  """Builds it for clients that train alone: all figures are 0.

  A simulation moves such models between its server and its clients. In a
  deployment they stay on the clients' own disks.
  """

  @tff.tensorflow.computation(model_type, model_type, np.int32)
  def communication(
    model: server_model.ServerModel,
    after: server_model.ServerModel,
    num_clients: tf.Tensor,
  ) -> collections.OrderedDict[str, tf.Tensor]:
    del model, after
    nothing = collections.OrderedDict(model=0)
    return _figures(
      collections.OrderedDict(down=nothing, up=nothing), num_clients, 1
    )

  return communication


def _figures(
  parts: Mapping[str, Mapping[str, int | tf.Tensor]],
  num_clients: tf.Tensor,
  dense_bytes: int,
) -> collections.OrderedDict[str, tf.Tensor]:
  """Computes metrics.

  Args:
    parts: Direction -> name of part -> bytes of a client.
    num_clients: int32 scalar.
    dense_bytes: The bytes of one dense model.

  Returns:
    Name -> scalar.
  """
  figures = collections.OrderedDict()
  for direction, sizes in parts.items():
    total = tf.add_n([tf.cast(size, tf.int64) for size in sizes.values()])
    figures[f'bytes_{direction}'] = total * tf.cast(num_clients, tf.int64)
    figures[f'bytes_{direction}_per_client'] = total
    # float32 would round large numbers of bytes before the division.
    figures[f'percent_of_model_{direction}'] = tf.cast(
      100.0 * tf.cast(total, tf.float64) / dense_bytes, tf.float32
    )
    for name, size in sizes.items():
      figures[f'bytes_{direction}_{name}'] = tf.cast(size, tf.int64)
  return figures


def _weights_bytes(model_type: tff.Type) -> int:
  """Computes the bytes of the model's weights, without sets."""
  return sum(
    num_bytes(part)
    for part in (
      model_type.trainable,
      model_type.non_trainable,
      model_type.statistics_count,
    )
  )


def _received_bytes(
  exchange: exchange_lib.Exchange, model: server_model.ServerModel
) -> int:
  """Computes the bytes of the exchange's values that a client uses."""

  def receive(model: server_model.ServerModel) -> Mapping[str, tf.Tensor]:
    message = exchange.message(exchange.initialize(), model, tf.constant(1))
    return exchange.receive(message, tf.constant(0))

  # Tracing tells the shapes of the values. Nothing runs.
  traced = tf.function(receive, autograph=False)
  specs = traced.get_concrete_function(model).structured_outputs
  return sum(
    (spec.shape.num_elements() or 0) * spec.dtype.size
    for name, value in specs.items()
    for spec in tf.nest.flatten(value)
    if name not in exchange.not_counted
  )


def num_bytes(tff_type: tff.Type) -> int:
  """Computes the bytes of a value whose tensors have static shapes."""
  specs = tf.nest.flatten(tff.types.type_to_tf_tensor_specs(tff_type))
  return sum(map(_spec_bytes, specs))


def _spec_bytes(spec: tf.TensorSpec) -> int:
  """Computes the bytes of a tensor of static shape."""
  size: int = spec.shape.num_elements() * spec.dtype.size
  return size
