"""The batch loop that clients and server share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

from tff_fssl import loops
from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import feed as feed_lib
from tff_fssl.local import non_finite
from tff_fssl.local import optimizer as optimizer_lib
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights, all_finite, select, zero_unless

# The metric for the regularizers' part of the loss, if a model has some.
REGULARIZATION = 'loss_regularization'

fold_in = feed_lib.fold_in

# (batch, seed of the networks' draws, if they make any) -> result.
_CompiledStep = Callable[
  [algorithm_lib.Batch, tf.Tensor | None],
  algorithm_lib.StepResult,
]
# (summed metrics, number of examples processed).
_Sums: TypeAlias = 'tuple[dict[str, algorithm_lib.Ratio], tf.Tensor]'


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """The configuration of the loop.

  Attributes:
    num_epochs: Passes over the longer stream of examples; the other repeats.
    batch_size: Unlabelled examples in a batch; the last batch of a pass may be
      smaller.
    labeled_batch_size: Labelled examples in a batch; the last batch of a pass
      may be smaller.
    optimizer: Applies the gradients.
    proximal_strength: mu of FedProx, >= 0.
    jit_compile: Whether XLA compiles the step.
    keeps_momentum: Whether the result contains the final momentum, from which
      the next round can start.
  """

  num_epochs: int
  batch_size: int
  labeled_batch_size: int
  optimizer: optimizer_lib.Optimizer
  proximal_strength: float = 0.0
  jit_compile: bool = False
  keeps_momentum: bool = False


class LocalResult(NamedTuple):
  """The result of local training.

  Attributes:
    update: Per trainable variable, weights before minus weights after; all 0 if
      it is not finite.
    of_peers: The same of all peers that are uploaded, one after another.
    non_trainable: The non-trainable variables after training; unchanged if the
      update is not finite.
    is_finite: bool scalar, whether the update is finite.
    num_examples: float32 scalar, examples processed (over all epochs).
    weight: `Prepared.weight`.
    ratios: Name -> metric, summed over batches.
    ranges: `Prepared.ranges`.
    momentum: The optimizer's momentum, per trainable variable; unchanged if the
      update is not finite; empty if it is not kept.
    finished: What the algorithm's `finish` returns.
  """

  update: tuple[tf.Tensor, ...]
  of_peers: tuple[tf.Tensor, ...]
  non_trainable: tuple[tf.Tensor, ...]
  is_finite: tf.Tensor
  num_examples: tf.Tensor
  weight: tf.Tensor | None
  ratios: dict[str, algorithm_lib.Ratio]
  ranges: dict[str, tf.Tensor]
  momentum: tuple[tf.Tensor, ...]
  finished: algorithm_lib.Finished


def _floats(prepared: algorithm_lib.Prepared) -> dict[str, tf.Tensor]:
  """The float tensors of `prepared`, by name."""
  named = {**prepared.ranges, **prepared.constants, **prepared.of_example}
  if prepared.weight is not None:
    named['aggregation weight'] = prepared.weight
  return {k: v for k, v in named.items() if v.dtype.is_floating}


def _named(
  what: str, variables: Sequence[tf.Variable], tensors: Sequence[tf.Tensor]
) -> dict[str, tf.Tensor]:
  """Float tensors, one per variable, by the variables' names."""
  return {
    f'{what} {variable.name.removesuffix(":0")}': tf.convert_to_tensor(tensor)
    for variable, tensor in zip(variables, tensors)
    if variable.dtype.is_floating
  }


class _Initial(NamedTuple):
  """What training starts from.

  Attributes:
    momentum: Of the local network.
    of_peers: Name -> the weights of a peer.
  """

  momentum: tuple[tf.Tensor, ...]
  of_peers: Mapping[str, Weights]


class LocalTraining:
  """Trains networks on the data of one client (or the server).

  The constructor makes variables, so call it outside of `tf.function`s; call
  `run` inside one.
  """

  def __init__(
    self,
    network: adapter.Network,
    algorithm: algorithm_lib.LocalAlgorithm,
    views: augment.Views,
    config: LoopConfig,
    peers: Mapping[str, adapter.Network] | None = None,
    initial: Mapping[str, Callable[[], Weights]] | None = None,
  ):
    """Makes the optimizers' slots.

    Args:
      network: The network that is trained.
      algorithm: What is done.
      views: The preprocessing.
      config: The configuration of the loop.
      peers: A network for each of the algorithm's peers.
      initial: For each peer with a `model_fn`, what gives its initial weights.
    """
    self._networks = algorithm_lib.Networks(
      network, algorithm_lib.Named(peers or {})
    )
    self._algorithm = algorithm
    self._initial = dict(initial or {})
    self._views = views
    self._config = config
    self._slots = config.optimizer.initialize(network)
    self._peer_slots = {
      name: config.optimizer.initialize(self._networks.peers[name])
      for name, peer in algorithm.peers.items()
      if peer.trained
    }
    trained = [network, *(self._networks.peers[n] for n in self._peer_slots)]
    self._is_regularized = any(n.has_regularizers for n in trained)
    self._steps = [self._compiled(step) for step in algorithm.steps]

  def _compiled(self, step: algorithm_lib.Step) -> _CompiledStep:
    """A step as a `tf.function`."""

    def run(
      batch: algorithm_lib.Batch, seed: tf.Tensor | None
    ) -> algorithm_lib.StepResult:
      # There is no seed if the network draws no random numbers.
      drawing: contextlib.AbstractContextManager[None]
      drawing = contextlib.nullcontext()
      if seed is not None:
        drawing = self._networks.draws(seed)
      with drawing:
        return step(self._networks, batch)

    compiled: _CompiledStep = tf.function(
      run, autograph=False, jit_compile=self._config.jit_compile or None
    )
    return compiled

  def run(
    self,
    weights: Weights,
    labeled: algorithm_lib.Examples,
    unlabeled: algorithm_lib.Examples,
    *,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
    round_num: tf.Tensor | int = 1,
    enabled: tf.Tensor | bool = True,
    share: tf.Tensor | None = None,
    momentum: Sequence[tf.Tensor] = (),
    sets: Mapping[str, Weights] | None = None,
    received: Mapping[str, tf.Tensor] | None = None,
    watch: non_finite.Watch | None = None,
  ) -> LocalResult:
    """Trains from `weights`.

    Args:
      weights: The model's weights, from which training starts unless the
        algorithm has a `start` of its own.
      labeled: Labelled examples, perhaps none.
      unlabeled: Unlabelled examples, perhaps none.
      learning_rate: float32 scalar.
      seed: int32 [2].
      round_num: int32 scalar.
      enabled: bool scalar; if false, no step is made.
      share: float32 scalar in [0, 1], the share of the steps that is made, but
        at least one step; None: all are.
      momentum: The initial momentum of the optimizer; empty: 0.
      sets: The server's further weight sets, from which peers start.
      received: Name -> tensor, what else the server sent.
      watch: If given, it checks all tensors computed from the client's data.

    Returns:
      The result.
    """
    named = algorithm_lib.Named
    sets, received = named(sets or {}), named(received or {})
    if self._algorithm.start is not None:
      weights = self._algorithm.start(weights, received)
    initial = self._start(weights, sets, received, momentum)
    data = algorithm_lib.ClientData(
      weights,
      labeled,
      unlabeled,
      received,
      tf.convert_to_tensor(round_num),
      fold_in(seed, feed_lib.PREPARE),
      sets,
    )
    prepared = self._prepare(data, watch)
    if prepared.rate is not None:
      learning_rate *= prepared.rate
    feed = feed_lib.Feed(
      self._algorithm,
      self._views,
      data,
      prepared,
      num_epochs=self._config.num_epochs,
      batch_sizes=(self._config.batch_size, self._config.labeled_batch_size),
      seed=seed,
      enabled=enabled,
      share=share,
    )
    ratios, num_examples = self._train(
      feed, seed, learning_rate, weights, watch
    )
    finished, finish = algorithm_lib.Finished(), self._algorithm.finish
    if finish is not None:
      after = data._replace(seed=fold_in(seed, feed_lib.FINISH))
      finished = finish(self._networks, after, self._views, ratios)
    result = self._result(data, prepared, ratios, num_examples, initial)
    if watch is not None:
      local = self._networks.local
      change = _change(weights, local)
      watch(feed.end, _named('update of', local.trainable_variables, change))
    return result._replace(
      ratios={**result.ratios, **finished.ratios}, finished=finished
    )

  def _start(
    self,
    weights: Weights,
    sets: Mapping[str, Weights],
    received: Mapping[str, tf.Tensor],
    momentum: Sequence[tf.Tensor],
  ) -> _Initial:
    """Assigns weights and momentum; returns what later is compared with."""
    self._networks.local.assign(weights)
    of_local = tuple(momentum) or tuple(map(tf.zeros_like, self._slots))
    for slot, value in zip(self._slots, of_local, strict=True):
      slot.assign(value)
    start = {}
    for name, peer in self._algorithm.peers.items():
      # That the server has the set was checked when the process was built.
      start[name] = sets.get(peer.starts_from, weights)
      if name in self._initial:
        start[name] = self._initial[name]()
      if peer.start is not None:
        start[name] = peer.start(start[name], received)
      self._networks.peers[name].assign(start[name])
      for slot in self._peer_slots.get(name, ()):
        slot.assign(tf.zeros_like(slot))
    return _Initial(of_local, start)

  def weights_now(self, statistics_count: tf.Tensor) -> Weights:
    """What the local network has learnt; its statistics have this count."""
    return self._networks.local.weights_now(statistics_count)

  def weights_of_peers(
    self, started_from: Mapping[str, Weights]
  ) -> dict[str, Weights]:
    """What peers have learnt; their statistics are those of the start."""
    return {
      name: network.weights_now(started_from[name].statistics_count)
      for name, network in self._networks.peers.items()
      if name in started_from
    }

  def _prepare(
    self, data: algorithm_lib.ClientData, watch: non_finite.Watch | None
  ) -> algorithm_lib.Prepared:
    """What the algorithm computes before training."""
    prepared = algorithm_lib.Prepared(tf.range(tf.shape(data.unlabeled.x)[0]))
    if self._algorithm.prepare is not None:
      prepared = self._algorithm.prepare(self._networks, data, self._views)
    if watch is not None:
      local = self._networks.local
      watch(
        0,
        _named('received', local.trainable_variables, data.weights[0])
        | _named('received', local.non_trainable_variables, data.weights[1])
        | _floats(prepared),
      )
    return prepared

  def _train(
    self,
    feed: feed_lib.Feed,
    seed: tf.Tensor,
    learning_rate: tf.Tensor,
    weights: Weights,
    watch: non_finite.Watch | None,
  ) -> tuple[dict[str, algorithm_lib.Ratio], tf.Tensor]:
    """Makes all steps: (summed metrics, number of examples processed)."""
    # Traced once, for the metrics' names and for the loop.
    make_ahead = tf.function(
      feed.ahead, autograph=False, input_signature=[tf.TensorSpec([], tf.int32)]
    )
    names = self._metric_names(feed, make_ahead)
    if self._is_regularized:
      names += (REGULARIZATION,)
    ratios = {name: (tf.constant(0.0), tf.constant(0.0)) for name in names}

    def make_step(ahead: feed_lib.Ahead, step: tf.Tensor, sums: _Sums) -> _Sums:
      ratios, num_examples = sums
      batch = feed.batch(ahead, step)
      of_step = self._make_steps(
        batch, fold_in(seed, feed_lib.DRAWS), learning_rate, weights, watch
      )
      ratios = {
        name: (total + of_step[name][0], count + of_step[name][1])
        for name, (total, count) in ratios.items()
      }
      return ratios, num_examples + feed.num_examples(batch.parts)

    def make_steps(first: tf.Tensor, sums: _Sums) -> _Sums:
      # Views of several steps are made at once: see `Feed.ahead`.
      ahead = make_ahead(first)
      return loops.fold(
        functools.partial(make_step, ahead), sums, start=first, end=ahead.end
      )

    return loops.fold(
      make_steps,
      (ratios, tf.constant(0.0)),
      end=feed.end,
      step=feed.steps_at_once,
    )

  def _metric_names(
    self,
    feed: feed_lib.Feed,
    make_ahead: Callable[[tf.Tensor], feed_lib.Ahead],
  ) -> tuple[str, ...]:
    """Names the metrics of the steps, by tracing these on a batch's type."""
    make_batch = tf.function(
      lambda step: feed.batch(make_ahead(step), step), autograph=False
    )
    batch = make_batch.get_concrete_function(
      tf.TensorSpec([], tf.int32)
    ).structured_outputs
    networks = (self._networks.local, *self._networks.peers.values())
    seed = None
    if any(network.is_random for network in networks):
      seed = tf.TensorSpec([2], tf.int32)
    names: dict[str, None] = {}
    for step in self._steps:
      traced: Any = step
      result = traced.get_concrete_function(batch, seed).structured_outputs
      names |= dict.fromkeys(result.ratios)
    return tuple(names)

  def _make_steps(
    self,
    batch: algorithm_lib.Batch,
    seed: tf.Tensor,
    learning_rate: tf.Tensor,
    weights: Weights,
    watch: non_finite.Watch | None,
  ) -> dict[str, algorithm_lib.Ratio]:
    """Makes the steps of a batch; returns its metrics."""
    local = self._networks.local
    ratios: dict[str, algorithm_lib.Ratio] = {}
    if self._is_regularized:
      ratios[REGULARIZATION] = (tf.constant(0.0), tf.constant(0.0))
    for index, step in enumerate(self._steps):
      draws = None
      if local.is_random or any(
        peer.is_random for peer in self._networks.peers.values()
      ):
        draws = fold_in(seed, batch.clock.step)
        draws = fold_in(draws, index) if index else draws
      result = step(
        batch._replace(seed=fold_in(batch.seed, index)) if index else batch,
        draws,
      )
      for name in result.of_peers:
        algorithm_lib.check_name(
          name, self._peer_slots, 'a step returns of_peers', 'trained peers'
        )
      ratios.update(result.ratios)
      penalties: list[tf.Tensor] = []
      gradients = None
      if result.gradients is not None:
        gradients = _regularized(local, result.gradients, penalties)
        gradients = self._with_proximal_term(gradients, weights)
        self._config.optimizer.apply(
          local, self._slots, gradients, learning_rate
        )
      for name, of_peer in result.of_peers.items():
        peer = self._networks.peers[name]
        self._config.optimizer.apply(
          peer,
          self._peer_slots[name],
          _regularized(peer, of_peer, penalties),
          learning_rate,
        )
      if penalties:
        total, count = ratios[REGULARIZATION]
        ratios[REGULARIZATION] = (total + tf.add_n(penalties), count + 1.0)
      if watch is not None:
        variables = local.trainable_variables
        watch(
          batch.clock.step + 1,
          {
            **{
              # A sum over no example may still be NaN.
              name: total / tf.where(count > 0.0, count, 1.0)
              for name, (total, count) in ratios.items()
            },
            **_named('gradient of', variables, gradients or ()),
            **_named('weights of', variables, variables),
          },
        )
    if self._algorithm.after_step is not None:
      self._algorithm.after_step(self._networks, batch)
    return ratios

  def _with_proximal_term(
    self, gradients: Sequence[tf.Tensor], weights: Weights
  ) -> list[tf.Tensor]:
    """Adds the gradient of FedProx's term."""
    strength = self._config.proximal_strength
    if not strength:
      return list(gradients)
    return [
      g + strength * (v - start)
      for g, v, start in zip(
        gradients, self._networks.local.trainable_variables, weights.trainable
      )
    ]

  def _result(
    self,
    data: algorithm_lib.ClientData,
    prepared: algorithm_lib.Prepared,
    ratios: Mapping[str, algorithm_lib.Ratio],
    num_examples: tf.Tensor,
    initial: _Initial,
  ) -> LocalResult:
    """The change of the weights, and all that is reported."""
    momentum, of_peers = initial
    local = self._networks.local
    update = _change(data.weights, local)
    uploads = [
      change
      for name, peer in self._algorithm.peers.items()
      if peer.uploaded
      for change in _change(of_peers[name], self._networks.peers[name])
    ]
    is_finite = all_finite((update, uploads))
    return LocalResult(
      zero_unless(is_finite, tuple(update)),
      zero_unless(is_finite, tuple(uploads)) if uploads else (),
      select(
        is_finite,
        tuple(v.read_value() for v in local.non_trainable_variables),
        lambda: tuple(data.weights.non_trainable),
      ),
      is_finite,
      num_examples,
      prepared.weight,
      {**prepared.ratios, **ratios},
      dict(prepared.ranges),
      select(
        is_finite,
        tuple(slot.read_value() for slot in self._slots),
        lambda: momentum,
      )
      if self._config.keeps_momentum
      else (),
      algorithm_lib.Finished(),
    )


def _regularized(
  network: adapter.Network,
  gradients: Sequence[tf.Tensor],
  penalties: list[tf.Tensor],
) -> list[tf.Tensor]:
  """Adds what a network's own regularizers ask for; notes what they are."""
  if not network.has_regularizers:
    return list(gradients)
  penalty, changes = network.regularization()
  penalties.append(penalty)
  return [g + c for g, c in zip(gradients, changes, strict=True)]


def _change(weights: Weights, network: adapter.Network) -> list[tf.Tensor]:
  """Trainable weights minus those that the network has now."""
  return [
    start - v
    for start, v in zip(weights.trainable, network.trainable_variables)
  ]
