"""Reading of images of any size and mode, from files or numbers."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import contextlib
import io
import itertools
import math
import os
import pathlib
from typing import BinaryIO, NamedTuple, TypeVar
import warnings

import numpy as np

from tff_fssl import files

# Endings of images that Pillow reads. Other files are not images.
SUFFIXES = frozenset(
  '.apng .avif .avifs .bmp .bw .dds .dib .gif .icb .ico .icns .im .j2c .j2k'
  ' .jfif .jp2 .jpc .jpe .jpeg .jpf .jpg .jpx .mpo .msp .pbm .pcx .pfm .pgm'
  ' .png .pnm .ppm .psd .qoi .ras .rgb .rgba .sgi .tga .tif .tiff .vda .vst'
  ' .webp .xbm .xpm'.split()
)
# Bits that images of 16 bits may use.
DEPTHS = (8, 10, 12, 14, 16)
MAX_DEPTH = DEPTHS[-1]
# JPEG files are decoded at an eighth, a quarter or half of their size, if the
# result is still this many times as large as the wanted image.
_DRAFT = 2
# The images that are decoded before the first of them is used.
_BATCH_BYTES, _MAX_BATCH = 2**26, 256

# Millions of pixels of images that were read before.
_READABLE = 10_000

_Item = TypeVar('_Item')
# A stored image: see `read`. A text is never taken as a path, since a hostile
# file could name another file by it.
Stored = pathlib.Path | bytes | np.ndarray


class Form(NamedTuple):
  """The form of all images of a data set.

  Attributes:
    shape: (height, width, channels), channels 1 or 3.
    resize: 'crop' or 'squash' (see `DataHparams`).
    depth: The bits that images of 16 bits use, in [8, 16].
  """

  shape: tuple[int, ...]
  resize: str = 'crop'
  depth: int = MAX_DEPTH


def is_image(path: str) -> bool:
  """Tells by the name of a file whether it is an image."""
  return os.path.splitext(path)[1].lower() in SUFFIXES


class Picture(NamedTuple):
  """An image that was read.

  Attributes:
    pixels: uint8 [height, width, channels], read-only.
    stored: (height, width) of the file's image.
    is_enlarged: Whether it was smaller than the form.
    depth: The bits of its largest value, if it has 16 bits, else 0.
    is_stack: Whether the file has further pages or frames.
  """

  pixels: np.ndarray
  stored: tuple[int, int]
  is_enlarged: bool
  depth: int = 0
  is_stack: bool = False


@contextlib.contextmanager
def quiet(megapixels: float = 0) -> Iterator[None]:
  """Silences Pillow's warnings, and sets its limit, in all threads.

  Args:
    megapixels: Millions of pixels of the largest image. 0: Pillow's limit.
  """
  from PIL import Image  # pylint: disable=import-outside-toplevel

  limit = Image.MAX_IMAGE_PIXELS
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    if megapixels:
      # Pillow refuses images of twice as many.
      Image.MAX_IMAGE_PIXELS = int(megapixels * 1e6 / 2)
    try:
      yield
    finally:
      Image.MAX_IMAGE_PIXELS = limit


def read(image: Stored, form: Form) -> Picture:
  """Reads an image and brings it into a form.

  A file's image is turned by its EXIF orientation. An animation gives its first
  frame. Transparent parts become white, of 16-bit values the upper 8 of the
  form's bits are kept, floats from 0 to 1 become round(255 x), and palettes,
  CMYK and other color spaces become RGB.

  Numbers are integers from 0 to 255, or floats from 0 to 1, which become
  round(255 x). No image is inverted.

  Args:
    image: The path of a file, or its content. Or [H, W], [H, W, channels] with
      1, 3 or 4 channels, or [N], which is a square image, gray or RGB.
    form: The form of the result.

  Returns:
    The image.

  Raises:
    files.FileError: If it is not an image. Only its `reason` matters.
  """
  path = str(image) if isinstance(image, pathlib.Path) else ''
  try:
    if path:
      with files.open_binary(path) as file:
        return decode(file, form)
    if isinstance(image, bytes):
      return decode(io.BytesIO(image), form)
    pixels = _quantize(_shaped(image))  # type: ignore[arg-type]
    height, width = pixels.shape[:2]
    is_enlarged = height < form.shape[0] or width < form.shape[1]
    return Picture(convert(pixels, form), (height, width), is_enlarged)
  except files.FileError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # Pillow does not catch the errors of its parsers, which have any class.
    raise files.FileError(path, _unreadable(error)) from error


def stored_shape(image: bytes | np.ndarray) -> tuple[int, int, int]:
  """Returns (height, width, channels) of a stored image.

  Args:
    image: The content of a file, or numbers, as for `read`.

  Returns:
    Its shape, which has 1 or 3 channels for files.

  Raises:
    files.FileError: As for `read`, but some damages of files are not found.
  """
  from PIL import Image  # pylint: disable=import-outside-toplevel

  try:
    if not isinstance(image, bytes):
      height, width, channels = _quantize(_shaped(image)).shape
      return height, width, channels
    with quiet(), Image.open(io.BytesIO(image)) as file:
      is_gray = file.mode.startswith(('1', 'L', 'I')) and file.mode != 'LA'
      is_gray = is_gray and not file.has_transparency_data
      return file.height, file.width, 1 if is_gray else 3
  except Exception as error:  # pylint: disable=broad-except
    raise files.FileError('', _unreadable(error)) from error


def parse_bytes(content: bytes) -> np.ndarray | bytes:
  """Interprets bytes as an image file, or else as numbers, for `read`."""
  from PIL import Image  # pylint: disable=import-outside-toplevel

  try:
    with quiet(), Image.open(io.BytesIO(content)):
      return content
  except Image.UnidentifiedImageError:
    return np.frombuffer(content, np.uint8)
  except Exception:  # pylint: disable=broad-except
    # `read` will report the error.
    return content


def decode(file: BinaryIO, form: Form) -> Picture:
  """Reads an open image file like `read`, but raises errors of any class."""
  from PIL import Image  # pylint: disable=import-outside-toplevel
  from PIL import ImageOps  # pylint: disable=import-outside-toplevel

  height, width, _ = form.shape
  with Image.open(file) as image:
    stored = image.height, image.width
    longer = _DRAFT * max(height, width)
    image.draft(None, (longer, longer))
    is_stack = getattr(image, 'is_animated', False) and image.format != 'MPO'
    turned = ImageOps.exif_transpose(image)
    is_enlarged = turned.height < height or turned.width < width
    depth = 0
    if turned.mode.startswith('I;16'):
      depth = int(np.asarray(turned).max()).bit_length()
    flat = _flat(turned, image.format, form.depth)
    return Picture(_fit(flat, form), stored, is_enlarged, depth, is_stack)


class Traits(NamedTuple):
  """Traits of an image file that do not depend on its content.

  Attributes:
    encoding: The format, such as PNG.
    size: 'WIDTH x HEIGHT' of the stored image.
    is_transparent: Whether the image has transparent parts, which become white.
  """

  encoding: str
  size: str
  is_transparent: bool


def traits_of(paths: Iterable[str]) -> list[Traits]:
  """Reads the headers of readable image files."""
  from PIL import Image  # pylint: disable=import-outside-toplevel

  traits = []
  with quiet(_READABLE):
    for path in paths:
      with files.open_binary(path) as file, Image.open(file) as image:
        size = f'{image.width} x {image.height}'
        is_transparent = image.has_transparency_data
        traits.append(Traits(str(image.format), size, is_transparent))
  return traits


def _unreadable(error: Exception) -> str:
  """Says why an image cannot be decoded."""
  return f'it is not a readable image ({_words(error)})'


def read_all(
  items: Iterable[_Item], read_item: Callable[[_Item], Picture], form: Form
) -> Iterator[tuple[_Item, Picture | str]]:
  """Reads many images, with one thread per core.

  Args:
    items: Identifies the images.
    read_item: Reads an image, or raises `files.FileError`.
    form: The form of the results.

  Yields:
    Each item, in order, with its image, or with the reason why it cannot be
    read.
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
    # `map` alone would read everything ahead of a slow consumer.
    while batch := list(itertools.islice(items, size)):
      yield from zip(batch, pool.map(read_safely, batch))


def convert(pixels: np.ndarray, form: Form) -> np.ndarray:
  """Brings a decoded image into a form.

  Args:
    pixels: uint8 [H, W, channels], channels 1, 3 or 4 (RGBA).
    form: The form of the result.

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


def _flat(image, file_format=None, depth=MAX_DEPTH):
  """Converts an image to 8 bits without transparency: mode L or RGB."""
  from PIL import Image  # pylint: disable=import-outside-toplevel

  # Pillow scales PGM files of more than 8 bits to 16.
  is_scaled = image.mode == 'I' and file_format == 'PPM'
  if image.mode.startswith('I;16') or is_scaled:
    bits = MAX_DEPTH if is_scaled else depth
    values = np.asarray(image).astype(np.int64) >> (bits - 8)
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
  if image.mode == 'F':
    return Image.fromarray(_quantize(np.asarray(image)))
  if image.mode == 'I':
    raise ValueError('integers of 32 bits, whose range is not known')
  if image.mode in ('L', '1') and not image.has_transparency_data:
    return image.convert('L')
  if image.has_transparency_data:
    image = image.convert('RGBA')
    white = Image.new('RGBA', image.size, 'white')
    return Image.alpha_composite(white, image).convert('RGB')
  return image.convert('RGB')


def _fit(image, form: Form) -> np.ndarray:
  """Brings an image of mode L or RGB into its form."""
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
  from PIL import Image  # pylint: disable=C0415
  from PIL import UnidentifiedImageError  # pylint: disable=C0415

  if isinstance(error, UnidentifiedImageError):
    return 'of no known format'
  if isinstance(error, Image.DecompressionBombError):
    return f'{files.first_line(error)}; --max_megapixels allows more'
  return files.first_line(error)


def _shaped(values: np.ndarray) -> np.ndarray:
  """Shapes numbers as [H, W, channels], or raises ValueError."""
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


def _quantize(values: np.ndarray) -> np.ndarray:
  """Converts numbers of any type to pixels, or raises ValueError."""
  if values.dtype == np.uint8:
    return values
  is_float = np.issubdtype(values.dtype, np.floating)
  if not is_float and not np.issubdtype(values.dtype, np.integer):
    raise ValueError(f'its values are {values.dtype}')
  least, most = values.min(), values.max()
  largest = 1 if is_float else 255
  # Also rejects NaN.
  if not (least >= 0 and most <= largest):
    kind = 'floats' if is_float else 'integers'
    raise ValueError(
      f'its values go from {least:g} to {most:g}; {kind} must be from 0 to'
      f' {largest}'
    )
  if is_float:
    values = np.rint(255 * values.astype(np.float64))
  return values.astype(np.uint8)
