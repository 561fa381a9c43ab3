"""FedDB: less trust in the classes that a model predicts too often.

Zhu et al., "Estimating before Debiasing: A Bayesian Approach to Detaching Prior
Bias in Federated Semi-Supervised Learning", IJCAI 2024 (arXiv 2405.19789). Of
the paper, only the abstract was available. Details are from the authors' code:
github.com/GuogangZhu/FedDB.

All clients hold labels. In a round:
1.  The server broadcasts the model.
2.  A client predicts a weak view of each unlabelled example. The mean of its
    predictions is p, its average prediction probability of unlabelled data
    (APP-U). It divides each prediction by p and scales it to sum 1. The
    pseudo-label is the class of the result. An example is kept if that reaches
    `confidence_threshold`.
3.  It trains on labelled examples and on strong views of kept ones. Before each
    step, p becomes the mean of p and of the predictions of the batch's weak
    views.
4.  It sends the change of the model, and p.
5.  The server searches weights by which the mean of all p is nearer to
    uniform, and averages by these. For this it must see each client's change.
    With `weights=last_mean`, clients weigh themselves by the mean p of the
    round before. Then sums suffice.

docs/algorithms/feddb.md lists the deviations from paper and authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import frequencies
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

# Values of --feddb.weights and --feddb.app_u.
COHORT, LAST_MEAN, UNIFORM = 'cohort', 'last_mean', 'uniform'
TRAINING, START = 'training', 'start'
# Names of the values that travel.
_APP_U, _MEAN, _CHANGE = 'app_u', 'mean_app_u', 'change'
# The search for weights (authors' code): the rate 1 times 1 + 0.9, since a new
# Nesterov optimizer of momentum 0.9 makes each step, and the weight decay.
_STEP, _DECAY, _NUM_ITERATIONS = 1.9, 0.9, 100
# Rounding may take the sum of probabilities this far from 1.
_TOLERANCE = 0.001


class FedDbMemory(NamedTuple):
  """The server's memory if clients weigh themselves by the mean APP-U, [C]."""

  mean_app_u: tf.Tensor


@dataclasses.dataclass(frozen=True)
class FedDb(base.Algorithm):
  """FedDB: pseudo-labels and weights without the prior of the predictions."""

  name = 'feddb'
  paper = 'Zhu et al., IJCAI 2024'
  scenarios = (base.LABELS_AT_CLIENTS,)
  unlabeled_views = base.WEAK_AND_STRONG
  norm = 'sbn'
  capabilities = base.Capabilities(
    extra_uploads=('mean prediction',),
    without_own_weights='weights=uniform',
    signals='sends_rows',
    without_signals='weights=uniform',
  )
  round_defaults = {
    'client_epochs': 5,
    'client_batch_size': 500,
    'client_labeled_batch_size': 500,
    'learning_rate_schedule': 'cosine',
  }
  tiny = {'confidence_threshold': 0.3}
  metrics = (
    metrics_lib.client_metric(
      'app_u_distance',
      'Distance (total variation) of the mean prediction of a client from'
      ' uniform, mean over clients with unlabelled examples.',
      metrics_lib.SHARE,
      curve=metrics_lib.Curve('Distance of mean predictions from uniform'),
    ),
  )

  confidence_threshold: float = hparam(
    0.95,
    'The least debiased probability of a pseudo-label.',
    minimum=0,
    maximum=1,
  )
  debias: bool = hparam(
    True,
    'Whether predictions are divided by their mean. If false, pseudo-labels'
    " are those of FixMatch by the received model (paper's ablation).",
  )
  weights: str = hparam(
    COHORT,
    'The weights of updates. cohort: by which the mean of all APP-U is nearer'
    ' to uniform (paper); for these the server must see single updates.'
    ' last_mean: by the mean of the round before, so that sums suffice (ours).'
    ' uniform: client_weighting decides.',
    choices=(COHORT, LAST_MEAN, UNIFORM),
  )
  app_u: str = hparam(
    TRAINING,
    "The APP-U that is sent. training: it follows the predictions of the steps'"
    " weak views (authors' code); start: the one that debiases pseudo-labels.",
    choices=(TRAINING, START),
    when=lambda feddb: feddb.weights != UNIFORM,
  )

  @property
  def sets_weights(self) -> bool:
    """Tells whether APP-U determine the weights of updates (step 5)."""
    return self.weights != UNIFORM

  @property
  def sends_rows(self) -> bool:
    """Tells whether the server sees single clients' updates."""
    return self.weights == COHORT

  @property
  def _follows(self) -> bool:
    return self.sets_weights and self.app_u == TRAINING

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts the mean APP-U as uniform, if it is needed."""
    if self.weights != LAST_MEAN:
      return base.ServerState(weights)
    uniform = tf.fill([setup.num_classes], 1.0 / setup.num_classes)
    return base.ServerState(weights, FedDbMemory(uniform))

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts the mean APP-U of the round before, if it is needed."""
    del state
    return {_MEAN: base.Broadcast()} if self.weights == LAST_MEAN else {}

  def uploads(self, setup: base.Setup) -> Mapping[str, base.Upload]:
    """Declares APP-U, and the change whose weight the server sets (step 4)."""
    spec = tf.TensorSpec([setup.num_classes])
    if self.weights == UNIFORM:
      return {}
    if self.weights == LAST_MEAN:
      return {_APP_U: base.Upload(0.0, math.inf, base.SUM, spec)}
    if not setup.plain_mean:
      raise UsageError(
        f'--feddb.weights={COHORT}: the algorithm itself weighs the updates of'
        ' single clients, so that the aggregator neither bounds nor compresses'
        f' them; give --aggregator={aggregator_hparams.MEAN}, or set'
        f' --feddb.weights={LAST_MEAN} or {UNIFORM}'
      )
    shapes = [spec.shape for spec in setup.weights.trainable]
    size = sum(shape.num_elements() for shape in shapes)
    return {
      _APP_U: base.Upload(0.0, math.inf, base.ROWS, spec),
      # The server knows it from the update.
      _CHANGE: base.Upload(
        how=base.ROWS, spec=tf.TensorSpec([size]), is_known=True
      ),
    }

  def is_possible(self, uploads: base.Tensors) -> tf.Tensor:
    """Tells whether this may be a client's APP-U."""
    total = tf.reduce_sum(uploads[_APP_U])
    # A client may have scaled it down by its own weight (`finish`).
    least = 1.0 - _TOLERANCE if self.weights == COHORT else 0.0
    return (total >= least) & (total <= 1.0 + _TOLERANCE)

  def prepare(self, client: base.Client) -> base.Prepared:
    """Computes APP-U, and debiased pseudo-labels (step 2)."""
    probs = client.predict(self.round.statistics_batch_size, own_moments=True)
    app_u = _mean(probs, tf.ones_like(probs[:, 0]))
    debiased = frequencies.divide(probs, app_u) if self.debias else probs
    labels = thresholds.pseudo_labels(debiased)
    kept = thresholds.fixed_mask(debiased, self.confidence_threshold)
    # An example with NaN is kept, so that the update becomes NaN and the client
    # is counted. Otherwise it would be dropped silently.
    kept |= tf.reduce_any(tf.math.is_nan(probs), axis=-1)
    return base.Prepared(
      selected=tf.cast(tf.where(kept)[:, 0], tf.int32),
      per_example={'labels': labels},
      metrics=diagnostics.pseudo_label_metrics(
        labels, client.unlabeled.y, kept
      ),
      # The server, or `finish`, replaces it.
      weight=tf.constant(1.0) if self.sets_weights else None,
      values={_APP_U: app_u},
    )

  def unlabeled_step(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.StepResult:
    """Moves APP-U, then differentiates the loss (step 3)."""
    examples, values = batch.unlabeled, dict[str, tf.Tensor]()
    if self._follows:
      probs = tf.nn.softmax(examples.logits(networks.model, 'weak'))
      moved = (batch.values[_APP_U] + _mean(probs, examples.weights)) / 2.0
      # A client that has kept nothing has a batch of fillers.
      has_examples = examples.size > 0.0
      values[_APP_U] = tf.where(has_examples, moved, batch.values[_APP_U])
    return super().unlabeled_step(networks, batch)._replace(values=values)

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes cross-entropy of kept examples' strong views (step 3)."""
    examples = batch.unlabeled
    entropies = losses.cross_entropy(
      examples.per_example['labels'], examples.logits(networks.model, 'strong')
    )
    loss = losses.masked_mean(entropies, examples.weights)
    return loss, {'loss_pseudo_label': base.Mean.weighted(loss, examples.size)}

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Sends APP-U, and what its weight is made by (steps 4 and 5)."""
    del metrics
    app_u = client.values[_APP_U]
    distance = 0.5 * tf.reduce_sum(tf.abs(app_u - 1.0 / app_u.shape[0]))
    # Without unlabelled examples, APP-U is uniform by definition.
    has = tf.cast(tf.size(client.unlabeled.y) > 0, tf.float32)
    output = base.ClientOutput(
      metrics={'app_u_distance': base.Mean.ratio(distance * has, has)}
    )
    if self.weights == COHORT:
      old, new = (
        tf.concat([tf.reshape(w, [-1]) for w in weights], axis=0)
        for weights in (
          client.weights.trainable,
          client.networks.model.trainable_variables,
        )
      )
      return output._replace(uploads={_APP_U: app_u, _CHANGE: old - new})
    if self.weights == LAST_MEAN:
      lower, upper = _score_limits(app_u.shape[0])
      score = tf.clip_by_value(
        sum_only_score(app_u, client.received[_MEAN]), lower, upper
      )
      # The mean by the clients' weights is in the proportions of the plain one.
      return output._replace(
        uploads={_APP_U: app_u * lower / score}, weight=score / upper
      )
    return output

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Averages by the weights of the cohort, or of clients (step 5)."""
    if self.weights == LAST_MEAN:
      # The mean is in the proportions of the plain one.
      mean = frequencies.follow(
        state.memory.mean_app_u, aggregate[_APP_U], decay=0.0
      )
      state = state.remember(mean_app_u=mean)
    if self.weights == COHORT:
      weights = cohort_weights(aggregate[_APP_U])
      mean = tf.linalg.matvec(aggregate[_CHANGE], weights, transpose_a=True)
      # Moving averages, which follow the weights in an update, keep the plain
      # mean. An update without clients is NaN, by which the server knows.
      num_weights = len(state.weights.trainable)
      plain, other = (
        aggregate.update[:num_weights],
        aggregate.update[num_weights:],
      )
      update = [
        tf.where(tf.size(weights) > 0, tf.reshape(part, old.shape), old)
        for part, old in zip(
          tf.split(mean, [w.shape.num_elements() for w in plain]),
          plain,
          strict=True,
        )
      ]
      aggregate = dataclasses.replace(aggregate, update=(*update, *other))
    return super().update(state, aggregate, server)


def _mean(probs: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
  """Averages predictions: float32 [C], uniform if there are none."""
  num = tf.reduce_sum(weights)
  total = tf.reduce_sum(weights[:, None] * probs, axis=0)
  uniform = tf.fill(tf.shape(total), 1.0 / probs.shape[-1])
  return tf.where(num > 0.0, tf.math.divide_no_nan(total, num), uniform)


def cohort_weights(app_u: tf.Tensor) -> tf.Tensor:
  """Searches weights by which the mean of APP-U is nearer to uniform (step 5).

  Args:
    app_u: float32 [K, C], rows of sum 1.

  Returns:
    float32 [K], of sum 1.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.algorithms import feddb
    >>> app_u = tf.constant([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9]])
    >>> print(feddb.cohort_weights(app_u).numpy().round(3))
    [0.311 0.318 0.371]
  """
  num, num_classes = tf.shape(app_u)[0], app_u.shape[-1]
  uniform = tf.fill([num], tf.math.divide_no_nan(1.0, tf.cast(num, tf.float32)))

  def move(weights: tf.Tensor) -> tuple[tf.Tensor]:
    mean = tf.linalg.matvec(app_u, weights, transpose_a=True)
    gradient = tf.linalg.matvec(app_u, _bias(mean)) * (2.0 / num_classes)
    moved = weights - _STEP * (gradient + _DECAY * weights)
    return (tf.nn.softmax(moved),)

  (weights,) = tf.while_loop(
    lambda _: True, move, (uniform,), maximum_iterations=_NUM_ITERATIONS
  )
  return weights


def sum_only_score(app_u: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
  """Computes a client's weight, up to a factor, by a known mean APP-U.

  With the mean over the round's clients, these are the weights after the first
  iteration of `cohort_weights`.

  Args:
    app_u: float32 [C], the client's, of sum 1.
    mean: float32 [C], of sum 1.

  Returns:
    float32 scalar, in `_score_limits`.
  """
  gradient = tf.reduce_sum(app_u * _bias(mean)) * (2.0 / app_u.shape[-1])
  return tf.exp(-_STEP * gradient)


def _bias(mean: tf.Tensor) -> tf.Tensor:
  """Subtracts the uniform distribution from a mean of APP-U."""
  return mean - 1.0 / mean.shape[-1]


def _score_limits(num_classes: int) -> tuple[float, float]:
  """Computes the least and the greatest score that are possible."""
  scale = -2.0 * _STEP / num_classes
  return (
    math.exp(scale * (1.0 - 1.0 / num_classes)),
    math.exp(-scale / num_classes),
  )
