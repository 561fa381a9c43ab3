"""Steps on two weak views of each example, with a target network.

FedCon's; at clients it is BYOL (Grill et al., "Bootstrap Your Own Latent",
NeurIPS 2020).
"""

from __future__ import annotations

from collections.abc import Callable

from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.models import adapter
from tff_fssl.semisup import losses

VIEWS = {'first': 'weak', 'second': 'weak'}
# Names of the peers.
TARGET, PROJECTOR = 'target', 'projector'
SIMILARITY_RATIOS = ('loss_similarity', 'feature_deviation')
CONSISTENCY_RATIOS = (*objective.LABELED_RATIOS, 'loss_consistency')
_EPSILON = 1e-5


def build_projector(
  hidden_size: int,
) -> Callable[[adapter.Network], tf.keras.Model]:
  """`Peer.model_fn` of the projector: an MLP from features to as many values.

  Args:
    hidden_size: The width of its one hidden layer, which has batch norm with
      the epsilon of the authors' framework, PyTorch.

  Returns:
    The function.
  """

  def model_fn(local: adapter.Network) -> tf.keras.Model:
    layers, size = tf.keras.layers, local.feature_size
    return tf.keras.Sequential(
      [
        tf.keras.Input([size]),
        layers.Dense(hidden_size, name='hidden'),
        layers.BatchNormalization(epsilon=_EPSILON, name='norm'),
        layers.ReLU(name='relu'),
        layers.Dense(size, name='prediction'),
      ],
      name=PROJECTOR,
    )

  return model_fn


def similarity_step(
  networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
) -> algorithm_lib.StepResult:
  """A step of the local network f and the projector h on unlabelled examples.

  The loss is D(h(f(x1)), f'(x2)) / 2 + D(h(f(x2)), f'(x1)) / 2, where f' is the
  target network, without gradient, and D the mean of
  `losses.negative_cosine`. All take features; no network uses its last layer.

  Args:
    networks: The networks.
    batch: The batch.

  Returns:
    The step's result, with metrics `SIMILARITY_RATIOS`.
  """
  part = batch.parts[objective.UNLABELED]
  local, target = networks.local, networks.peers[TARGET]
  projector = networks.peers[PROJECTOR]
  images = [part.views[name] for name in VIEWS]
  targets = [target.features(x, training=True) for x in images]
  with tf.GradientTape() as tape:
    features = [local.features(x, training=True) for x in images]
    loss = 0.0
    for own, other in zip(features, reversed(targets), strict=True):
      prediction = projector.logits(own, training=True)
      distances = losses.negative_cosine(prediction, other)
      loss += 0.5 * losses.masked_mean(distances, part.weights)
  of_local, of_projector = adapter.gradients(tape, loss, local, projector)
  size = tf.reduce_sum(part.weights)
  spread = losses.feature_deviation(features[0])
  return algorithm_lib.StepResult(
    of_local,
    {
      'loss_similarity': algorithm_lib.mean_metric(loss, size),
      'feature_deviation': algorithm_lib.mean_metric(spread, size),
    },
    of_peers={PROJECTOR: of_projector},
  )


def consistency_step(
  networks: algorithm_lib.Networks,
  batch: algorithm_lib.Batch,
  *,
  weight: tf.Tensor,
  is_online: bool,
) -> algorithm_lib.StepResult:
  """A step of the local network on labelled examples.

  The loss is the mean cross-entropy of both views, plus weight times the mean
  of KL(p2' || p1) / 2 + KL(p1' || p2) / 2, where p' are predictions of the
  target network, without gradient.

  Args:
    networks: The networks.
    batch: The batch.
    weight: float32 scalar.
    is_online: Whether p' are predictions of the local network instead.

  Returns:
    The step's result, with metrics `CONSISTENCY_RATIOS`.
  """
  part, local = batch.parts[objective.LABELED], networks.local
  labeler = local if is_online else networks.peers[TARGET]
  images = [part.views[name] for name in VIEWS]
  targets = [tf.nn.softmax(labeler.logits(x, training=True)) for x in images]
  with tf.GradientTape() as tape:
    logits = [local.logits(x, training=True) for x in images]
    (first, ratios), (second, _) = (
      objective.labeled_loss(z, part) for z in logits
    )
    entropy = 0.5 * (first + second)
    divergences = [
      losses.masked_mean(losses.kl_divergence(p, z), part.weights)
      for p, z in zip(reversed(targets), logits, strict=True)
    ]
    consistency = 0.5 * tf.add_n(divergences)
    loss = entropy + weight * consistency
  size = tf.reduce_sum(part.weights)
  ratios['loss_labeled'] = algorithm_lib.mean_metric(entropy, size)
  ratios['loss_consistency'] = algorithm_lib.mean_metric(consistency, size)
  return algorithm_lib.StepResult(local.gradients(tape, loss), ratios)
