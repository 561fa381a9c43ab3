"""Predictions of helpers, and the losses on them (FedMatch, eq. 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tff_fssl.interface import base
from tff_fssl.lazy import np, tf
from tff_fssl.models import inference
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds
from tff_fssl.semisup.means import Mean

# Names in `BatchExamples.per_example` and `Batch.values`.
PROBS, WEIGHTS = 'helper_probs', 'helper_weights'
LOSS_OF_ALL = 'unmasked_cross_entropy'
# Mean and deviation of the image of noise, before truncation to [0, 255].
_NOISE, _NOISE_SEED = 125.0, 0


def predict(
  client: base.Client,
  helpers: Sequence[Sequence[tf.Tensor]],
  weights: tf.Tensor,
  batch_size: int,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Predicts a client's unlabelled examples by its helpers.

  Args:
    client: The client.
    helpers: For each helper, tensors that are added to sigma.
    weights: float32 [H], 0 for helpers that do not count.
    batch_size: Examples in a forward pass.

  Returns:
    (probabilities float32 [N, H, C], `weights` with 0 for helpers that do not
    predict finite numbers).
  """
  model = client.networks.model

  def predict_by_all() -> tf.Tensor:
    probs = []
    for helper in helpers:
      with model.perturbed(helper):
        probs.append(
          inference.plain_probs(
            model,
            client.unlabeled.x,
            client.views,
            batch_size,
          )
        )
    return tf.stack(probs, axis=1)

  num = tf.shape(client.unlabeled.x)[0]
  nothing = tf.zeros([num, weights.shape[0], model.num_outputs])
  if not helpers:
    return nothing, weights
  # In most rounds no helper is due, and the passes are saved.
  probs = tf.cond(
    tf.reduce_any(weights > 0.0), predict_by_all, lambda: tf.identity(nothing)
  )
  # A client may have uploaded anything.
  is_finite = tf.reduce_all(tf.math.is_finite(probs), axis=[0, 2])
  probs = tf.where(is_finite[:, tf.newaxis], probs, 0.0)
  return probs, weights * tf.cast(is_finite, tf.float32)


def loss(
  examples: base.BatchExamples,
  plain: tf.Tensor,
  strong: tf.Tensor,
  helper_weights: tf.Tensor,
  *,
  threshold: float,
  label_weight: float,
  consistency_weight: float,
  agree: bool,
  local_breaks_ties: bool,
) -> base.Loss:
  """Computes the losses of consistency with helpers and of pseudo-labels.

  Both are means over the local network's confident examples. The helpers'
  confidence does not matter, as in the authors' code.

  Args:
    examples: The batch's unlabelled examples, with `helper_probs`.
    plain: float32 [B, C], the local network's logits of plain views.
    strong: float32 [B, C], its logits of strong views.
    helper_weights: float32 [H], 0 for helpers that do not count.
    threshold: tau.
    label_weight: lambda_a.
    consistency_weight: lambda_i.
    agree: Whether helpers vote on pseudo-labels.
    local_breaks_ties: See `vote`.

  Returns:
    The loss and its metrics.
  """
  probs = tf.stop_gradient(tf.nn.softmax(plain))
  helper_probs = examples.per_example[PROBS]
  voters = helper_weights if agree else tf.zeros_like(helper_weights)
  labels = vote(probs, helper_probs, voters, local_breaks_ties)
  mask = thresholds.fixed_mask(probs, threshold)
  confident = tf.cast(mask, tf.float32) * examples.weights
  size = tf.reduce_sum(confident)
  entropy = losses.masked_mean(losses.cross_entropy(labels, strong), confident)
  divergence = losses.masked_mean(
    divergence_from_helpers(helper_probs, helper_weights, plain), confident
  )
  # Without mask and votes: this loss drives the client's learning rate.
  own = losses.cross_entropy(thresholds.pseudo_labels(probs), strong)
  metrics = diagnostics.pseudo_label_metrics(
    labels, examples.labels, confident, weights=examples.weights
  )
  metrics['loss_pseudo_label'] = Mean.weighted(entropy, size)
  metrics['loss_helpers'] = Mean.weighted(
    divergence, size * tf.reduce_max(helper_weights)
  )
  metrics[LOSS_OF_ALL] = Mean(
    tf.reduce_sum(own * examples.weights), examples.size
  )
  return label_weight * entropy + consistency_weight * divergence, metrics


def vote(
  probs: tf.Tensor,
  helper_probs: tf.Tensor,
  helper_weights: tf.Tensor,
  local_breaks_ties: bool = True,
) -> tf.Tensor:
  """Finds the classes with the most votes of local network and helpers (eq. 3).

  Args:
    probs: float32 [B, C], the local network's predictions.
    helper_probs: float32 [B, H, C], the helpers' predictions.
    helper_weights: float32 [H], 1, or 0 for helpers that do not vote.
    local_breaks_ties: Whether a tied vote goes to the local network's class if
      it is among the tied ones. Other tied votes go to the lowest class.

  Returns:
    int32 [B].
  """
  num_classes = probs.shape[-1]
  own = tf.one_hot(thresholds.pseudo_labels(probs), num_classes)
  theirs = tf.one_hot(thresholds.pseudo_labels(helper_probs), num_classes)
  votes = own + tf.reduce_sum(theirs * helper_weights[:, tf.newaxis], axis=1)
  # Half a vote decides ties, and nothing else.
  if local_breaks_ties:
    votes += 0.5 * own
  return thresholds.pseudo_labels(votes)


def divergence_from_helpers(
  helper_probs: tf.Tensor, helper_weights: tf.Tensor, logits: tf.Tensor
) -> tf.Tensor:
  """Computes the mean over helpers of KL(helper || local) (eq. 2).

  Args:
    helper_probs: float32 [B, H, C], constants. Rows sum to 1.
    helper_weights: float32 [H], 1, or 0 for helpers that do not count.
    logits: float32 [B, C], of the local network.

  Returns:
    float32 [B], in nats, and 0 if no helper counts.
  """
  each = losses.kl_divergence(helper_probs, logits[:, tf.newaxis])
  return tf.math.divide_no_nan(
    tf.reduce_sum(each * helper_weights, axis=-1),
    tf.reduce_sum(helper_weights),
  )


def embedding(client: base.Client) -> tf.Tensor:
  """Predicts an image of noise, by which helpers are chosen: float32 [C].

  A text of noise consists of words with numbers up to 255. For vectors, the
  input is the noise in units of its own deviation, since their entries have no
  common range.
  """
  shape, dtype = client.unlabeled.x.shape[1:], client.unlabeled.x.dtype
  if dtype.is_floating:
    values = draw_noise(shape[-1]) / _NOISE - 1.0
    inputs = tf.constant(values[np.newaxis], tf.float32)
  else:
    values = draw_noise(shape.num_elements()).reshape([1, *shape])
    inputs = client.views.plain(tf.cast(tf.constant(values), dtype))
  logits = client.networks.model.inference_logits(inputs)
  return tf.nn.softmax(logits)[0]


def draw_noise(num_values: int) -> np.ndarray[Any, Any]:
  """Draws truncated Gaussian noise, the same at each call: float64.

  Mean and deviation are 125. Values outside of [0, 255] are drawn again, as in
  the authors' code.
  """
  # Most draws are in range, so that enough remain.
  draws = np.random.default_rng(_NOISE_SEED).normal(
    _NOISE, _NOISE, 8 * num_values + 64
  )
  return draws[(draws >= 0) & (draws <= 255)][:num_values]
