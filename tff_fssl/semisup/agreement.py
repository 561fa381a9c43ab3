"""Pseudo-labels on which several networks agree, and consistency with them."""

from __future__ import annotations

from tff_fssl.lazy import tf
from tff_fssl.semisup import losses
from tff_fssl.semisup import names
from tff_fssl.semisup import thresholds


def agreed_labels(
  probs: tf.Tensor,
  helper_probs: tf.Tensor,
  helper_weights: tf.Tensor,
  tie: str = names.LOCAL,
) -> tf.Tensor:
  """The classes that most networks find most probable.

  FedMatch (Jeong et al. 2021), eq. 3 and the text below it: each network has
  one vote, the local one too.

  Args:
    probs: float32 [B, C], the local network's predictions.
    helper_probs: float32 [B, H, C], those of the helpers.
    helper_weights: float32 [H], 1, or 0 for helpers that do not vote.
    tie: Which of several classes with equally many votes. `names.LOCAL`: the
      local network's, if it is among them, else the lowest; `names.LOWEST`: the
      lowest.

  Returns:
    int32 [B].
  """
  num_classes = probs.shape[-1]
  own = tf.one_hot(thresholds.pseudo_labels(probs), num_classes)
  theirs = tf.one_hot(thresholds.pseudo_labels(helper_probs), num_classes)
  votes = own + tf.reduce_sum(theirs * helper_weights[:, tf.newaxis], axis=1)
  if tie == names.LOCAL:
    votes += 0.5 * own
  return thresholds.pseudo_labels(votes)


def divergence_from_helpers(
  helper_probs: tf.Tensor, helper_weights: tf.Tensor, logits: tf.Tensor
) -> tf.Tensor:
  """The mean over helpers of KL(helper || softmax(logits)), per example.

  FedMatch's inter-client consistency (Jeong et al. 2021, eq. 2).

  Args:
    helper_probs: float32 [B, H, C], rows sum to 1; no gradient is taken through
      them.
    helper_weights: float32 [H], 1, or 0 for helpers that do not count.
    logits: float32 [B, C], of the local network.

  Returns:
    float32 [B], in nats; 0 if no helper counts.
  """
  each = losses.kl_divergence(helper_probs, logits[:, tf.newaxis])
  return tf.math.divide_no_nan(
    tf.reduce_sum(each * helper_weights, axis=-1),
    tf.reduce_sum(helper_weights),
  )
