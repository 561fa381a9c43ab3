"""FedRGD: groups of clients that go on from their own means.

Zhang, Yang, Yao, Yan, Gonzalez, Ramchandran and Mahoney, "Improving
Semi-supervised Federated Learning by Reducing the Gradient Diversity of
Models", arXiv 2020 (2008.11364), IEEE BigData 2021. Details are from the
authors' code (github.com/jhcknzzm/SSFL-Benchmarking); of the paper, we had the
abstract.

In a round, with S groups:
1.  The clients of the cohort are put into groups by their position in it, an
    order that is drawn for the round. A client receives the model theta_g of
    its group g. Labels at the clients: the first one of each group receives the
    global model theta instead.
2.  A client trains: FixMatch's loss (the consistency regularization loss), with
    labels at the clients plus the loss of a labelled batch.
3.  Meanwhile, labels at the server: from theta, the server trains S copies on
    its labels, each with batches and views of its own.
4.  theta_g <- the mean of the group's clients and, labels at the server, of
    copy g, which counts like a client. A group without clients: copy g, or
    theta_g as it is.
5.  theta <- the mean of all theta_g.

With groups of equal size, step 5 is one mean over all clients and copies. What
groups change is where clients start (`mode`), and the weight of the server.

Deviations from the authors' code: clients make epochs, not 16 steps; momenta
start at 0 in each round (theirs stay with the place in the cohort, whoever
takes it); the learning rate has no warm-up.
"""

from __future__ import annotations

import functools

from tff_fssl.algorithms import fedrgd_hparams
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import feed
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import groups as groups_lib
from tff_fssl.rounds import round_hparams as round_hparams_lib

FedRgdHparams = fedrgd_hparams.FedRgdHparams
RoundHparams = round_hparams_lib.RoundHparams
ServerModel = server_algorithm.ServerModel
_GROUPS = 'groups'
# Random groups have no first client: one in five starts from the global model.
# (The groups of the authors' code have five clients.)
_FIRST = 0.2


def build_local_algorithm(
  hparams: FedRgdHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: step 2."""
  term = terms.fixmatch
  if hparams.pseudo_labels == fedrgd_hparams.EACH_VIEW:
    term = terms.self_training
  of_clients = term(
    confidence_threshold=hparams.confidence_threshold,
    loss_weight=hparams.unlabeled_loss_weight,
  )
  if not round_hparams.labels_at_clients:
    return objective.minimize(of_clients)
  return objective.minimize(of_clients, objective.supervised())


def _averaged(
  weights: Weights, round_hparams: RoundHparams
) -> tuple[tf.Tensor, ...]:
  """What clients change, in the order of their updates."""
  if round_hparams.batch_norm_statistics != 'moving_average':
    return tuple(weights.trainable)
  floats = [t for t in weights.non_trainable if t.dtype.is_floating]
  return (*weights.trainable, *floats)


def _stacked(tensor: tf.Tensor, num: int) -> tf.Tensor:
  """The tensor `num` times, in a first dimension."""
  return tf.repeat(tensor[None], num, axis=0)


def _beside(values: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
  """`values` with further dimensions, to be multiplied by stacked tensors."""
  return tf.reshape(values, [*values.shape, *[1] * tensor.shape.rank])


def build_groups(
  hparams: FedRgdHparams, round_hparams: RoundHparams
) -> groups_lib.Groups:
  """Who is in which group, and starts from what: step 1."""
  num, at_clients = hparams.num_groups, round_hparams.labels_at_clients

  def starts(model: ServerModel) -> Weights:
    theta = rows = tf.nest.map_structure(lambda t: t[None], model.weights)
    if hparams.keeps_groups:
      same = tf.nest.map_structure(lambda t: _stacked(t, num), model.weights)
      stacks = iter(model.sets[_GROUPS])
      trainable = tuple(next(stacks) for _ in theta.trainable)
      floats = (
        next(stacks, t) if t.dtype.is_floating else t
        for t in same.non_trainable
      )
      rows = same._replace(trainable=trainable, non_trainable=tuple(floats))
      if at_clients:
        rows = tf.nest.map_structure(
          lambda *pair: tf.concat(pair, axis=0), rows, theta
        )
    weights: Weights = rows
    return weights

  def place(slot: tf.Tensor, seed: tf.Tensor) -> groups_lib.Place:
    group, is_first = slot % num, tf.equal(slot // num, 0)
    if hparams.grouping == fedrgd_hparams.RANDOM:
      own = feed.fold_in(seed, feed.GROUP)
      group = tf.random.stateless_uniform([], own, 0, num, tf.int32)
      is_first = tf.random.stateless_uniform([], feed.fold_in(own, 1)) < _FIRST
    if not hparams.keeps_groups:
      return groups_lib.Place(group, tf.zeros_like(group))
    start = tf.where(is_first, num, group) if at_clients else group
    return groups_lib.Place(group, start)

  num_starts = num + int(at_clients) if hparams.keeps_groups else 1
  by_position = hparams.grouping == fedrgd_hparams.POSITION
  return groups_lib.Groups(
    num, num_starts, starts, place, hparams.has_groups and by_position
  )


def build_server(
  hparams: FedRgdHparams, round_hparams: RoundHparams
) -> server_algorithm.ServerAlgorithm:
  """The server's part: steps 3 to 5."""
  groups = build_groups(hparams, round_hparams)
  num, at_clients = hparams.num_groups, round_hparams.labels_at_clients
  num_copies = num if hparams.keeps_groups else 1
  averaged = functools.partial(_averaged, round_hparams=round_hparams)

  def start(weights: Weights) -> ServerModel:
    model = ServerModel(*weights)
    if not hparams.keeps_groups:
      return model
    stacks = (_stacked(t, num) for t in averaged(weights))
    return model.with_sets(**{_GROUPS: tuple(stacks)})

  def update(
    model: ServerModel,
    aggregated: server_algorithm.Aggregated,
    tools: server_algorithm.ServerTools,
  ) -> ServerModel:
    by_group = aggregated.of_groups()
    # Weights are differences from theta: of one group, this is FedAvg's update.
    theta = averaged(model.weights)
    copies: list[tuple[tf.Tensor, ...]] = []
    if not at_clients:
      copies = [
        averaged(tools.train(model.weights, i)) for i in range(num_copies)
      ]
    # A group without clients stays at its own row.
    own = tf.one_hot(tf.range(num) % groups.num_starts, groups.num_starts)
    shares = tf.where(by_group.sizes[:, None] > 0.0, by_group.starts, own)
    rows = averaged(groups.starts(model))
    of_groups = []
    for i, of_theta in enumerate(theta):
      far = _beside(shares, of_theta) * (of_theta - rows[i])[None]
      change = tf.reduce_sum(far, axis=1) + by_group.update[i]
      if copies:
        size = _beside(by_group.sizes, of_theta)
        of_copies = tf.stack([of_theta - copy[i] for copy in copies])
        change = (size * change + of_copies) / (size + 1.0)
      of_groups.append(change)
    mean = tuple(tf.reduce_mean(change, axis=0) for change in of_groups)
    if at_clients:  # Without any client, there is no update to apply.
      nobody = tf.equal(tf.reduce_sum(by_group.sizes), 0.0)
      mean = tuple(tf.where(nobody, float('nan'), t) for t in mean)
    after = model.with_weights(tools.apply(model.weights, mean))
    if not hparams.keeps_groups:
      return after
    stacks = (t[None] - c for t, c in zip(theta, of_groups, strict=True))
    return after.with_sets(**{_GROUPS: tuple(stacks)})

  return server_algorithm.ServerAlgorithm(
    start,
    update,
    sends=lambda model: {},  # Clients receive rows instead.
    num_trainings=num_copies,
  )
