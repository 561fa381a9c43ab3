"""Perturbations of weights towards sharper loss (SAM, ASAM)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tff_fssl.lazy import tf
from tff_fssl.models import adapter

# Keeps eps finite if all gradients are 0.
_TINY = 1e-16


def is_scaled(variable: tf.Variable) -> bool:
  """Tells whether ASAM scales a variable: kernels and gammas, not biases.

  The authors' code scales every parameter whose name contains "weight".
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
  """Computes ASAM's ascent (Kwon et al. 2021): eps = rho T^2 g / ||T g||.

  T is |w| + eta for scaled weights and 1 for others. If no weight is scaled,
  this is SAM (Foret et al. 2021), eq. 12 of (FL)^2.

  Args:
    weights: w, float tensors.
    gradients: g, of the same shapes. If all are 0, eps is 0.
    rho: Radius, >= 0.
    eta: Added to |w|, >= 0.
    scaled: Whether each weight is scaled.

  Returns:
    eps, of the same shapes.
  """
  scales = [tf.abs(w) + eta if s else None for w, s in zip(weights, scaled)]
  ascents = [g if t is None else t * g for g, t in zip(gradients, scales)]
  factor = rho / (tf.linalg.global_norm(ascents) + _TINY)
  return [factor * (a if t is None else t * a) for a, t in zip(ascents, scales)]


def loss_and_gradients_at_ascent(
  network: adapter.Network,
  gradients: Sequence[tf.Tensor],
  loss_fn: Callable[[], tf.Tensor],
  *,
  rho: float,
  eta: float,
  adaptive: bool,
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
  """Computes a loss and its gradient at W + eps, with constant eps.

  Args:
    network: The network with weights W, which are restored at the end.
    gradients: The gradients at W of the loss that eps ascends.
    loss_fn: The loss, float32 scalar, computed with `network`.
    rho: Radius.
    eta: ASAM's eta.
    adaptive: True for ASAM, false for SAM.

  Returns:
    The loss and its gradient with respect to W + eps.
  """
  variables = network.trainable_variables
  eps = perturbation(
    variables,
    gradients,
    rho=rho,
    eta=eta,
    scaled=[adaptive and is_scaled(v) for v in variables],
  )
  with network.perturbed(eps), tf.GradientTape() as tape:
    loss = loss_fn()
  return loss, tuple(network.gradients(tape, loss))
