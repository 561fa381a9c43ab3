"""What tests of the data layer share."""

import types

import numpy as np
from PIL import Image
from PIL import ImageDraw
from PIL import ImageEnhance
from PIL import ImageOps
import pytest
from sklearn import datasets

from tff_fssl.data import sources


@pytest.fixture(scope='session')
def cifar10(tfds_dir) -> sources.DataSet:
  """The real CIFAR-10."""
  return sources.load('cifar10', tfds_dir)


@pytest.fixture(scope='session')
def digits() -> sources.DataSet:
  """The embedded digits."""
  return sources.load('digits')


@pytest.fixture(scope='session')
def photographs() -> np.ndarray:
  """100 pieces of scikit-learn's two photographs, uint8 [100, 32, 32, 3]."""
  pieces = []
  for image in datasets.load_sample_images().images:
    rows, columns = (side // 32 for side in image.shape[:2])
    image = image[: 32 * rows, : 32 * columns]
    image = image.reshape(rows, 32, columns, 32, 3).swapaxes(1, 2)
    image = image.reshape(-1, 32, 32, 3)
    pieces.append(image[:: len(image) // 50][:50])
  return np.concatenate(pieces)


# Arguments to test with, wider than what any policy uses.
_RANGES = {
  'posterize': (1, 9),
  'solarize': (0, 257),
  'brightness': (0, 2),
  'color': (0, 2),
  'contrast': (0, 2),
  'sharpness': (0, 2),
  'rotate': (-45, 45),
  'shear_x': (-0.5, 0.5),
  'shear_y': (-0.5, 0.5),
  'translate_x': (-20, 20),
  'translate_y': (-20, 20),
}


def _to_pil(image):
  return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def _apply_by_pillow(image: np.ndarray, op: str, arg: float) -> np.ndarray:
  """One operation of `image_ops.OPS` on one image, uint8 [H, W, C]."""
  # Interpolation takes .3 as Python does, not the nearest float32.
  pil = _to_pil(image)
  v = round(float(arg), 6) if 'smooth' in op else float(arg)
  coefficients = {
    'shear_x': (1, v, 0, 0, 1, 0),
    'shear_y': (1, 0, 0, v, 1, 0),
    'translate_x': (1, 0, v, 0, 1, 0),
    'translate_y': (1, 0, 0, 0, 1, v),
  }
  if op == 'identity':
    result = pil
  elif op == 'autocontrast':
    result = ImageOps.autocontrast(pil)
  elif op == 'equalize':
    result = ImageOps.equalize(pil)
  elif op == 'posterize':
    result = ImageOps.posterize(pil, int(v))
  elif op == 'solarize':
    result = ImageOps.solarize(pil, v)
  elif op == 'rotate':
    result = pil.rotate(v)
  elif op.removeprefix('smooth_') in coefficients:
    result = pil.transform(
      pil.size,
      Image.Transform.AFFINE,
      coefficients[op.removeprefix('smooth_')],
      Image.Resampling.BILINEAR if 'smooth' in op else Image.Resampling.NEAREST,
    )
  else:
    result = getattr(ImageEnhance, op.capitalize())(pil).enhance(v)
  return np.asarray(result).reshape(image.shape)


def _fill_box_by_pillow(
  image: np.ndarray, box: tuple[float, ...], fill: tuple[int, ...]
) -> np.ndarray:
  """A rectangle, with its edges, drawn on a copy of an image."""
  pil = _to_pil(image).copy()
  ImageDraw.Draw(pil).rectangle(box, fill if len(fill) > 1 else fill[0])
  return np.asarray(pil).reshape(image.shape)


@pytest.fixture(scope='session')
def pillow() -> types.SimpleNamespace:
  """What `image_ops` must equal: `apply`, `fill_box`; `ranges` of arguments."""
  return types.SimpleNamespace(
    apply=_apply_by_pillow, fill_box=_fill_box_by_pillow, ranges=_RANGES
  )
