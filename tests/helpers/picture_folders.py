"""Folders of small pictures, drawn for tests."""

import pathlib

import numpy as np
from PIL import Image


def draw(path: pathlib.Path, seed: int, size: tuple[int, int] = (9, 7)) -> None:
  """Writes a picture of random pixels; `size` is (width, height)."""
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = np.random.default_rng(seed).integers(
    0, 256, (size[1], size[0], 3), np.uint8
  )
  Image.fromarray(pixels).save(path)


def class_folders(root: pathlib.Path, counts: dict[str, int]) -> None:
  """Writes `counts[folder]` pictures of different sizes into each folder."""
  seed = 0
  for folder, count in counts.items():
    (root / folder).mkdir(parents=True, exist_ok=True)
    for i in range(count):
      seed += 1
      suffix = ('png', 'jpg', 'BMP')[i % 3]
      draw(root / folder / f'{i}.{suffix}', seed, (6 + i % 5, 8 + i % 3))


def manifest(root: pathlib.Path, lines: list[str], count: int = 12) -> None:
  """Writes `count` pictures, 0.png and so on, and a manifest of them."""
  for i in range(count):
    draw(root / f'{i}.png', i)
  (root / 'manifest.csv').write_text('\n'.join(lines) + '\n')
