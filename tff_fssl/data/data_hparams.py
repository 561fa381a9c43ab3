"""Flags for reading a data set."""

from collections.abc import Callable, Collection, Sequence
import dataclasses
import math
import os
import re
from typing import Any

from tff_fssl import hparams
from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam

_SIZE = re.compile(r'([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?', re.ASCII)
_DEFAULT_SIZE = (32, 32)
# Networks compute in float32.
_MAX_FLOAT, _LEAST_STD = 3.4e38, 1e-30
STANDARD, SCALE, NONE = 'standard', 'scale', 'none'
WORDS, CHARACTERS = 'words', 'characters'
# Fields of the views of vectors without views of their own, and of texts.
WEAK_VECTORS = ('weak_noise',)
STRONG_VECTORS = ('strong_noise', 'strong_dropout')
TEXTS = (
  'text_unit',
  'vocabulary_size',
  'max_words',
  'weak_deletion',
  'strong_replacement',
  'strong_edits',
)


def _read(name: str) -> Callable[[Any], bool]:
  """Builds the predicate of a field that only some data sets read."""
  return lambda data: name in data.info.uses


@dataclasses.dataclass(frozen=True)
class DataHparams:
  """Flags for reading a data set, without a prefix."""

  image_size: str = hparam(
    '',
    'Size of the images: 32, or HEIGHTxWIDTH such as 32x48. If empty: 32 for'
    ' folder:, else the size that TFDS states, or that of the first 16 images'
    ' of the data set, or 32 if these differ.',
    group='Images of folder:, clientdata: and huggingface:, and other splits'
    ' and sizes of TFDS sets',
    when=_read('image_size'),
  )
  resize: str = hparam(
    'crop',
    'Method of resizing. crop: the middle part of that shape is scaled. squash:'
    ' the whole image is scaled, and its proportions change.',
    choices=('crop', 'squash'),
    when=_read('resize'),
  )
  color: str = hparam(
    'auto',
    'Channels: rgb, gray, or auto: gray if TFDS states it or the first 16'
    ' images of clientdata: or huggingface: are gray, else rgb.',
    choices=('auto', 'rgb', 'gray'),
    when=_read('color'),
  )
  bit_depth: int = hparam(
    0,
    'Bits that images of 16 bits use, 8 to 16: of 12, the value 4,095 is white.'
    ' 0: the least of 8, 10, 12, 14 and 16 that holds all values of the data.',
    minimum=0,
    maximum=16,
    when=_read('bit_depth'),
  )
  flip: bool = hparam(
    True,
    'Whether views may be mirrored. Set it to false if a mirrored image has'
    ' another meaning, such as text.',
    when=_read('flip'),
  )
  test_share: float = hparam(
    0.2,
    'Share of test examples, if the data have no test split. A hash of its name'
    ' selects an image, a hash of its content a vector or a text, so that new'
    ' examples do not move others.',
    minimum=0.001,
    maximum=0.999,
    when=_read('test_share'),
  )
  split_by: str = hparam(
    names.EXAMPLE,
    'What --test_share and --num_validation take whole: each example, or each'
    ' client (patient, user) of the data, so that no client is on both sides.',
    choices=names.SPLIT_UNITS,
    when=_read('split_by'),
  )
  class_words: str = hparam(
    '',
    'Words, with commas between them, that are classes of these data, although'
    ' they usually say that a class is not known: none, NA, null, unknown,'
    ' unlabeled and the like, in cells and as names of folders.',
    when=_read('class_words'),
  )
  accept_findings: bool = hparam(
    False,
    'Whether to train although something in the data makes results meaningless,'
    ' such as test examples that are for training, too.',
    may_change=True,
  )
  max_megapixels: int = hparam(
    170,
    'Millions of pixels of the largest image that is read. A small file may'
    ' hold an image that fills the memory.',
    minimum=1,
    maximum=10_000,
    may_change=True,
    when=_read('max_megapixels'),
  )
  max_unreadable: int = hparam(
    0,
    'Greatest number of unreadable image files, which are skipped. 0 by'
    ' default, since a damaged file may mean a damaged copy of the folder.',
    minimum=0,
    may_change=True,
    when=_read('max_unreadable'),
  )
  image_field: str = hparam(
    '',
    'Field of clientdata:PATH, or column of huggingface:OWNER/NAME, with the'
    ' images. If empty, it is found by its name, such as image.',
    when=_read('image_field'),
  )
  label_field: str = hparam(
    '',
    'Field or column of the classes. If empty, it is found by its name, such as'
    ' label.',
    when=_read('label_field'),
  )
  client_field: str = hparam(
    '',
    'Column with the client of each row, for --partition=natural. If empty, it'
    ' is found in a table by its name, such as client or hospital.',
    when=_read('client_field'),
  )
  split_field: str = hparam(
    '',
    'Column of a table (features:PATH.csv) with train or test. If empty, it is'
    ' split, if there is one.',
    when=_read('split_field'),
  )
  drop: str = hparam(
    '',
    'Columns of a table to leave out, with commas between them, such as those'
    ' of names and identifiers.',
    when=_read('drop'),
  )
  split_preset: str = hparam(
    names.OFFICIAL,
    'Split into training and test images. official: as published. The others'
    ' pool all images, split them anew (equally for each --seed), and set'
    " --num_validation, too. fedmatch: FedMatch's paper (CIFAR-10: 54,000 /"
    ' 3,000 validation / 3,000 test, Fashion-MNIST: 63,000 / 3,500 / 3,500).'
    ' fedmatch_code: its code (CIFAR-10: 56,000 / 2,000 / 2,000). protofssl:'
    " ProtoFSSL's, per class (CIFAR-10: 5,400 / 300 / 300, SVHN: 5,400 / 200 /"
    ' 200, STL-10: 1,000 / 150 / 150).',
    choices=(names.OFFICIAL, *names.SPLIT_PRESETS),
    when=_read('split_preset'),
  )
  svhn_extra: bool = hparam(
    False,
    'Whether to train on the 531,131 extra images, too (svhn_cropped).',
    when=_read('svhn_extra'),
  )
  cache_dir: str = hparam(
    '',
    'Folder of decoded images, which are made once and may be removed at any'
    ' time. If empty, tff_fssl in $XDG_CACHE_HOME or else in ~/.cache.',
    may_change=True,
    when=_read('cache_dir'),
  )

  normalization: str = hparam(
    STANDARD,
    'Scaling of values for networks. standard: (value - mean) / deviation.'
    ' scale: pixels / 255, from 0 to 1 (images only). none: pixels from 0 to'
    ' 255, or the numbers of vectors. Mean and deviation are'
    " (FL)^2's for the CIFAR and SVHN sets, else measured on all training"
    ' examples, but with --aggregator=secure or dp only on labelled examples at'
    ' the server and validation examples.',
    choices=(STANDARD, SCALE, NONE),
    group='Images and vectors as networks receive them',
    when=lambda data: data.info.kind != names.TEXTS,
  )
  mean: str = hparam(
    '',
    'Other means, together with --std: for each channel, of pixels / 255, or'
    ' for each number of a vector. One number, or several with commas, such as'
    " 0.4914,0.4822,0.4465 (SemiFL's for CIFAR-10).",
    when=lambda data: data.has_moments,
  )
  std: str = hparam(
    '',
    "Other deviations, such as 0.2023,0.1994,0.2010 (SemiFL's for CIFAR-10).",
    when=lambda data: data.has_moments,
  )
  weak_noise: float = hparam(
    0.1,
    'Deviation of the Gaussian noise of weak views, in units of the deviation'
    ' of each number. It has no effect if the file has weak views, and the next'
    ' two flags have none if it has strong views.',
    minimum=0,
    maximum=1e3,
    group='Vectors (features:PATH)',
    when=_read('weak_noise'),
  )
  strong_noise: float = hparam(
    0.5,
    'Deviation of the Gaussian noise of strong views, in the same units.',
    minimum=0,
    maximum=1e3,
    when=_read('strong_noise'),
  )
  strong_dropout: float = hparam(
    0.2,
    'Share of the numbers of a strong view that are replaced by their means.',
    minimum=0,
    maximum=1,
    when=_read('strong_dropout'),
  )

  vocabulary_size: int = hparam(
    16_384,
    'Number of hash buckets for words. No vocabulary is built, since it could'
    ' reveal the texts of clients.',
    minimum=256,
    maximum=2**24,
    group='Texts (text:PATH, ag_news)',
    when=_read('vocabulary_size'),
  )
  text_unit: str = hparam(
    WORDS,
    'What a text consists of: words, which spaces part, or characters, for'
    ' languages without spaces such as Chinese, Japanese and Thai. A character'
    ' then counts as a word in the other flags.',
    choices=(WORDS, CHARACTERS),
    when=_read('text_unit'),
  )
  max_words: int = hparam(
    64,
    'Number of words of a text that are used, from its start.',
    minimum=5,
    maximum=4096,
    when=_read('max_words'),
  )
  weak_deletion: float = hparam(
    0.1,
    "Share of a text's words that are deleted in a weak view (value: random"
    " deletion of EDA's code).",
    minimum=0,
    maximum=1,
    when=_read('weak_deletion'),
  )
  strong_replacement: float = hparam(
    0.5,
    "Share of a strong view's words that are replaced by uninformative words,"
    " key words less often (UDA's TF-IDF based word replacement, the value is"
    ' ours).',
    minimum=0,
    maximum=1,
    when=_read('strong_replacement'),
  )
  strong_edits: float = hparam(
    0.1,
    "Share of a strong view's words that change places, and share that are"
    " deleted (value: EDA's code, which has one for all edits).",
    minimum=0,
    maximum=1,
    when=_read('strong_edits'),
  )

  def __post_init__(self):
    hparams.validate(self)
    if self.image_size and not _SIZE.fullmatch(self.image_size):
      raise UsageError(
        f'--image_size={self.image_size}: must be a number of pixels such as'
        ' 32, or HEIGHTxWIDTH such as 32x48, each from 1 to 9999'
      )
    if 0 < self.bit_depth < 8:
      raise UsageError(
        f'--bit_depth={self.bit_depth}: must be 0, or from 8 to 16'
      )
    if bool(self.mean) != bool(self.std):
      given, absent = ('mean', 'std') if self.mean else ('std', 'mean')
      raise UsageError(
        f'--{given}={getattr(self, given)}: needs --{absent}; give both, or'
        ' neither'
      )
    if self.std and min(_numbers('std', self.std)) < _LEAST_STD:
      raise UsageError(
        f'--std={self.std}: must be greater than 0, at least {_LEAST_STD:g}'
      )
    if self.mean:
      _numbers('mean', self.mean)

  def is_unknown(
    self, word: str, among: Collection[str] = names.UNKNOWN_WORDS
  ) -> bool:
    """Tells whether a word says that a class is not known.

    Args:
      word: A cell, or the name of a folder.
      among: Words for an unknown class, in lower case.

    Returns:
      Whether it is one of them, and not a class by `class_words`.
    """
    word = word.strip().casefold()
    real = map(str.strip, self.class_words.casefold().split(','))
    return word in among and (not word or word not in real)

  def moments(
    self, size: int
  ) -> tuple[Sequence[float], Sequence[float]] | None:
    """Parses `mean` and `std`.

    Args:
      size: The number of channels, or of a vector's numbers.

    Returns:
      (mean, std), `size` numbers each, or None if they are not given.

    Raises:
      UsageError: If a flag has neither `size` numbers nor one.
    """
    if not self.mean:
      return None
    mean, std = self.mean, self.std
    return _numbers('mean', mean, size), _numbers('std', std, size)

  @property
  def size(self) -> tuple[int, int] | None:
    """Returns (height, width) of `image_size`, or None if it is empty."""
    match = _SIZE.fullmatch(self.image_size)
    return (int(match[1]), int(match[2] or match[1])) if match else None

  def image_shape(self, stored: tuple[int, ...] = ()) -> tuple[int, int, int]:
    """Chooses the shape of an image.

    Args:
      stored: (height, width, channels) in the data set, -1 for a value that
        differs between images. () if the data set does not tell.

    Returns:
      (height, width, channels).
    """
    fixed = len(stored) == 3 and min(stored[:2]) > 0
    height, width = self.size or (stored[:2] if fixed else _DEFAULT_SIZE)
    is_gray = self.color == 'gray' or (
      self.color == 'auto' and stored[2:] == (1,)
    )
    return height, width, 1 if is_gray else 3

  @property
  def cache_folder(self) -> str:
    """Returns the absolute folder of `cache_dir`."""
    if self.cache_dir:
      return os.path.abspath(os.path.expanduser(self.cache_dir))
    parent = os.environ.get('XDG_CACHE_HOME', '')
    # XDG's specification ignores relative paths.
    if not os.path.isabs(parent):
      parent = os.path.expanduser(os.path.join('~', '.cache'))
    return os.path.join(parent, 'tff_fssl')


def _numbers(flag: str, text: str, size: int = 0) -> tuple[float, ...]:
  """Parses `size` numbers in a flag, or raises `UsageError`."""
  try:
    numbers = tuple(float(part) for part in text.split(','))
  except ValueError:
    # Rejected below, like numbers out of range.
    numbers = (math.nan,)
  # Rejects NaN.
  if not all(abs(number) <= _MAX_FLOAT for number in numbers):
    raise UsageError(
      f'--{flag}={text}: must be a number of float32, or several with commas'
      ' between them, such as 0.5,0.5,0.5'
    )
  if size and len(numbers) not in (1, size):
    raise UsageError(
      f'--{flag}={text}: has {len(numbers)} numbers; the data need {size}, or'
      ' one for all'
    )
  return numbers * size if len(numbers) == 1 and size else numbers
