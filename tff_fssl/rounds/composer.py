"""A round, from the server's message to the next model, and its process.

`_build_round` is the whole round in one function, numbered like the picture in
docs/architecture.md. In TFF's type notation, `T@SERVER` is one value of type T
at the server, `T@CLIENTS` is one at each client of the cohort, and `D*` is a
sequence (a `tf.data.Dataset`) of elements of type D.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
import warnings

import numpy as np

from tff_fssl.aggregators import collecting
from tff_fssl.interface import channels
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import checks
from tff_fssl.rounds import client_work as client_work_lib
from tff_fssl.rounds import communication
from tff_fssl.rounds import messages
from tff_fssl.rounds import optimizers
from tff_fssl.rounds import plan as plan_lib
from tff_fssl.rounds import screen
from tff_fssl.rounds import server_step
from tff_fssl.rounds import server_training
from tff_fssl.rounds import statistics_phase

LearningAlgorithmState: TypeAlias = (
  tff.learning.templates.LearningAlgorithmState
)
ServerModel = server_model.ServerModel


class _Next(tff.framework.ConcreteComputation):
  """`LearningProcess.next`, which warns of clients that would be ignored."""

  @classmethod
  def of(cls, next_fn: tff.Computation) -> _Next:
    """Makes it of the computation."""
    return cls(
      computation_proto=tff.framework.ConcreteComputation.get_proto(next_fn),
      context_stack=tff.framework.get_context_stack(),
      annotated_type=next_fn.type_signature,
    )

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    state, client_data = args if len(args) == 2 else (None, None)
    round_num = getattr(state, 'client_work', None)
    # In a TFF computation, neither is known.
    is_early = isinstance(round_num, (int, np.integer)) and round_num < 1
    if is_early and isinstance(client_data, Sequence) and len(client_data):
      warnings.warn(
        f'round {round_num}: the server trains alone up to round 0'
        f' (num_pretraining_rounds), and ignores {len(client_data)} clients;'
        ' count rounds by `for round_num in process.rounds(...)`',
        stacklevel=2,
      )
    return super().__call__(*args, **kwargs)


class FsslProcess(tff.learning.templates.LearningProcess):
  """A learning process with attributes that describe it.

  These attributes are not part of the process's computations.

  Attributes:
    first_round: The number of the first round, below 1 with pre-training.
    find_non_finite: See `client_work.build_find_non_finite`.
    find_rejected: See `client_work.build_find_rejected`.
    local_model: See `client_work.build_local_model`. None if clients have only
      a part of the model, or keep models of their own.
    num_classes: The number of classes, if known. Clients' labels must be less.
    num_clients: The number of clients that the process knows by their ids.
      Their data must then contain `client_id`. 0: it knows none.
    needs_slots: Whether clients' data must contain `slot`, their position in
      the cohort.
    start: Weights -> the `ServerModel` of a process that starts from them.
    prediction: The rule by which the model predicts.
    plateau: The schedule that a program must tell each loss on validation
      examples (`follow`, of `state.global_model_weights`), or None.
    num_phases: Client phases in a round.
    min_clients: Rounds with fewer clients are discarded.
    outside: Loads the rows that are stored outside of the state before each
      round, and stores them after it. None if there are none. The table is
      `state.distributor['table']`.
  """

  first_round: int = 1
  find_non_finite: client_work_lib.FindNonFinite
  find_rejected: client_work_lib.FindRejected
  local_model: client_work_lib.LocalModel | None = None
  num_classes: int | None = None
  num_clients: int = 0
  needs_slots: bool = False
  start: Callable[[Weights], ServerModel]
  prediction: server_model.Prediction
  plateau: optimizers.Plateau | None = None
  num_phases: int = 1
  min_clients: int = 0
  outside: exchange_lib.Outside | None = None

  def rounds(self, total_rounds: int) -> range:
    """Returns the numbers of rounds, pre-training first.

    Args:
      total_rounds: The number of the last round. Clients train in rounds from 1
        on.

    Returns:
      The numbers from `first_round` on, by which `CohortDataSource.cohort`
      gives the clients of each round.
    """
    return range(self.first_round, total_rounds + 1)


def compose(
  plan: plan_lib.Plan, aggregator: tff.templates.AggregationProcess
) -> FsslProcess:
  """Composes the process of a plan.

  Its state holds a `ServerModel`, and `get_model_weights` converts it to
  `tff.learning.models.ModelWeights`, which evaluation and export expect.

  Args:
    plan: The plan.
    aggregator: Combines what clients send, by weight.

  Returns:
    The process. The caller sets the attributes that describe it.
  """
  initial_model = server_training.build_initial_model(plan)
  table = messages.build_table(plan)
  model_type = initial_model.type_signature.result
  server_state = server_step.build_initialize(plan, model_type)

  @tff.federated_computation
  def init_fn() -> tff.Value:
    return tff.federated_zip(
      LearningAlgorithmState(
        tff.federated_eval(initial_model, tff.SERVER),
        tff.federated_eval(table, tff.SERVER),
        tff.federated_value(plan.hparams.first_round, tff.SERVER),
        aggregator.initialize(),
        tff.federated_eval(server_state, tff.SERVER),
      )
    )

  state_type = init_fn.type_signature.result
  next_fn = _build_round(plan, aggregator, state_type.member)
  to_model, to_state = _model_weights_fns(plan, state_type.member)
  return FsslProcess(init_fn, _Next.of(next_fn), to_model, to_state)


def _build_round(
  plan: plan_lib.Plan,
  aggregator: tff.templates.AggregationProcess,
  state_type: tff.Type,
) -> tff.Computation:
  """Builds a round: `<S@SERVER, D*@CLIENTS> -> <S, metrics>@SERVER`."""
  model_type = state_type.global_model_weights
  write = messages.build_message(plan, state_type.distributor, model_type)
  checks.check(plan, model_type, write.type_signature.result)

  @tff.federated_computation(
    tff.FederatedType(state_type, tff.SERVER),
    tff.FederatedType(plan.data_type, tff.CLIENTS),
  )
  def next_fn(
    state: tff.Value, data: tff.Value
  ) -> tff.learning.templates.LearningProcessOutput:
    old_model, round_num = state.global_model_weights, state.client_work
    # 1. The server sends its model, and what the algorithm broadcasts.
    message = tff.federated_map(write, (state.distributor, old_model))
    message = tff.federated_broadcast(message)
    # 2, 3. Clients check their data, and train.
    work = client_work_lib.build_work(plan, message.type_signature.member)
    told = (message, data, tff.federated_broadcast(round_num))
    result, report = tff.federated_map(work, told)
    # 4. What they send is checked. Their reports are summed.
    result, of_clients = screen.check_and_sum(plan, result, report)
    update, rows = _collect_rows(plan, result.update)
    # 5. Their updates are combined.
    combined = aggregator.next(state.aggregator, update, result.update_weight)
    # 6. The server applies the update, and trains on its labels.
    sent = _sent(plan, combined.result, of_clients, rows)
    step = server_step.build_step(
      plan, state_type.finalizer, model_type, sent.type_signature.member
    )
    server_state, new_model, of_server = tff.federated_map(
      step, (state.finalizer, old_model, sent)
    )
    # 7 to 9. Statistics for static batch norm are gathered.
    renewed = statistics_phase.renew(plan, old_model, message, new_model, data)
    # 9. The table of clients keeps their rows.
    counts = _counts(plan, round_num, of_clients)
    table, of_table = _keep_rows(
      plan, state.distributor, rows, renewed.model, counts
    )
    # The round is counted. If too few clients took part, it changes no more.
    new_state = LearningAlgorithmState(
      renewed.model,
      table,
      tff.federated_map(_count_up, round_num),
      combined.state,
      server_state,
    )
    new_state = _keep_unless(plan, state, new_state, counts)
    bytes_of = communication.build_communication(
      plan,
      model_type,
      result.type_signature.member,
      None if plan.is_confidential else report.type_signature.member,
      statistics_up=renewed.bytes_up,
    )
    num_clients = of_clients['train']['num_clients']
    metrics = collections.OrderedDict(
      distributor=tff.federated_value((), tff.SERVER),
      client_work=_released(of_clients),
      aggregator=combined.measurements,
      finalizer=of_server,
      participation=_participation(plan, counts),
      last_phase=renewed.metrics,
      exchange=of_table,
      communication=tff.federated_map(
        bytes_of, (old_model, new_model, num_clients)
      ),
    )
    return tff.learning.templates.LearningProcessOutput(
      new_state, _zip_some(metrics)
    )

  return next_fn


def _collect_rows(
  plan: plan_lib.Plan, sent: tff.Value
) -> tuple[tff.Value, tff.Value | None]:
  """Splits what clients send into updates@CLIENTS and rows@SERVER, or None."""
  if not plan.row_specs:
    return sent, None
  collect, _ = collecting.build_collect(messages.row_type(plan.row_specs))
  return sent['update'], collect(sent['row'])


def _sent(
  plan: plan_lib.Plan,
  combined: tff.Value,
  of_clients: tff.Value,
  rows: tff.Value | None,
) -> tff.Value:
  """Joins what clients have sent for the server's step, at the server."""
  sent = collections.OrderedDict(
    update=combined,
    uploads=of_clients['uploads'],
    num_reports=of_clients['num_reports'],
  )
  if channels.sent_as(plan.uploads, channels.ROWS):
    sent['rows'] = rows
  return tff.federated_zip(sent)


def _keep_rows(
  plan: plan_lib.Plan,
  table: tff.Value,
  rows: tff.Value | None,
  model: tff.Value,
  counts: tff.Value,
) -> tuple[tff.Value, tff.Value | None]:
  """Adds clients' rows to the table, all at the server: (table, metrics)."""
  if plan.exchange is None or rows is None:
    return table, None
  types = [value.type_signature.member for value in (table, rows, model)]
  accept = messages.build_accept(plan.exchange, *types)
  ended = tff.federated_map(accept, (table, rows, model, counts))
  return ended[0], ended[1]


def _counts(
  plan: plan_lib.Plan, round_num: tff.Value, of_clients: tff.Value
) -> tff.Value:
  """Tells whether the round counts: bool at the server."""
  if not plan.can_discard:
    return tff.federated_value(True, tff.SERVER)
  counts = build_counts(plan, of_clients.type_signature.member)
  return tff.federated_map(counts, (round_num, of_clients))


def _keep_unless(
  plan: plan_lib.Plan,
  old: tff.Value,
  new: LearningAlgorithmState,
  counts: tff.Value,
) -> tff.Value:
  """Discards a round that does not count: the next state, at the server."""
  state = tff.federated_zip(new)
  if not plan.can_discard:
    return state
  keep_unless = _build_keep_unless(plan, old.type_signature.member)
  return tff.federated_map(keep_unless, (old, state, counts))


def _released(of_clients: tff.Value) -> tff.Value:
  """Selects the metrics of clients that are released, without uploads."""
  train = collections.OrderedDict(train=of_clients['train'])
  return tff.federated_zip(train)


def _participation(plan: plan_lib.Plan, counts: tff.Value) -> tff.Value | None:
  """Makes the metric of discarded rounds, if few clients discard them."""
  if not plan.hparams.min_clients:
    return None
  too_few = tff.federated_map(_is_not, counts)
  return tff.federated_zip(collections.OrderedDict(too_few_clients=too_few))


def _zip_some(metrics: Mapping[str, tff.Value | None]) -> tff.Value:
  """Zips the metrics that are not None."""
  return tff.federated_zip(
    collections.OrderedDict((n, m) for n, m in metrics.items() if m is not None)
  )


@tff.tensorflow.computation(tf.int32)
def _count_up(round_num: tf.Tensor) -> tf.Tensor:
  """Adds 1."""
  return round_num + 1


def build_counts(
  plan: plan_lib.Plan, measured_type: tff.Type
) -> tff.Computation:
  """Builds `<round number, measured> -> bool`, whether the round counts.

  A round does not count if clients took part but none reported (they failed,
  were rejected, or have nothing to train on), or if fewer than `min_clients`
  did. Rounds before round 1 have no clients, and count.

  Args:
    plan: The plan.
    measured_type: The type of `screen.check_and_sum`'s metrics.

  Returns:
    The computation.
  """
  min_clients = plan.hparams.min_clients

  @tff.tensorflow.computation(tf.int32, measured_type)
  def counts(round_num: tf.Tensor, measured: Mapping[str, Any]) -> tf.Tensor:
    num_usable = tf.cast(measured['num_reports'], tf.int32)
    took_part = measured['train']['num_clients'] > 0
    all_failed = tf.logical_and(took_part, num_usable <= 0)
    too_few = tf.logical_or(all_failed, num_usable < min_clients)
    return tf.logical_not(tf.logical_and(round_num >= 1, too_few))

  return counts


def _build_keep_unless(
  plan: plan_lib.Plan, state_type: tff.Type
) -> tff.Computation:
  """Builds `<S, S, bool> -> S`, which discards a round that does not count.

  It takes the states before and after the round. It restores the old model, of
  which only the algorithm's `after_round` changes something, the finalizer's
  state, and that of the aggregator, unless this accounts for what the round has
  released (differential privacy). It does not restore the table, to which such
  a round adds no rows.
  """

  @tff.tensorflow.computation(state_type, state_type, tf.bool)
  def keep_unless(
    old: LearningAlgorithmState, new: LearningAlgorithmState, counts: tf.Tensor
  ) -> LearningAlgorithmState:
    def kept(old: Any, new: Any) -> Any:
      return tf.nest.map_structure(
        lambda n, o: tf.where(counts, n, o), new, old
      )

    model = plan.states.discard(
      ServerModel(*old.global_model_weights), old.finalizer['round_num']
    )
    finalizer_state = kept(old.finalizer, new.finalizer)
    # Counters go up even so, or the next round would repeat this one's draws.
    finalizer_state['round_num'] = new.finalizer['round_num']
    return new._replace(
      global_model_weights=kept(model, ServerModel(*new.global_model_weights)),
      aggregator=new.aggregator
      if plan.is_private
      else kept(old.aggregator, new.aggregator),
      finalizer=finalizer_state,
    )

  return keep_unless


@tff.tensorflow.computation(tf.bool)
def _is_not(counts: tf.Tensor) -> tf.Tensor:
  """Negates a bool, as an int32 scalar."""
  return tf.cast(tf.logical_not(counts), tf.int32)


def _model_weights_fns(
  plan: plan_lib.Plan, state_type: tff.Type
) -> tuple[tff.Computation, tff.Computation]:
  """Builds `get_model_weights` and `set_model_weights` of the process."""

  @tff.tensorflow.computation(state_type)
  def get_model_weights(
    state: LearningAlgorithmState,
  ) -> tff.learning.models.ModelWeights:
    model = ServerModel(*state.global_model_weights)
    weights = plan.states.prediction.weights(model)
    return tff.learning.models.ModelWeights(
      tuple(weights.trainable), tuple(weights.non_trainable)
    )

  @tff.tensorflow.computation(
    state_type, get_model_weights.type_signature.result
  )
  def set_model_weights(
    state: LearningAlgorithmState,
    model_weights: tff.learning.models.ModelWeights,
  ) -> LearningAlgorithmState:
    # Weights from outside already contain batch norm statistics: their count is
    # not 0.
    weights = Weights(
      tuple(model_weights.trainable),
      tuple(model_weights.non_trainable),
      tf.constant(1.0),
    )
    return LearningAlgorithmState(plan.states.start(weights), *tuple(state)[1:])

  return get_model_weights, set_model_weights
