"""The composition of a round's parts."""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.models.weights import Weights
from tff_fssl.rounds import composer


def test_a_client_that_lies_in_a_later_phase_only_is_counted():
  phases = [collections.OrderedDict(num_rejected_clients=n) for n in (0, 2, 1)]
  assert composer._largest(phases) == {'num_rejected_clients': 2}


def test_one_phase_is_tffs_composition():
  """Our composer and TFF's give one process from one set of parts."""
  weights_type = tff.to_type(Weights((np.float32,), (), np.float32))
  data_type = tff.SequenceType(np.float32)

  @tff.tensorflow.computation
  def initial():
    return Weights((tf.constant(2.0),), (), tf.constant(1.0))

  @tff.tensorflow.computation(weights_type, data_type)
  def work(weights, dataset):
    total = dataset.reduce(0.0, lambda a, b: a + b)
    return tff.learning.templates.ClientResult(
      (weights.trainable[0] - total,), 1.0
    )

  @tff.federated_computation
  def no_state():
    return tff.federated_value((), tff.SERVER)

  @tff.tensorflow.computation(weights_type, np.float32)
  def subtract(weights, update):
    return weights._replace(trainable=(weights.trainable[0] - update,))

  def build_parts(is_ours):
    """What our composer takes has uploads of the clients beside the update."""

    @tff.federated_computation(
      no_state.type_signature.result,
      tff.FederatedType(weights_type, tff.CLIENTS),
      tff.FederatedType(data_type, tff.CLIENTS),
    )
    def work_next(state, weights, data):
      measurements = collections.OrderedDict(train=())
      if is_ours:
        measurements.update(uploads=(), num_reports=0)
      return tff.templates.MeasuredProcessOutput(
        state,
        tff.federated_map(work, (weights, data)),
        tff.federated_value(measurements, tff.SERVER),
      )

    client_work = tff.learning.templates.ClientWorkProcess(no_state, work_next)
    worked = client_work.next.type_signature.result
    update_type = worked.result.member.update
    aggregator = tff.aggregators.MeanFactory().create(
      update_type, tff.TensorType(np.float32)
    )
    from_clients = update_type
    if is_ours:
      measured = worked.measurements.member
      from_clients = tff.to_type(
        collections.OrderedDict(
          update=update_type,
          uploads=measured.uploads,
          num_reports=measured.num_reports,
        )
      )

    @tff.federated_computation(
      no_state.type_signature.result,
      tff.FederatedType(weights_type, tff.SERVER),
      tff.FederatedType(from_clients, tff.SERVER),
    )
    def finalize(state, weights, received):
      update = received.update if is_ours else received
      return tff.templates.MeasuredProcessOutput(
        state,
        tff.federated_map(subtract, (weights, update[0])),
        tff.federated_value((), tff.SERVER),
      )

    return (
      initial,
      tff.learning.templates.build_broadcast_process(weights_type),
      client_work,
      aggregator,
      tff.learning.templates.FinalizerProcess(no_state, finalize),
    )

  ours = composer.compose_fssl_process(
    *build_parts(True), start=lambda weights: weights
  )
  theirs = tff.learning.templates.compose_learning_process(*build_parts(False))
  assert ours.next.type_signature == theirs.next.type_signature
  data = [[1.0, 2.0], [5.0]]
  mine, other = ours.initialize(), theirs.initialize()
  for _ in range(2):
    mine, my_metrics = ours.next(mine, data)
    other, other_metrics = theirs.next(other, data)
  assert str(my_metrics) == str(other_metrics)
  np.testing.assert_array_equal(
    mine.global_model_weights.trainable, other.global_model_weights.trainable
  )
