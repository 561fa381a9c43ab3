"""Terms of semi-supervised objectives on unlabelled examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.models import adapter
from tff_fssl.semisup import annealing
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import mixup
from tff_fssl.semisup import prototypes as prototypes_lib
from tff_fssl.semisup import sharpening
from tff_fssl.semisup import thresholds

WEAK_AND_STRONG = {
  objective.UNLABELED: algorithm_lib.Stream(
    {'weak': 'weak', 'strong': 'strong'}
  )
}
PSEUDO_LABEL_RATIOS = (
  'loss_pseudo_label',
  *diagnostics.names(diagnostics.PSEUDO_LABEL),
)


def pseudo_label_loss(
  probs: tf.Tensor,
  logits: tf.Tensor,
  part: algorithm_lib.Part,
  *,
  confidence_threshold: float,
  loss_weight: float,
) -> objective.Loss:
  """The loss of FixMatch's term, whoever predicts the weak views.

  Args:
    probs: float32 [B, C], predictions for weak views; no gradient is taken
      through them.
    logits: float32 [B, C], for strong views.
    part: The unlabelled part of the batch.
    confidence_threshold: See `fixmatch`.
    loss_weight: See `fixmatch`.

  Returns:
    The loss and its metrics, `PSEUDO_LABEL_RATIOS`.
  """
  pseudo_labels = thresholds.pseudo_labels(probs)
  mask = thresholds.fixed_mask(probs, confidence_threshold)
  kept = tf.cast(mask, tf.float32) * part.weights
  entropies = losses.cross_entropy(pseudo_labels, logits)
  ratios = diagnostics.pseudo_label_ratios(
    pseudo_labels, part.labels, kept, weights=part.weights
  )
  ratios['loss_pseudo_label'] = algorithm_lib.ratio(
    tf.reduce_sum(kept * entropies), tf.reduce_sum(kept)
  )
  return loss_weight * tf.reduce_mean(kept * entropies), ratios


PROTOTYPE_LABEL_RATIOS = (
  'loss_prototype_label',
  *diagnostics.names(diagnostics.PSEUDO_LABEL),
)


def prototype_label_loss(
  embeddings: tf.Tensor,
  log_probs: tf.Tensor,
  part: algorithm_lib.Part,
  helpers: Mapping[str, tf.Tensor],
  *,
  distance: str,
  temperature: float,
  stop_gradient: bool,
) -> objective.Loss:
  """The loss of ProtoFSSL's term, on labels by others' prototypes.

  mean_b CE(p_b, own prediction), p the helpers' mean prediction, sharpened.

  Args:
    embeddings: float32 [B, D], of unlabelled examples.
    log_probs: float32 [B, K], own predictions for them.
    part: The unlabelled part of the batch.
    helpers: Arguments of `prototypes.mean_probs`, by name.
    distance: See `prototypes.distances`.
    temperature: T of sharpening, > 0.
    stop_gradient: Whether no gradient flows through p.

  Returns:
    The loss and its metrics, `PROTOTYPE_LABEL_RATIOS`.
  """
  probs = prototypes_lib.mean_probs(embeddings, **helpers, distance=distance)
  targets = sharpening.sharpen_with_gradient(probs, temperature)
  if stop_gradient:
    targets = tf.stop_gradient(targets)
  entropies = prototypes_lib.cross_entropy(targets, log_probs)
  loss = losses.masked_mean(entropies, part.weights)
  ratios = diagnostics.pseudo_label_ratios(
    thresholds.pseudo_labels(probs),
    part.labels,
    part.weights,
    weights=part.weights,
  )
  size = tf.reduce_sum(part.weights)
  ratios['loss_prototype_label'] = algorithm_lib.mean_metric(loss, size)
  return loss, ratios


def fixmatch(
  *, confidence_threshold: float, loss_weight: float
) -> objective.Term:
  """FixMatch's term: pseudo-labels of weak views, learnt on strong views.

  Sohn et al. 2020, eq. 4: (1/B) sum_b 1[max q_b >= tau] H(argmax q_b,
  f(strong_b)), q = softmax(f(weak)) without gradient, over the whole batch.

  Args:
    confidence_threshold: tau, in [0, 1].
    loss_weight: lambda_u, >= 0.

  Returns:
    The term.
  """

  def loss(
    network: adapter.Network, batch: algorithm_lib.Batch
  ) -> objective.Loss:
    part = batch.parts[objective.UNLABELED]
    probs = tf.nn.softmax(objective.training_logits(network, part, 'weak'))
    return pseudo_label_loss(
      probs,
      objective.training_logits(network, part, 'strong'),
      part,
      confidence_threshold=confidence_threshold,
      loss_weight=loss_weight,
    )

  return objective.Term(loss, PSEUDO_LABEL_RATIOS, WEAK_AND_STRONG)


def self_training(
  *, confidence_threshold: float, loss_weight: float
) -> objective.Term:
  """The pseudo-labels of weak and of strong views, learnt on the same views.

  FedRGD's code with labels at the clients: the mean over all 2 B views v of
  1[max q_v >= tau] H(argmax q_v, f(v)), q_v = softmax(f(v)) without gradient.
  Metrics of pseudo-labels are means over both views, too.

  Args:
    confidence_threshold: tau, in [0, 1].
    loss_weight: The weight of the term, >= 0.

  Returns:
    The term.
  """

  def loss(
    network: adapter.Network, batch: algorithm_lib.Batch
  ) -> objective.Loss:
    part = batch.parts[objective.UNLABELED]
    of_views = []
    for view in part.views:
      logits = objective.training_logits(network, part, view)
      of_views.append(
        pseudo_label_loss(
          tf.nn.softmax(logits),
          logits,
          part,
          confidence_threshold=confidence_threshold,
          loss_weight=0.5 * loss_weight,
        )
      )
    (first, ratios), (second, more) = of_views
    # A count is at most the number of examples.
    halves = {
      name: (0.5 * (total + more[name][0]), 0.5 * (count + more[name][1]))
      for name, (total, count) in ratios.items()
    }
    return first + second, halves

  return objective.Term(loss, PSEUDO_LABEL_RATIOS, WEAK_AND_STRONG)


def uda(
  *, confidence_threshold: float, temperature: float, loss_weight: float
) -> objective.Term:
  """UDA's term: consistency with sharpened predictions for weak views.

  Xie et al. 2020, section 3.2, and the authors' code: (1/B) sum_b 1[max q_b >
  beta] KL(softmax(z_b / T) || f(strong_b)), q = softmax(z), z the logits of the
  weak view, without gradient. The mask sees probabilities before sharpening.

  Args:
    confidence_threshold: beta, in [0, 1].
    temperature: T, > 0.
    loss_weight: lambda, >= 0.

  Returns:
    The term.
  """

  def loss(
    network: adapter.Network, batch: algorithm_lib.Batch
  ) -> objective.Loss:
    part = batch.parts[objective.UNLABELED]
    logits = objective.training_logits(network, part, 'weak')
    probs = tf.nn.softmax(logits)
    mask = thresholds.strict_mask(probs, confidence_threshold)
    kept = tf.cast(mask, tf.float32) * part.weights
    targets = sharpening.sharpened_softmax(logits, temperature)
    strong = objective.training_logits(network, part, 'strong')
    divergences = losses.kl_divergence(targets, strong)
    ratios = diagnostics.pseudo_label_ratios(
      thresholds.pseudo_labels(probs), part.labels, kept, weights=part.weights
    )
    ratios['loss_soft_pseudo_label'] = algorithm_lib.ratio(
      tf.reduce_sum(kept * divergences), tf.reduce_sum(kept)
    )
    mean = losses.masked_mean(kept * divergences, part.weights)
    return loss_weight * mean, ratios

  return objective.Term(
    loss,
    (
      'loss_soft_pseudo_label',
      *diagnostics.names(diagnostics.PSEUDO_LABEL),
    ),
    WEAK_AND_STRONG,
  )


def annealed_supervised(*, schedule: str, num_rounds: int) -> objective.Term:
  """The supervised term with training signal annealing (TSA).

  Xie et al. 2020, section 3.3: labelled examples whose label already has a
  probability above a threshold are left out. The threshold rises from about 1/C
  to 1 over `num_rounds` rounds. Before round 1 (server pre-training) no example
  is left out.

  Args:
    schedule: `linear`, `log` or `exp`; `none`: no example is ever left out.
    num_rounds: Rounds until the threshold is 1.

  Returns:
    The term.
  """
  plain = objective.supervised()
  if schedule == 'none':
    return plain

  def loss(
    network: adapter.Network, batch: algorithm_lib.Batch
  ) -> objective.Loss:
    part = batch.parts[objective.LABELED]
    logits = objective.training_logits(network, part, 'weak')
    threshold = tf.where(
      batch.clock.round_num >= 1,
      annealing.tsa_threshold(
        batch.clock.progress(num_rounds), schedule, logits.shape[-1]
      ),
      1.0,
    )
    value, kept = annealing.tsa_cross_entropy(
      part.labels, logits, threshold, part.weights
    )
    _, ratios = objective.labeled_loss(logits, part)
    ratios['tsa_ratio'] = algorithm_lib.ratio(
      tf.reduce_sum(kept), tf.reduce_sum(part.weights)
    )
    return value, ratios

  return plain._replace(loss=loss, ratios=(*plain.ratios, 'tsa_ratio'))


def mixmatch(
  *,
  labeled: bool,
  num_views: int,
  temperature: float,
  concentration: float,
  loss_weight: float,
  ramp_rounds: int,
) -> objective.Term:
  """MixMatch's objective: guessed labels, mixup of all examples, two losses.

  Berthelot et al. 2019, algorithm 1. The labels of an unlabelled example are
  guessed from the mean prediction for its weak views, sharpened. All views of
  all examples of the batch are mixed with partners drawn among them, with
  shares max(lam, 1 - lam), lam ~ Beta(a, a) for each. L = L_x + lambda_u L_u:
  L_x is the mean cross-entropy of mixed labelled examples, L_u the mean squared
  error, over examples and classes, of mixed unlabelled ones.

  Args:
    labeled: Whether clients hold labels; if not, L = lambda_u L_u, and
      unlabelled examples are mixed among themselves.
    num_views: A, the number of weak views of an unlabelled example.
    temperature: T of sharpening, > 0.
    concentration: a of the Beta distribution; 0: no mixing.
    loss_weight: lambda_u, >= 0, after the ramp.
    ramp_rounds: Rounds over which lambda_u rises from 0; 0: no ramp.

  Returns:
    The term.
  """
  names = tuple(f'weak_{i}' for i in range(num_views))

  def loss(
    network: adapter.Network, batch: algorithm_lib.Batch
  ) -> objective.Loss:
    part = batch.parts[objective.UNLABELED]
    probs = [
      tf.nn.softmax(network.logits(part.views[name], training=True))
      for name in names
    ]
    guess = sharpening.guess(probs, temperature)
    rows = _rows(batch, names, guess, labeled=labeled)
    if concentration:
      rows = _mixed(rows, concentration, batch.seed)
    logits = network.logits(rows.images, training=True)
    of_guess = _mean_loss(
      losses.squared_error, rows, logits, slice(rows.num_labeled, None)
    )
    total = loss_weight * _ramp(batch.clock, ramp_rounds) * of_guess
    ratios = diagnostics.pseudo_label_ratios(
      thresholds.pseudo_labels(guess),
      part.labels,
      part.weights,
      weights=part.weights,
    )
    ratios['loss_guess'] = algorithm_lib.mean_metric(
      of_guess, tf.reduce_sum(part.weights)
    )
    if labeled:
      of_labels = _mean_loss(
        losses.soft_cross_entropy, rows, logits, slice(None, rows.num_labeled)
      )
      weights = batch.parts[objective.LABELED].weights
      ratios['loss_mixed_labeled'] = algorithm_lib.mean_metric(
        of_labels, tf.reduce_sum(weights)
      )
      total += of_labels
    return total, ratios

  streams = {
    objective.UNLABELED: algorithm_lib.Stream(dict.fromkeys(names, 'weak'))
  }
  if labeled:
    streams |= objective.supervised().streams
  names_of_ratios = (
    'loss_guess',
    *(('loss_mixed_labeled',) if labeled else ()),
    *diagnostics.names(diagnostics.PSEUDO_LABEL),
  )
  return objective.Term(loss, names_of_ratios, streams)


class _Rows(NamedTuple):
  """All views of a batch's examples, N in all, the labelled ones first.

  Attributes:
    images: float32 [N, ...].
    targets: float32 [N, C], probabilities.
    weights: float32 [N]; see `Part.weights`.
    num_labeled: int32 scalar, or 0 if the batch has no labelled part.
  """

  images: tf.Tensor
  targets: tf.Tensor
  weights: tf.Tensor
  num_labeled: tf.Tensor | int


def _rows(
  batch: algorithm_lib.Batch,
  names: Sequence[str],
  guess: tf.Tensor,
  *,
  labeled: bool,
) -> _Rows:
  """The rows of a batch: labels are known, or guessed for all of `names`."""
  part = batch.parts[objective.UNLABELED]
  images = [part.views[name] for name in names]
  targets, weights = [guess] * len(names), [part.weights] * len(names)
  num_labeled: tf.Tensor | int = 0
  if labeled:
    known = batch.parts[objective.LABELED]
    num_labeled = tf.size(known.labels)
    images = [known.views['weak'], *images]
    targets = [tf.one_hot(known.labels, guess.shape[-1]), *targets]
    weights = [known.weights, *weights]
  return _Rows(
    tf.concat(images, axis=0),
    tf.concat(targets, axis=0),
    tf.concat(weights, axis=0),
    num_labeled,
  )


def _mixed(rows: _Rows, concentration: float, seed: tf.Tensor) -> _Rows:
  """Mixes each row with a partner among all rows; it keeps the larger share."""
  size = tf.size(rows.weights)
  shares = mixup.draw_shares([size], concentration, seed)
  partners = mixup.permutation(size, tf.reverse(seed, [0]))
  images, targets = mixup.mix_with_partners(
    rows.images,
    rows.targets,
    rows.weights,
    partners,
    mixup.at_least_half(shares),
  )
  return rows._replace(images=images, targets=targets)


def _ramp(clock: algorithm_lib.Clock, num_rounds: int) -> tf.Tensor:
  """Rises from 0 to 1 over `num_rounds` rounds; 1 if there are none."""
  if not num_rounds:
    return tf.constant(1.0)
  return annealing.linear_ramp(clock.progress(num_rounds), 1.0)


def _mean_loss(
  loss_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  rows: _Rows,
  logits: tf.Tensor,
  which: slice,
) -> tf.Tensor:
  """The mean of `loss_fn(targets, logits)` over some rows."""
  of_rows = loss_fn(rows.targets[which], logits[which])
  return losses.masked_mean(of_rows, rows.weights[which])
