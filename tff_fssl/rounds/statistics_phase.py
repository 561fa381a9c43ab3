"""The client phase of static batch norm: statistics of the new weights.

Types are in TFF's notation: `D*@CLIENTS` is a data set of elements of type D at
each client, `W@SERVER` one value of type W at the server.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple, Protocol, TypeAlias

from tff_fssl.aggregators import collecting
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.models.weights import Weights, select
from tff_fssl.rounds import client_data
from tff_fssl.rounds import communication
from tff_fssl.rounds import messages
from tff_fssl.rounds import plan as plan_lib

ServerModel = server_model.ServerModel


class Renewed(NamedTuple):
  """The result of the phases for static batch norm.

  Attributes:
    model: The model with new statistics, at the server.
    metrics: OrderedDict(num_rejected_clients), int32, at the server. None
      without phases.
    bytes_up: The bytes that a client sends.
  """

  model: tff.Value
  metrics: tff.Value | None
  bytes_up: int


def renew(
  plan: plan_lib.Plan,
  before: tff.Value,
  message: tff.Value,
  model: tff.Value,
  data: tff.Value,
) -> Renewed:
  """Gathers statistics of the model and its sets, in a round.

  All examples of the cohort, labelled or not, and the server's labelled ones
  count equally. With `statistics.MEDIAN`, all clients and the server count
  equally. Without any examples, the old statistics stay. Impossible sums are
  dropped, and their senders counted: see `is_possible`.

  Args:
    plan: The plan.
    before: The model before the round, at the server.
    message: The message for training, at the clients. With
      `--statistics_phase=training`, statistics are those of the weights in it,
      and need no broadcast of the new ones.
    model: The model after the server's step, at the server.
    data: The clients' data.

  Returns:
    The result.
  """
  of_phases, bytes_up = [], 0
  for set_name, is_needed in when_gathered(plan).items():
    phase = _Phase(plan, set_name, is_needed)
    # The message for training was made from the model before the round.
    measured, sent = before, message
    if plan.has_last_phases:
      pick = phase.build_pick(model.type_signature.member)
      measured = model
      sent = tff.federated_broadcast(tff.federated_map(pick, model))
    gather = phase.build_at_client(sent.type_signature.member)
    sums = tff.federated_map(gather, (sent, data))
    sums_type = sums.type_signature.member
    sums, rejected = tff.federated_map(_build_screen(plan, sums_type), sums)
    if plan.hparams.batch_norm_statistics == statistics.MEDIAN:
      # A median cannot be computed from a sum: the server needs all rows.
      to_rows = tff.tensorflow.computation(statistics.encode_row, sums_type)
      combined = collecting.collect_rows(tff.federated_map(to_rows, sums))
    else:
      combined = tff.federated_sum(sums)
    put = phase.build_at_server(
      model.type_signature.member, combined.type_signature.member
    )
    model = tff.federated_map(put, (model, measured, combined))
    of_phase = collections.OrderedDict(
      num_rejected_clients=tff.federated_sum(rejected)
    )
    of_phases.append(tff.federated_zip(of_phase))
    bytes_up += communication.num_bytes(sums_type)
  if not of_phases:
    return Renewed(model, None, bytes_up)
  metrics = of_phases[0]
  if len(of_phases) > 1:
    # A client may lie in some of them only.
    metrics = tff.federated_map(_largest, tff.federated_zip(of_phases))
  return Renewed(model, metrics, bytes_up)


# ServerModel -> bool scalar. None: true.
_IsNeeded: TypeAlias = 'Callable[[ServerModel], tf.Tensor] | None'


@tff.tensorflow.computation
def _largest(measurements: Sequence[Any]) -> Any:
  """Returns the largest of each of the phases' measurements."""
  return tf.nest.map_structure(
    lambda *values: tf.reduce_max(tf.stack(values)), *measurements
  )


def when_gathered(plan: plan_lib.Plan) -> dict[str, _IsNeeded]:
  """Lists the weights whose statistics are gathered.

  Returns:
    Name of a set, '' for the model -> whether statistics are gathered after a
    round that ends with a model. None: always.
  """
  if not plan.gathers_statistics:
    return {}
  states = plan.states
  return {
    **dict.fromkeys(('', *states.statistics_of)),
    **{
      name: functools.partial(states.is_sent, name)
      for name in states.statistics_if_sent
    },
  }


class _Phase(NamedTuple):
  """The phase that gathers statistics of the model or of one of its sets.

  Attributes:
    plan: The plan.
    set_name: The set. '': the weights that predict.
    is_needed: If false, the weights are not sent, clients return sums over no
      example, and the old statistics stay.
  """

  plan: plan_lib.Plan
  set_name: str
  is_needed: _IsNeeded

  def weights_of(self, model: Any) -> Weights:
    """Returns the weights whose statistics are gathered."""
    model = ServerModel(*model)
    weights = (
      model.sets[self.set_name]
      if self.set_name
      else self.plan.states.prediction.weights(model)
    )
    return Weights(
      tuple(weights.trainable),
      tuple(weights.non_trainable),
      weights.statistics_count,
    )

  def build_pick(self, model_type: tff.Type) -> tff.Computation:
    """Builds `M -> broadcast`: weights, or a sequence of one or none."""

    @tff.tensorflow.computation(model_type)
    def pick(model: ServerModel) -> Any:
      weights = self.plan.select_weights(self.weights_of(model))
      if self.is_needed is None:
        return weights
      is_needed = self.is_needed(ServerModel(*model))
      return client_data.one_if(is_needed, weights)

    return pick

  def build_at_client(self, sent_type: tff.Type) -> tff.Computation:
    """Builds `<broadcast or message, D*> -> sums` of one client."""

    @tff.tensorflow.computation(sent_type, self.plan.data_type)
    def gather_at_client(
      sent: Any, dataset: tf.data.Dataset
    ) -> statistics.Sums:
      weights = sent if self.plan.has_last_phases else self._read(sent)
      return _gather_at_client(self.plan, weights, dataset)

    return gather_at_client

  def _read(self, message: messages.Message) -> Weights | tf.data.Dataset:
    """Reads what `build_pick` selects from the message for training.

    Returns:
      The weights. Those of a set are a sequence of one element, or of none.
    """
    message = messages.Message(*message)
    if self.set_name:
      return message.sets[self.set_name].map(self.plan.select_weights)
    sets = {n: client_data.read_one(s) for n, s in message.sets.items()}
    model = ServerModel(*message.weights, sets, message.control)
    return self.weights_of(model)

  def build_at_server(
    self, model_type: tff.Type, combined_type: tff.Type
  ) -> tff.Computation:
    """Builds `<M, the measured model, clients' sums> -> M`."""

    @tff.tensorflow.computation(model_type, model_type, combined_type)
    def gather_at_server(
      model: ServerModel,
      measured: ServerModel,
      combined: statistics.Sums | tf.Tensor,
    ) -> ServerModel:
      model, measured = ServerModel(*model), ServerModel(*measured)
      needed = None if self.is_needed is None else self.is_needed(measured)
      weights = self.weights_of(measured)
      new = _gather_at_server(self.plan, weights, combined, needed)
      old = model.sets[self.set_name] if self.set_name else model.weights
      # Measured weights may be older: only their statistics are taken.
      weights = new._replace(trainable=tuple(old.trainable))
      if self.set_name:
        return model.replace_sets(**{self.set_name: weights})
      return model.replace_weights(weights)

    return gather_at_server


def _gather_at_client(
  plan: plan_lib.Plan,
  weights: Weights | tf.data.Dataset,
  dataset: tf.data.Dataset,
) -> statistics.Sums:
  """Computes a client's sums over all its examples.

  Args:
    plan: The plan.
    weights: The weights, or a sequence of one such element, or of none. For an
      empty sequence, the sums are over no example.
    dataset: The client's data.

  Returns:
    The sums.
  """
  network, views = plan.networks.make(), plan.data.views

  @tf.function(autograph=False)
  def run(
    weights: Weights | tf.data.Dataset, dataset: tf.data.Dataset
  ) -> statistics.Sums:
    data, _ = client_data.read_client(
      dataset, plan.networks.num_classes, views.accepts
    )
    if isinstance(weights, tf.data.Dataset):
      # Without weights, the client's examples are cut to none: the graph is the
      # same for both cases.
      num_sent = weights.reduce(0, lambda num, _: num + 1)
      weights = client_data.read_one(weights)
      for part in ('labeled', 'unlabeled'):
        data[part] = tf.nest.map_structure(
          lambda t: t[: num_sent * tf.shape(t)[0]], data[part]
        )
    return client_sums(
      network,
      plan.restore_weights(weights),
      data,
      views=views,
      kind=plan.hparams.batch_norm_statistics,
      batch_size=plan.hparams.statistics_batch_size,
    )

  sums: statistics.Sums = run(weights, dataset)
  return sums


def _gather_at_server(
  plan: plan_lib.Plan,
  weights: Weights,
  combined: statistics.Sums | tf.Tensor,
  is_needed: tf.Tensor | None,
) -> Weights:
  """Adds the server's sums to the clients', and sets the statistics.

  Args:
    plan: The plan.
    weights: The weights.
    combined: The sums over clients. With `statistics.MEDIAN`, all clients'
      rows, float32 [rows, columns] (`statistics.encode_row`).
    is_needed: If false, the old statistics stay, whatever clients sent. None:
      true.

  Returns:
    The weights with the new statistics.
  """
  network, kind = plan.networks.make(), plan.hparams.batch_norm_statistics

  @tf.function(autograph=False)
  def run(
    weights: Weights,
    combined: statistics.Sums | tf.Tensor,
    is_needed: tf.Tensor | None,
  ) -> Weights:
    own = statistics.zero_sums(network)
    if plan.data.server_data_fn is not None:
      images = client_data.read_one(plan.data.server_data_fn())['x']
      # An unneeded pass over the server's data is avoided.
      if is_needed is not None:
        images = images[: tf.where(is_needed, tf.shape(images)[0], 0)]
      own = statistics.gather(
        network,
        weights,
        images,
        plan.data.views,
        kind=kind,
        batch_size=plan.server_statistics_batch_size,
      )
    if kind == statistics.MEDIAN:
      rows = tf.concat([combined, statistics.encode_row(own)], axis=0)
      sums = statistics.combine_rows(network, rows)
    else:
      sums = tf.nest.map_structure(tf.add, combined, own)
    result = statistics.put(network, weights, sums, kind=kind)
    if is_needed is not None:
      result = select(is_needed, result, lambda: weights)
    return result

  with_statistics: Weights = run(weights, combined, is_needed)
  return with_statistics


def _build_screen(plan: plan_lib.Plan, sums_type: tff.Type) -> tff.Computation:
  """Builds `sums -> <sums, 1 if they were rejected and set to 0>`."""

  @tff.tensorflow.computation(sums_type)
  def screen(sums: statistics.Sums) -> tuple[statistics.Sums, tf.Tensor]:
    possible = is_possible(
      sums,
      kind=plan.hparams.batch_norm_statistics,
      max_examples=plan.hparams.most_client_examples,
    )
    sums = tf.nest.map_structure(
      lambda t: tf.where(possible, t, tf.zeros_like(t)), sums
    )
    return sums, tf.cast(tf.logical_not(possible), tf.int32)

  return screen


class OwnStatistics(Protocol):
  """The statistics of static batch norm of one client."""

  def __call__(self, model: ServerModel, images: tf.Tensor, /) -> ServerModel:
    """Returns a client's model with the statistics of its images."""


def make_own(plan: plan_lib.Plan) -> OwnStatistics:
  """Makes the function that gathers a client's own statistics.

  Call it where variables may be made. Without static batch norm, the function
  changes nothing.
  """
  if not plan.gathers_statistics:
    return lambda model, images: model
  network, predicting = plan.networks.make(), plan.states.prediction.weights

  def gather(model: ServerModel, images: tf.Tensor) -> ServerModel:
    renewed = statistics.renewed(
      network,
      predicting(model),
      images,
      plan.data.views,
      kind=plan.hparams.batch_norm_statistics,
      batch_size=plan.hparams.statistics_batch_size,
    )
    # The weights that predict may differ from the model's (an average): only
    # their statistics are taken.
    return model.replace_weights(renewed._replace(trainable=model.trainable))

  return gather


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
