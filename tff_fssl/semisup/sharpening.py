"""Targets for consistency losses, made sharper by a temperature.

All functions take a temperature T > 0, as a Python number. 1 changes nothing.
In the limit T -> 0 the most probable classes share all of the probability.
Targets carry no gradient, unless a function says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from tff_fssl import hparams
from tff_fssl.lazy import tf

# In this range, T and 1 / T are normal numbers of float32.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30


def sharpened_softmax(logits: tf.Tensor, temperature: float) -> tf.Tensor:
  """Computes softmax(logits / T): UDA's targets (Xie et al. 2020, sec. 3.2).

  Args:
    logits: float32 [..., C], -inf for probability 0.
    temperature: T.

  Returns:
    float32 [..., C], rows sum to 1, without gradient.

  Raises:
    UsageError: If the temperature is out of range.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import sharpening
    >>> logits = tf.constant([1.0, 0.0])
    >>> print(sharpening.sharpened_softmax(logits, 1.0).numpy().round(3))
    [0.731 0.269]
    >>> print(sharpening.sharpened_softmax(logits, 0.4).numpy().round(3))
    [0.924 0.076]
  """
  if not _MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE:
    raise hparams.UsageError(
      f'temperature={temperature}: must be from {_MIN_TEMPERATURE:g} to'
      f' {_MAX_TEMPERATURE:g}'
    )
  # The largest logit becomes 0 first, so that the division cannot overflow it.
  logits -= tf.reduce_max(logits, axis=-1, keepdims=True)
  return tf.stop_gradient(tf.nn.softmax(logits / temperature))


def sharpen_with_gradient(probs: tf.Tensor, temperature: float) -> tf.Tensor:
  """Sharpens like `sharpen`, but with gradients, and rows may be 0.

  Args:
    probs: float32 [..., C], rows sum to 1, or are 0.
    temperature: T.

  Returns:
    float32 [..., C], rows sum to 1, or are 0.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import sharpening
    >>> probs = tf.constant([[0.6, 0.4], [0.0, 0.0]])
    >>> print(sharpening.sharpen_with_gradient(probs, 0.5).numpy().round(3))
    [[0.692 0.308]
     [0.    0.   ]]
  """
  largest = tf.stop_gradient(tf.reduce_max(probs, axis=-1, keepdims=True))
  # 0 ** (1 / T) may have an infinite gradient, which `where` would turn to NaN.
  is_possible = probs > 0.0
  relative = tf.where(
    is_possible, probs / tf.where(largest > 0.0, largest, 1.0), 1.0
  )
  powers = tf.where(is_possible, relative ** (1.0 / temperature), 0.0)
  return tf.math.divide_no_nan(
    powers, tf.reduce_sum(powers, axis=-1, keepdims=True)
  )


def sharpen(probs: tf.Tensor, temperature: float) -> tf.Tensor:
  """Sharpens as MixMatch does (Berthelot et al. 2019, eq. 7).

      p(c)^(1/T) / sum_c' p(c')^(1/T)

  Args:
    probs: float32 [..., C], rows sum to 1.
    temperature: T.

  Returns:
    float32 [..., C], rows sum to 1, without gradient.

  Raises:
    UsageError: If the temperature is out of range.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import sharpening
    >>> probs = tf.constant([0.6, 0.4])
    >>> for temperature in (1.0, 0.5, 0.1):
    ...   print(sharpening.sharpen(probs, temperature).numpy().round(3))
    [0.6 0.4]
    [0.692 0.308]
    [0.983 0.017]
  """
  return sharpened_softmax(tf.math.log(probs), temperature)


def guess(probs_of_views: Sequence[tf.Tensor], temperature: float) -> tf.Tensor:
  """Guesses MixMatch's labels: the mean over A views, sharpened.

  See Berthelot et al. 2019, eq. 6 and 7. All views of an example get one guess.

  Args:
    probs_of_views: A >= 1 tensors, float32 [B, C], rows sum to 1: the
      predictions for A weak views of the same examples.
    temperature: T.

  Returns:
    float32 [B, C], rows sum to 1, without gradient.

  Raises:
    UsageError: If the temperature is out of range.

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.semisup import sharpening
    >>> views = [tf.constant([[0.9, 0.1]]), tf.constant([[0.3, 0.7]])]
    >>> print(sharpening.guess(views, 1.0).numpy().round(3))
    [[0.6 0.4]]
    >>> print(sharpening.guess(views, 0.5).numpy().round(3))
    [[0.692 0.308]]
  """
  mean = tf.add_n(list(probs_of_views)) / float(len(probs_of_views))
  return sharpen(mean, temperature)
