"""FLOPs of clients and server in a round, measured from the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math

from tff_fssl.client import batches
from tff_fssl.client import compute
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import round_hparams
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import flops as flops_lib
from tff_fssl.models import model_fns
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import messages
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import states as states_lib

Flops = flops_lib.Flops


@dataclasses.dataclass(frozen=True)
class RoundCompute:
  """FLOPs of a round, by numbers of examples.

  Attributes:
    clients: The cost of clients for each example.
    server: The cost of the server for each of its labelled examples. None if it
      has none.
    states: The states of the algorithm.
    algorithm: The algorithm.
    is_static: Whether a round gathers static batch norm statistics.
    num_classes: The number of classes.
  """

  clients: compute.Cost
  server: compute.Cost | None
  states: states_lib.States
  algorithm: base.Algorithm
  is_static: bool
  num_classes: int

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
    hparams, streams = self.algorithm.round, self.algorithm.streams()
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
    hparams, streams = self.algorithm.round, self.algorithm.streams()
    name = batches.own_stream(streams, labeled=True)
    groups = streams[name or ''].episode or ()
    sizes = (hparams.client_batch_size, self.num_classes * sum(groups))
    return [
      (hparams.client_steps or hparams.client_epochs) * min(num, size)
      for num, size in zip((num_unlabeled, num_labeled), sizes)
    ]

  def count_server(self, num_labeled: float) -> Flops:
    """Counts the FLOPs of the server's round."""
    if self.server is None:
      return Flops()
    processed = self.algorithm.round.server_epochs * num_labeled
    processed *= self.algorithm.num_trainings
    return self.server.labeled * processed + self._statistics(num_labeled)

  def _statistics(self, num_examples: float) -> Flops:
    """Counts the FLOPs of passes that gather static batch norm statistics."""
    if not self.is_static:
      return Flops()
    always = 1 + len(self.states.statistics_of)
    # The clients get some sets in some rounds only: FLOPs are a range.
    most = always + len(self.states.statistics_if_sent)
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
  hparams, num_classes = algorithm.round, None
  model_fn = network_factory.network_fn(model_fn, algorithm)
  if isinstance(model_fn, model_fns.EmbeddingFn):
    num_classes = model_fn.num_classes()
  # In a graph of its own, variables are never initialized, so no memory is
  # used.
  with tf.Graph().as_default():
    network = adapter.Network(
      model_fn,
      image_shape=shape,
      compute_dtype=hparams.compute_dtype,
      track_moving_averages=hparams.batch_norm_statistics == 'moving_average',
      trace=False,
    )
    passes = compute.measure_network(network, shape)
    options = {'views': views, 'passes': passes, 'stored': stored}
    num_classes = num_classes or network.num_outputs
    states = states_lib.States(
      algorithm, _setup(network, algorithm, num_classes)
    )
    clients = compute.measure_algorithm(
      network,
      algorithm,
      received=_received(network, algorithm, states),
      **options,
    )
    server = None
    if not hparams.labels_at_clients:
      server = compute.measure_algorithm(
        network, algorithm.server_trainer(), at_server=True, **options
      )
    return RoundCompute(
      clients, server, states, algorithm, network.is_static, num_classes
    )


def receive(
  network: adapter.Network, algorithm: base.Algorithm, num_classes: int
) -> messages.Received:
  """Makes the values that a client receives in the first round.

  Args:
    network: A network of the algorithm.
    algorithm: The algorithm.
    num_classes: The number of classes.

  Returns:
    The message, as client 0 uses it.
  """
  setup = _setup(network, algorithm, num_classes)
  exchange = _exchange(network, algorithm, setup)
  return _receive(exchange, network, states_lib.States(algorithm, setup))


def _setup(
  network: adapter.Network, algorithm: base.Algorithm, num_classes: int
) -> base.Setup:
  """Describes a process with this network to the algorithm."""
  # The number of clients does not change the values that one client receives.
  return base.Setup(
    1,
    network.weight_specs,
    num_classes=num_classes,
    num_outputs=network.num_outputs,
    feature_size=lambda: network.feature_size,
  )


def _exchange(
  network: adapter.Network, algorithm: base.Algorithm, setup: base.Setup
) -> exchange_lib.Exchange | None:
  """Makes the exchange, if there is one. This may make variables."""

  def specs_of(build: Callable[[adapter.Network], tf.keras.Model]) -> Weights:
    model_fn = functools.partial(build, network)
    return adapter.Network(model_fn, trace=False).weight_specs

  return messages.build_exchange(algorithm, setup, specs_of)


def _receive(
  exchange: exchange_lib.Exchange | None,
  network: adapter.Network,
  states: states_lib.States,
) -> messages.Received:
  """Makes the message of the first round, as client 0 uses it."""
  table = () if exchange is None else exchange.initialize()
  model = states.start(network.initial_weights())
  message = messages.make_message(
    exchange, states, table, model, tf.constant(1)
  )
  return messages.read_message(exchange, message, tf.constant(0))


def _received(
  network: adapter.Network,
  algorithm: base.Algorithm,
  states: states_lib.States,
) -> Mapping[str, tf.TensorSpec]:
  """Returns the specs of `Client.received`."""
  exchange = _exchange(network, algorithm, states.setup)
  traced = tf.function(
    lambda: _receive(exchange, network, states).values, autograph=False
  ).get_concrete_function()
  specs: Mapping[str, tf.TensorSpec] = tf.nest.map_structure(
    lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype),
    traced.structured_outputs,
  )
  return specs


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
