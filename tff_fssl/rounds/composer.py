"""Chains TFF's four parts, and a further client phase, into a process.

The four parts of a TFF learning process are the distributor, which broadcasts
the weights; the client work; the aggregator, which combines the clients'
results; and the finalizer, which applies the combined result at the server. A
client phase is one broadcast, work at the clients, and an aggregation.

In TFF's type notation, `T@SERVER` is one value of type T at the server,
`T@CLIENTS` is one at each client of the cohort, and `D*` is a sequence (a
`tf.data.Dataset`) of elements of type D.
"""

import collections
from collections.abc import Mapping

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.models import adapter
from tff_fssl.rounds import client_work as client_work_lib

LearningAlgorithmState = tff.learning.templates.LearningAlgorithmState


class FsslProcess(tff.learning.templates.LearningProcess):
  """A learning process that can say, in a simulation, why a client failed.

  Attributes:
    find_non_finite: See `client_work.build_find_non_finite`; not part of the
      process's computations.
    num_classes: The number of classes, if known; clients' labels must be less.
  """

  find_non_finite: client_work_lib.FindNonFinite
  num_classes: int | None = None


def compose_fssl_process(
  initial_weights_fn: tff.Computation,
  distributor: tff.learning.templates.DistributionProcess,
  client_work: tff.learning.templates.ClientWorkProcess,
  aggregator: tff.templates.AggregationProcess,
  finalizer: tff.learning.templates.FinalizerProcess,
  *,
  last_phase: tff.Computation | None = None,
  revise_state: tff.Computation | None = None,
  communication: Mapping[str, int] | None = None,
  find_non_finite: client_work_lib.FindNonFinite | None = None,
  num_classes: int | None = None,
) -> FsslProcess:
  """Composes a `LearningProcess`.

  Without the keyword arguments it is
  `tff.learning.templates.compose_learning_process`, with one difference: the
  state holds `adapter.Weights`, and `get_model_weights` converts them to
  `tff.learning.models.ModelWeights`, which evaluation and export expect.

  Args:
    initial_weights_fn: `( -> W)`, the initial weights.
    distributor: Broadcasts the weights.
    client_work: Trains at the clients.
    aggregator: Combines the clients' updates; weighted.
    finalizer: Applies the combined update at the server.
    last_phase: `<W@SERVER, D*@CLIENTS> -> <result=W, measurements=M>@SERVER`, a
      further client phase after the finalizer.
    revise_state: `<S, S, M> -> S`, from the state before the round, the state
      after it and the client work's measurements to the final state.
    communication: Constant figures reported among the metrics.
    find_non_finite: Value of that attribute, if any.
    num_classes: Value of that attribute.

  Returns:
    The process.
  """
  data_type = client_work.next.type_signature.parameter[2]

  @tff.federated_computation
  def init_fn():
    return tff.federated_zip(
      LearningAlgorithmState(
        tff.federated_eval(initial_weights_fn, tff.SERVER),
        distributor.initialize(),
        client_work.initialize(),
        aggregator.initialize(),
        finalizer.initialize(),
      )
    )

  @tff.federated_computation(init_fn.type_signature.result, data_type)
  def next_fn(state, client_data):
    distributed = distributor.next(
      state.distributor, state.global_model_weights
    )
    worked = client_work.next(
      state.client_work, distributed.result, client_data
    )
    aggregated = aggregator.next(
      state.aggregator, worked.result.update, worked.result.update_weight
    )
    finalized = finalizer.next(
      state.finalizer, state.global_model_weights, aggregated.result
    )
    weights, of_last_phase = finalized.result, None
    if last_phase is not None:
      of_last_phase = last_phase(weights, client_data)
      weights = of_last_phase.result
    new_state = tff.federated_zip(
      LearningAlgorithmState(
        weights,
        distributed.state,
        worked.state,
        aggregated.state,
        finalized.state,
      )
    )
    if revise_state is not None:
      new_state = tff.federated_map(
        revise_state, (state, new_state, worked.measurements)
      )
    metrics = collections.OrderedDict(
      distributor=distributed.measurements,
      client_work=worked.measurements,
      aggregator=aggregated.measurements,
      finalizer=finalized.measurements,
    )
    if of_last_phase is not None:
      metrics['last_phase'] = of_last_phase.measurements
    if communication is not None:
      metrics['communication'] = tff.federated_eval(
        _constants(communication), tff.SERVER
      )
    return tff.learning.templates.LearningProcessOutput(
      new_state, tff.federated_zip(metrics)
    )

  state_type = init_fn.type_signature.result.member
  to_model, to_state = _model_weights_fns(state_type)
  process = FsslProcess(init_fn, next_fn, to_model, to_state)
  process.num_classes = num_classes
  if find_non_finite is not None:
    process.find_non_finite = find_non_finite
  return process


def _constants(values: Mapping[str, int]) -> tff.Computation:
  @tff.tensorflow.computation
  def constants():
    return collections.OrderedDict(
      (name, tf.constant(value, tf.int64)) for name, value in values.items()
    )

  return constants


def _model_weights_fns(
  state_type: tff.Type,
) -> tuple[tff.Computation, tff.Computation]:
  """`get_model_weights` and `set_model_weights` of the process."""

  @tff.tensorflow.computation(state_type)
  def get_model_weights(state):
    weights = state.global_model_weights
    return tff.learning.models.ModelWeights(
      tuple(weights.trainable), tuple(weights.non_trainable)
    )

  @tff.tensorflow.computation(
    state_type, get_model_weights.type_signature.result
  )
  def set_model_weights(state, model_weights):
    # Weights from outside already contain batch norm statistics.
    weights = adapter.Weights(
      tuple(model_weights.trainable),
      tuple(model_weights.non_trainable),
      tf.constant(1.0),
    )
    return LearningAlgorithmState(weights, *tuple(state)[1:])

  return get_model_weights, set_model_weights
