"""The batch loop that clients and server share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

from tff_fssl import loops
from tff_fssl import seeds
from tff_fssl.client import batches as batches_lib
from tff_fssl.client import non_finite
from tff_fssl.client import optimizer as optimizer_lib
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import names as names_lib
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights, all_finite, select, zero_unless

# The metric for the regularizers' part of the loss, if a model has some.
REGULARIZATION = 'loss_regularization'

fold_in = seeds.fold_in

_Step: TypeAlias = 'Callable[[base.Networks, base.Batch], base.StepResult]'
# (batch, seed of the networks' draws, if they make any, learning rate, the
# weights that FedProx keeps the model near) -> (result, the regularizers of
# networks that the step has moved).
_CompiledStep = Callable[
  [base.Batch, tf.Tensor | None, tf.Tensor, tuple[tf.Tensor, ...]],
  tuple[base.StepResult, list[tf.Tensor]],
]
# (summed metrics, number of examples processed, `Batch.values`).
_Sums: TypeAlias = 'tuple[dict[str, base.Mean], tf.Tensor, base.Tensors]'


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """The configuration of the batch loop.

  Attributes:
    num_epochs: Passes over the longer stream of examples. The other repeats.
    batch_size: Unlabelled examples in a batch. The last batch of a pass may be
      smaller.
    labeled_batch_size: Labelled examples in a batch. The last batch of a pass
      may be smaller.
    optimizer: Applies the gradients.
    proximal_strength: mu of FedProx, >= 0.
    jit_compile: Whether XLA compiles the step.
    keeps_momentum: Whether the result contains the final momentum, from which
      the next round can start.
    num_steps: The number of steps, instead of `num_epochs`. 0: by epochs.
  """

  num_epochs: int
  batch_size: int
  labeled_batch_size: int
  optimizer: optimizer_lib.Optimizer
  proximal_strength: float = 0.0
  jit_compile: bool = False
  keeps_momentum: bool = False
  num_steps: int = 0


class LocalResult(NamedTuple):
  """The result of local training.

  If an update is not finite, all updates are 0, and `non_trainable` and
  `momentum` are those from before training.

  Attributes:
    update: Per trainable variable, weights before minus weights after.
    auxiliary: Name of an uploaded auxiliary network -> its update.
    non_trainable: The non-trainable variables after training.
    is_finite: bool scalar, whether the updates are finite.
    num_examples: float32 scalar, examples processed (over all epochs).
    weight: `ClientOutput.weight`, or `Prepared.weight`.
    metrics: Name -> metric, summed over batches.
    ranges: `Prepared.ranges`.
    momentum: The optimizer's momentum, per trainable variable. () if it is not
      kept.
    uploads: `ClientOutput.uploads`.
  """

  update: tuple[tf.Tensor, ...]
  auxiliary: dict[str, tuple[tf.Tensor, ...]]
  non_trainable: tuple[tf.Tensor, ...]
  is_finite: tf.Tensor
  num_examples: tf.Tensor
  weight: tf.Tensor | None
  metrics: dict[str, base.Mean]
  ranges: dict[str, tf.Tensor]
  momentum: tuple[tf.Tensor, ...]
  uploads: Mapping[str, tf.Tensor]


def _floats(prepared: base.Prepared) -> dict[str, tf.Tensor]:
  """Lists the float tensors of `prepared` by name."""
  named = {**prepared.ranges, **prepared.values, **prepared.per_example}
  if prepared.weight is not None:
    named['aggregation weight'] = prepared.weight
  return {k: v for k, v in named.items() if v.dtype.is_floating}


def _named(
  what: str, variables: Sequence[tf.Variable], tensors: Sequence[tf.Tensor]
) -> dict[str, tf.Tensor]:
  """Names float tensors, one per variable, after the variables."""
  return {
    f'{what} {variable.name.removesuffix(":0")}': tf.convert_to_tensor(tensor)
    for variable, tensor in zip(variables, tensors, strict=True)
    if variable.dtype.is_floating
  }


class _Initial(NamedTuple):
  """The state from which training starts.

  Attributes:
    momentum: The momentum of the model's optimizer.
    auxiliary: Name of an auxiliary network -> its weights.
  """

  momentum: tuple[tf.Tensor, ...]
  auxiliary: Mapping[str, Weights]


@contextlib.contextmanager
def draws(networks: base.Networks, seed: tf.Tensor) -> Iterator[None]:
  """Makes all networks draw from `seed`, int32 [2]."""
  with contextlib.ExitStack() as stack:
    every = (networks.model, *networks.auxiliary.values())
    # One network can stand for several, and must not be entered twice.
    for network in dict.fromkeys(every):
      stack.enter_context(network.draws(seed))
    yield


def step_of(algorithm: base.Algorithm, *, at_server: bool = False) -> _Step:
  """Returns the step that is made on each batch."""
  return algorithm.labeled_step if at_server else algorithm.step


def streams_of(
  algorithm: base.Algorithm, *, at_server: bool = False
) -> Mapping[str, base.Stream]:
  """Returns the streams of a batch by name."""
  if at_server:
    return {base.LABELED: algorithm.labeled_stream()}
  return algorithm.streams()


def server_networks(algorithm: base.Algorithm) -> tuple[str, ...]:
  """Names the auxiliary networks of the training on the server's labels."""
  trainer = algorithm.server_trainer()
  # The networks of clients are not the server's.
  return () if trainer is algorithm else tuple(trainer.networks())


class LocalTraining:
  """The training of networks on the data of one client, or of the server.

  The constructor makes variables, so call it outside of `tf.function`s. Call
  `run` inside one.
  """

  def __init__(
    self,
    network: adapter.Network,
    algorithm: base.Algorithm,
    views: augment.Views,
    config: LoopConfig,
    auxiliary: Mapping[str, adapter.Network] | None = None,
    initial: Mapping[str, Callable[[], Weights]] | None = None,
    *,
    at_server: bool = False,
  ):
    """Makes the variables of the optimizers.

    Args:
      network: The network of the model.
      algorithm: The algorithm, whose steps are made.
      views: The preprocessing.
      config: The configuration of the loop.
      auxiliary: Name -> each of the algorithm's auxiliary networks.
      initial: Name of each of these with a `build` -> a function that returns
        its initial weights.
      at_server: Whether this is the server, which makes labelled steps only.
    """
    self._networks = base.Networks(network, names_lib.Named(auxiliary or {}))
    self._algorithm, self._at_server = algorithm, at_server
    self._declared = algorithm.networks() if auxiliary else {}
    self._streams = streams_of(algorithm, at_server=at_server)
    self._initial = dict(initial or {})
    self._views = views
    self._config = config
    self._slots = config.optimizer.initialize(network)
    self._auxiliary_slots = {
      name: config.optimizer.initialize(self._networks[name])
      for name, declared in self._declared.items()
      if declared.trained
    }
    trained = [network, *map(self._networks.__getitem__, self._auxiliary_slots)]
    self._is_regularized = any(n.has_regularizers for n in trained)
    self._step = self._compiled(step_of(algorithm, at_server=at_server))

  @property
  def _is_random(self) -> bool:
    """Tells whether networks draw random numbers in training."""
    networks = [self._networks.model, *self._networks.auxiliary.values()]
    return any(network.is_random for network in networks)

  def _compiled(self, step: _Step) -> _CompiledStep:
    """Makes a `tf.function` of a step."""

    def run(
      batch: base.Batch,
      seed: tf.Tensor | None,
      learning_rate: tf.Tensor,
      anchor: tuple[tf.Tensor, ...],
    ) -> tuple[base.StepResult, list[tf.Tensor]]:
      penalties: list[tf.Tensor] = []
      graph, num_moves = tf.compat.v1.get_default_graph(), 0

      def descend(
        name: str,
        gradients: Sequence[tf.Tensor],
        rate_factor: tf.Tensor | float = 1.0,
      ) -> None:
        nonlocal num_moves
        # Nothing leaves a branch of `tf.cond`.
        is_outside = tf.compat.v1.get_default_graph() is graph
        self._descend(
          name,
          gradients,
          learning_rate * rate_factor,
          anchor,
          penalties if is_outside else [],
        )
        if name == base.MODEL and seed is not None:
          # What follows must not draw like what was before.
          num_moves += 1
          drawing.close()
          drawing.enter_context(draws(self._networks, fold_in(seed, num_moves)))

      networks = dataclasses.replace(self._networks, descend=descend)
      with contextlib.ExitStack() as drawing:
        # Networks that draw no random numbers get no seed, so that none is
        # computed.
        if seed is not None:
          drawing.enter_context(draws(self._networks, seed))
        result = step(networks, batch)
      return result, penalties

    compiled: _CompiledStep = tf.function(
      run,
      autograph=False,
      # None leaves the choice to TensorFlow. False would forbid XLA.
      jit_compile=self._config.jit_compile or None,
    )
    return compiled

  def run(
    self,
    weights: Weights,
    labeled: base.Examples,
    unlabeled: base.Examples,
    *,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
    round_num: tf.Tensor | int = 1,
    enabled: tf.Tensor | bool = True,
    share: tf.Tensor | None = None,
    momentum: Sequence[tf.Tensor] = (),
    received: Mapping[str, Any] | None = None,
    watch: non_finite.Watch | None = None,
  ) -> LocalResult:
    """Trains from `weights`.

    Args:
      weights: The model's weights. Training starts from them unless the
        algorithm's `start` returns others.
      labeled: Labelled examples, possibly none.
      unlabeled: Unlabelled examples, possibly none.
      learning_rate: float32 scalar.
      seed: int32 [2].
      round_num: int32 scalar.
      enabled: bool scalar. If false, no step is made.
      share: float32 scalar in [0, 1], the share of the steps that is made, at
        least one step. None: all.
      momentum: The initial momentum of the optimizer. (): zeros.
      received: Name of a broadcast -> its value. Auxiliary networks start from
        those that are `Weights`.
      watch: If given, checks all tensors computed from the client's data.

    Returns:
      The result.
    """
    received = names_lib.Named(received or {})
    if not self._at_server:
      weights = self._algorithm.start(base.MODEL, weights, received)
    initial = self._start(weights, received, momentum)
    client = base.Client(
      self._networks,
      weights,
      labeled,
      unlabeled,
      received,
      self._views,
      tf.convert_to_tensor(round_num),
      fold_in(seed, seeds.PREPARE),
    )
    prepared = self._prepare(client, watch)
    if prepared.learning_rate_factor is not None:
      learning_rate *= prepared.learning_rate_factor
    feed = batches_lib.Feed(
      self._streams,
      client,
      prepared,
      num_epochs=self._config.num_epochs,
      num_steps=self._config.num_steps,
      batch_sizes=(self._config.batch_size, self._config.labeled_batch_size),
      seed=seed,
      enabled=enabled,
      share=share,
    )
    metrics, num_examples, values = self._train(
      feed, seed, learning_rate, weights, watch
    )
    output = self._finish(client, seed, values, metrics)
    # `finish` may assign other weights: the change is measured after it.
    result = self._result(client, prepared, metrics, num_examples, initial)
    if watch is not None:
      variables = self._networks.model.trainable_variables
      change = _change(weights, self._networks.model)
      watch(feed.end, _named('update of', variables, change))
    return result._replace(
      metrics=names_lib.join('metrics', result.metrics, output.metrics),
      uploads=output.uploads,
      weight=prepared.weight if output.weight is None else output.weight,
    )

  def _start(
    self,
    weights: Weights,
    received: Mapping[str, Any],
    momentum: Sequence[tf.Tensor],
  ) -> _Initial:
    """Assigns initial weights and momentum, and returns them."""
    self._networks.model.assign(weights)
    momentum = tuple(momentum) or tuple(map(tf.zeros_like, self._slots))
    for slot, value in zip(self._slots, momentum, strict=True):
      slot.assign(value)
    starts = {}
    for name in self._declared:
      first = weights
      if name in self._initial:
        first = self._initial[name]()
      starts[name] = self._algorithm.start(name, first, received)
      self._networks[name].assign(starts[name])
      # Unlike the server's model, auxiliary networks keep no momentum over
      # rounds.
      for slot in self._auxiliary_slots.get(name, ()):
        slot.assign(tf.zeros_like(slot))
    return _Initial(momentum, starts)

  def weights_now(self) -> Weights:
    """Reads the model's current weights."""
    return self._networks.model.weights_now()

  def auxiliary_weights(self, names: Collection[str]) -> dict[str, Weights]:
    """Reads those auxiliary networks that have one of the names."""
    return {
      name: network.weights_now()
      for name, network in self._networks.auxiliary.items()
      if name in names
    }

  def _prepare(
    self, client: base.Client, watch: non_finite.Watch | None
  ) -> base.Prepared:
    """Computes the algorithm's values before training."""
    prepared = base.Prepared()
    if not self._at_server:
      prepared = self._algorithm.prepare(client)
    if watch is not None:
      model = self._networks.model
      watch(
        0,
        _named('received', model.trainable_variables, client.weights[0])
        | _named('received', model.non_trainable_variables, client.weights[1])
        | _floats(prepared),
      )
    return prepared

  def _finish(
    self,
    client: base.Client,
    seed: tf.Tensor,
    values: base.Tensors,
    metrics: base.Metrics,
  ) -> base.ClientOutput:
    """Computes the algorithm's values after training."""
    if self._at_server:
      return base.ClientOutput()
    client = dataclasses.replace(
      client, seed=fold_in(seed, seeds.FINISH), values=values
    )
    return self._algorithm.finish(client, metrics)

  def _train(
    self,
    feed: batches_lib.Feed,
    seed: tf.Tensor,
    learning_rate: tf.Tensor,
    weights: Weights,
    watch: non_finite.Watch | None,
  ) -> _Sums:
    """Makes all steps, and sums their metrics."""
    # One function for the metrics' names and for the loop is traced only once.
    make_ahead = tf.function(
      feed.ahead, autograph=False, input_signature=[tf.TensorSpec([], tf.int32)]
    )
    names = self._metric_names(feed, make_ahead, self._anchor(weights))
    if self._is_regularized:
      names += (REGULARIZATION,)
    zeros = {
      name: base.Mean(tf.constant(0.0), tf.constant(0.0)) for name in names
    }

    def make_step(
      ahead: batches_lib.Ahead, step: tf.Tensor, sums: _Sums
    ) -> _Sums:
      metrics, num_examples, values = sums
      batch = feed.batch(ahead, step)._replace(values=values)
      of_step, values = self._make_step(
        batch, fold_in(seed, seeds.DRAWS), learning_rate, weights, watch
      )
      metrics = {
        name: base.Mean(
          total + of_step[name].total, count + of_step[name].count
        )
        for name, (total, count) in metrics.items()
      }
      num_examples += feed.num_examples(batch.streams)
      return metrics, num_examples, values

    def make_steps(first: tf.Tensor, sums: _Sums) -> _Sums:
      # Views of several steps are made at once: see `Feed.ahead`.
      ahead = make_ahead(first)
      return loops.fold(
        functools.partial(make_step, ahead), sums, start=first, end=ahead.end
      )

    return loops.fold(
      make_steps,
      (zeros, tf.constant(0.0), feed.values),
      end=feed.end,
      step=feed.steps_at_once,
    )

  def _metric_names(
    self,
    feed: batches_lib.Feed,
    make_ahead: Callable[[tf.Tensor], batches_lib.Ahead],
    anchor: tuple[tf.Tensor, ...],
  ) -> tuple[str, ...]:
    """Finds the names of the step's metrics, by tracing the step.

    The loop's initial state needs them before the first step.
    """
    make_batch = tf.function(
      lambda step: feed.batch(make_ahead(step), step), autograph=False
    )
    batch = make_batch.get_concrete_function(
      tf.TensorSpec([], tf.int32)
    ).structured_outputs
    seed = tf.TensorSpec([2], tf.int32) if self._is_random else None
    traced: Any = self._step
    concrete = traced.get_concrete_function(
      batch,
      seed,
      tf.TensorSpec([]),
      tuple(tf.TensorSpec(t.shape, t.dtype) for t in anchor),
    )
    result, _ = concrete.structured_outputs
    return tuple(result.metrics)

  def _make_step(
    self,
    batch: base.Batch,
    seed: tf.Tensor,
    learning_rate: tf.Tensor,
    weights: Weights,
    watch: non_finite.Watch | None,
  ) -> tuple[base.Metrics, base.Tensors]:
    """Makes the step of a batch: (metrics, `Batch.values`)."""
    anchor = self._anchor(weights)
    draws = fold_in(seed, batch.time.step) if self._is_random else None
    result, penalties = self._step(batch, draws, learning_rate, anchor)
    metrics = result.metrics
    gradients = result.gradients
    if gradients is not None:
      gradients = self._descend(
        base.MODEL, gradients, learning_rate, anchor, penalties
      )
    if self._is_regularized:
      penalty = base.Mean(tf.constant(0.0), tf.constant(0.0))
      if penalties:
        penalty = base.Mean(tf.add_n(penalties), tf.constant(1.0))
      metrics = names_lib.join('metrics', {REGULARIZATION: penalty}, metrics)
    if watch is not None:
      variables = self._networks.model.trainable_variables
      watch(
        batch.time.step + 1,
        {
          **{
            # A sum over no example may still be NaN.
            name: total / tf.where(count > 0.0, count, 1.0)
            for name, (total, count) in metrics.items()
          },
          **(_named('gradient of', variables, gradients) if gradients else {}),
          **_named('weights of', variables, variables),
        },
      )
    batch = _replace_values(batch, result.values)
    # A server without auxiliary networks has none to change after a step.
    if self._declared or not self._at_server:
      self._algorithm.after_step(self._networks, batch)
    return metrics, batch.values

  def _anchor(self, weights: Weights) -> tuple[tf.Tensor, ...]:
    """Returns the weights that FedProx keeps the model near, if it does."""
    return tuple(weights.trainable) if self._config.proximal_strength else ()

  def _descend(
    self,
    name: str,
    gradients: Sequence[tf.Tensor],
    learning_rate: tf.Tensor,
    anchor: tuple[tf.Tensor, ...],
    penalties: list[tf.Tensor],
  ) -> list[tf.Tensor]:
    """Moves a network, which the algorithm named.

    Args:
      name: The name.
      gradients: The gradients of the loss.
      learning_rate: float32 scalar.
      anchor: `_anchor`'s result.
      penalties: Gets the value of the network's regularizers, if it has some.

    Returns:
      The gradients of the whole loss, with regularizers and FedProx's term.
    """
    slots = {base.MODEL: self._slots, **self._auxiliary_slots}
    names_lib.check(name, slots, 'Networks.descend', 'trained networks')
    network = self._networks.model
    if name != base.MODEL:
      network, anchor = self._networks[name], ()
    gradients = _regularized(network, gradients, penalties)
    if anchor:
      gradients = [
        g + self._config.proximal_strength * (v - start)
        for g, v, start in zip(
          gradients, network.trainable_variables, anchor, strict=True
        )
      ]
    self._config.optimizer.apply(network, slots[name], gradients, learning_rate)
    return gradients

  def _result(
    self,
    client: base.Client,
    prepared: base.Prepared,
    metrics: base.Metrics,
    num_examples: tf.Tensor,
    initial: _Initial,
  ) -> LocalResult:
    """Computes the updates, and replaces them by 0 if they are not finite."""
    model = self._networks.model
    update = _change(client.weights, model)
    auxiliary = {
      name: tuple(_change(initial.auxiliary[name], self._networks[name]))
      for name, declared in self._declared.items()
      if declared.uploaded
    }
    is_finite = all_finite((update, auxiliary))
    return LocalResult(
      zero_unless(is_finite, tuple(update)),
      zero_unless(is_finite, auxiliary) if auxiliary else {},
      select(
        is_finite,
        tuple(v.read_value() for v in model.non_trainable_variables),
        lambda: tuple(client.weights.non_trainable),
      ),
      is_finite,
      num_examples,
      prepared.weight,
      names_lib.join('metrics', prepared.metrics, metrics),
      dict(prepared.ranges),
      select(
        is_finite,
        tuple(slot.read_value() for slot in self._slots),
        lambda: initial.momentum,
      )
      if self._config.keeps_momentum
      else (),
      {},
    )


def _regularized(
  network: adapter.Network,
  gradients: Sequence[tf.Tensor],
  penalties: list[tf.Tensor],
) -> list[tf.Tensor]:
  """Adds the gradients of a network's own regularizers.

  Args:
    network: The network.
    gradients: The gradients of the loss.
    penalties: Gets the value of the regularizers, if there are any.

  Returns:
    The gradients.
  """
  if not network.has_regularizers:
    return list(gradients)
  penalty, changes = network.regularization()
  penalties.append(penalty)
  return [g + c for g, c in zip(gradients, changes, strict=True)]


def _replace_values(batch: base.Batch, changed: base.Tensors) -> base.Batch:
  """Replaces values that go from step to step."""
  for name in changed:
    names_lib.check(
      name, batch.values, 'StepResult.values', 'names in Prepared.values'
    )
  return batch._replace(values=names_lib.Named({**batch.values, **changed}))


def _change(weights: Weights, network: adapter.Network) -> list[tf.Tensor]:
  """Subtracts a network's current trainable weights from `weights`."""
  return [
    start - v
    for start, v in zip(
      weights.trainable, network.trainable_variables, strict=True
    )
  ]
