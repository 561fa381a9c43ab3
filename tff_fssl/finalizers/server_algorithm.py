"""The server's part of an algorithm, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, all_finite, select, zero_unless
from tff_fssl.semisup import moving_average

ServerModel = server_model.ServerModel


class ByGroup(NamedTuple):
  """The combined updates of each of several groups of clients.

  Attributes:
    update: Like `Aggregated.update`, with one dimension more, the first: the
      groups. 0 for a group without a usable update.
    sizes: float32 [groups], the numbers of usable updates.
    starts: float32 [groups, rows], the share of a group's weight that started
      from each row of `Groups.starts`; 0 for a group without a usable update.
  """

  update: tuple[tf.Tensor, ...]
  sizes: tf.Tensor
  starts: tf.Tensor


class Aggregated(NamedTuple):
  """What came from the clients of a round.

  Attributes:
    update: The combined update of the model: per trainable weight, then, if
      they are tracked, per non-trainable float weight.
    of_peers: Name of an uploaded peer -> its combined update, per trainable
      weight.
    signals: Name -> float32 scalar, the mean over the clients that reported; 0
      if none did.
    num_reports: float32 scalar, the number of these clients; where nothing but
      a protected sum may leave clients, the size of the cohort.
    by_group: What replaces `update`, which then is (), with several groups, or
      with one and the plain mean.
  """

  update: tuple[tf.Tensor, ...]
  of_peers: Mapping[str, tuple[tf.Tensor, ...]]
  signals: Mapping[str, tf.Tensor]
  num_reports: tf.Tensor
  by_group: ByGroup | None = None

  def moved(self, name: str, old: Weights) -> Weights:
    """A set after the mean change of its peer; as it was if there is none."""
    changes = self.of_peers[name]
    new = tuple(w - c for w, c in zip(old.trainable, changes, strict=True))
    new = select(all_finite(new), new, lambda: tuple(old.trainable))
    return old._replace(trainable=new)

  def of_groups(self) -> ByGroup:
    """`by_group`; of one group that another aggregator has combined, `update`.

    All of that group started from row 0, and its size is `num_reports`.
    """
    if self.by_group is not None:
      return self.by_group
    update = tuple(t[None] for t in self.update)
    some = all_finite(update)  # Else no client's weight was above 0.
    sizes = tf.where(some, self.num_reports, 0.0)[None]
    return ByGroup(zero_unless(some, update), sizes, tf.sign(sizes)[:, None])


class ServerTools(NamedTuple):
  """What a server algorithm can do besides arithmetic.

  Attributes:
    apply: (weights, update) -> weights, by the server optimizer. Call it once.
    train: (weights, copy) -> weights, on the server's labels; if it has none,
      it returns them as they are. Call it at most once for each copy, a number
      from 0, 0 unless given: copies draw other batches and views. Metrics are
      means over copies, and a momentum that is kept is that of copy 0.
    round_num: int32 scalar; less than 1 in server pre-training.
    train_with: (weights, sets) -> (weights, name of each peer of the server's
      training -> its weights): `train`, in which peers start from the sets.
  """

  apply: Callable[[Weights, tuple[tf.Tensor, ...]], Weights]
  train: Callable[..., Weights]
  round_num: tf.Tensor
  train_with: Callable[..., tuple[Weights, Mapping[str, Weights]]] | None = None


def _apply_then_train(
  model: ServerModel, aggregated: Aggregated, tools: ServerTools
) -> ServerModel:
  weights = tools.apply(model.weights, aggregated.update)
  return model.replace_weights(tools.train(weights))


class ServerAlgorithm(NamedTuple):
  """The server's part of an algorithm.

  Attributes:
    start: The initial weights -> the model before the first round. Also called
      when weights are set from outside.
    update: The model after a round.
    sends: The model -> name of a set -> bool scalar, whether clients get it in
      the next round. None: they get every set, always. Sets that clients never
      need are not in the result.
    statistics_of: Names of sets, `Weights`, whose static batch norm
      statistics are gathered with those of the model.
    statistics_if_sent: Names of further such sets, whose statistics are
      gathered only at the end of rounds after which clients get the set.
    num_trainings: How often `update` trains on the server's labels.
  """

  start: Callable[[Weights], ServerModel] = lambda weights: ServerModel(
    *weights
  )
  update: Callable[[ServerModel, Aggregated, ServerTools], ServerModel] = (
    _apply_then_train
  )
  sends: Callable[[ServerModel], Mapping[str, tf.Tensor]] | None = None
  statistics_of: tuple[str, ...] = ()
  statistics_if_sent: tuple[str, ...] = ()
  num_trainings: int = 1

  def sent(self, model: ServerModel) -> dict[str, tf.Tensor]:
    """Name of each set that clients may get -> whether they get it now."""
    if self.sends is not None:
      sent = dict(self.sends(model))
      for name in sent:
        algorithm_lib.check_name(
          name, model.sets, 'server: sends', 'sets of the model'
        )
      return sent
    return {name: tf.constant(True) for name in model.sets}

  def is_sent(self, name: str, model: ServerModel) -> tf.Tensor:
    """Whether clients get a set in the next round: bool scalar."""
    return self.sent(model)[name]


# The server of FedAvg: applies the mean update, then trains on its labels.
FEDAVG = ServerAlgorithm()


def with_moving_average(
  server: ServerAlgorithm,
  name: str,
  decay: float,
  weights_of: server_model.WeightsOf = server_model.own_weights,
) -> ServerAlgorithm:
  """Adds a set: the exponential moving average of the model's weights.

  After each round from round 1 on, average <- decay average + (1 - decay)
  weights; before, it is a copy of the model. It changes nothing else.

  Args:
    server: The server's part of an algorithm.
    name: The name of the set.
    decay: alpha, in [0, 1].
    weights_of: The model -> the weights that are averaged.

  Returns:
    The server's part with the set, which is not sent to clients.
  """

  def start(weights: Weights) -> ServerModel:
    model = server.start(weights)
    return model.replace_sets(**{name: weights_of(model)})

  def update(
    model: ServerModel, aggregated: Aggregated, tools: ServerTools
  ) -> ServerModel:
    average = model.sets[name]
    model = server.update(model, aggregated, tools)
    weights = weights_of(model)
    started = tools.round_num >= 1
    # Without statistics of its own yet, it takes the model's.
    has_statistics = tf.logical_and(started, average.statistics_count > 0.0)
    trainable, non_trainable = (
      tf.nest.map_structure(
        lambda old, new: tf.where(averages, old, new),
        tuple(moving_average.moving_average(old, new, decay)),
        tuple(new),
      )
      for averages, old, new in (
        (started, average.trainable, weights.trainable),
        (has_statistics, average.non_trainable, weights.non_trainable),
      )
    )
    average = Weights(trainable, non_trainable, weights.statistics_count)
    return model.replace_sets(**{name: average})

  def sends(model: ServerModel) -> dict[str, tf.Tensor]:
    sent = server.sent(model)
    sent.pop(name, None)
    return sent

  return server._replace(
    start=start,
    update=update,
    sends=sends,
    statistics_of=(*server.statistics_of, name),
  )
