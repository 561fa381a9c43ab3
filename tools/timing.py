"""Helpers for the measurements of benchmarks."""

from collections.abc import Callable
import time
from typing import Any

# It sets what TensorFlow reads when it is imported.
from tff_fssl.lazy import tf


def seconds(fn: Callable[[], Any]) -> float:
  """The time that one call takes, in seconds."""
  start = time.perf_counter()
  fn()
  return time.perf_counter() - start


def matrix_peak() -> float:
  """Floating-point operations per second of a large float32 product.

  Returns:
    The best of 20 TensorFlow products of two 2048 x 2048 matrices.
  """
  size = 2048
  a = tf.random.stateless_normal([size, size], [0, 1])
  multiply = tf.function(
    lambda: tf.reduce_sum(tf.matmul(a, a)), autograph=False
  )
  multiply()
  return (
    2 * size**3 / min(seconds(lambda: multiply().numpy()) for _ in range(20))
  )
