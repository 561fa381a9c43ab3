"""What benchmarks measure by."""

from collections.abc import Callable
import time
from typing import Any

import tensorflow as tf


def seconds(fn: Callable[[], Any]) -> float:
  """How long one call takes."""
  start = time.perf_counter()
  fn()
  return time.perf_counter() - start


def matrix_peak() -> float:
  """Floating-point operations a second of a large float32 product.

  Returns:
    Of TensorFlow's product of two 2048 x 2048 matrices, the best of 20.
  """
  size = 2048
  a = tf.random.stateless_normal([size, size], [0, 1])
  multiply = tf.function(lambda: tf.reduce_sum(tf.matmul(a, a)))
  multiply()
  return (
    2 * size**3 / min(seconds(lambda: multiply().numpy()) for _ in range(20))
  )
