"""FedCon's steps on two weak views of each example, with a target network.

At clients it is BYOL (Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020).
"""

from __future__ import annotations

from collections.abc import Callable

from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.semisup import losses
from tff_fssl.semisup.means import Mean

VIEWS = {'first': 'weak', 'second': 'weak'}
TARGET, PROJECTOR = 'target', 'projector'
# The default of the authors' framework, PyTorch.
_EPSILON = 1e-5


def build_projector(
  hidden_size: int,
) -> Callable[[adapter.Network], tf.keras.Model]:
  """Builds the function that makes a projector for a client's network.

  Args:
    hidden_size: The width of the one hidden layer, which has batch norm.

  Returns:
    A function from a network to an MLP with as many inputs and outputs as the
    network has features.
  """

  def model_fn(network: adapter.Network) -> tf.keras.Model:
    layers, size = tf.keras.layers, network.feature_size
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
  networks: base.Networks, batch: base.Batch
) -> base.StepResult:
  """Differentiates the similarity of two views, and moves the projector.

  The loss is D(h(f(x1)), f'(x2)) / 2 + D(h(f(x2)), f'(x1)) / 2, where h is the
  projector, f' the target network, without gradient, and D the mean of
  `losses.negative_cosine`. No network uses its last layer.

  Args:
    networks: The client's networks.
    batch: The batch.

  Returns:
    The backbone's gradients, and the metrics `loss_similarity` and
    `feature_deviation`.
  """
  examples, model = batch.unlabeled, networks.model
  images = [examples.views[name] for name in VIEWS]
  # Outside of the tape: no gradient flows through the targets.
  targets = [networks[TARGET].features(x, training=True) for x in images]
  with tf.GradientTape() as tape:
    features = [model.features(x, training=True) for x in images]
    loss = 0.0
    # Each view predicts the target of the other one.
    for own, other in zip(features, reversed(targets), strict=True):
      prediction = networks[PROJECTOR].logits(own, training=True)
      distances = losses.negative_cosine(prediction, other)
      loss += 0.5 * losses.masked_mean(distances, examples.weights)
  own_gradients, projector_gradients = adapter.gradients(
    tape, loss, model, networks[PROJECTOR]
  )
  networks.descend(PROJECTOR, projector_gradients)
  # Without negative examples the features may collapse to a point.
  spread = losses.feature_deviation(features[0])
  return base.StepResult(
    own_gradients,
    {
      'loss_similarity': Mean.weighted(loss, examples.size),
      'feature_deviation': Mean.weighted(spread, examples.size),
    },
  )


def consistency_step(
  networks: base.Networks,
  batch: base.Batch,
  *,
  weight: tf.Tensor,
  is_online: bool,
) -> base.StepResult:
  """Differentiates cross-entropy and consistency of labelled examples.

  The loss is the mean cross-entropy of both views, plus weight times the mean
  of KL(p2' || p1) / 2 + KL(p1' || p2) / 2. The p' are predictions of the target
  network, without gradient.

  Args:
    networks: The server's networks.
    batch: The batch.
    weight: float32 scalar.
    is_online: Whether the p' are predictions of the trained network instead.

  Returns:
    The gradients, the metrics of labels, and `loss_consistency`.
  """
  examples, model = batch.labeled, networks.model
  labeler = model if is_online else networks[TARGET]
  images = [examples.views[name] for name in VIEWS]
  targets = [tf.nn.softmax(labeler.logits(x, training=True)) for x in images]
  with tf.GradientTape() as tape:
    logits = [model.logits(x, training=True) for x in images]
    (first, metrics), (second, _) = (
      base.cross_entropy_loss(z, examples) for z in logits
    )
    entropy = 0.5 * (first + second)
    divergences = [
      losses.masked_mean(losses.kl_divergence(p, z), examples.weights)
      for p, z in zip(reversed(targets), logits, strict=True)
    ]
    consistency = 0.5 * tf.add_n(divergences)
    loss = entropy + weight * consistency
  # In place of the cross-entropy of the first view alone.
  metrics['loss_labeled'] = Mean.weighted(entropy, examples.size)
  metrics['loss_consistency'] = Mean.weighted(consistency, examples.size)
  return base.StepResult(model.gradients(tape, loss), metrics)
