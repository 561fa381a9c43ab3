"""Terms of semi-supervised objectives on unlabelled examples."""

import tensorflow as tf

from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

_WEAK_AND_STRONG = {
  objective.UNLABELED: algorithm_lib.Stream(
    {'weak': 'weak', 'strong': 'strong'}
  )
}
_PSEUDO_LABEL_RATIOS = (
  'loss_pseudo_label',
  *diagnostics.names(diagnostics.PSEUDO_LABEL),
)


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

  def loss(network, batch):
    part = batch.parts[objective.UNLABELED]
    probs = tf.nn.softmax(network.logits(part.views['weak'], training=True))
    pseudo_labels = thresholds.pseudo_labels(probs)
    mask = thresholds.fixed_mask(probs, confidence_threshold)
    kept = tf.cast(mask, tf.float32) * part.weights
    logits = network.logits(part.views['strong'], training=True)
    entropies = losses.cross_entropy(pseudo_labels, logits)
    ratios = diagnostics.pseudo_label_ratios(
      pseudo_labels, part.labels, kept, weights=part.weights
    )
    ratios['loss_pseudo_label'] = algorithm_lib.ratio(
      tf.reduce_sum(kept * entropies), tf.reduce_sum(kept)
    )
    return loss_weight * tf.reduce_mean(kept * entropies), ratios

  return objective.Term(loss, _PSEUDO_LABEL_RATIOS, _WEAK_AND_STRONG)
