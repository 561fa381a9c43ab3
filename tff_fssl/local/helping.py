"""Networks of others that help a client: predictions, agreement, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import inference
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models import adapter
from tff_fssl.semisup import agreement
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

# Names in `Part.of_example` and `Batch.constants`: what helpers predict, and
# which of them count.
PROBS, WEIGHTS = 'helper_probs', 'helper_weights'
LOSS_OF_ALL = 'unmasked_cross_entropy'
RATIOS = (*terms.PSEUDO_LABEL_RATIOS, 'loss_helpers', LOSS_OF_ALL)
# Mean and deviation of the image of noise, before it is cut to [0, 255].
_NOISE, _NOISE_SEED = 125.0, 0


def predict(
  network: adapter.Network,
  helpers: Sequence[Sequence[tf.Tensor]],
  weights: tf.Tensor,
  data: algorithm_lib.ClientData,
  views: augment.Views,
  batch_size: int,
) -> tuple[tf.Tensor, tf.Tensor]:
  """What helpers predict for a client's unlabelled examples as they are.

  Helpers do not change while a client trains, so once a round is enough.

  Args:
    network: The local network.
    helpers: For each helper, what is added to the trainable weights.
    weights: float32 [H], 0 for helpers that do not count.
    data: The client's data.
    views: The preprocessing.
    batch_size: Examples in a batch.

  Returns:
    float32 [N, H, C], rows sum to 1, or are 0 if no helper counts; `weights`,
    with 0 for helpers whose predictions are not finite: a client may have
    uploaded anything.
  """

  def all_probs() -> tf.Tensor:
    probs = []
    for helper in helpers:
      with network.perturbed(helper):
        probs.append(inference.plain_probs(network, data, views, batch_size))
    return tf.stack(probs, axis=1)

  num = tf.shape(data.unlabeled.x)[0]
  nothing = tf.zeros([num, weights.shape[0], network.num_outputs])
  if not helpers:
    return nothing, weights
  probs = tf.cond(
    tf.reduce_any(weights > 0.0), all_probs, lambda: tf.identity(nothing)
  )
  is_finite = tf.reduce_all(tf.math.is_finite(probs), axis=[0, 2])
  probs = tf.where(is_finite[:, tf.newaxis], probs, 0.0)
  return probs, weights * tf.cast(is_finite, tf.float32)


def loss(
  batch: algorithm_lib.Batch,
  plain: tf.Tensor,
  strong: tf.Tensor,
  *,
  confidence_threshold: float,
  label_weight: float,
  consistency_weight: float,
  agree: bool,
  tie: str,
) -> objective.Loss:
  """FedMatch's inter-client consistency loss and pseudo-label loss.

  Jeong et al. 2021, eq. 2 and 3, as in the authors' code: both are means over
  the examples of which the local network is confident; whether helpers are is
  not asked.

  Args:
    batch: The batch; `of_example` and `constants` have `predict`'s results.
    plain: float32 [B, C], the local network's logits of examples as they are.
    strong: float32 [B, C], of strong views.
    confidence_threshold: tau.
    label_weight: lambda_a.
    consistency_weight: lambda_i.
    agree: Whether helpers vote on pseudo-labels.
    tie: See `agreement.agreed_labels`.

  Returns:
    The loss and its metrics, `RATIOS`.
  """
  part = batch.parts[objective.UNLABELED]
  probs = tf.stop_gradient(tf.nn.softmax(plain))
  helper_probs, weights = part.of_example[PROBS], batch.constants[WEIGHTS]
  voters = weights if agree else tf.zeros_like(weights)
  labels = agreement.agreed_labels(probs, helper_probs, voters, tie)
  mask = thresholds.fixed_mask(probs, confidence_threshold)
  confident = tf.cast(mask, tf.float32) * part.weights
  size = tf.reduce_sum(confident)
  of_labels = losses.masked_mean(
    losses.cross_entropy(labels, strong), confident
  )
  divergence = losses.masked_mean(
    agreement.divergence_from_helpers(helper_probs, weights, plain), confident
  )
  has_helpers = tf.reduce_max(weights)
  own = losses.cross_entropy(thresholds.pseudo_labels(probs), strong)
  ratios = diagnostics.pseudo_label_ratios(
    labels, part.labels, confident, weights=part.weights
  )
  ratios['loss_pseudo_label'] = algorithm_lib.mean_metric(of_labels, size)
  ratios['loss_helpers'] = algorithm_lib.mean_metric(
    divergence, size * has_helpers
  )
  ratios[LOSS_OF_ALL] = (
    tf.reduce_sum(own * part.weights),
    tf.reduce_sum(part.weights),
  )
  return label_weight * of_labels + consistency_weight * divergence, ratios


def noise(num_values: int) -> np.ndarray[Any, Any]:
  """Truncated Gaussian noise, the same at each call: float64 [num_values].

  FedMatch's code: mean and deviation 125, cut to [0, 255] by drawing again.
  """
  draws = np.random.default_rng(_NOISE_SEED).normal(
    _NOISE, _NOISE, 8 * num_values + 64
  )
  return draws[(draws >= 0) & (draws <= 255)][:num_values]


def embedding(
  network: adapter.Network, data: algorithm_lib.ClientData, views: augment.Views
) -> tf.Tensor:
  """What a network predicts for an image of noise: float32 [C], sums to 1.

  A text of noise has words of numbers up to 255. Numbers of vectors have no
  common range, so that for vectors the network's input is the noise, in units
  of its own deviation.

  Args:
    network: The network.
    data: Of a client; the shape of its examples is used.
    views: The preprocessing.

  Returns:
    The prediction.
  """
  shape, dtype = data.unlabeled.x.shape[1:], data.unlabeled.x.dtype
  if dtype.is_floating:
    values = noise(shape[-1]) / _NOISE - 1.0
    inputs = tf.constant(values[np.newaxis], tf.float32)
  else:
    values = noise(shape.num_elements()).reshape([1, *shape])
    inputs = views.plain(tf.cast(tf.constant(values), dtype))
  logits = network.inference_logits(inputs, data.weights.statistics_count)
  return tf.nn.softmax(logits)[0]
