"""Disjoint learning: weights are sigma + psi, each moved by other examples.

Jeong et al. 2021 (FedMatch), section 3.2. Sigma are the local network's
trainable weights, psi those of a peer. All functions also work without psi:
then sigma does both.
"""

from __future__ import annotations

from collections.abc import Sequence

from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import sparsity

# The names of the sets; psi is also the peer's.
SIGMA, PSI = 'sigma', 'psi'


def psi_of(networks: algorithm_lib.Networks) -> Sequence[tf.Variable]:
  """What is added to sigma; () without psi."""
  return networks.peers[PSI].trainable_variables if networks.peers else ()


def sets_of(
  networks: algorithm_lib.Networks,
) -> dict[str, Sequence[tf.Variable]]:
  """The sets by name, sigma first."""
  sets = {SIGMA: networks.local, **networks.peers}
  return {name: n.trainable_variables for name, n in sets.items()}


def split(weights: Weights, factor: float) -> tuple[Weights, Weights]:
  """(sigma, psi) with psi = factor sigma, whose sum is `weights` exactly.

  Args:
    weights: The weights.
    factor: In [0, 1].

  Returns:
    Two sets.
  """
  sigma = tuple(w / (1.0 + factor) for w in weights.trainable)
  psi = tuple(w - s for w, s in zip(weights.trainable, sigma, strict=True))
  return weights._replace(trainable=sigma), weights._replace(trainable=psi)


def summed(
  sigma: Weights, psi: Sequence[tf.Tensor], threshold: float
) -> Weights:
  """The weights that predict: psi counts only where |psi| > threshold."""
  kept = sparsity.sparsify(psi, threshold)
  return sigma._replace(
    trainable=tuple(s + p for s, p in zip(sigma.trainable, kept, strict=True))
  )


def supervised(loss_weight: float) -> algorithm_lib.LocalAlgorithm:
  """Sigma learns from labelled examples as they are: weight * mean CE."""

  def step(
    networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
  ) -> algorithm_lib.StepResult:
    local, part = networks.local, batch.parts[objective.LABELED]
    with local.perturbed(psi_of(networks)), tf.GradientTape() as tape:
      logits = objective.training_logits(local, part, 'plain')
      loss, ratios = objective.labeled_loss(logits, part)
      loss *= loss_weight
    return algorithm_lib.StepResult(local.gradients(tape, loss), ratios)

  return algorithm_lib.LocalAlgorithm(
    (step,),
    objective.LABELED_RATIOS,
    {objective.LABELED: algorithm_lib.Stream({'plain': 'plain'}, labeled=True)},
  )


def penalty_gradients(
  psi: Sequence[tf.Tensor],
  sigma: Sequence[tf.Tensor],
  l1_weight: float,
  l2_weight: float,
) -> list[tf.Tensor]:
  """Gradients with respect to psi of l1 |psi|_1 + l2 |sigma - psi|_2^2.

  Both are sums over all elements (FedMatch, eq. 4).
  """
  return [
    l1_weight * tf.sign(p) + 2.0 * l2_weight * (p - s)
    for p, s in zip(psi, sigma, strict=True)
  ]
