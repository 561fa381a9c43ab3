"""FLOPs of an algorithm on a client, measured from its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from tff_fssl.client import batches
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import names
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import flops as flops_lib

Flops = flops_lib.Flops
# Examples in a traced batch. The cost is linear in their number.
_SIZE = 2


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs for one example.

  Attributes:
    forward: FLOPs of a forward pass: one forward-equivalent.
    backward: FLOPs of a backward pass. This is less than two
      forward-equivalents, since the first layer needs no gradient of its input.
    unlabeled: FLOPs of the steps for each unlabelled example in a batch.
    labeled: FLOPs of the steps for each labelled example in a batch.
    once: FLOPs of `prepare` and `finish` in a round, for each of the client's
      unlabelled examples. If the algorithm draws episodes, for each labelled
      one.
  """

  forward: float
  backward: float
  unlabeled: Flops = Flops()
  labeled: Flops = Flops()
  once: Flops = Flops()

  def passes(self, forward: float, backward: float) -> float:
    """Counts the FLOPs of a number of forward and backward passes."""
    return forward * self.forward + backward * self.backward


def measure_network(
  network: adapter.Network, image_shape: tuple[int | None, ...]
) -> Cost:
  """Measures the passes over a network, without an algorithm.

  Args:
    network: The network.
    image_shape: The shape of one of its inputs.

  Returns:
    The cost. Only `forward` and `backward` are not 0.

  Raises:
    flops.UnknownFlopsError: If the network has loops that contain products
      (recurrent layers), or shapes that depend on the data.
  """

  @tf.function(autograph=False)
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


def measure_algorithm(
  network: adapter.Network,
  algorithm: base.Algorithm,
  views: augment.Views,
  *,
  passes: Cost,
  stored: tf.TensorSpec,
  received: Mapping[str, Any] | None = None,
  at_server: bool = False,
) -> Cost:
  """Measures an algorithm by tracing it. Nothing runs.

  Args:
    network: The network. It also stands for all auxiliary networks without a
      `build`.
    algorithm: The algorithm.
    views: The preprocessing of examples. It is not counted in steps, whose
      views are made in advance.
    passes: The cost of the network's passes.
    stored: The spec of examples as they are stored, [None, ...].
    received: Name -> `tf.TensorSpec`s, `Client.received`.
    at_server: Whether to measure the training on the server's labels.

  Returns:
    The cost.

  Raises:
    flops.UnknownFlopsError: If steps have loops that contain products, or
      shapes that depend on the data.
  """
  shape = augment.input_shape(views, stored)
  tracing = _Tracing(network, algorithm, views, shape, at_server)
  client = tracing.client_specs(stored, received or {})
  prepared, once = tracing.prepare(client)
  total = tracing.step({False: _SIZE, True: _SIZE}, prepared)
  once += tracing.finish(client, prepared)
  streams = training.streams_of(algorithm, at_server=at_server)
  if not batches.trains_on(streams, labeled=True):
    unlabeled = total * (1 / _SIZE)
  elif not batches.trains_on(streams, labeled=False):
    unlabeled = Flops()
  else:
    # Steps mix both kinds of examples. A batch with more unlabelled ones tells
    # the cost of each kind.
    more = tracing.step({False: 2 * _SIZE, True: _SIZE}, prepared)
    unlabeled = (more - total) * (1 / _SIZE)
  labeled = total * (1 / _SIZE) - unlabeled
  return dataclasses.replace(
    passes, unlabeled=unlabeled, labeled=labeled, once=once
  )


class _Tracing:
  """Traces of an algorithm's methods, on specs of their arguments."""

  def __init__(
    self,
    network: adapter.Network,
    algorithm: base.Algorithm,
    views: augment.Views,
    image_shape: tuple[int | None, ...],
    at_server: bool,
  ):
    declared = algorithm.networks()
    # Networks of the same kind cost the same, so one stands for all of them.
    further = names.Named(dict.fromkeys(declared, network))
    for name, auxiliary in declared.items():
      if auxiliary.build is not None:
        further[name] = adapter.Network(
          functools.partial(auxiliary.build, network), trace=False
        )
    self._networks = base.Networks(network, further)
    self._algorithm, self._views = algorithm, views
    self._at_server = at_server
    self._streams = training.streams_of(algorithm, at_server=at_server)
    self._step = training.step_of(algorithm, at_server=at_server)
    self._image_shape = image_shape
    self._metrics: dict[str, Any] = {}

  def client_specs(
    self, stored: tf.TensorSpec, received: Mapping[str, Any]
  ) -> tuple[Any, ...]:
    """Returns the specs of `_client`'s arguments."""
    examples = base.Examples(stored, _labels(None))
    weights = self._networks.model.weight_specs
    return weights, examples, examples, dict(received), _INT, _SEED

  def _client(self, *values: Any) -> base.Client:
    weights, labeled, unlabeled, received, round_num, seed, *others = values
    return base.Client(
      self._networks,
      weights,
      labeled,
      unlabeled,
      names.Named(received),
      self._views,
      round_num,
      seed,
      *others,
    )

  def prepare(self, client: tuple[Any, ...]) -> tuple[base.Prepared, Flops]:
    """Traces `prepare`.

    Args:
      client: The specs of a client.

    Returns:
      (spec of the result, FLOPs for an example).
    """
    if self._at_server:
      return base.Prepared(), Flops()
    return _trace(lambda *c: self._algorithm.prepare(self._client(*c)), *client)

  def finish(self, client: tuple[Any, ...], prepared: base.Prepared) -> Flops:
    """Counts the FLOPs of `finish` for an example. Call `step` before."""
    if self._at_server or self._algorithm.alone:
      # Without federation, `finish` is the pass of static batch norm, which the
      # round counts separately.
      return Flops()
    # `finish` gets the metrics of the steps, whose names `step` has collected.
    metrics = dict.fromkeys(self._metrics, base.Mean(_FLOAT, _FLOAT))
    _, flops = _trace(
      lambda metrics, *c: self._algorithm.finish(self._client(*c), metrics),
      metrics,
      *client,
      _specs(prepared.values),
    )
    return flops

  def step(self, sizes: Mapping[bool, int], prepared: base.Prepared) -> Flops:
    """Counts the FLOPs of a batch's step.

    Args:
      sizes: `Stream.labeled` -> examples in the batch.
      prepared: The specs of the algorithm's values before training.

    Returns:
      The FLOPs.
    """

    def run(batch: base.Batch) -> tuple[base.StepResult, list[tf.Tensor]]:
      graph, moves = tf.compat.v1.get_default_graph(), list[tf.Tensor]()

      def descend(
        name: str,
        gradients: Sequence[tf.Tensor],
        rate_factor: tf.Tensor | float = 1.0,
      ) -> None:
        del name, rate_factor
        # Only what leaves the graph is counted. Nothing leaves `tf.cond`.
        if tf.compat.v1.get_default_graph() is graph:
          moves.extend(gradients)

      networks = dataclasses.replace(self._networks, descend=descend)
      with training.draws(self._networks, batch.seed):
        return self._step(networks, batch), moves

    batch = self._batch(sizes, prepared)
    traced = tf.function(run, autograph=False).get_concrete_function(batch)
    result, _ = traced.structured_outputs
    self._metrics |= dict.fromkeys(result.metrics)
    return flops_lib.count_flops(traced.graph)

  def _batch(
    self, sizes: Mapping[bool, int], prepared: base.Prepared
  ) -> base.Batch:
    """Returns the spec of a batch."""
    streams, parts = self._streams, names.Named()
    for name, stream in streams.items():
      # A stream of partners has one for each example of another stream.
      own = streams[stream.partner_of] if stream.partner_of else stream
      size = sizes[own.labeled]
      parts[name] = base.BatchExamples(
        names.Named(
          (view, _images(size, self._image_shape)) for view in stream.views
        ),
        _labels(size),
        tf.TensorSpec([size]),
        {}
        if stream.labeled
        else {
          key: tf.TensorSpec([size, *value.shape[1:]], value.dtype)
          for key, value in prepared.per_example.items()
        },
        _labels(size) if stream.labeled and stream.episode else None,
      )
    clock = base.StepTime(_INT, _INT, _INT)
    return base.Batch(parts, _specs(prepared.values), clock, _SEED)


def _trace(function: Callable[..., Any], *specs: Any) -> tuple[Any, Flops]:
  """Traces a function.

  Args:
    function: The function.
    *specs: The specs of its arguments.

  Returns:
    (spec of its result, FLOPs for an example).
  """
  concrete = tf.function(function, autograph=False).get_concrete_function(
    *specs
  )
  flops = flops_lib.count_flops(concrete.graph, per_example=True)
  return concrete.structured_outputs, flops


_INT, _FLOAT = tf.TensorSpec([], tf.int32), tf.TensorSpec([])
_SEED = tf.TensorSpec([2], tf.int32)


def _specs(values: base.Tensors) -> dict[str, tf.TensorSpec]:
  return {
    key: tf.TensorSpec(value.shape, value.dtype)
    for key, value in values.items()
  }


def _labels(num: int | None) -> tf.TensorSpec:
  return tf.TensorSpec([num], tf.int32)


def _images(num: int, shape: tuple[int | None, ...]) -> tf.TensorSpec:
  return tf.TensorSpec([num, *shape])
