"""The losses' mathematics in float64 NumPy, and gradients by differences."""

from collections.abc import Callable

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Of the last axis."""
  logits = np.asarray(logits, np.float64)
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def softmax(logits: np.ndarray) -> np.ndarray:
  """Of the last axis."""
  return np.exp(log_softmax(logits))


def cross_entropy(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
  """Per example, in nats."""
  return -log_softmax(logits)[np.arange(len(labels)), labels]


def gradient(
  function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-5
) -> np.ndarray:
  """Central differences of a scalar function; their error is about 1e-9."""
  at = np.asarray(at, np.float64)
  result = np.empty_like(at)
  for index in np.ndindex(at.shape):
    delta = np.zeros_like(at)
    delta[index] = step
    result[index] = (function(at + delta) - function(at - delta)) / (2 * step)
  return result
