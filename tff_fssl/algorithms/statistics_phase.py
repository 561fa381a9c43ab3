"""Static batch norm's client phase: statistics of the round's new weights."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.algorithms import client_work
from tff_fssl.data import augment
from tff_fssl.models import adapter
from tff_fssl.models import statistics


def build_statistics_phase(
  weights_type: tff.Type,
  element_spec: Any,
  make_network: Callable[[], adapter.Network],
  views: augment.Views,
  *,
  kind: str,
  batch_size: int,
  server_data_fn: Callable[[], tf.data.Dataset] | None = None,
) -> tuple[tff.Computation, int]:
  """Builds `<W@SERVER, D*@CLIENTS> -> W@SERVER`: W with new statistics.

  The cohort's examples, labelled and unlabelled, and the server's labelled ones
  count alike. Where no example was seen the old statistics stay.

  Args:
    weights_type: The type W of an `adapter.Weights`.
    element_spec: Of the one element of a client's data.
    make_network: Called where variables may be made.
    views: The preprocessing; `plain` is used.
    kind: `statistics.POOLED` or `statistics.BATCH_MEAN`.
    batch_size: Examples in a batch of the pass.
    server_data_fn: The server's labelled data, if it has any.

  Returns:
    The federated computation, and the bytes that a client sends in it.
  """

  def gather(network, weights, images):
    return statistics.gather(
      network, weights, images, views, kind=kind, batch_size=batch_size
    )

  @tff.tensorflow.computation(weights_type, client_work.data_type(element_spec))
  def of_client(weights, dataset):
    network = make_network()

    @tf.function
    def run(weights, dataset):
      data = client_work.read_one(dataset)
      images = tf.concat([data['labeled']['x'], data['unlabeled']['x']], axis=0)
      return gather(network, weights, images)

    return run(weights, dataset)

  @tff.tensorflow.computation(weights_type, of_client.type_signature.result)
  def at_server(weights, sums):
    network = make_network()

    @tf.function
    def run(weights, sums):
      if server_data_fn is not None:
        images = client_work.read_one(server_data_fn())['x']
        sums = tf.nest.map_structure(
          tf.add, sums, gather(network, weights, images)
        )
      return statistics.put(network, weights, sums, kind=kind)

    return run(weights, sums)

  @tff.federated_computation(
    tff.FederatedType(weights_type, tff.SERVER),
    tff.FederatedType(client_work.data_type(element_spec), tff.CLIENTS),
  )
  def phase(weights, dataset):
    sums = tff.federated_map(
      of_client, (tff.federated_broadcast(weights), dataset)
    )
    return tff.federated_map(at_server, (weights, tff.federated_sum(sums)))

  return phase, client_work.num_bytes(of_client.type_signature.result)
