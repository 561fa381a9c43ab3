"""The composition of a process from TFF's four parts and further client phases.

The four parts of a TFF learning process are:

*   the distributor, which broadcasts the weights,
*   the client work,
*   the aggregator, which combines the clients' results,
*   the finalizer, which applies the combined result at the server.

A client phase is one broadcast, work at the clients, and an aggregation.

In TFF's type notation, `T@SERVER` is one value of type T at the server,
`T@CLIENTS` is one at each client of the cohort, and `D*` is a sequence (a
`tf.data.Dataset`) of elements of type D.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias
import warnings

import numpy as np

from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import client_work as client_work_lib

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


class LastPhase(Protocol):
  """A client phase that follows the finalizer, in a federated computation."""

  def __call__(
    self,
    before: tff.Value,
    message: tff.Value,
    model: tff.Value,
    data: tff.Value,
    /,
  ) -> Mapping[str, tff.Value]:
    """Builds the phase.

    Args:
      before: The model before the round, at the server.
      message: The message, at the clients.
      model: The model that the finalizer made, at the server.
      data: The clients' data.

    Returns:
      OrderedDict(result=model, measurements), at the server.
    """


class Discard(Protocol):
  """The changes that a discarded round makes in the model."""

  def __call__(
    self, model: ServerModel, round_num: tf.Tensor, /
  ) -> ServerModel:
    """Changes the model from before the round, in a TensorFlow computation."""


class EndRound(Protocol):
  """The end of a round for the distributor, in a federated computation."""

  def __call__(
    self,
    state: tff.Value,
    rows: tff.Value,
    model: tff.Value,
    counts: tff.Value,
    /,
  ) -> tff.Value:
    """Adds the clients' rows to the distributor's state, all at the server.

    Args:
      state: The distributor's state.
      rows: The rows of the clients.
      model: The model after the round.
      counts: Whether the round counts.

    Returns:
      (state, metrics).
    """


def compose_fssl_process(
  initial_model_fn: tff.Computation,
  distributor: tff.learning.templates.DistributionProcess,
  client_work: tff.learning.templates.ClientWorkProcess,
  aggregator: tff.templates.AggregationProcess,
  finalizer: tff.learning.templates.FinalizerProcess,
  *,
  start: Callable[[Weights], ServerModel],
  weights_of: server_model.WeightsOf = server_model.own_weights,
  last_phases: Sequence[LastPhase] = (),
  end_round: EndRound | None = None,
  collect_rows: Callable[[tff.Value], tff.Value] | None = None,
  counts: tff.Computation | None = None,
  discard: Discard = lambda model, round_num: model,
  reports_too_few: bool = False,
  keeps_aggregator: bool = False,
  communication: tff.Computation | None = None,
) -> FsslProcess:
  """Composes a `LearningProcess`.

  Without the keyword arguments it is TFF's `compose_learning_process`, but the
  state holds a `ServerModel`, and `get_model_weights` converts it to
  `tff.learning.models.ModelWeights`, which evaluation and export expect.

  Args:
    initial_model_fn: `( -> M)`, the initial model.
    distributor: Makes the message and broadcasts it.
    client_work: Trains at the clients. Its measurements are OrderedDict(train,
      uploads, num_reports), of which `train` is released.
    aggregator: Combines the clients' updates by weight.
    finalizer: Makes the new model from the combined uploads.
    start: See `FsslProcess`.
    weights_of: The model -> `get_model_weights`'s result.
    last_phases: Further client phases. They follow the finalizer, since some
      need the new model.
    end_round: Adds clients' rows to the distributor's state.
    collect_rows: rows@CLIENTS -> rows@SERVER, if clients send OrderedDict(
      update, row). The finalizer gets them if it takes `rows`.
    counts: `<round number, measured> -> bool`, whether the round counts, from
      the client work's measurements. A round that does not count is discarded:
      it changes only counters.
    discard: What such a round changes in the model.
    reports_too_few: Whether the metrics tell which rounds were discarded.
    keeps_aggregator: Whether the aggregator's state is kept even so, since it
      accounts for what a discarded round has released (differential privacy).
    communication: `<M, M, number of clients> -> figures`, a part of the
      metrics. The models are those before and after the finalizer.

  Returns:
    The process. The caller sets its `find_non_finite` and `prediction`.
  """
  init_fn = _build_init(
    initial_model_fn, distributor, client_work, aggregator, finalizer
  )
  next_fn = _build_next(
    _Round(
      distributor,
      client_work,
      aggregator,
      finalizer,
      last_phases,
      end_round,
      collect_rows,
      counts,
      discard,
      reports_too_few,
      keeps_aggregator,
      communication,
    ),
    init_fn.type_signature.result,
  )
  state_type = init_fn.type_signature.result.member
  to_model, to_state = _model_weights_fns(state_type, start, weights_of)
  process = FsslProcess(init_fn, _Next.of(next_fn), to_model, to_state)
  process.start = start
  return process


def _build_init(
  initial_model_fn: tff.Computation, *parts: tff.templates.MeasuredProcess
) -> tff.Computation:
  """Builds `( -> S@SERVER)` from the model and the four parts."""

  @tff.federated_computation
  def init_fn() -> tff.Value:
    return tff.federated_zip(
      LearningAlgorithmState(
        tff.federated_eval(initial_model_fn, tff.SERVER),
        *(part.initialize() for part in parts),
      )
    )

  return init_fn


def build_counts(
  measured_type: tff.Type, *, min_clients: int, is_confidential: bool
) -> tff.Computation | None:
  """Builds `<round number, measured> -> bool`, the argument `counts`.

  A round does not count if clients took part but none reported (they failed,
  were rejected, or have nothing to train on), or if fewer than `min_clients`
  did. Rounds before round 1 have no clients, and count.

  Args:
    measured_type: The type of the client work's measurements.
    min_clients: The least number of clients. 0: a round without any counts.
    is_confidential: Whether the server must not learn which updates were
      usable. Then all count as usable.

  Returns:
    The computation. None if all rounds count.
  """
  # All clients count as usable, so no round can fail.
  if is_confidential and not min_clients:
    return None

  @tff.tensorflow.computation(tf.int32, measured_type)
  def counts(round_num: tf.Tensor, measured: Mapping[str, Any]) -> tf.Tensor:
    num_usable = tf.cast(measured['num_reports'], tf.int32)
    took_part = measured['train']['num_clients'] > 0
    all_failed = tf.logical_and(took_part, num_usable <= 0)
    too_few = tf.logical_or(all_failed, num_usable < min_clients)
    return tf.logical_not(tf.logical_and(round_num >= 1, too_few))

  return counts


def _build_keep_unless(
  state_type: tff.Type, *, discard: Discard, keeps_aggregator: bool
) -> tff.Computation:
  """Builds `<S, S, bool> -> S`, which discards a round that does not count.

  It takes the states before and after the round. It restores the old model, of
  which only `discard` changes something, the finalizer's state, and that of the
  aggregator, unless it `keeps_aggregator`. It does not restore the exchange's
  table, to which such a round adds no rows.
  """

  @tff.tensorflow.computation(state_type, state_type, tf.bool)
  def keep_unless(
    old: LearningAlgorithmState, new: LearningAlgorithmState, counts: tf.Tensor
  ) -> LearningAlgorithmState:
    def kept(old: Any, new: Any) -> Any:
      return tf.nest.map_structure(
        lambda n, o: tf.where(counts, n, o), new, old
      )

    model = discard(
      ServerModel(*old.global_model_weights), old.finalizer['round_num']
    )
    finalizer_state = kept(old.finalizer, new.finalizer)
    # Counters go up even so, or the next round would repeat this one's draws.
    finalizer_state['round_num'] = new.finalizer['round_num']
    return new._replace(
      global_model_weights=kept(model, ServerModel(*new.global_model_weights)),
      aggregator=new.aggregator
      if keeps_aggregator
      else kept(old.aggregator, new.aggregator),
      finalizer=finalizer_state,
    )

  return keep_unless


@tff.tensorflow.computation(tf.bool)
def _is_not(counts: tf.Tensor) -> tf.Tensor:
  """Negates a bool, as an int32 scalar."""
  return tf.cast(tf.logical_not(counts), tf.int32)


@tff.tensorflow.computation
def _largest(measurements: Sequence[Any]) -> Any:
  """Returns the largest of each of the phases' measurements."""
  return tf.nest.map_structure(
    lambda *values: tf.reduce_max(tf.stack(values)), *measurements
  )


class _Round(NamedTuple):
  """The components of a round: arguments of `compose_fssl_process`."""

  distributor: tff.learning.templates.DistributionProcess
  client_work: tff.learning.templates.ClientWorkProcess
  aggregator: tff.templates.AggregationProcess
  finalizer: tff.learning.templates.FinalizerProcess
  last_phases: Sequence[LastPhase]
  end_round: EndRound | None
  collect_rows: Callable[[tff.Value], tff.Value] | None
  counts: tff.Computation | None
  discard: Discard
  reports_too_few: bool
  keeps_aggregator: bool
  communication: tff.Computation | None


class _Results(NamedTuple):
  """The results of a round's four parts.

  Attributes:
    distributed: The distributor's.
    worked: The client work's.
    aggregated: The aggregator's.
    rows: The rows, if clients send some.
    finalized: The finalizer's.
  """

  distributed: tff.Value
  worked: tff.Value
  aggregated: tff.Value
  rows: tff.Value | None
  finalized: tff.Value


def _build_next(parts: _Round, state_type: tff.Type) -> tff.Computation:
  """Builds `<S@SERVER, D*@CLIENTS> -> <state=S, metrics>@SERVER`."""
  data_type = parts.client_work.next.type_signature.parameter[2]
  keep_unless = None
  if parts.counts:
    keep_unless = _build_keep_unless(
      state_type.member,
      discard=parts.discard,
      keeps_aggregator=parts.keeps_aggregator,
    )

  @tff.federated_computation(state_type, data_type)
  def next_fn(
    state: tff.Value, client_data: tff.Value
  ) -> tff.learning.templates.LearningProcessOutput:
    old_model = state.global_model_weights
    results = _run_parts(parts, state, client_data)
    model, of_phases = results.finalized.result, []
    for phase in parts.last_phases:
      of_phase = phase(
        old_model, results.distributed.result, model, client_data
      )
      model = of_phase['result']
      of_phases.append(of_phase['measurements'])
    train = results.worked.measurements['train']
    counts = tff.federated_value(True, tff.SERVER)
    if parts.counts is not None:
      measured = results.worked.measurements
      counts = tff.federated_map(parts.counts, (state.client_work, measured))
    distributor_state, of_exchange = results.distributed.state, None
    if parts.end_round is not None:
      ended = parts.end_round(distributor_state, results.rows, model, counts)
      distributor_state, of_exchange = ended[0], ended[1]
    new_state = tff.federated_zip(
      LearningAlgorithmState(
        model,
        distributor_state,
        results.worked.state,
        results.aggregated.state,
        results.finalized.state,
      )
    )
    if keep_unless is not None:
      new_state = tff.federated_map(keep_unless, (state, new_state, counts))
    metrics = _metrics_of_parts(results)
    if parts.reports_too_few:
      too_few = tff.federated_map(_is_not, counts)
      metrics['participation'] = tff.federated_zip(
        collections.OrderedDict(too_few_clients=too_few)
      )
    if of_phases:
      metrics['last_phase'] = of_phases[0]
      if len(of_phases) > 1:
        # A client may lie in some of them only.
        together = tff.federated_zip(of_phases)
        metrics['last_phase'] = tff.federated_map(_largest, together)
    if of_exchange is not None:
      metrics['exchange'] = of_exchange
    if parts.communication is not None:
      metrics['communication'] = tff.federated_map(
        parts.communication,
        # The last phases have broadcast the finalizer's result, and have
        # replaced `model`.
        (old_model, results.finalized.result, train['num_clients']),
      )
    return tff.learning.templates.LearningProcessOutput(
      new_state, tff.federated_zip(metrics)
    )

  return next_fn


def _run_parts(
  parts: _Round, state: tff.Value, client_data: tff.Value
) -> _Results:
  """Runs TFF's four parts, one after another, in a federated computation."""
  old_model = state.global_model_weights
  distributed = parts.distributor.next(state.distributor, old_model)
  worked = parts.client_work.next(
    state.client_work, distributed.result, client_data
  )
  update, rows = worked.result.update, None
  if parts.collect_rows is not None:
    update, rows = update['update'], parts.collect_rows(update['row'])
  aggregated = parts.aggregator.next(
    state.aggregator, update, worked.result.update_weight
  )
  of_clients = worked.measurements
  combined = collections.OrderedDict(
    update=aggregated.result,
    uploads=of_clients['uploads'],
    num_reports=of_clients['num_reports'],
  )
  taken = parts.finalizer.next.type_signature.parameter[2].member
  if tff.structure.has_field(taken, 'rows'):
    combined['rows'] = rows
  finalized = parts.finalizer.next(
    state.finalizer, old_model, tff.federated_zip(combined)
  )
  return _Results(distributed, worked, aggregated, rows, finalized)


def _metrics_of_parts(
  results: _Results,
) -> collections.OrderedDict[str, tff.Value]:
  """Selects the measurements of the four parts that are released."""
  # The means of uploads are for the server's step only.
  train = collections.OrderedDict(train=results.worked.measurements['train'])
  return collections.OrderedDict(
    distributor=results.distributed.measurements,
    client_work=tff.federated_zip(train),
    aggregator=results.aggregated.measurements,
    finalizer=results.finalized.measurements,
  )


def _model_weights_fns(
  state_type: tff.Type,
  start: Callable[[Weights], ServerModel],
  weights_of: Callable[[ServerModel], Weights],
) -> tuple[tff.Computation, tff.Computation]:
  """Builds `get_model_weights` and `set_model_weights` of the process."""

  @tff.tensorflow.computation(state_type)
  def get_model_weights(
    state: LearningAlgorithmState,
  ) -> tff.learning.models.ModelWeights:
    weights = weights_of(ServerModel(*state.global_model_weights))
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
    return LearningAlgorithmState(start(weights), *tuple(state)[1:])

  return get_model_weights, set_model_weights
