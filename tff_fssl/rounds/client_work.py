"""The work of a client in a round, as a TFF client work process.

Types are in TFF's notation: `D*@CLIENTS` is a data set of elements of type D at
each client, `W@SERVER` one value of type W at the server.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
from typing import Any, Protocol

from tff_fssl.client import non_finite
from tff_fssl.client import training
from tff_fssl.hparams import UsageError
from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import names
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models.weights import select
from tff_fssl.rounds import client_data
from tff_fssl.rounds import communication
from tff_fssl.rounds import delivery as delivery_lib
from tff_fssl.rounds import messages
from tff_fssl.rounds import screen as screen_lib


class FindNonFinite(Protocol):
  """A repetition of a client's work that looks at every tensor."""

  def __call__(
    self, state: Any, dataset: tf.data.Dataset, round_num: int, /
  ) -> non_finite.NonFinite | None:
    """Finds the first tensor that is not finite.

    Args:
      state: The state of the process before the round.
      dataset: The client's data, as a round gets them.
      round_num: The round.
    """


class FindRejected(Protocol):
  """A repetition of a client's work, of which the upload is checked."""

  def __call__(
    self, state: Any, dataset: tf.data.Dataset, round_num: int, /
  ) -> str | None:
    """Says why the server rejects the upload, or None. See `FindNonFinite`."""


class LocalModel(Protocol):
  """A repetition of a client's work, of which the model is kept."""

  def __call__(
    self, state: Any, dataset: tf.data.Dataset, round_num: int, /
  ) -> server_model.ServerModel:
    """Trains the client's model. See `FindNonFinite`."""


class OwnStatistics(Protocol):
  """The statistics of static batch norm of one client."""

  def __call__(
    self, model: server_model.ServerModel, images: tf.Tensor, /
  ) -> server_model.ServerModel:
    """Returns a client's model with the statistics of its images."""


# (update and weight, report): a client's upload.
_Upload = tuple[
  tff.learning.templates.ClientResult, collections.OrderedDict[str, Any]
]
# The fields of a report that are 0 unless the client reports.
_COUNTED = ('num_examples', 'ratios', 'ranges', 'uploads')


@dataclasses.dataclass(frozen=True)
class ClientPart:
  """The clients' part of a round, and their weights in the mean.

  Attributes:
    make_training: Makes the local training. It is called where variables may be
      made.
    learning_rate_fn: Round number -> learning rate.
    num_classes: The number of classes. See `client_data.read_client`.
    accepts: `augment.Views.accepts`.
    weigh_by_examples: Whether weights are numbers of examples, if the algorithm
      sets none. They count processed examples, or, with `draws_episodes`, all
      examples of the client (even of a straggler).
    draws_episodes: Whether the algorithm draws episodes.
    trains_on: The parts of its data, `labeled` or `unlabeled`, that a client
      trains on.
    track_non_trainable: Whether the change of non-trainable weights is part of
      the update.
    uploads: Name -> each upload of the algorithm.
    exchange: The exchange, if there is one.
    delivery: The weights that travel.
    release_metrics: If false, clients send only update and weight, to the
      aggregator, and the only metric is the number of clients.
  """

  make_training: Callable[[], training.LocalTraining]
  learning_rate_fn: Callable[[tf.Tensor], tf.Tensor]
  num_classes: int
  accepts: Callable[[tf.Tensor], tf.Tensor] | None
  weigh_by_examples: bool = False
  draws_episodes: bool = False
  trains_on: Collection[str] = ('labeled', 'unlabeled')
  track_non_trainable: bool = False
  uploads: Mapping[str, channels.Upload] = dataclasses.field(
    default_factory=dict
  )
  exchange: exchange_lib.Exchange | None = None
  delivery: delivery_lib.Delivery = delivery_lib.Delivery()
  release_metrics: bool = True

  def train(
    self,
    local: training.LocalTraining,
    received: messages.Received,
    data: Mapping[str, Any],
    round_num: tf.Tensor,
    watch: non_finite.Watch | None = None,
  ) -> tuple[training.LocalResult, tf.Tensor]:
    """Trains a client in a round.

    Args:
      local: The local training.
      received: The message, as the client uses it.
      data: The client's element.
      round_num: int32 scalar.
      watch: If given, checks all tensors.

    Returns:
      (result, whether update and weight are finite: bool scalar).
    """
    result = local.run(
      received.weights,
      client_data.read_examples(data['labeled']),
      client_data.read_examples(data['unlabeled']),
      learning_rate=self.learning_rate_fn(round_num),
      seed=data['seed'],
      round_num=round_num,
      enabled=round_num >= 1,
      share=data.get('share'),
      received=received.values,
      watch=watch,
    )
    finite = result.is_finite
    if result.weight is not None:
      finite = tf.logical_and(finite, tf.math.is_finite(result.weight))
    return result, finite

  def read_message(
    self, message: messages.Message, data: Mapping[str, Any]
  ) -> messages.Received:
    """Reads the parts of the server's message that the client uses."""
    # Only elements for an exchange of known clients have an id.
    client_id = data.get('client_id', tf.constant(-1))
    groups = self.delivery.groups
    start = None if groups is None else groups.place_of(data).start
    return messages.read_message(
      self.exchange, message, client_id, start, self.delivery
    )


def build_find_non_finite(
  part: ClientPart,
  make_message: Callable[[Any, tf.Tensor], messages.Message],
) -> FindNonFinite:
  """Builds a function that repeats a client's round to find where it fails.

  The function runs outside TFF.

  Args:
    part: The clients' part. Its training is made when first needed.
    make_message: (state of the process, round number) -> the message.

  Returns:
    `(state, dataset, round number) -> NonFinite`, or None if the client's
    update and weight are finite.
  """

  def build() -> Callable[..., non_finite.NonFinite | None]:
    local, watch = part.make_training(), non_finite.Watch()

    @tf.function(autograph=False, reduce_retracing=True)
    def run(
      state: Any, data: Mapping[str, Any], round_num: tf.Tensor
    ) -> tf.Tensor:
      watch.reset()
      received = part.read_message(make_message(state, round_num), data)
      _, finite = part.train(local, received, data, round_num, watch)
      return finite

    return lambda *client: None if run(*client) else watch.found()

  return _repeating(part, build)


def build_find_rejected(
  part: ClientPart,
  make_message: Callable[[Any, tf.Tensor], messages.Message],
  bounds: screen_lib.Bounds,
) -> FindRejected:
  """Builds a function that repeats a client's round to find why it is rejected.

  The function runs outside TFF. A metric whose `Mean.count` is wrong rejects
  every client, for example.

  Args:
    part: The clients' part. Its training is made when first needed.
    make_message: (state of the process, round number) -> the message.
    bounds: Bounds on an honest client's upload.

  Returns:
    `(state, dataset, round number) -> str`, the first check that fails, with
    its value, or None if all pass.
  """

  def build() -> Callable[..., str | None]:
    local, named = part.make_training(), dict[str, str]()

    @tf.function(autograph=False, reduce_retracing=True)
    def run(
      state: Any, data: Mapping[str, Any], round_num: tf.Tensor
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
      received = part.read_message(make_message(state, round_num), data)
      result, finite = part.train(local, received, data, round_num)
      usable = tf.constant(True)
      upload = _upload(part, received, data, result, finite, usable, round_num)
      checks = screen_lib.checks_of(*upload, bounds)
      named.update({name: c.allowed for name, c in checks.items()})
      return [(c.value, c.is_possible) for c in checks.values()]

    def find(*client: Any) -> str | None:
      results = run(*client)
      for (value, possible), (name, allowed) in zip(results, named.items()):
        if not possible:
          return f'{name} is {float(value):g} (allowed: {allowed})'
      return None

    return find

  return _repeating(part, build)


def build_local_model(
  part: ClientPart,
  make_message: Callable[[Any, tf.Tensor], messages.Message],
  make_statistics: Callable[[], OwnStatistics],
) -> LocalModel:
  """Builds a function that computes the model of one client in a round.

  The function runs outside TFF.

  Args:
    part: The clients' part. Its training is made when first needed.
    make_message: (state of the process, round number) -> the message.
    make_statistics: Makes the function that gathers statistics of static batch
      norm, if the network has it, over all the client's examples. It makes
      variables.

  Returns:
    `(state, dataset, round number) -> ServerModel`: the server's model with the
    client's trained weights, or unchanged if these are not finite.
  """

  def build() -> Callable[..., Any]:
    local, own_statistics = part.make_training(), make_statistics()

    def run(state: Any, data: Mapping[str, Any], round_num: tf.Tensor) -> Any:
      model = server_model.ServerModel(*state.global_model_weights)
      received = part.read_message(make_message(state, round_num), data)
      _, finite = part.train(local, received, data, round_num)
      learnt = model.replace_weights(local.weights_now())
      learnt = learnt.replace_sets(**local.auxiliary_weights(model.sets))
      images = tf.concat([data['labeled']['x'], data['unlabeled']['x']], axis=0)
      learnt = own_statistics(learnt, images)
      return select(finite, learnt, lambda: model)

    compiled: Callable[..., Any] = tf.function(
      run, autograph=False, reduce_retracing=True
    )
    return compiled

  return _repeating(part, build)


def _repeating(
  part: ClientPart, build: Callable[[], Callable[..., Any]]
) -> Callable[[Any, tf.data.Dataset, int], Any]:
  """Makes a function that repeats a client's round outside TFF.

  Args:
    part: The clients' part.
    build: Returns a function of tensors: (state of the process, a client's
      data, round number) -> result. It is called when the function is first
      needed.

  Returns:
    `(state, dataset, round number) -> result`.
  """
  # Tracing takes seconds, and most processes are never asked.
  built = functools.cache(build)

  def repeat(state: Any, dataset: tf.data.Dataset, round_num: int) -> Any:
    state = tf.nest.map_structure(tf.convert_to_tensor, state)
    data, _ = client_data.read_client(dataset, part.num_classes, part.accepts)
    return built()(state, data, tf.constant(round_num))

  return repeat


def build_client_work(
  message_type: tff.Type,
  element_spec: Any,
  part: ClientPart,
  *,
  first_round: int,
  bounds: screen_lib.Bounds,
) -> tuple[tff.learning.templates.ClientWorkProcess, int]:
  """Builds the client work.

  Its `next` is `<int32@SERVER, M@CLIENTS, D*@CLIENTS> -> <int32@SERVER,
  ClientResult(update, weight)@CLIENTS, metrics@SERVER>`. Its state is the round
  number. Before round 1 clients do nothing. The metrics are OrderedDict(train,
  uploads, num_reports). `uploads` has the uploads in the MEAN. `next` of the
  composed process releases `train` alone.

  The update has its values by channel: the model's change, that of each
  uploaded network, with groups the client's place, float32 [2], and uploads in
  the SUM. Clients with a row, of uploads in ROWS or for the exchange, send
  OrderedDict(update, row).

  If the algorithm sets no weight, a client's weight is 1 or the number of
  examples that it processed. One with nothing to train on does not report, and
  weighs 0. So does one whose update is not finite: its report is ignored,
  and `num_non_finite_clients` counts it. If no metrics are released, its weight
  is NaN, so that the aggregator counts it. A client whose data cannot be used
  is rejected.

  Clients are not trusted: `screen.build_screen` checks their uploads. If no
  metrics are released, the aggregator's own check stands alone.

  Args:
    message_type: The type M of an `exchange.Message`.
    element_spec: The spec of the one element of a client's data set.
    part: The clients' part.
    first_round: The number of the first round.
    bounds: Bounds on an honest client's upload.

  Returns:
    The process, and the bytes that a client sends for metrics.
  """
  data_type = client_data.data_type(element_spec)
  work = _build_work(message_type, data_type, part)
  screen = None
  if part.release_metrics:
    result_type, report_type = work.type_signature.result
    screen = screen_lib.build_screen(result_type, report_type, bounds)

  @tff.tensorflow.computation(tf.int32)
  def count_up(round_num: tf.Tensor) -> tf.Tensor:
    return round_num + 1

  @tff.federated_computation
  def init_fn() -> tff.Value:
    return tff.federated_value(first_round, tff.SERVER)

  @tff.federated_computation(
    init_fn.type_signature.result,
    tff.FederatedType(message_type, tff.CLIENTS),
    tff.FederatedType(data_type, tff.CLIENTS),
  )
  def next_fn(
    round_num: tff.Value, message: tff.Value, dataset: tff.Value
  ) -> tff.templates.MeasuredProcessOutput:
    round_at_clients = tff.federated_broadcast(round_num)
    result, report = tff.federated_map(
      work, (message, dataset, round_at_clients)
    )
    if screen is not None:
      result, metrics = _measured(screen, result, report)
    else:
      metrics = _number_of_clients()
    return tff.templates.MeasuredProcessOutput(
      tff.federated_map(count_up, round_num), result, metrics
    )

  process = tff.learning.templates.ClientWorkProcess(init_fn, next_fn)
  if screen is None:
    return process, 0
  return process, communication.num_bytes(work.type_signature.result[1])


def _build_work(
  message_type: tff.Type, data_type: tff.Type, part: ClientPart
) -> tff.Computation:
  """Builds `<M, D*, round number> -> <ClientResult, report>` of one client."""

  @tff.tensorflow.computation(message_type, data_type, tf.int32)
  def work(
    message: messages.Message,
    dataset: tf.data.Dataset,
    round_num: tf.Tensor,
  ) -> _Upload:
    # Variables can be made in the computation's graph, but not in `run`.
    local = part.make_training()

    @tf.function(autograph=False)
    def run(
      message: messages.Message,
      dataset: tf.data.Dataset,
      round_num: tf.Tensor,
    ) -> _Upload:
      data, usable = client_data.read_client(
        dataset, part.num_classes, part.accepts
      )
      received = part.read_message(message, data)
      result, finite = part.train(local, received, data, round_num)
      return _upload(part, received, data, result, finite, usable, round_num)

    upload: _Upload = run(message, dataset, round_num)
    return upload

  return work


def _weight(
  part: ClientPart, result: training.LocalResult, num_held: tf.Tensor
) -> tf.Tensor:
  """Returns the weight that the algorithm set, else `weigh_by_examples`'s."""
  if result.weight is not None:
    return result.weight
  if not part.weigh_by_examples:
    return tf.constant(1.0)
  # Episodes have about the same size at all clients, so processed examples
  # would say little.
  if part.draws_episodes:
    return tf.cast(num_held, tf.float32)
  return result.num_examples


def _upload(
  part: ClientPart,
  received: messages.Received,
  data: Mapping[str, Any],
  result: training.LocalResult,
  finite: tf.Tensor,
  usable: tf.Tensor,
  round_num: tf.Tensor,
) -> _Upload:
  """Builds a client's upload.

  Args:
    part: The clients' part.
    received: The message, as the client uses it.
    data: The client's element.
    result: The result of its training.
    finite: bool scalar, whether update and weight are finite.
    usable: bool scalar, whether the data could be used.
    round_num: int32 scalar.

  Returns:
    (update and weight, report).
  """
  num_held = tf.add_n([tf.size(data[kind]['y']) for kind in part.trains_on])
  weight = _weight(part, result, num_held)
  # Clients that kept no pseudo-labels still report.
  reports = tf.logical_and(tf.logical_and(round_num >= 1, num_held > 0), finite)
  counts = reports
  if result.weight is None:
    counts = tf.logical_and(counts, result.num_examples > 0.0)
  weight = tf.where(counts, weight, 0.0)
  # A weight of NaN gets the client rejected. Without a report it also marks
  # clients whose training failed.
  valid = usable if part.release_metrics else tf.logical_and(usable, finite)
  weight = tf.where(valid, weight, float('nan'))
  values = _uploads(part, result)
  # Weight 0 does not cancel NaN, so values without a report become 0.
  of_sum = screen_lib.masked(values[channels.SUM], reports, 0.0)
  change = _change(part, received, data, result)
  sent: Any = channels.sort_by_name(names.join('channels', change, of_sum))
  if values[channels.ROWS]:
    row = collections.OrderedDict(
      is_valid=reports,
      client_id=data.get('client_id', tf.constant(0)),
      values=values[channels.ROWS],
    )
    sent = collections.OrderedDict(update=sent, row=row)
  report = collections.OrderedDict(
    is_finite=finite,
    reports=reports,
    num_examples=result.num_examples,
    ratios=collections.OrderedDict(
      (name, tf.stack(pair)) for name, pair in sorted(result.metrics.items())
    ),
    ranges=collections.OrderedDict(sorted(result.ranges.items())),
    uploads=values[channels.MEAN],
  )
  for name in _COUNTED:
    report[name] = screen_lib.masked(report[name], reports, 0.0)
  return tff.learning.templates.ClientResult(sent, weight), report


def _uploads(
  part: ClientPart, result: training.LocalResult
) -> dict[str, collections.OrderedDict[str, tf.Tensor]]:
  """Groups the values of `finish` by `Upload.how`.

  Raises:
    UsageError: If they have other names than those that are declared, so that
      they would have no bounds.
  """
  kinds = {name: upload.how for name, upload in part.uploads.items()}
  if part.exchange is not None:
    of_row = dict.fromkeys(part.exchange.row_specs, channels.ROWS)
    kinds = names.join('values that clients send', kinds, of_row)
  if set(result.uploads) != set(kinds):
    raise UsageError(
      f'finish: uploads has {", ".join(sorted(result.uploads)) or "nothing"};'
      f' the algorithm declares {", ".join(sorted(kinds)) or "nothing"}'
    )
  # Names are sorted, since TFF's types depend on the order of fields.
  return {
    how: collections.OrderedDict(
      (n, v) for n, v in sorted(result.uploads.items()) if kinds[n] == how
    )
    for how in (channels.MEAN, channels.SUM, channels.ROWS)
  }


def _change(
  part: ClientPart,
  received: messages.Received,
  data: Mapping[str, Any],
  result: training.LocalResult,
) -> dict[str, Any]:
  """Returns, by channel, what training changed, and the client's place."""
  update = result.update
  if part.track_non_trainable:
    update += tuple(
      before - after
      for before, after in zip(
        received.weights.non_trainable, result.non_trainable, strict=True
      )
      if before.dtype.is_floating  # Training never changes counters.
    )
  change: dict[str, Any] = {
    channels.MODEL: part.delivery.select_update(update),
    **result.auxiliary,
  }
  if part.delivery.groups is not None:
    place = tf.stack(part.delivery.groups.place_of(data))
    change[channels.PLACE] = tf.cast(place, tf.float32)
  return change


def _measured(
  screen: tff.Computation, result: tff.Value, report: tff.Value
) -> tuple[tff.Value, tff.Value]:
  """Checks the clients' uploads and sums their reports.

  Args:
    screen: The check, a result of `screen.build_screen`.
    result: The `ClientResult`s, at clients.
    report: The reports, at clients.

  Returns:
    (the checked results@CLIENTS, metrics@SERVER).
  """
  result, (sums, minima, maxima) = tff.federated_map(screen, (result, report))
  of_screen = screen.type_signature.result[1]
  finalize = _build_finalize(of_screen[0], of_screen[1])
  metrics = tff.federated_map(
    finalize,
    (
      tff.federated_sum(sums),
      tff.federated_min(minima),
      tff.federated_max(maxima),
    ),
  )
  return result, metrics


def _number_of_clients() -> tff.Value:
  """Counts clients: the only metric of a confidential aggregator."""
  one = tff.federated_value(1, tff.CLIENTS)
  # The server must not learn which clients failed: all count as reports.
  report = tff.federated_value(1.0, tff.CLIENTS)
  return tff.federated_zip(
    collections.OrderedDict(
      train=collections.OrderedDict(num_clients=tff.federated_sum(one)),
      uploads=tff.federated_value(collections.OrderedDict(), tff.SERVER),
      num_reports=tff.federated_sum(report),
    )
  )


def _build_finalize(
  sums_type: tff.Type, range_type: tff.Type
) -> tff.Computation:
  """Builds the computation of metrics from sums over clients."""

  @tff.tensorflow.computation(sums_type, range_type, range_type)
  def finalize(
    sums: Mapping[str, Any],
    minima: Mapping[str, tf.Tensor],
    maxima: Mapping[str, tf.Tensor],
  ) -> collections.OrderedDict[str, Any]:
    some = sums['num_reports'] > 0.0
    nan = tf.constant(float('nan'))
    train = collections.OrderedDict(
      num_clients=sums['num_clients'],
      num_non_finite_clients=sums['num_non_finite_clients'],
      num_rejected_clients=sums['num_rejected_clients'],
      num_examples=sums['num_examples'],
    )
    # 0/0 is NaN, correct / 0 wrong inf.
    ratios = {name: pair[0] / pair[1] for name, pair in sums['ratios'].items()}
    ranges = collections.OrderedDict[str, tf.Tensor]()
    for name, total in sums['ranges'].items():
      ranges[f'{name}_min'] = tf.where(some, minima[name], nan)
      ranges[f'{name}_mean'] = total / sums['num_reports']
      ranges[f'{name}_max'] = tf.where(some, maxima[name], nan)
    total = sums['weight']
    weights = {
      'min': minima['aggregation_weight'] / total,
      'max': maxima['aggregation_weight'] / total,
      # Entropy of the shares w/S, in nats: log S - (sum w log w) / S.
      'entropy': tf.math.log(total) - sums['weight_log_weight'] / total,
    }
    weights = {
      f'aggregation_weight_{suffix}': tf.where(total > 0.0, value, nan)
      for suffix, value in weights.items()
    }
    joined = names.join('metrics', train, ratios, ranges, weights)
    train = collections.OrderedDict(joined)
    uploads = collections.OrderedDict(
      (name, tf.math.divide_no_nan(value, sums['num_reports']))
      for name, value in sums['uploads'].items()
    )
    return collections.OrderedDict(
      train=train, uploads=uploads, num_reports=sums['num_reports']
    )

  return finalize
