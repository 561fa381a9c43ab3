"""FLOPs of clients and server in a round, measured from the graph."""

from __future__ import annotations

import dataclasses
import math

from tff_fssl.client import batches
from tff_fssl.client import compute
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import flops as flops_lib
from tff_fssl.rounds import messages
from tff_fssl.rounds import plan as plan_lib

Flops = flops_lib.Flops


@dataclasses.dataclass(frozen=True)
class RoundCompute:
  """FLOPs of a round, by numbers of examples.

  Attributes:
    clients: The cost of clients for each example.
    server: The cost of the server for each of its labelled examples. None if it
      has none.
    plan: The plan of a process with the same algorithm and model.
  """

  clients: compute.Cost
  server: compute.Cost | None
  plan: plan_lib.Plan

  @property
  def forward(self) -> float:
    """Returns the FLOPs of one example's forward pass: a forward-equivalent."""
    return self.clients.forward

  def count_client(self, num_labeled: float, num_unlabeled: float) -> Flops:
    """Counts the FLOPs of a client's round, if it trains on all its examples.

    Args:
      num_labeled: Its labelled examples. This can be the mean over clients.
      num_unlabeled: Its unlabelled examples.

    Returns:
      The FLOPs of steps, of values computed once, and of static batch norm.
    """
    hparams, streams = self.plan.algorithm.round, self.plan.algorithm.streams()
    uses = [batches.trains_on(streams, labeled=kind) for kind in (False, True)]
    sizes = hparams.client_batch_sizes(uses[0])
    once_for = num_unlabeled
    if batches.draws_episodes(streams):
      in_steps = self._examples_in_episodes(num_labeled, num_unlabeled)
      once_for = num_labeled
    else:
      in_steps = _examples_in_steps(
        hparams,
        (num_unlabeled, sizes[0], uses[0]),
        (num_labeled, sizes[1], uses[1]),
      )
    total = self.clients.unlabeled * in_steps[0]
    total += self.clients.labeled * in_steps[1]
    total += self.clients.once * once_for
    return total + self._statistics(num_labeled + num_unlabeled)

  def _examples_in_episodes(
    self, num_labeled: float, num_unlabeled: float
  ) -> list[float]:
    """Counts unlabelled and labelled examples in all episodes of a round."""
    hparams, streams = self.plan.algorithm.round, self.plan.algorithm.streams()
    name = batches.own_stream(streams, labeled=True)
    groups = streams[name or ''].episode or ()
    sizes = (
      hparams.client_batch_size,
      self.plan.networks.num_classes * sum(groups),
    )
    return [
      (hparams.client_steps or hparams.client_epochs) * min(num, size)
      for num, size in zip((num_unlabeled, num_labeled), sizes)
    ]

  def count_server(self, num_labeled: float) -> Flops:
    """Counts the FLOPs of the server's round."""
    if self.server is None:
      return Flops()
    processed = self.plan.algorithm.round.server_epochs * num_labeled
    processed *= self.plan.algorithm.num_trainings
    return self.server.labeled * processed + self._statistics(num_labeled)

  def _statistics(self, num_examples: float) -> Flops:
    """Counts the FLOPs of passes that gather static batch norm statistics."""
    if not self.plan.networks.is_static:
      return Flops()
    always = 1 + len(self.plan.states.statistics_of)
    # The clients get some sets in some rounds only: FLOPs are a range.
    most = always + len(self.plan.states.statistics_if_sent)
    return Flops(self.forward * always, self.forward * most) * num_examples


def measure(
  model_fn: adapter.ModelFn,
  algorithm: base.Algorithm,
  *,
  views: augment.Views,
  stored: tf.TensorSpec,
) -> RoundCompute:
  """Measures an algorithm by tracing it. Nothing runs.

  Args:
    model_fn: Builds a Keras model, images -> logits.
    algorithm: The algorithm.
    views: Makes network inputs of stored examples.
    stored: The spec of examples as they are stored, [None, ...].

  Returns:
    The FLOPs of a round.

  Raises:
    flops.UnknownFlopsError: If the FLOPs depend on the data. See
      `client.compute`.
    UsageError: If the model cannot be trained.
  """
  shape = augment.input_shape(views, stored)
  # The number of clients does not change the values that one client receives.
  data = plan_lib.DataSpec({'unlabeled': {'x': stored}}, views, num_clients=1)
  plan = plan_lib.build_plan(model_fn, algorithm, data, seed=0, checks=False)
  algorithm = plan.algorithm  # With the quota, if its round has it.
  with plan.networks.probe() as network:
    passes = compute.measure_network(network, shape)
    options = {'views': views, 'passes': passes, 'stored': stored}
    traced = tf.function(
      lambda: receive(plan, network).values, autograph=False
    ).get_concrete_function()
    clients = compute.measure_algorithm(
      network,
      algorithm,
      received=tf.nest.map_structure(
        lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
        traced.structured_outputs,
      ),
      **options,
    )
    server = None
    if not algorithm.round.labels_at_clients:
      server = compute.measure_algorithm(
        network, algorithm.server_trainer(), at_server=True, **options
      )
    return RoundCompute(clients, server, plan)


def receive(plan: plan_lib.Plan, network: adapter.Network) -> messages.Received:
  """Makes the values that client 0 receives in the first round.

  Args:
    plan: The plan.
    network: A network of the plan.

  Returns:
    The message, as the client uses it.
  """
  message = messages.make_message(
    plan,
    () if plan.exchange is None else plan.exchange.initialize(),
    plan.states.start(network.initial_weights()),
    tf.constant(1),
  )
  data = {'client_id': tf.constant(0), 'seed': tf.zeros([2], tf.int32)}
  return messages.read_message(plan, message, data)


def _examples_in_steps(
  hparams: round_hparams.RoundHparams, *streams: tuple[float, int, bool]
) -> list[float]:
  """Counts the examples of each stream in all batches of a client's round.

  Args:
    hparams: The numbers of steps, or of passes over the longer of the streams.
      The other one repeats.
    *streams: For each, (examples, examples in a batch, whether it is used).

  Returns:
    The numbers, 0 for a stream that is not used. A stream without examples has
    a filler in each batch.
  """
  batches = [math.ceil(max(num, 1) / size) for num, size, _ in streams]
  used = [n for n, (_, _, is_used) in zip(batches, streams) if is_used]
  num_steps = hparams.client_steps or (
    hparams.client_epochs * max(used, default=0)
  )
  return [
    num_steps * max(num, 1) / of_pass if is_used else 0.0
    for of_pass, (num, _, is_used) in zip(batches, streams)
  ]
