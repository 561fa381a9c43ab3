"""What a local algorithm computes for each example, measured from its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.models import adapter
from tff_fssl.models import flops as flops_lib

Flops = flops_lib.Flops
# Examples in a traced batch. The cost is linear in it.
_SIZE = 2


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs for one example.

  Attributes:
    forward: Of a forward pass: one forward-equivalent.
    backward: Of a backward pass. Less than two forward-equivalents, since the
      first layer needs no gradient of its input.
    unlabeled: Of the steps on a batch, for each unlabelled example in it.
    labeled: The same for each labelled example.
    once: Of `prepare` and `finish` in a round, for each of the client's
      unlabelled examples (of an algorithm that draws episodes: labelled ones).
  """

  forward: float
  backward: float
  unlabeled: Flops = Flops()
  labeled: Flops = Flops()
  once: Flops = Flops()

  def passes(self, forward: float, backward: float) -> float:
    """FLOPs of a number of forward and backward passes."""
    return forward * self.forward + backward * self.backward


def of_network(
  network: adapter.Network, image_shape: tuple[int | None, ...]
) -> Cost:
  """The cost of passes over a network, without an algorithm.

  Args:
    network: The network.
    image_shape: The shape of one of its inputs.

  Returns:
    The cost; all but `forward` and `backward` is 0.

  Raises:
    flops.UnknownFlopsError: If the network has loops with products in them
      (recurrent layers), or shapes that depend on the data.
  """

  @tf.function
  def run(
    images: tf.Tensor, seed: tf.Tensor
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    with network.draws(seed), tf.GradientTape() as tape:
      logits = network.logits(images, training=True)
      loss = tf.reduce_sum(logits)
    return logits, network.gradients(tape, loss)

  graph = run.get_concrete_function(_images(_SIZE, image_shape), _SEED).graph
  forward = flops_lib.count_flops(graph, graph.outputs[:1]).most
  both = flops_lib.count_flops(graph, graph.outputs).most
  return Cost(forward / _SIZE, (both - forward) / _SIZE)


def of_algorithm(
  network: adapter.Network,
  algorithm: algorithm_lib.LocalAlgorithm,
  views: augment.Views,
  *,
  passes: Cost,
  stored: tf.TensorSpec,
  received: Mapping[str, tf.TensorSpec] | None = None,
) -> Cost:
  """The cost of all that an algorithm does; it is traced, nothing runs.

  Args:
    network: The network; it also stands for all peers without a `model_fn`.
    algorithm: The algorithm.
    views: The preprocessing of examples. Steps get their views ready-made.
    passes: The cost of the network's passes.
    stored: The spec of examples as they are stored, [None, ...].
    received: Name -> `tf.TensorSpec`, `ClientData.received`.

  Returns:
    The cost.

  Raises:
    flops.UnknownFlopsError: If steps have loops with products in them, or
      shapes that depend on the data.
  """
  shape = augment.input_shape(views, stored)
  tracing = _Tracing(network, algorithm, views, shape)
  data = tracing.client_data(stored, received or {})
  prepared, once = tracing.prepare(data)
  total = tracing.steps({False: _SIZE, True: _SIZE}, prepared)
  once += tracing.finish(data)
  if not algorithm.trains_on_labels:
    unlabeled = total * (1 / _SIZE)
  elif not algorithm.trains_on_unlabeled:
    unlabeled = Flops()
  else:
    more = tracing.steps({False: 2 * _SIZE, True: _SIZE}, prepared)
    unlabeled = (more - total) * (1 / _SIZE)
  labeled = total * (1 / _SIZE) - unlabeled
  return dataclasses.replace(
    passes, unlabeled=unlabeled, labeled=labeled, once=once
  )


class _Tracing:
  """Traces the functions of an algorithm, on specs of their arguments."""

  def __init__(
    self,
    network: adapter.Network,
    algorithm: algorithm_lib.LocalAlgorithm,
    views: augment.Views,
    image_shape: tuple[int | None, ...],
  ):
    peers = dict.fromkeys(algorithm.peers, network)
    for name, peer in algorithm.peers.items():
      if peer.model_fn is not None:
        peers[name] = adapter.Network(
          functools.partial(peer.model_fn, network), trace=False
        )
    self._networks = algorithm_lib.Networks(network, peers)
    self._algorithm, self._views = algorithm, views
    self._image_shape = image_shape
    self._ratios: dict[str, Any] = {}

  def client_data(
    self, stored: tf.TensorSpec, received: Mapping[str, tf.TensorSpec]
  ) -> algorithm_lib.ClientData:
    """The spec of a client's data."""
    examples = algorithm_lib.Examples(stored, _labels(None))
    return algorithm_lib.ClientData(
      self._networks.local.weight_specs,
      examples,
      examples,
      dict(received),
      _INT,
      _SEED,
    )

  def prepare(
    self, data: algorithm_lib.ClientData
  ) -> tuple[algorithm_lib.Prepared, Flops]:
    """The spec of what `prepare` returns, and its FLOPs for an example."""
    prepare = self._algorithm.prepare
    if prepare is None:
      return algorithm_lib.Prepared(_labels(None)), Flops()
    return _trace(lambda d: prepare(self._networks, d, self._views), data)

  def finish(self, data: algorithm_lib.ClientData) -> Flops:
    """Counts the FLOPs of `finish` for an example; call `steps` before."""
    finish = self._algorithm.finish
    if finish is None:
      return Flops()
    ratios = dict.fromkeys(self._ratios, (_FLOAT, _FLOAT))
    _, flops = _trace(
      lambda d, r: finish(self._networks, d, self._views, r), data, ratios
    )
    return flops

  def steps(
    self, sizes: Mapping[bool, int], prepared: algorithm_lib.Prepared
  ) -> Flops:
    """The FLOPs of the steps on a batch; `sizes` are by `Stream.labeled`."""

    def run(batch: algorithm_lib.Batch) -> list[algorithm_lib.StepResult]:
      with self._networks.draws(batch.seed):
        return [step(self._networks, batch) for step in self._algorithm.steps]

    batch = self._batch(sizes, prepared)
    traced = tf.function(run).get_concrete_function(batch)
    for result in traced.structured_outputs:
      self._ratios |= dict.fromkeys(result.ratios)
    return flops_lib.count_flops(traced.graph)

  def _batch(
    self, sizes: Mapping[bool, int], prepared: algorithm_lib.Prepared
  ) -> algorithm_lib.Batch:
    """The spec of a batch."""
    streams, parts = self._algorithm.streams, {}
    for name, stream in streams.items():
      # A partner for each example of another stream.
      own = streams[stream.partner_of] if stream.partner_of else stream
      size = sizes[own.labeled]
      parts[name] = algorithm_lib.Part(
        {view: _images(size, self._image_shape) for view in stream.views},
        _labels(size),
        tf.TensorSpec([size]),
        {}
        if stream.labeled
        else {
          key: tf.TensorSpec([size, *value.shape[1:]], value.dtype)
          for key, value in prepared.of_example.items()
        },
        _labels(size) if stream.labeled and stream.episode else None,
      )
    constants = {
      key: tf.TensorSpec(value.shape, value.dtype)
      for key, value in prepared.constants.items()
    }
    clock = algorithm_lib.Clock(_INT, _INT, _INT)
    return algorithm_lib.Batch(parts, constants, clock, _SEED)


def _trace(function: Callable[..., Any], *specs: Any) -> tuple[Any, Flops]:
  """The structure that a function returns, and its FLOPs for an example."""
  concrete = tf.function(function).get_concrete_function(*specs)
  flops = flops_lib.count_flops(concrete.graph, per_example=True)
  return concrete.structured_outputs, flops


_INT, _FLOAT = tf.TensorSpec([], tf.int32), tf.TensorSpec([])
_SEED = tf.TensorSpec([2], tf.int32)


def _labels(num: int | None) -> tf.TensorSpec:
  return tf.TensorSpec([num], tf.int32)


def _images(num: int, shape: tuple[int | None, ...]) -> tf.TensorSpec:
  return tf.TensorSpec([num, *shape])
