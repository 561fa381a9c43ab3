"""Perturbations of weights towards sharper loss (SAM, ASAM)."""

from typing import Sequence

import tensorflow as tf

_TINY = 1e-16


def is_scaled(variable: tf.Variable) -> bool:
  """Whether ASAM scales a variable: kernels and norms' gamma, not biases.

  In the authors' code: every parameter whose name contains "weight".
  """
  leaf = variable.name.split('/')[-1].split(':')[0]
  return leaf not in ('bias', 'beta')


def perturbation(
    weights: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    *,
    rho: float,
    eta: float,
    scaled: Sequence[bool],
) -> list[tf.Tensor]:
  """ASAM's ascent step (Kwon et al. 2021): eps = rho T^2 g / ||T g||.

  T = |w| + eta for scaled weights, 1 for others; with no weight scaled it is
  SAM (Foret et al. 2021), (FL)^2's eq. 12.

  Args:
    weights: w, float tensors.
    gradients: g, of the same shapes. If all are 0, eps is 0.
    rho: Radius, >= 0.
    eta: Added to |w|, >= 0.
    scaled: Which weights are scaled.

  Returns:
    eps, of the same shapes.
  """
  scales = [
      tf.abs(w) + eta if s else None for w, s in zip(weights, scaled)
  ]
  ascents = [
      g if t is None else t * g for g, t in zip(gradients, scales)
  ]
  factor = rho / (tf.linalg.global_norm(ascents) + _TINY)
  return [
      factor * (a if t is None else t * a) for a, t in zip(ascents, scales)
  ]
