"""Small files of vectors."""

import os

import numpy as np


def write(path: str | os.PathLike[str], num_classes: int, num: int) -> None:
  """Writes vectors of 16 numbers near their class, and strong views of them."""
  rng = np.random.default_rng(0)
  y = np.arange(num) % num_classes
  x = rng.normal(y[:, None], 1.0, [num, 16]).astype(np.float32)
  np.savez(path, x=x, y=y, x_strong=x + rng.normal(0.0, 0.5, x.shape))
