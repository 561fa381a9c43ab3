"""CBAFed: thresholds by how often all clients predict a class.

Li et al., "Class Balanced Adaptive Pseudo Labeling for Federated
Semi-Supervised Learning", CVPR 2023, 16292-16301. Of the paper, only the
abstract was available. Details are from the authors' code:
github.com/minglllli/CBAFed.

Few clients hold labels, of all their examples. The others hold none. In a
round:
1.  The server broadcasts the model, and the frequencies f of classes. A class
    has the threshold f(c) + `threshold_base` - std(f), but at most
    `threshold_cap`. So rare classes have lower thresholds.
2.  A client predicts a weak view of each unlabelled example by the received
    model. It keeps the examples above the threshold of their class. An example
    below it, whose second class is rarer than `second_label_frequency`, is kept
    with this label.
3.  It trains on weak views of these for `unlabeled_epochs`. A client with
    labels trains on them, for `--client_epochs`, with the residual connection:
    after the epochs 5, 10, ... (from 0), its weights become their weighted mean
    with those that it had five epochs before.
4.  It sends the change of the model, and the number of its examples of each
    class: labelled ones, and kept ones by their pseudo-labels. It weighs as
    much as all of these.
5.  The server averages. After the rounds 5, 10, ... it also takes the mean with
    the model of five rounds before. f are the frequencies in the sum of all
    clients' numbers, scaled to 0.1 where classes are balanced.

In the first `warmup_rounds`, clients learn from labels only.

docs/algorithms/cbafed.md lists the deviations from the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import inference
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import frequencies as frequencies_lib
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

_RESIDUAL = 'residual'
# Names of the values that travel: shares of classes.
_SHARES, _COUNTS = 'shares', 'counts'
# Rounding may take the sum of a client's shares this far above 1.
_TOLERANCE = 1.001


class CbaFedMemory(NamedTuple):
  """The server's memory.

  Attributes:
    shares: float32 [C], the frequencies of classes, of sum 1.
    residual: The model of some rounds before. () without residual connections.
  """

  shares: tf.Tensor
  residual: Weights | tuple[()]


class Selection(NamedTuple):
  """The pseudo-labels of a client's examples.

  Attributes:
    labels: int32 [N].
    kept: bool [N].
    second: bool [N], the kept ones with the second class as label.
  """

  labels: tf.Tensor
  kept: tf.Tensor
  second: tf.Tensor


@dataclasses.dataclass(frozen=True)
class CbaFed(base.Algorithm):
  """CBAFed: thresholds that fall with the rarity of a class at all clients."""

  name = 'cbafed'
  paper = 'Li et al., CVPR 2023'
  scenarios = (base.LABELS_AT_CLIENTS,)
  unlabeled_views = base.WEAK
  norm = 'bn'
  capabilities = base.Capabilities(
    extra_uploads=('shares of classes',),
    without_own_weights='weigh_by_examples=false',
    without_quota='weights and frequencies count all kept examples',
  )
  round_defaults = {
    'client_epochs': 11,
    'client_batch_size': 64,
    'client_labeled_batch_size': 64,
    'client_learning_rate': 0.03,
    'nesterov': False,
    'weight_decay': 0.0005,
    'max_gradient_norm': 5.0,
    'server_optimizer_momentum': 0.0,
  }
  # So low that all examples of an untrained network are kept.
  tiny = {'threshold_base': 0.1, 'warmup_rounds': 0, 'residual_interval': 1}
  metrics = (
    metrics_lib.client_metric(
      'second_label_ratio',
      'Share of unlabelled examples that are kept with their second class.',
      metrics_lib.SHARE,
      curve=metrics_lib.Curve(
        metrics_lib.PSEUDO_LABELS, 'second class', metrics_lib.DASHED
      ),
    ),
    metrics_lib.client_metric(
      'second_label_accuracy',
      'Accuracy of these pseudo-labels.',
      metrics_lib.SHARE,
      metrics_lib.HIGHER,
      curve=metrics_lib.Curve(
        metrics_lib.PSEUDO_LABEL_ACCURACY, 'second class', metrics_lib.DASHED
      ),
    ),
  )

  threshold_base: float = hparam(
    0.84,
    'The threshold of a class is its frequency (0.1 if classes are balanced)'
    ' plus this, minus the standard deviation of all frequencies (value: the'
    " authors' code).",
    minimum=0,
    maximum=1,
  )
  threshold_cap: float = hparam(
    0.95,
    "The highest threshold (authors' code: 0.95; for SVHN 0.9).",
    minimum=0,
    maximum=1,
  )
  second_labels: bool = hparam(
    True,
    'Whether an example below the threshold of its class is kept with its'
    ' second class, however improbable, if that is rare.',
  )
  second_label_frequency: float = hparam(
    0.03,
    'The frequency below which a class is rare (0.1 if classes are balanced;'
    " value: the authors' code).",
    minimum=0,
    maximum=1,
    when=lambda cbafed: cbafed.second_labels,
  )
  fixed_views: bool = hparam(
    False,
    "Whether a client trains on the very views that were labelled (authors'"
    ' code); if false, on new weak views.',
  )
  unlabeled_epochs: int = hparam(
    1,
    'Epochs on kept examples at a client without labels, at most'
    " --client_epochs (value: the authors' code).",
    minimum=1,
    maximum=10_000,
    when=lambda own: own.client_steps == 0,
  )
  unlabeled_rate_factor: float = hparam(
    2 / 3,
    'Learning rate of clients without labels, as a factor of'
    " --client_learning_rate (authors' code: 0.02 and 0.03).",
    minimum=0,
    maximum=100,
  )
  weigh_by_examples: bool = hparam(
    True,
    "Whether a client's weight is the number of its labelled and kept examples;"
    ' if false, client_weighting decides.',
  )
  residual_interval: int = hparam(
    5,
    'Epochs between residual connections at clients with labels (none with'
    ' --client_steps, which knows no epochs), and rounds between those at the'
    " server; 0: none (value: the authors' code).",
    minimum=0,
    maximum=10_000,
  )
  client_residual_share: float = hparam(
    0.8,
    "The share of the older weights at clients (value: the authors' code).",
    minimum=0,
    maximum=1,
    when=lambda own: own.residual_interval and own.client_steps == 0,
  )
  server_residual_share: float = hparam(
    0.5,
    "The share of the older weights at the server (value: the authors' code).",
    minimum=0,
    maximum=1,
    when=lambda cbafed: cbafed.residual_interval,
  )
  warmup_rounds: int = hparam(
    46,
    "The first rounds, in which clients learn from labels only (authors' code:"
    ' 501 epochs of the client with labels).',
    minimum=0,
    maximum=10**6,
  )
  count_decay: float = hparam(
    0.0,
    'The share of the old frequencies in the new ones. 0: those of one round,'
    ' in which all clients take part (paper). Where few take part: 0.9 (ours).',
    minimum=0,
    maximum=1,
  )

  def check(self) -> None:
    """Refuses more epochs on pseudo-labels than on labels."""
    if not self.round.client_steps:
      if self.unlabeled_epochs > self.round.client_epochs:
        raise UsageError(
          f'--cbafed.unlabeled_epochs={self.unlabeled_epochs}: must be at most'
          f' --client_epochs={self.round.client_epochs}'
        )

  @property
  def sets_weights(self) -> bool:
    """Tells whether numbers of examples are weights (step 4)."""
    return self.weigh_by_examples

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Declares the older weights of a client (step 3)."""
    return {_RESIDUAL: base.AuxiliaryNetwork()} if self._connects else {}

  @property
  def _connects(self) -> bool:
    """Tells whether clients connect weights with those of older epochs."""
    return self.residual_interval > 0 and not self.round.client_steps

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts with equal frequencies, and the older weights as the model."""
    shares = tf.fill([setup.num_classes], 1.0 / setup.num_classes)
    residual = weights if self.residual_interval else ()
    return base.ServerState(weights, CbaFedMemory(shares, residual))

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts the frequencies of classes (step 1)."""
    del state
    return {_SHARES: base.Broadcast()}

  def uploads(self, setup: base.Setup) -> Mapping[str, base.Upload]:
    """Declares the numbers of examples of each class (step 4)."""
    spec = tf.TensorSpec([setup.num_classes])
    return {_COUNTS: base.Upload(0.0, _TOLERANCE, base.SUM, spec)}

  def is_possible(self, uploads: base.Tensors) -> tf.Tensor:
    """Tells whether these may be a client's shares of classes."""
    return tf.reduce_sum(uploads[_COUNTS]) <= _TOLERANCE

  def prepare(self, client: base.Client) -> base.Prepared:
    """Selects examples, and computes the client's weight (steps 2 and 4)."""
    probs, per_example = self._predict(client)
    learns = client.round_num > self.warmup_rounds
    labels, kept, second = self._select(probs, client.received[_SHARES])
    kept, second = kept & learns, second & learns
    num_labeled, num_kept = (
      tf.cast(n, tf.float32)
      for n in (tf.size(client.labeled.y), tf.math.count_nonzero(kept))
    )
    has_labels = num_labeled > 0.0
    weight = (num_labeled + num_kept) / self.round.most_client_examples
    num_epochs = tf.where(
      has_labels, self.round.client_epochs, self.unlabeled_epochs
    )
    ratio, accuracy, *_ = diagnostics.pseudo_label_metrics(
      labels, client.unlabeled.y, second
    ).values()
    return base.Prepared(
      selected=tf.cast(tf.where(kept)[:, 0], tf.int32),
      per_example={'labels': labels, 'kept': kept, **per_example},
      values={
        'num_epochs': num_epochs,
        'has_labels': has_labels,
        _COUNTS: self._count(client, labels, kept),
      },
      metrics={
        **diagnostics.pseudo_label_metrics(labels, client.unlabeled.y, kept),
        'second_label_ratio': ratio,
        'second_label_accuracy': accuracy,
      },
      weight=tf.minimum(weight, 1.0) if self.weigh_by_examples else None,
      learning_rate_factor=tf.where(
        has_labels, 1.0, self.unlabeled_rate_factor
      ),
      num_epochs=num_epochs,
    )

  def _predict(
    self, client: base.Client
  ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Predicts weak views: float32 [N, C], and the views if these are kept."""
    batch_size = self.round.statistics_batch_size
    if not self.fixed_views:
      return client.predict(batch_size), {}
    stored = client.unlabeled.x
    num_examples = tf.shape(stored)[0]
    # No view of 0 images can be made.
    some = inference.zero_row(stored, tf.equal(num_examples, 0))
    views = client.views.weak(some, client.seed)[:num_examples]
    logits = inference.outputs(
      client.networks.model,
      views,
      lambda batch, _: batch,
      batch_size,
    )
    return tf.nn.softmax(logits), {'view': views}

  def _select(self, probs: tf.Tensor, shares: tf.Tensor) -> Selection:
    """Selects the examples to learn from, and their pseudo-labels (step 2).

    Args:
      probs: float32 [N, C].
      shares: float32 [C], the frequencies of classes, of sum 1.

    Returns:
      The pseudo-labels.
    """
    frequencies = scaled(shares)
    limits = class_thresholds(
      frequencies, self.threshold_base, self.threshold_cap
    )
    labels = thresholds.pseudo_labels(probs)
    is_sure = tf.reduce_max(probs, -1) > tf.gather(limits, labels)
    if not self.second_labels:
      return Selection(labels, is_sure, tf.zeros_like(is_sure))
    others = tf.one_hot(labels, probs.shape[-1], -1.0, 0.0)
    second_labels = thresholds.pseudo_labels(probs + others)
    is_rare = frequencies < self.second_label_frequency
    second = tf.gather(is_rare, second_labels) & ~is_sure
    # Of an example whose prediction is not finite, nothing is learnt.
    second &= tf.math.is_finite(tf.reduce_sum(probs, -1))
    return Selection(
      tf.where(second, second_labels, labels), is_sure | second, second
    )

  def _count(
    self, client: base.Client, labels: tf.Tensor, kept: tf.Tensor
  ) -> tf.Tensor:
    """Counts labelled and kept examples of each class, float32 [C] (step 4).

    The mean over clients, by their weights, is in the proportions of the sum of
    all clients' numbers.
    """
    num_classes = client.received[_SHARES].shape[0]
    weights = tf.cast(kept, tf.float32)[:, None]
    numbers = tf.reduce_sum(
      tf.one_hot(client.labeled.y, num_classes), axis=0
    ) + tf.reduce_sum(weights * tf.one_hot(labels, num_classes), axis=0)
    if self.weigh_by_examples:
      return tf.math.divide_no_nan(numbers, tf.reduce_sum(numbers))
    return numbers / self.round.most_client_examples

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes cross-entropy with the pseudo-labels of kept examples."""
    examples = batch.unlabeled
    if self.fixed_views:
      views = {'weak': examples.per_example['view']}
      examples = examples._replace(views=views)
    # A filler has no pseudo-label.
    mask = examples.weights * tf.cast(examples.per_example['kept'], tf.float32)
    entropies = losses.cross_entropy(
      examples.per_example['labels'], examples.logits(networks.model, 'weak')
    )
    loss = losses.masked_mean(entropies, mask)
    return loss, {
      'loss_pseudo_label': base.Mean.weighted(loss, tf.reduce_sum(mask))
    }

  def after_step(self, networks: base.Networks, batch: base.Batch) -> None:
    """Connects weights with older ones at the end of some epochs (step 3)."""
    if not self._connects:
      return
    time, prepared = batch.time, batch.values
    steps = tf.maximum(time.num_steps // prepared['num_epochs'], 1)
    num_done = (time.step + 1) // steps
    is_end = tf.equal((time.step + 1) % steps, 0) & prepared['has_labels']
    # The first epoch has the number 0.
    is_first = is_end & tf.equal(num_done, 1)
    is_due = is_end & tf.equal((num_done - 1) % self.residual_interval, 0)

    def connect() -> tf.Tensor:
      share = tf.where(is_first, 0.0, self.client_residual_share)
      for new, old in _pairs(networks.model, networks[_RESIDUAL]):
        own_share = tf.cast(share, new.dtype)
        new.assign(own_share * old + (1.0 - own_share) * new)
        old.assign(new)
      return tf.constant(0)

    tf.cond(is_due, connect, lambda: tf.constant(0))

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Uploads the numbers of examples (step 4)."""
    del metrics
    return base.ClientOutput({_COUNTS: client.values[_COUNTS]})

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Averages, and connects the model with an older one (step 5)."""
    state = super().update(state, aggregate, server)
    shares = frequencies_lib.follow(
      state.memory.shares, aggregate[_COUNTS], self.count_decay
    )
    state = state.remember(shares=shares)
    if not self.residual_interval:
      return state
    # The first round after the warm-up has the number 0.
    number = server.round_num - self.warmup_rounds - 1
    is_due = (number > 0) & tf.equal(number % self.residual_interval, 0)
    share = tf.where(is_due, self.server_residual_share, 0.0)
    old, new = state.memory.residual, state.weights

    def connect(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
      if not new.dtype.is_floating:
        return new
      return tf.where(is_due, share * old + (1.0 - share) * new, new)

    weights = new._replace(
      trainable=tuple(map(connect, old.trainable, new.trainable)),
      non_trainable=tuple(map(connect, old.non_trainable, new.non_trainable)),
    )
    keeps = is_due | (number < 0)
    residual = tf.nest.map_structure(
      lambda new, old: tf.where(keeps, new, old), weights, old
    )
    return state._replace(weights=weights).remember(residual=residual)


def _pairs(
  model: adapter.Network, residual: adapter.Network
) -> list[tuple[tf.Variable, tf.Variable]]:
  """Lists the float weights of a network and of its older version."""
  return [
    (new, old)
    for name in ('trainable_variables', 'non_trainable_variables')
    for new, old in zip(
      getattr(model, name), getattr(residual, name), strict=True
    )
    if new.dtype.is_floating
  ]


def scaled(shares: tf.Tensor) -> tf.Tensor:
  """Scales frequencies of sum 1 to 0.1 each where classes are balanced."""
  return shares * (shares.shape[0] / 10)


def class_thresholds(
  frequencies: tf.Tensor, base_value: float, cap: float
) -> tf.Tensor:
  """Computes the threshold of each class.

  Args:
    frequencies: float32 [C], 0.1 each where classes are balanced.
    base_value: Added to each frequency.
    cap: The highest threshold.

  Returns:
    float32 [C].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.algorithms import cbafed
    >>> frequencies = cbafed.scaled(tf.constant([0.6, 0.3, 0.09, 0.01]))
    >>> of_class = cbafed.class_thresholds(frequencies, 0.84, cap=0.95)
    >>> print(of_class.numpy().round(3))
    [0.95  0.855 0.771 0.739]
  """
  num = frequencies.shape[0]
  # The standard deviation of a sample.
  deviation = tf.math.reduce_std(frequencies) * (num / (num - 1)) ** 0.5
  return tf.minimum(frequencies + base_value - deviation, cap)
