"""The client phase of static batch norm: statistics of the new weights.

Types are in TFF's notation: `D*@CLIENTS` is a data set of elements of type D at
each client, `W@SERVER` one value of type W at the server.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
import functools
from typing import Any, TypeAlias

from tff_fssl.aggregators import collecting
from tff_fssl.data import augment
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.models.weights import Weights, select
from tff_fssl.rounds import client_data
from tff_fssl.rounds import communication
from tff_fssl.rounds import composer
from tff_fssl.rounds import delivery as delivery_lib
from tff_fssl.rounds import messages


@dataclasses.dataclass(frozen=True)
class Gathering:
  """The settings by which statistics are gathered.

  Attributes:
    make_network: Called where variables may be made.
    views: The preprocessing. `plain` is used.
    kind: `statistics.POOLED`, `BATCH_MEAN` or `MEDIAN`.
    batch_size: Examples in a batch of the clients' pass.
    max_client_examples: The most examples that a client can have.
    num_classes: See `client_data.read_client`.
    server_data_fn: The server's labelled data, if it has any.
    server_batch_size: Examples in a batch of the server's pass.
    predicting: The model -> the weights that predict, with which the model's
      own statistics are gathered.
    delivery: The weights that travel.
  """

  make_network: Callable[[], adapter.Network]
  views: augment.Views
  kind: str
  batch_size: int
  max_client_examples: int
  num_classes: int
  server_data_fn: Callable[[], tf.data.Dataset] | None
  server_batch_size: int
  predicting: Callable[[server_model.ServerModel], Weights]
  delivery: delivery_lib.Delivery = delivery_lib.Delivery()

  def weights_of(self, model: Any, set_name: str) -> Weights:
    """Returns the weights of a set, or, for '', those that predict."""
    model = server_model.ServerModel(*model)
    weights = model.sets[set_name] if set_name else self.predicting(model)
    return Weights(
      tuple(weights.trainable),
      tuple(weights.non_trainable),
      weights.statistics_count,
    )

  def read_sent(
    self, message: messages.Message, set_name: str
  ) -> Weights | tf.data.Dataset:
    """Reads the same weights from the message for training.

    Args:
      message: The message.
      set_name: The set. '': the weights that predict.

    Returns:
      The weights. Those of a set are a sequence of one element, or of none.
    """
    message = messages.Message(*message)
    if set_name:
      return message.sets[set_name].map(self.delivery.select_weights)
    sets = {n: client_data.read_one(s) for n, s in message.sets.items()}
    model = server_model.ServerModel(*message.weights, sets, message.control)
    return self.weights_of(model, '')

  def gather_at_client(
    self, weights: Weights, dataset: tf.data.Dataset
  ) -> statistics.Sums:
    """Computes a client's sums over all its examples.

    Args:
      weights: The weights, or a sequence of one such element, or of none. For
        an empty sequence, the sums are over no example.
      dataset: The client's data.

    Returns:
      The sums.
    """
    network = self.make_network()

    @tf.function(autograph=False)
    def run(weights: Weights, dataset: tf.data.Dataset) -> statistics.Sums:
      data, _ = client_data.read_client(
        dataset, self.num_classes, self.views.accepts
      )
      if isinstance(weights, tf.data.Dataset):
        # Without weights, the client's examples are cut to none: the graph is
        # the same for both cases.
        num_sent = weights.reduce(0, lambda num, _: num + 1)
        weights = client_data.read_one(weights)
        for part in ('labeled', 'unlabeled'):
          data[part] = tf.nest.map_structure(
            lambda t: t[: num_sent * tf.shape(t)[0]], data[part]
          )
      return client_sums(
        network,
        self.delivery.received(weights),
        data,
        views=self.views,
        kind=self.kind,
        batch_size=self.batch_size,
      )

    sums: statistics.Sums = run(weights, dataset)
    return sums

  def gather_at_server(
    self,
    weights: Weights,
    combined: statistics.Sums | tf.Tensor,
    is_needed: tf.Tensor | None = None,
  ) -> Weights:
    """Adds the server's sums to the clients', and sets the statistics.

    Args:
      weights: The weights.
      combined: The sums over clients. With `statistics.MEDIAN`, all clients'
        rows, float32 [rows, columns] (`statistics.encode_row`).
      is_needed: If false, the old statistics stay, whatever clients sent. None:
        true.

    Returns:
      The weights with the new statistics.
    """
    network = self.make_network()

    @tf.function(autograph=False)
    def run(
      weights: Weights,
      combined: statistics.Sums | tf.Tensor,
      is_needed: tf.Tensor | None,
    ) -> Weights:
      own = statistics.zero_sums(network)
      if self.server_data_fn is not None:
        images = client_data.read_one(self.server_data_fn())['x']
        # An unneeded pass over the server's data is avoided.
        if is_needed is not None:
          images = images[: tf.where(is_needed, tf.shape(images)[0], 0)]
        own = statistics.gather(
          network,
          weights,
          images,
          self.views,
          kind=self.kind,
          batch_size=self.server_batch_size,
        )
      if self.kind == statistics.MEDIAN:
        rows = tf.concat([combined, statistics.encode_row(own)], axis=0)
        sums = statistics.combine_rows(network, rows)
      else:
        sums = tf.nest.map_structure(tf.add, combined, own)
      result = statistics.put(network, weights, sums, kind=self.kind)
      if is_needed is not None:
        result = select(is_needed, result, lambda: weights)
      return result

    with_statistics: Weights = run(weights, combined, is_needed)
    return with_statistics


# ServerModel -> bool scalar.
_IsNeeded: TypeAlias = 'Callable[[server_model.ServerModel], tf.Tensor] | None'


def build_statistics_phase(
  model_type: tff.Type,
  element_spec: Any,
  gathering: Gathering,
  set_name: str = '',
  is_needed: _IsNeeded = None,
  message_type: tff.Type | None = None,
) -> tuple[composer.LastPhase, int]:
  """Builds the phase that gathers statistics of a model M or one of its sets.

  The result is M with new statistics. All examples of the cohort, labelled or
  not, and the server's labelled ones count equally. With `statistics.MEDIAN`,
  all clients and the server count equally. Without any examples, the old
  statistics stay. Impossible sums are dropped, and their senders counted as
  `num_rejected_clients`: see `is_possible`.

  Args:
    model_type: The type M of a `ServerModel`.
    element_spec: The spec of the one element of a client's data set.
    gathering: The settings.
    set_name: The set whose statistics are gathered. '': the model's.
    is_needed: M -> bool scalar. If false, the weights are not sent, clients
      return sums over no example, and the old statistics stay. None: true.
    message_type: The type of the message for training. If given, statistics are
      those of the weights in it, and need no broadcast. If None, statistics are
      those of M, which is broadcast for them.

  Returns:
    (before, message, M, data) -> OrderedDict(result, measurements), for use in
    a federated computation, and the bytes that a client sends.
  """
  weights_of = functools.partial(gathering.weights_of, set_name=set_name)
  pick = _build_pick(model_type, weights_of, is_needed, gathering.delivery)
  in_training = message_type is not None
  sent_type = message_type if in_training else pick.type_signature.result
  data_type = client_data.data_type(element_spec)

  @tff.tensorflow.computation(sent_type, data_type)
  def gather_at_client(sent: Any, dataset: tf.data.Dataset) -> statistics.Sums:
    weights = gathering.read_sent(sent, set_name) if in_training else sent
    return gathering.gather_at_client(weights, dataset)

  sums_type = gather_at_client.type_signature.result

  screen = _build_screen(sums_type, gathering)
  to_rows = tff.tensorflow.computation(statistics.encode_row, sums_type)
  by_median = gathering.kind == statistics.MEDIAN
  combined_type = to_rows.type_signature.result if by_median else sums_type

  at_server = _build_at_server(
    model_type, combined_type, gathering, set_name, is_needed
  )

  def phase(
    before: tff.Value, message: tff.Value, model: tff.Value, dataset: tff.Value
  ) -> collections.OrderedDict[str, tff.Value]:
    # The message for training was made from the model before the round.
    measured, sent = before, message
    if not in_training:
      measured = model
      sent = tff.federated_broadcast(tff.federated_map(pick, model))
    sums = tff.federated_map(gather_at_client, (sent, dataset))
    sums, rejected = tff.federated_map(screen, sums)
    if by_median:
      # A median cannot be computed from a sum: the server needs all rows.
      combined = collecting.collect_rows(tff.federated_map(to_rows, sums))
    else:
      combined = tff.federated_sum(sums)
    return collections.OrderedDict(
      result=tff.federated_map(at_server, (model, measured, combined)),
      measurements=tff.federated_zip(
        collections.OrderedDict(
          num_rejected_clients=tff.federated_sum(rejected)
        )
      ),
    )

  return phase, communication.num_bytes(sums_type)


def _build_at_server(
  model_type: tff.Type,
  combined_type: tff.Type,
  gathering: Gathering,
  set_name: str,
  is_needed: _IsNeeded,
) -> tff.Computation:
  """Builds `<M, the measured model, clients' sums> -> M`."""

  @tff.tensorflow.computation(model_type, model_type, combined_type)
  def gather_at_server(
    model: server_model.ServerModel,
    measured: server_model.ServerModel,
    combined: statistics.Sums | tf.Tensor,
  ) -> server_model.ServerModel:
    model = server_model.ServerModel(*model)
    measured = server_model.ServerModel(*measured)
    needed = None if is_needed is None else is_needed(measured)
    weights = gathering.weights_of(measured, set_name)
    new = gathering.gather_at_server(weights, combined, needed)
    old = model.sets[set_name] if set_name else model.weights
    # Measured weights may be older: only their statistics are taken.
    weights = new._replace(trainable=tuple(old.trainable))
    if set_name:
      return model.replace_sets(**{set_name: weights})
    return model.replace_weights(weights)

  return gather_at_server


def _build_pick(
  model_type: tff.Type,
  weights_of: Callable[[server_model.ServerModel], Weights],
  is_needed: _IsNeeded,
  delivery: delivery_lib.Delivery,
) -> tff.Computation:
  """Builds `M -> broadcast`: weights, or a sequence of one or none."""

  @tff.tensorflow.computation(model_type)
  def pick(model: server_model.ServerModel) -> Any:
    weights = delivery.select_weights(weights_of(model))
    if is_needed is None:
      return weights
    return client_data.one_if(
      is_needed(server_model.ServerModel(*model)), weights
    )

  return pick


def _build_screen(sums_type: tff.Type, gathering: Gathering) -> tff.Computation:
  """Builds `sums -> <sums, 1 if they were rejected and set to 0>`."""

  @tff.tensorflow.computation(sums_type)
  def screen(sums: statistics.Sums) -> tuple[statistics.Sums, tf.Tensor]:
    possible = is_possible(
      sums,
      kind=gathering.kind,
      max_examples=gathering.max_client_examples,
    )
    sums = tf.nest.map_structure(
      lambda t: tf.where(possible, t, tf.zeros_like(t)), sums
    )
    return sums, tf.cast(tf.logical_not(possible), tf.int32)

  return screen


def client_sums(
  network: adapter.Network, weights: Weights, data: Any, **options: Any
) -> statistics.Sums:
  """Computes the sums over all its examples that a client uploads.

  Args:
    network: The network, to which `weights` are assigned.
    weights: The weights whose activations are measured.
    data: The client's element, as `data.clients.element_spec` has it.
    **options: `statistics.gather`'s views, kind and batch_size.

  Returns:
    The sums.
  """
  images = tf.concat([data['labeled']['x'], data['unlabeled']['x']], axis=0)
  return statistics.gather(network, weights, images, **options)


def is_possible(
  sums: statistics.Sums, *, kind: str, max_examples: int
) -> tf.Tensor:
  """Tells whether one client can have these sums.

  Their count must be a whole number of at most `max_examples` examples (or
  batches), means must be within `statistics.MAX_MEAN`, and variances must not
  be negative. Activations have no natural bound: if sums are added, a client
  that lies within these limits can move the statistics arbitrarily. Medians
  limit this. Group norm has no statistics.

  Args:
    sums: The client's upload.
    kind: `statistics.POOLED`, `BATCH_MEAN` or `MEDIAN`.
    max_examples: The most examples that a client can have.

  Returns:
    bool scalar.
  """
  count = sums.count
  conditions = [
    tf.logical_and(count >= 0.0, count <= float(max_examples)),
    tf.equal(count, tf.floor(count)),
  ]
  for first, second in zip(sums.first, sums.second, strict=True):
    most = statistics.MAX_MEAN
    if kind == statistics.BATCH_MEAN:
      least = tf.zeros_like(second)
    else:
      # The square of the mean is at most the mean of the squares.
      least = tf.square(first) / tf.maximum(count, 1.0)
    # Sums in float32 are rounded.
    room = 1e-3 * least + 1e-6 * count
    conditions += [
      tf.reduce_all(tf.abs(first) <= most * count),
      tf.reduce_all(second <= most * most * count),
      tf.reduce_all(second >= least - room),
      tf.logical_or(count > 0.0, tf.reduce_all(tf.equal(second, 0.0))),
    ]
  return tf.reduce_all(conditions)
