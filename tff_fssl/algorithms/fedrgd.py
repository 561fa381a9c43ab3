"""FedRGD: groups of clients that resume from their own means.

Zhang, Yang, Yao, Yan, Gonzalez, Ramchandran and Mahoney, "Improving
Semi-supervised Federated Learning by Reducing the Gradient Diversity of
Models", arXiv 2020 (2008.11364), IEEE BigData 2021. Details are from the
authors' code (github.com/jhcknzzm/SSFL-Benchmarking). Of the paper, only the
abstract was available.

In a round, with S groups:
1.  Clients form groups by their position in the cohort, in an order that is
    drawn for the round. Groups differ by at most one client, unless clients
    drop out. A client receives the model theta_g of its group g. With labels at
    the clients, the first client of each group receives the global model theta
    instead.
2.  A client trains on FixMatch's loss (the consistency regularization loss).
    With labels at the clients, the loss of a labelled batch is added.
3.  With labels at the server, the server trains S copies of theta on its
    labels, each with batches and views of its own.
4.  theta_g <- the mean of the group's clients and, with labels at the server,
    of copy g, which counts like a client. In a group without clients, theta_g
    becomes copy g, or stays as it is if there is no copy.
5.  theta <- the mean of all theta_g.

With groups of equal size, step 5 is one mean over all clients and copies.
Groups change the clients' start (`mode`) and the weight of the server.

Deviations from the authors' code: Clients train for epochs, not for 16 steps.
Momenta start at 0 in each round. In the authors' code they stay with the
position in the cohort, whichever client takes it. The learning rate has no
warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl import seeds
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.interface import groups as groups_lib
from tff_fssl.lazy import tf
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import pseudo_labels as pseudo_labels_lib

# Values of --fedrgd.mode, --fedrgd.grouping and --fedrgd.pseudo_labels.
PERSISTENT_GROUPS, TWO_LEVEL_MEAN = 'persistent_groups', 'two_level_mean'
POSITION, RANDOM = 'position', 'random'
WEAK_VIEW, EACH_VIEW = 'weak_view', 'each_view'
# Random groups have no first client: one in five starts from the global model.
# (The groups of the authors' code have five clients.)
_FIRST = 0.2

_METRICS = (
  metrics_lib.Metric(
    'aggregator/inner/gradient_diversity',
    'Gradient diversity of a group, mean |u|² / |mean u|² over its updates u;'
    ' mean over groups. 1 if all are equal; the more they point apart, the'
    ' larger.',
    'ratio',
    curve=metrics_lib.Curve('Gradient diversity'),
    figure='diversity',
  ),
  metrics_lib.Metric(
    'aggregator/inner/{smallest,largest}_group',
    'Clients in the smallest and in the largest group, of those whose update'
    ' weighs more than 0.',
    'count',
  ),
)


class FedRgdMemory(NamedTuple):
  """The server's memory.

  Attributes:
    groups: The models of the groups, stacked in a first dimension: one tensor
      for each tensor that clients change. () if groups start from one model.
  """

  groups: tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class FedRgd(base.Algorithm):
  """FedRGD: groups of clients that go on from their own means."""

  name = 'fedrgd'
  paper = 'Zhang et al., IEEE BigData 2021'
  unlabeled_views = base.WEAK_AND_STRONG
  norm = 'gn'
  capabilities = base.Capabilities(
    extra_uploads=('group (two numbers)',),
    without_groups='num_groups=1',
  )
  # The paper's optimizers, except for the learning rate, which depends on the
  # network: 0.165 for ResNet-18, 0.0075 for ResNet-9.
  round_defaults = {
    'client_batch_size': 64,
    'client_epochs': 1,
    'client_labeled_batch_size': 64,
    'max_gradient_norm': 0.0,
    'num_pretraining_rounds': 0,
    'server_batch_size': 64,
    'server_epochs': 1,
    'server_optimizer_momentum': 0.0,
    'weight_decay': 1e-4,
  }
  tiny = {'confidence_threshold': 0.3}
  metrics = _METRICS

  confidence_threshold: float = hparam(
    0.95,
    'A pseudo-label is used if its probability is at least this. (In the'
    " authors' code it is a constant; --tao acts on gradient measurements"
    ' only.)',
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'The weight of the loss on pseudo-labels relative to the loss on labels'
    " (value: the authors' code).",
    minimum=0,
  )
  num_groups: int = hparam(
    2,
    'S, the number of groups that the clients of a round form, and of copies of'
    " the model that the server trains. The authors' code has 2 for 10 and 20"
    ' clients a round, 3 for 30 and 5 for 47. With 1, there is one mean of all,'
    ' in which the server counts as one client more.',
    minimum=1,
    maximum=100,
  )
  mode: str = hparam(
    PERSISTENT_GROUPS,
    'What clients start from. persistent_groups: the last mean of their group'
    " (the authors' code); two_level_mean: the mean of the groups' means, and"
    ' the server trains one model that counts in each group (as SemiFL'
    ' implements it, but with weights whose sum is 1 for groups of any size).',
    choices=(PERSISTENT_GROUPS, TWO_LEVEL_MEAN),
    when=lambda fedrgd: fedrgd.has_groups,
  )
  grouping: str = hparam(
    POSITION,
    'How clients are put into groups, anew in each round. position: by their'
    ' position in the cohort, so that groups differ by at most one client if'
    ' none drops out; random: each client draws its own, which needs nothing of'
    ' the data source and gives unequal groups.',
    choices=(POSITION, RANDOM),
    when=lambda fedrgd: fedrgd.has_groups,
  )
  pseudo_labels: str = hparam(
    WEAK_VIEW,
    'What pseudo-labels are learnt on. weak_view: that of the weak view on the'
    ' strong view (the consistency regularization loss, FixMatch); each_view:'
    " those of both views on these views themselves (the authors' code with"
    ' labels at the clients).',
    choices=(WEAK_VIEW, EACH_VIEW),
  )

  @property
  def has_groups(self) -> bool:
    """Tells whether the server sees sums over fewer than all clients."""
    return self.num_groups > 1

  @property
  def keeps_groups(self) -> bool:
    """Tells whether the server keeps a model for each group."""
    return self.has_groups and self.mode == PERSISTENT_GROUPS

  @property
  def _num_copies(self) -> int:
    """Returns the number of models that the server trains."""
    return self.num_groups if self.keeps_groups else 1

  @property
  def num_trainings(self) -> int:
    """Returns the number of the server's trainings in a round (step 3)."""
    return self._num_copies

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts all groups from the model."""
    del setup
    if not self.keeps_groups:
      return base.ServerState(weights)
    stacks = (_stack(t, self.num_groups) for t in self._changed(weights))
    return base.ServerState(weights, FedRgdMemory(tuple(stacks)))

  def _changed(self, weights: Weights) -> tuple[tf.Tensor, ...]:
    """Returns the tensors that clients change, in the order of updates."""
    # Moving averages of batch norm are part of the updates, other statistics
    # are not.
    if self.round.batch_norm_statistics != 'moving_average':
      return tuple(weights.trainable)
    floats = [t for t in weights.non_trainable if t.dtype.is_floating]
    return (*weights.trainable, *floats)

  def groups(self) -> groups_lib.Groups:
    """Declares the groups and the models that clients start from (step 1)."""
    num_starts = 1
    if self.keeps_groups:
      # The first client of a group may start from the global model.
      num_starts = self.num_groups + int(self.round.labels_at_clients)
    return groups_lib.Groups(
      self.num_groups,
      num_starts,
      lambda model: self._starts(model.weights, model.sets.get('groups', ())),
      self._place,
      self.has_groups and self.grouping == POSITION,
    )

  def _starts(self, weights: Weights, groups: Sequence[tf.Tensor]) -> Weights:
    """Stacks the models that clients start from, with the global one last."""
    theta: Weights = tf.nest.map_structure(lambda t: t[None], weights)
    if not self.keeps_groups:
      return theta
    same = tf.nest.map_structure(lambda t: _stack(t, self.num_groups), weights)
    stacks = iter(groups)
    trainable = tuple(next(stacks) for _ in theta.trainable)
    floats = (
      next(stacks, t) if t.dtype.is_floating else t for t in same.non_trainable
    )
    rows: Weights = same._replace(
      trainable=trainable, non_trainable=tuple(floats)
    )
    if self.round.labels_at_clients:
      rows = tf.nest.map_structure(
        lambda *pair: tf.concat(pair, axis=0), rows, theta
      )
    return rows

  def _place(self, slot: tf.Tensor, seed: tf.Tensor) -> groups_lib.Place:
    """Returns a client's group, and its row of `_starts`."""
    num = self.num_groups
    group, is_first = slot % num, tf.equal(slot // num, 0)
    if self.grouping == RANDOM:
      own = seeds.fold_in(seed, seeds.GROUP)
      group = tf.random.stateless_uniform([], own, 0, num, tf.int32)
      is_first = tf.random.stateless_uniform([], seeds.fold_in(own, 1)) < _FIRST
    if not self.keeps_groups:
      return groups_lib.Place(group, tf.zeros_like(group))
    start = group
    if self.round.labels_at_clients:
      start = tf.where(is_first, num, group)
    return groups_lib.Place(group, start)

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes the loss on pseudo-labels (step 2)."""
    examples = batch.unlabeled

    def learn(
      labeling: tf.Tensor, logits: tf.Tensor
    ) -> tuple[tf.Tensor, base.Metrics]:
      return pseudo_labels_lib.loss(
        tf.nn.softmax(labeling),
        logits,
        examples.labels,
        examples.weights,
        self.confidence_threshold,
      )

    weak = examples.logits(networks.model, 'weak')
    if self.pseudo_labels == WEAK_VIEW:
      strong = examples.logits(networks.model, 'strong')
      loss, metrics = learn(weak, strong)
      return self.unlabeled_loss_weight * loss, metrics
    # The mean over both views, each of which labels itself.
    first, metrics = learn(weak, weak)
    strong = examples.logits(networks.model, 'strong')
    second, more = learn(strong, strong)
    weight = 0.5 * self.unlabeled_loss_weight
    # A count is at most the number of examples.
    halves = {
      name: base.Mean(
        0.5 * (total + more[name].total), 0.5 * (count + more[name].count)
      )
      for name, (total, count) in metrics.items()
    }
    return weight * first + weight * second, halves

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Averages within groups, then over groups (steps 3 to 5)."""
    by_group = aggregate.by_group()
    # All models are differences from theta, so that one group gives FedAvg's
    # update.
    theta = self._changed(state.weights)
    copies: list[tuple[tf.Tensor, ...]] = []
    if not self.round.labels_at_clients:
      copies = [
        self._changed(server.train(state.weights, i))
        for i in range(self._num_copies)
      ]
    groups = state.memory.groups if self.keeps_groups else ()
    rows = self._changed(self._starts(state.weights, groups))
    # A group without clients keeps its own model.
    num, num_rows = self.num_groups, rows[0].shape[0]
    own = tf.one_hot(tf.range(num) % num_rows, num_rows)
    shares = tf.where(by_group.sizes[:, None] > 0.0, by_group.starts, own)
    changes = []
    for i, of_theta in enumerate(theta):
      # The distance of the group's mean start from theta, plus its mean update.
      far = _expand(shares, of_theta) * (of_theta - rows[i])[None]
      change = tf.reduce_sum(far, axis=1) + by_group.update[i]
      if copies:
        size = _expand(by_group.sizes, of_theta)
        # The server counts like one more client.
        trained = tf.stack([of_theta - copy[i] for copy in copies])
        change = (size * change + trained) / (size + 1.0)
      changes.append(change)
    mean = tuple(tf.reduce_mean(change, axis=0) for change in changes)
    if self.round.labels_at_clients:  # Without clients there is no update.
      nobody = tf.equal(tf.reduce_sum(by_group.sizes), 0.0)
      mean = tuple(tf.where(nobody, float('nan'), t) for t in mean)
    state = state._replace(weights=server.apply(state.weights, mean))
    if not self.keeps_groups:
      return state
    stacks = (t[None] - c for t, c in zip(theta, changes, strict=True))
    return state.remember(groups=tuple(stacks))


def _stack(tensor: tf.Tensor, num: int) -> tf.Tensor:
  """Repeats a tensor in a new first dimension."""
  return tf.repeat(tensor[None], num, axis=0)


def _expand(values: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
  """Adds dimensions to `values`, to multiply stacked tensors by them."""
  return tf.reshape(values, [*values.shape, *[1] * tensor.shape.rank])
