"""The work of a client in a round, and repetitions of it that explain it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import functools
from typing import Any, Protocol, TypeVar

from tff_fssl import loops
from tff_fssl.client import batches
from tff_fssl.client import non_finite
from tff_fssl.client import training
from tff_fssl.hparams import UsageError
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import names
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, select
from tff_fssl.rounds import client_data
from tff_fssl.rounds import messages
from tff_fssl.rounds import optimizers
from tff_fssl.rounds import plan as plan_lib
from tff_fssl.rounds import screen as screen_lib
from tff_fssl.rounds import statistics_phase

_Found = TypeVar('_Found', covariant=True)


class Repeat(Protocol[_Found]):
  """A repetition of a client's work, outside of TFF, that finds something."""

  def __call__(
    self, state: Any, dataset: tf.data.Dataset, round_num: int, /
  ) -> _Found:
    """Repeats the work.

    Args:
      state: The state of the process before the round.
      dataset: The client's data, as a round gets them.
      round_num: The round.
    """


# The first tensor that is not finite, if there is one.
FindNonFinite = Repeat[non_finite.NonFinite | None]
# Why the server rejects the upload, if it does.
FindRejected = Repeat[str | None]
# The client's model after its training.
LocalModel = Repeat[server_model.ServerModel]
# (update and weight, report): a client's upload.
_Upload = tuple[
  tff.learning.templates.ClientResult, collections.OrderedDict[str, Any]
]
# The fields of a report that are 0 unless the client reports.
_COUNTED = ('num_examples', 'ratios', 'ranges', 'uploads')


def build_work(plan: plan_lib.Plan, message_type: tff.Type) -> tff.Computation:
  """Builds `<M, D*, round number> -> <ClientResult, report>` of one client.

  Before round 1 clients do nothing. A client whose data cannot be used is
  rejected.

  The update has its values by channel: the model's change, that of each
  uploaded network, with groups the client's place, float32 [2], and uploads in
  the SUM. Clients with a row, of uploads in ROWS or for the exchange, send
  OrderedDict(update, row).

  The client's weight is the one that the algorithm set, else that of
  `client_weighting`: 1 or the number of examples that it processed. One that
  processed none weighs 0, unless the algorithm sets its weight. One that holds
  nothing to train on, or whose update is not finite, does not report and weighs
  0.

  Clients are not trusted: `screen.build_screen` checks their uploads. Of a
  confidential process, the aggregator's own check stands alone.

  Args:
    plan: The plan.
    message_type: The type M of a `messages.Message`.

  Returns:
    The computation.
  """

  @tff.tensorflow.computation(message_type, plan.data_type, tf.int32)
  def work(
    message: messages.Message,
    dataset: tf.data.Dataset,
    round_num: tf.Tensor,
  ) -> _Upload:
    # Variables can be made in the computation's graph, but not in `run`.
    local = make_training(plan)

    @tf.function(autograph=False)
    def run(
      message: messages.Message,
      dataset: tf.data.Dataset,
      round_num: tf.Tensor,
    ) -> _Upload:
      data, usable = read_client(plan, dataset)
      received = messages.read_message(plan, message, data)
      result, finite = train(plan, local, received, data, round_num)
      return _upload(plan, received, data, result, finite, usable, round_num)

    upload: _Upload = run(message, dataset, round_num)
    return upload

  return work


def make_training(plan: plan_lib.Plan) -> training.LocalTraining:
  """Makes a client's training. Call it where variables may be made."""
  hparams, local = plan.hparams, plan.networks.make()
  streams = plan.algorithm.streams()
  uses_unlabeled = batches.trains_on(streams, labeled=False)
  further: dict[str, adapter.Network] = {}
  initial: dict[str, Callable[[], Weights]] = {}
  for name, declared in plan.algorithm.networks().items():
    # An auxiliary network without a `build` is a copy of the model's network.
    if declared.build is None:
      further[name] = plan.networks.make()
    else:
      further[name], initial[name] = plan.networks.make_other(
        declared.build, local
      )
  return training.LocalTraining(
    local,
    plan.algorithm,
    plan.data.views,
    training.LoopConfig(
      hparams.client_epochs,
      *hparams.client_batch_sizes(uses_unlabeled),
      optimizers.client_optimizer(hparams),
      hparams.proximal_strength,
      hparams.jit_compile,
      num_steps=hparams.client_steps,
    ),
    further,
    initial,
  )


def read_client(
  plan: plan_lib.Plan, dataset: tf.data.Dataset
) -> tuple[Any, tf.Tensor]:
  """Reads and checks a client's element. See `client_data.read_client`."""
  return client_data.read_client(
    dataset, plan.networks.num_classes, plan.data.views.accepts
  )


def train(
  plan: plan_lib.Plan,
  local: training.LocalTraining,
  received: messages.Received,
  data: Mapping[str, Any],
  round_num: tf.Tensor,
  watch: non_finite.Watch | None = None,
) -> tuple[training.LocalResult, tf.Tensor]:
  """Trains a client in a round.

  Args:
    plan: The plan.
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
    learning_rate=optimizers.learning_rate(
      plan.hparams,
      plan.hparams.client_learning_rate,
      round_num,
      received.values,
    ),
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


def _upload(
  plan: plan_lib.Plan,
  received: messages.Received,
  data: Mapping[str, Any],
  result: training.LocalResult,
  finite: tf.Tensor,
  usable: tf.Tensor,
  round_num: tf.Tensor,
) -> _Upload:
  """Builds a client's upload.

  Args:
    plan: The plan.
    received: The message, as the client uses it.
    data: The client's element.
    result: The result of its training.
    finite: bool scalar, whether update and weight are finite.
    usable: bool scalar, whether the data could be used.
    round_num: int32 scalar.

  Returns:
    (update and weight, report).
  """
  num_held = _count_held(plan, data)
  weight = _weight(plan, result, num_held)
  # Clients that kept no pseudo-labels still report.
  reports = tf.logical_and(tf.logical_and(round_num >= 1, num_held > 0), finite)
  counts = reports
  if result.weight is None:
    counts = tf.logical_and(counts, result.num_examples > 0.0)
  # Without a report, only the mark tells that the training failed.
  valid = tf.logical_and(usable, finite) if plan.is_confidential else usable
  weight = screen_lib.mark(tf.where(counts, weight, 0.0), valid)
  values = _uploads(plan, result)
  # Weight 0 does not cancel NaN, so values without a report become 0.
  of_sum = screen_lib.masked(values[channels.SUM], reports, 0.0)
  change = _change(plan, received, data, result)
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


def _count_held(plan: plan_lib.Plan, data: Mapping[str, Any]) -> tf.Tensor:
  """Counts the examples that a client can train on: int32 scalar."""
  every = {base.UNLABELED: False, base.LABELED: True}
  streams = plan.algorithm.streams()
  trained = [
    kind
    for kind, labeled in every.items()
    if batches.trains_on(streams, labeled=labeled)
    and (plan.hparams.labels_at_clients or not labeled)
  ]
  # Clients that do not train report whatever they hold.
  return tf.add_n([tf.size(data[kind]['y']) for kind in trained or every])


def _weight(
  plan: plan_lib.Plan, result: training.LocalResult, num_held: tf.Tensor
) -> tf.Tensor:
  """Returns the weight that the algorithm set, else `client_weighting`'s."""
  if result.weight is not None:
    return result.weight
  if plan.hparams.client_weighting != 'examples':
    return tf.constant(1.0)
  # Episodes have about the same size at all clients, so processed examples
  # would say little.
  if batches.draws_episodes(plan.algorithm.streams()):
    return tf.cast(num_held, tf.float32)
  return result.num_examples


def _uploads(
  plan: plan_lib.Plan, result: training.LocalResult
) -> dict[str, collections.OrderedDict[str, tf.Tensor]]:
  """Groups the values of `finish` by `Upload.how`.

  Raises:
    UsageError: If they have other names than those that are declared, so that
      they would have no bounds.
  """
  kinds = {name: upload.how for name, upload in plan.uploads.items()}
  if plan.exchange is not None:
    of_row = dict.fromkeys(plan.exchange.row_specs, channels.ROWS)
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
  plan: plan_lib.Plan,
  received: messages.Received,
  data: Mapping[str, Any],
  result: training.LocalResult,
) -> dict[str, Any]:
  """Returns, by channel, what training changed, and the client's place."""
  update = result.update
  if plan.networks.tracks_moving_averages:
    update += tuple(
      before - after
      for before, after in zip(
        received.weights.non_trainable, result.non_trainable, strict=True
      )
      if before.dtype.is_floating  # Training never changes counters.
    )
  change: dict[str, Any] = {
    channels.MODEL: plan.select(update),
    **result.auxiliary,
  }
  if plan.groups is not None:
    place = tf.stack(plan.groups.place_of(data))
    change[channels.PLACE] = tf.cast(place, tf.float32)
  return change


def build_find_non_finite(plan: plan_lib.Plan) -> FindNonFinite:
  """Builds a function that repeats a client's round to find where it fails.

  The function runs outside TFF. Its training is made when first needed.

  Args:
    plan: The plan.

  Returns:
    `(state, dataset, round number) -> NonFinite`, or None if the client's
    update and weight are finite.
  """

  def build() -> Callable[..., non_finite.NonFinite | None]:
    local, watch = make_training(plan), non_finite.Watch()

    @tf.function(autograph=False, reduce_retracing=True)
    def run(
      state: Any, data: Mapping[str, Any], round_num: tf.Tensor
    ) -> tf.Tensor:
      watch.reset()
      received = _receive(plan, state, data, round_num)
      _, finite = train(plan, local, received, data, round_num, watch)
      return finite

    return lambda *client: None if run(*client) else watch.found()

  return _repeating(plan, build)


def build_find_rejected(plan: plan_lib.Plan) -> FindRejected:
  """Builds a function that repeats a client's round to find why it is rejected.

  The function runs outside TFF. A metric whose `Mean.count` is wrong rejects
  every client, for example.

  Args:
    plan: The plan.

  Returns:
    `(state, dataset, round number) -> str`, the first check that fails, with
    its value, or None if all pass.
  """

  def build() -> Callable[..., str | None]:
    local, named = make_training(plan), dict[str, str]()

    @tf.function(autograph=False, reduce_retracing=True)
    def run(
      state: Any, data: Mapping[str, Any], round_num: tf.Tensor
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
      received = _receive(plan, state, data, round_num)
      result, finite = train(plan, local, received, data, round_num)
      usable = tf.constant(True)
      upload = _upload(plan, received, data, result, finite, usable, round_num)
      checks = screen_lib.checks_of(plan, *upload)
      named.update({name: c.allowed for name, c in checks.items()})
      return [(c.value, c.is_possible) for c in checks.values()]

    def find(*client: Any) -> str | None:
      results = run(*client)
      for (value, possible), (name, allowed) in zip(results, named.items()):
        if not possible:
          return f'{name} is {float(value):g} (allowed: {allowed})'
      return None

    return find

  return _repeating(plan, build)


def build_local_model(plan: plan_lib.Plan) -> LocalModel:
  """Builds a function that computes the model of one client in a round.

  The function runs outside TFF. With static batch norm, the model has the
  statistics of all the client's examples.

  Args:
    plan: The plan.

  Returns:
    `(state, dataset, round number) -> ServerModel`: the server's model with the
    client's trained weights, or unchanged if these are not finite.
  """

  def build() -> Callable[..., Any]:
    local = make_training(plan)
    own_statistics = statistics_phase.make_own(plan)

    def run(state: Any, data: Mapping[str, Any], round_num: tf.Tensor) -> Any:
      model = server_model.ServerModel(*state.global_model_weights)
      received = _receive(plan, state, data, round_num)
      _, finite = train(plan, local, received, data, round_num)
      learnt = model.replace_weights(local.weights_now())
      learnt = learnt.replace_sets(**local.auxiliary_weights(model.sets))
      images = tf.concat([data['labeled']['x'], data['unlabeled']['x']], axis=0)
      learnt = own_statistics(learnt, images)
      return select(finite, learnt, lambda: model)

    compiled: Callable[..., Any] = tf.function(
      run, autograph=False, reduce_retracing=True
    )
    return compiled

  return _repeating(plan, build)


def _receive(
  plan: plan_lib.Plan,
  state: Any,
  data: Mapping[str, Any],
  round_num: tf.Tensor,
) -> messages.Received:
  """Makes the message of a round, and reads it as a client does."""
  message = messages.make_message(
    plan,
    () if plan.exchange is None else state.distributor['table'],
    server_model.ServerModel(*state.global_model_weights),
    round_num,
  )
  return messages.read_message(plan, message, data)


def _repeating(
  plan: plan_lib.Plan, build: Callable[[], Callable[..., Any]]
) -> Callable[[Any, tf.data.Dataset, int], Any]:
  """Makes a function that repeats a client's round outside TFF.

  Args:
    plan: The plan.
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
    data, _ = read_client(plan, dataset)
    with loops.call_options():
      return built()(state, data, tf.constant(round_num))

  return repeat
