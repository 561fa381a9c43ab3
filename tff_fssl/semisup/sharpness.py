"""Perturbations of weights towards sharper loss (SAM, ASAM)."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tff_fssl.models import adapter

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
  """A loss and its gradient at W + eps, eps held constant.

  Args:
    network: At weights W, to which it returns.
    gradients: Of the loss that eps ascends, at W.
    loss_fn: The loss, float32 scalar, computed with `network`.
    rho: Radius.
    eta: ASAM's.
    adaptive: Whether it is ASAM or SAM.

  Returns:
    The loss and its gradient by W + eps.
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
