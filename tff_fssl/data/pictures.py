"""Reads an image file of any size and mode as an array. TensorFlow-free."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import contextlib
import dataclasses
import itertools
import os
from typing import BinaryIO, NamedTuple, TypeVar
import warnings

import numpy as np

from tff_fssl import files

# Interpreted by Pillow; what else is in a folder is not an image.
SUFFIXES = frozenset(
  '.bmp .gif .jpeg .jpg .pbm .pgm .png .ppm .tif .tiff .webp'.split()
)
# JPEG files are decoded at an eighth, a quarter or half of their size if the
# result is still this many times as large as what is wanted.
_DRAFT = 2
# What is decoded before any of it is used.
_BATCH_BYTES, _MAX_BATCH = 2**26, 256

_Item = TypeVar('_Item')


@dataclasses.dataclass(frozen=True)
class Form:
  """What all images of a data set become.

  Attributes:
    shape: (height, width, channels), channels 1 or 3.
    resize: 'crop' or 'squash'; see `DataHparams`.
  """

  shape: tuple[int, ...]
  resize: str = 'crop'


def is_image(path: str) -> bool:
  """Whether a file is one of images, by its name."""
  return os.path.splitext(path)[1].lower() in SUFFIXES


class Picture(NamedTuple):
  """An image that was read.

  Attributes:
    pixels: uint8 [height, width, channels], not to be written to.
    stored: (height, width) of the file's image.
    is_enlarged: Whether it was smaller than what is wanted.
  """

  pixels: np.ndarray
  stored: tuple[int, int]
  is_enlarged: bool


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silences Pillow's warnings, for all threads; yields once."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    yield


def read(path: str, form: Form) -> Picture:
  """Reads an image file.

  The image is turned as its EXIF orientation says. Of an animation, the first
  frame counts; what is transparent becomes white; 16-bit values lose their
  lower byte; palettes, CMYK and other color spaces become RGB.

  Args:
    path: The file.
    form: What it is to become.

  Returns:
    The image.

  Raises:
    files.FileError: If the file is not an image that can be read.
  """
  with files.open_binary(path) as file:
    try:
      return decode(file, form)
    except files.FileError:
      raise
    except Exception as error:  # pylint: disable=broad-except
      raise files.FileError(path, unreadable(error)) from error


def decode(file: BinaryIO, form: Form) -> Picture:
  """Reads an open image file; like `read`, but raises errors of any class."""
  from PIL import Image  # pylint: disable=import-outside-toplevel
  from PIL import ImageOps  # pylint: disable=import-outside-toplevel

  height, width, _ = form.shape
  with Image.open(file) as image:
    stored = image.height, image.width
    longer = _DRAFT * max(height, width)
    image.draft(None, (longer, longer))
    turned = ImageOps.exif_transpose(image)
    is_enlarged = turned.height < height or turned.width < width
    return Picture(_fit(_flat(turned, image.format), form), stored, is_enlarged)


class Traits(NamedTuple):
  """What an image file is like, apart from what it shows.

  Attributes:
    encoding: Its format, such as PNG.
    size: 'WIDTH x HEIGHT' of the stored image.
    is_transparent: Whether it has transparent parts, which become white.
  """

  encoding: str
  size: str
  is_transparent: bool


def traits_of(paths: Iterable[str]) -> list[Traits]:
  """Reads the headers of image files that are known to be readable."""
  from PIL import Image  # pylint: disable=import-outside-toplevel

  traits = []
  with quiet():
    for path in paths:
      with files.open_binary(path) as file, Image.open(file) as image:
        size = f'{image.width} x {image.height}'
        is_transparent = image.has_transparency_data
        traits.append(Traits(str(image.format), size, is_transparent))
  return traits


def unreadable(error: Exception) -> str:
  """Why an image cannot be decoded; Pillow passes on its parsers' errors."""
  return f'it is not an image that can be read ({_words(error)})'


def read_all(
  items: Iterable[_Item], read_item: Callable[[_Item], Picture], form: Form
) -> Iterator[tuple[_Item, Picture | str]]:
  """Reads many images, with as many threads as there are cores.

  Args:
    items: What is to be read.
    read_item: Reads one; raises `files.FileError` if that is not possible.
    form: What the images become.

  Yields:
    Each item, in order, with its image, or why it cannot be read.
  """

  def read_safely(item):
    try:
      return read_item(item)
    except files.FileError as error:
      return error.reason

  threads = len(os.sched_getaffinity(0))
  size = _BATCH_BYTES // int(np.prod(form.shape))
  size = max(threads, min(size, _MAX_BATCH))
  items = iter(items)
  with quiet(), futures.ThreadPoolExecutor(threads) as pool:
    while batch := list(itertools.islice(items, size)):
      yield from zip(batch, pool.map(read_safely, batch))


def convert(pixels: np.ndarray, form: Form) -> np.ndarray:
  """Brings a decoded image into a form.

  Args:
    pixels: uint8 [H, W, channels], channels 1, 3 or 4 (RGBA).
    form: What it is to become.

  Returns:
    uint8 [height, width, channels].

  Raises:
    ValueError: If it is not an image.
  """
  if pixels.shape == form.shape:
    return pixels
  from PIL import Image  # pylint: disable=import-outside-toplevel

  if pixels.dtype != np.uint8 or pixels.ndim != 3 or not pixels.size:
    raise ValueError(f'an image is {pixels.dtype} {list(pixels.shape)}')
  flat = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
  return _fit(_flat(Image.fromarray(flat)), form)


def _flat(image, file_format=None):
  """An image of 8 bits, without transparency: mode L or RGB."""
  from PIL import Image  # pylint: disable=import-outside-toplevel

  if image.mode.startswith('I;16') or (
    # Pillow scales PGM files of more than 8 bits to 16.
    image.mode == 'I' and file_format == 'PPM'
  ):
    values = np.asarray(image).astype(np.int64) >> 8
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
  if image.mode in ('I', 'F'):
    raise ValueError('32 bits a pixel, whose range is not known')
  if image.mode in ('L', '1') and not image.has_transparency_data:
    return image.convert('L')
  if image.has_transparency_data:
    image = image.convert('RGBA')
    white = Image.new('RGBA', image.size, 'white')
    return Image.alpha_composite(white, image).convert('RGB')
  return image.convert('RGB')


def _fit(image, form: Form) -> np.ndarray:
  """An image of mode L or RGB in its form."""
  from PIL import Image  # pylint: disable=import-outside-toplevel
  from PIL import ImageOps  # pylint: disable=import-outside-toplevel

  height, width, channels = form.shape
  image = image.convert('L' if channels == 1 else 'RGB')
  if image.size != (width, height):
    method = Image.Resampling.BICUBIC
    if form.resize == 'crop':
      image = ImageOps.fit(image, (width, height), method)
    else:
      image = image.resize((width, height), method)
  result = np.array(image).reshape(form.shape)
  result.flags.writeable = False
  return result


def _words(error: Exception) -> str:
  from PIL import UnidentifiedImageError  # pylint: disable=C0415

  if isinstance(error, UnidentifiedImageError):
    return 'of no known format'
  return files.first_line(error)
