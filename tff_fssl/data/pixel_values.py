"""Images that come as numbers, or as the content of an image file. TF-free."""

import io
import math

import numpy as np

from tff_fssl import files
from tff_fssl.data import pictures


def read(value: np.ndarray | bytes, form: pictures.Form) -> pictures.Picture:
  """Brings an image into a form.

  Numbers are integers from 0 to 255, or floats from 0 to 1, which become
  round(255 x); none is inverted. Bytes are the content of an image file.

  Args:
    value: Bytes; or [H, W], [H, W, channels] with 1, 3 or 4 channels, or [N],
      which is a square image, gray or RGB.
    form: What it is to become.

  Returns:
    The image.

  Raises:
    files.FileError: If it is no such image; only its `reason` matters.
  """
  try:
    pixels = _pixels(value)
    if isinstance(pixels, bytes):
      return pictures.decode(io.BytesIO(pixels), form)
    height, width = pixels.shape[:2]
    is_enlarged = height < form.shape[0] or width < form.shape[1]
    converted = pictures.convert(pixels, form)
    return pictures.Picture(converted, (height, width), is_enlarged)
  except Exception as error:  # pylint: disable=broad-except
    raise files.FileError('', pictures.unreadable(error)) from error


def stored_shape(value: np.ndarray | bytes) -> tuple[int, int, int]:
  """(height, width, channels) of an image, as `read` takes it.

  Args:
    value: The image.

  Returns:
    Its shape; of files, with 1 or 3 channels.

  Raises:
    files.FileError: As `read` does, but not for all damages of files.
  """
  from PIL import Image  # pylint: disable=import-outside-toplevel

  try:
    pixels = _pixels(value)
    if not isinstance(pixels, bytes):
      height, width, channels = pixels.shape
      return height, width, channels
    with pictures.quiet(), Image.open(io.BytesIO(pixels)) as image:
      is_gray = image.mode.startswith(('1', 'L', 'I')) and image.mode != 'LA'
      is_gray = is_gray and not image.has_transparency_data
      return image.height, image.width, 1 if is_gray else 3
  except Exception as error:  # pylint: disable=broad-except
    raise files.FileError('', pictures.unreadable(error)) from error


def of_bytes(content: bytes) -> np.ndarray | bytes:
  """What `read` takes of bytes that are an image file, or its numbers."""
  from PIL import Image  # pylint: disable=import-outside-toplevel

  try:
    with pictures.quiet(), Image.open(io.BytesIO(content)):
      return content
  except Image.UnidentifiedImageError:
    return np.frombuffer(content, np.uint8)
  except Exception:  # pylint: disable=broad-except
    return content  # `read` will say what is wrong with this file.


def _pixels(value: np.ndarray | bytes) -> np.ndarray | bytes:
  """uint8 [H, W, channels], or the content of a file; raises ValueError."""
  return value if isinstance(value, bytes) else _as_uint8(_shaped(value))


def _shaped(values: np.ndarray) -> np.ndarray:
  """An image's numbers as [H, W, channels]; raises ValueError."""
  if values.ndim == 1:
    for channels in (1, 3):
      side = math.isqrt(len(values) // channels)
      if side and side * side * channels == len(values):
        return values.reshape(side, side, channels)
    raise ValueError(f'{len(values):,} values are no square image')
  if values.ndim == 2:
    values = values[..., None]
  if values.ndim != 3 or values.shape[2] not in (1, 3, 4) or not values.size:
    raise ValueError(f'its shape is {list(values.shape)}')
  return values


def _as_uint8(values: np.ndarray) -> np.ndarray:
  """Pixels of any type of numbers; raises ValueError."""
  if values.dtype == np.uint8:
    return values
  is_float = np.issubdtype(values.dtype, np.floating)
  if not is_float and not np.issubdtype(values.dtype, np.integer):
    raise ValueError(f'its values are {values.dtype}')
  least, most = values.min(), values.max()
  largest = 1 if is_float else 255
  if not (least >= 0 and most <= largest):  # Nor is NaN.
    kind = 'floats' if is_float else 'integers'
    raise ValueError(
      f'its values go from {least:g} to {most:g}; {kind} must be from 0 to'
      f' {largest}'
    )
  if is_float:
    values = np.rint(255 * values.astype(np.float64))
  return values.astype(np.uint8)
