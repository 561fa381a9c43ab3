"""What a client and the server compute in a round, measured from the graph."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math

from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import compute
from tff_fssl.models import adapter
from tff_fssl.models import embedding
from tff_fssl.models import flops as flops_lib
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import parts as parts_lib
from tff_fssl.rounds import round_hparams

Flops = flops_lib.Flops


@dataclasses.dataclass(frozen=True)
class RoundCompute:
  """FLOPs of a round, by numbers of examples.

  Attributes:
    clients: What clients compute for each example.
    server: What the server computes for each of its labelled examples; None if
      it has none.
    parts: The algorithm.
    hparams: The round's hyper-parameters.
    is_static: Whether a round gathers static batch norm statistics.
    num_classes: The number of classes.
  """

  clients: compute.Cost
  server: compute.Cost | None
  parts: parts_lib.Parts
  hparams: round_hparams.RoundHparams
  is_static: bool
  num_classes: int

  @property
  def forward(self) -> float:
    """FLOPs of a forward pass over one example: one forward-equivalent."""
    return self.clients.forward

  def of_client(
    self,
    num_labeled: float,
    num_unlabeled: float,
    unlabeled: Flops | None = None,
  ) -> Flops:
    """The FLOPs of a client's round, if it trains on all its examples.

    Args:
      num_labeled: Its labelled examples; the mean over clients, for instance.
      num_unlabeled: Its unlabelled examples.
      unlabeled: FLOPs of the steps for each unlabelled example; None: those
        that were measured.

    Returns:
      The FLOPs of steps, of what is computed once, and of static batch norm.
    """
    hparams, local = self.hparams, self.parts.local
    sizes = hparams.client_batch_sizes(local.trains_on_unlabeled)
    once_for = num_unlabeled
    if local.draws_episodes:
      in_steps = self._examples_in_episodes(num_labeled, num_unlabeled)
      once_for = num_labeled
    else:
      in_steps = _examples_in_steps(
        hparams.client_epochs,
        (num_unlabeled, sizes[0], local.trains_on_unlabeled),
        (num_labeled, sizes[1], local.trains_on_labels),
      )
    total = (unlabeled or self.clients.unlabeled) * in_steps[0]
    total += self.clients.labeled * in_steps[1]
    total += self.clients.once * once_for
    return total + self._statistics(num_labeled + num_unlabeled)

  def _examples_in_episodes(
    self, num_labeled: float, num_unlabeled: float
  ) -> list[float]:
    """The unlabelled and the labelled examples in all episodes of a round."""
    local, hparams = self.parts.local, self.hparams
    groups = local.streams[local.own_stream(labeled=True) or ''].episode or ()
    sizes = (hparams.client_batch_size, self.num_classes * sum(groups))
    return [
      hparams.client_epochs * min(num, size)
      for num, size in zip((num_unlabeled, num_labeled), sizes)
    ]

  def of_server(self, num_labeled: float) -> Flops:
    """The FLOPs of the server's round, with so many labelled examples."""
    if self.server is None:
      return Flops()
    processed = self.hparams.server_epochs * num_labeled
    processed *= self.parts.server.num_trainings
    return self.server.labeled * processed + self._statistics(num_labeled)

  def _statistics(self, num_examples: float) -> Flops:
    """The FLOPs of passes that gather static batch norm statistics."""
    if not self.is_static:
      return Flops()
    server = self.parts.server
    always = 1 + len(server.statistics_of)
    most = always + len(server.statistics_if_sent)
    return Flops(self.forward * always, self.forward * most) * num_examples


def measure(
  model_fn: adapter.ModelFn,
  parts: parts_lib.Parts,
  *,
  views: augment.Views,
  stored: tf.TensorSpec,
  hparams: round_hparams.RoundHparams,
) -> RoundCompute:
  """Traces an algorithm's steps; runs nothing.

  Args:
    model_fn: Builds a Keras model, images -> logits.
    parts: The algorithm.
    views: How stored examples become the network's inputs.
    stored: The spec of examples as they are stored, [None, ...].
    hparams: The round's hyper-parameters.

  Returns:
    What a round computes.

  Raises:
    flops.UnknownFlopsError: If that depends on the data: see
      `local.compute`.
    UsageError: If the model cannot be trained.
  """
  shape = augment.input_shape(views, stored)
  model_fn, num_classes = parts.network_fn(model_fn), None
  if isinstance(model_fn, embedding.EmbeddingFn):
    num_classes = model_fn.num_classes()
  with tf.Graph().as_default():
    network = adapter.Network(
      model_fn,
      image_shape=shape,
      compute_dtype=hparams.compute_dtype,
      track_moving_averages=hparams.batch_norm_statistics == 'moving_average',
      trace=False,
    )
    passes = compute.of_network(network, shape)
    options = {'views': views, 'passes': passes, 'stored': stored}
    local = parts.local
    if parts.alone:  # Its end is static batch norm's pass: see `_statistics`.
      local = local._replace(finish=None)
    clients = compute.of_algorithm(
      network,
      local,
      received=_received(network, parts, num_classes or network.num_outputs),
      **options,
    )
    server = None
    if not hparams.labels_at_clients:
      server = compute.of_algorithm(network, parts.server_training, **options)
    return RoundCompute(
      clients,
      server,
      parts,
      hparams,
      network.is_static,
      num_classes or network.num_outputs,
    )


def receive(
  network: adapter.Network, parts: parts_lib.Parts, num_classes: int
) -> exchange_lib.Received:
  """Makes what a client receives in the first round.

  Args:
    network: A network of the algorithm.
    parts: The algorithm.
    num_classes: The number of classes.

  Returns:
    The message, as client 0 uses it.
  """
  return _receive(_exchange(network, parts, num_classes), network, parts)


def _exchange(
  network: adapter.Network, parts: parts_lib.Parts, num_classes: int
) -> exchange_lib.Exchange | None:
  """Makes the exchange, if there is one; may make variables."""
  exchange = parts.exchange
  if exchange is not None and not isinstance(exchange, exchange_lib.Exchange):
    # The size of the population has no influence on what one client gets.
    of_peers = {
      name: adapter.Network(
        functools.partial(peer.model_fn, network), trace=False
      ).weight_specs
      for name, peer in parts.local.peers.items()
      if peer.model_fn is not None
    }
    population = exchange_lib.Population(
      1, network.weight_specs, of_peers, num_classes, network.num_outputs
    )
    exchange = exchange(population)
  return exchange


def _receive(
  exchange: exchange_lib.Exchange | None,
  network: adapter.Network,
  parts: parts_lib.Parts,
) -> exchange_lib.Received:
  """Makes what a client receives in the first round."""
  table = () if exchange is None else exchange.initialize()
  model = parts.server.start(network.initial_weights())
  message = exchange_lib.make_message(
    exchange, parts.server, table, model, tf.constant(1)
  )
  return exchange_lib.read_message(exchange, message, tf.constant(0))


def _received(
  network: adapter.Network, parts: parts_lib.Parts, num_classes: int
) -> Mapping[str, tf.TensorSpec]:
  """The specs of `ClientData.received`."""
  exchange = _exchange(network, parts, num_classes)
  traced = tf.function(
    lambda: _receive(exchange, network, parts).others, autograph=False
  ).get_concrete_function()
  specs: Mapping[str, tf.TensorSpec] = tf.nest.map_structure(
    lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
    traced.structured_outputs,
  )
  return specs


def _examples_in_steps(
  num_epochs: int, *streams: tuple[float, int, bool]
) -> list[float]:
  """The examples of each stream in all batches of a client's round.

  Args:
    num_epochs: Passes over the longer of the streams; the other one repeats.
    *streams: For each (examples, examples in a batch, whether it is used).

  Returns:
    Their numbers; 0 for a stream that is not used. A stream without examples
    has a blank one in each batch.
  """
  batches = [math.ceil(max(num, 1) / size) for num, size, _ in streams]
  used = [n for n, (_, _, is_used) in zip(batches, streams) if is_used]
  num_steps = num_epochs * max(used, default=0)
  return [
    num_steps * max(num, 1) / of_pass if is_used else 0.0
    for of_pass, (num, _, is_used) in zip(batches, streams)
  ]
