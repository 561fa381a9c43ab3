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

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import sharpness
    >>> layer = tf.keras.layers.Dense(3)
    >>> layer.build([None, 2])
    >>> {v.name: sharpness.is_scaled(v) for v in layer.trainable_variables}
    {'kernel': True, 'bias': False}
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
  """Computes ASAM's ascent (Kwon et al. 2021).

      eps = rho T^2 g / ||T g||

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

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import sharpness
    >>> w, g = tf.constant([2.0, 0.0]), tf.constant([0.3, 0.4])
    >>> for scaled in (False, True):  # SAM, ASAM (which spares small weights).
    ...   (eps,) = sharpness.perturbation(
    ...     [w], [g], rho=0.1, eta=0.01, scaled=[scaled]
    ...   )
    ...   print(eps.numpy().round(3))
    [0.06 0.08]
    [0.201 0.   ]
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
    rho: Radius, >= 0.
    eta: ASAM's eta, >= 0.
    adaptive: True for ASAM, false for SAM.

  Returns:
    The loss and its gradient with respect to W + eps.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.models import adapter
    >>> from tff_fssl.models import networks
    >>> from tff_fssl.semisup import sharpness
    >>> model_fn = lambda: networks.build_network('linear', [1], num_classes=2)
    >>> network = adapter.Network(model_fn, seed=0)
    >>> bias = network.trainable_variables[1]  # It is 0.
    >>> loss_fn = lambda: tf.reduce_sum(tf.square(bias - 1.0))
    >>> gradients = [tf.zeros([1, 2]), 2.0 * (bias - 1.0)]
    >>> loss, _ = sharpness.loss_and_gradients_at_ascent(
    ...   network, gradients, loss_fn, rho=0.1, eta=0.01, adaptive=False
    ... )
    >>> print(f'{loss_fn():.3f} {loss:.3f}')  # At W and at W + eps.
    2.000 2.293
  """
  variables = network.trainable_variables
  eps = perturbation(
    variables,
    gradients,
    rho=rho,
    eta=eta,
    scaled=[adaptive and is_scaled(v) for v in variables],
  )
  ascent = network.perturbed(eps, moves_averages=False)
  with ascent, tf.GradientTape() as tape:
    loss = loss_fn()
  return loss, tuple(network.gradients(tape, loss))
