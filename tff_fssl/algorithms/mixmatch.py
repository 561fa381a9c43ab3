"""MixMatch at clients, with FedAvg or FedProx.

Berthelot et al., "MixMatch: A Holistic Approach to Semi-Supervised Learning",
NeurIPS 2019.

In a round:
1.  The server broadcasts the model.
2.  For each batch, a client guesses the label of each unlabelled example as the
    sharpened mean prediction for several weak views. It mixes all views of all
    examples of the batch, labelled ones included, with one another. The loss is
    the cross-entropy of mixed labelled examples plus lambda_u times the squared
    error of mixed unlabelled ones. lambda_u rises linearly over the first
    rounds.
3.  The server averages. With labels at the server, it then trains on them
    (cross-entropy, weak view, no mixing).

Choices and deviations: With labels at the server, clients mix unlabelled
examples with one another, and their loss is the squared error alone. All mixed
examples go through the network as one batch, so that batch norm sees them
together (the authors interleave sub-batches). The ramp's length is 1/64 of the
paper's training, as in the authors' code, but in rounds. SGD with weight decay
in the gradient replaces Adam. There is no moving average of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.client import joint_pass
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.semisup import annealing
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import mixup
from tff_fssl.semisup import sharpening
from tff_fssl.semisup import thresholds


class _MixedRows(NamedTuple):
  """The N views of a batch's examples, those of labelled ones first.

  Attributes:
    images: float32 [N, ...].
    targets: float32 [N, C], probabilities.
    weights: float32 [N], 0 for fillers.
    num_labeled: int32 scalar, or 0.
  """

  images: tf.Tensor
  targets: tf.Tensor
  weights: tf.Tensor
  num_labeled: tf.Tensor | int

  def mean(
    self,
    loss_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    logits: tf.Tensor,
    which: slice,
  ) -> tf.Tensor:
    """Computes the mean of `loss_fn(targets, logits)` over some rows."""
    values = loss_fn(self.targets[which], logits[which])
    return losses.masked_mean(values, self.weights[which])


@dataclasses.dataclass(frozen=True)
class MixMatch(base.Algorithm):
  """MixMatch at clients, with FedAvg or FedProx."""

  name = 'mixmatch'
  paper = 'Berthelot et al., NeurIPS 2019'
  capabilities = base.Capabilities(without_mixing='mixup_concentration=0')
  tiny = {'ramp_rounds': 0}
  metrics = (
    metrics_lib.client_metric(
      'loss_guess',
      'Squared error between mixed guesses and predictions for mixed views,'
      " mean over the unlabelled examples' views and over classes, before its"
      ' weight and ramp.',
      '',
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(metrics_lib.LOSS_AT_CLIENTS, 'guesses'),
      figure='loss',
    ),
    metrics_lib.client_metric(
      'loss_mixed_labeled',
      'With labels at the clients: cross-entropy of mixed labels with'
      ' predictions for mixed images, mean over the labelled examples.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(
        metrics_lib.LOSS_AT_CLIENTS, 'mixed labelled', metrics_lib.DASHED
      ),
      figure='label loss',
    ),
  )

  num_views: int = hparam(
    2,
    'A, the number of weak views from which a label is guessed (MixMatch,'
    ' section 4.1).',
    minimum=1,
    maximum=100,
  )
  temperature: float = hparam(
    0.5,
    'T of sharpening (MixMatch, section 4.1).',
    minimum=1e-6,
    maximum=1e6,
  )
  mixup_concentration: float = hparam(
    0.75,
    'alpha of Beta(alpha, alpha), from which shares of mixup are drawn'
    ' (MixMatch, section 4.1); 0: no mixing.',
    minimum=0,
    maximum=1e6,
  )
  unlabeled_loss_weight: float = hparam(
    75.0,
    'lambda_u, the weight of the squared error after the ramp (MixMatch,'
    ' section 4.2.1, for CIFAR-10).',
    minimum=0,
  )
  ramp_rounds: int = hparam(
    13,
    'Rounds over which that weight rises linearly from 0; 0: no ramp. The'
    " authors' ramp is 1/64 of training, here of 800 rounds.",
    minimum=0,
    maximum=10**7,
  )

  def unlabeled_stream(self) -> base.Stream:
    """Draws several weak views of each unlabelled example."""
    return base.Stream({f'weak_{i}': 'weak' for i in range(self.num_views)})

  def step(self, networks: base.Networks, batch: base.Batch) -> base.StepResult:
    """Differentiates the joint loss of labelled and unlabelled examples."""
    return base.minimize(self._loss, networks, batch)

  def _loss(self, networks: base.Networks, batch: base.Batch) -> base.Loss:
    """Computes L_x + lambda_u L_u (MixMatch, algorithm 1)."""
    examples = batch.unlabeled
    probs = [
      tf.nn.softmax(examples.logits(networks.model, view))
      for view in examples.views
    ]
    # All views of an example share the guess.
    guess = sharpening.guess(probs, self.temperature)
    rows = self._mixed_rows(batch, guess)
    # One pass, so that batch norm sees all mixed examples together.
    call = lambda images: networks.model.logits(images, training=True)
    groups = [(rows.images, rows.weights)]
    if base.LABELED in batch.streams:
      parts = slice(None, rows.num_labeled), slice(rows.num_labeled, None)
      groups = [(rows.images[part], rows.weights[part]) for part in parts]
    logits = tf.concat(joint_pass.skip_fillers(call, *groups), 0)
    error = rows.mean(
      losses.squared_error, logits, slice(rows.num_labeled, None)
    )
    loss = self.unlabeled_loss_weight * self._ramp(batch.time) * error
    # MixMatch has no threshold: every example counts as kept.
    metrics = diagnostics.pseudo_label_metrics(
      thresholds.pseudo_labels(guess),
      examples.labels,
      examples.weights,
      weights=examples.weights,
    )
    metrics['loss_guess'] = base.Mean.weighted(error, examples.size)
    if base.LABELED in batch.streams:
      entropy = rows.mean(
        losses.soft_cross_entropy, logits, slice(None, rows.num_labeled)
      )
      loss += entropy
      metrics['loss_mixed_labeled'] = base.Mean.weighted(
        entropy, batch.labeled.size
      )
    return loss, metrics

  def _mixed_rows(self, batch: base.Batch, guess: tf.Tensor) -> _MixedRows:
    """Mixes each view with a partner among all views of the batch."""
    images = list(batch.unlabeled.views.values())
    targets = [guess] * len(images)
    weights = [batch.unlabeled.weights] * len(images)
    num_labeled: tf.Tensor | int = 0
    if base.LABELED in batch.streams:
      # In front, where `num_labeled` separates them.
      known = batch.labeled
      num_labeled = tf.size(known.labels)
      images.insert(0, known.views['weak'])
      targets.insert(0, tf.one_hot(known.labels, guess.shape[-1]))
      weights.insert(0, known.weights)
    rows = _MixedRows(
      tf.concat(images, axis=0),
      tf.concat(targets, axis=0),
      tf.concat(weights, axis=0),
      num_labeled,
    )
    if not self.mixup_concentration:
      return rows
    size = tf.size(rows.weights)
    shares = mixup.draw_shares([size], self.mixup_concentration, batch.seed)
    mixed_images, mixed_targets = mixup.mix_with_partners(
      rows.images,
      rows.targets,
      rows.weights,
      # Reversed, the seed draws partners independently of shares.
      mixup.permutation(size, tf.reverse(batch.seed, [0])),
      # An example keeps the larger share, and so its own kind of loss.
      mixup.larger_shares(shares),
    )
    return rows._replace(images=mixed_images, targets=mixed_targets)

  def _ramp(self, time: base.StepTime) -> tf.Tensor:
    """Computes the factor that rises from 0 to 1 over `ramp_rounds`."""
    if not self.ramp_rounds:
      return tf.constant(1.0)
    return annealing.linear_ramp(time.progress(self.ramp_rounds), 1.0)
