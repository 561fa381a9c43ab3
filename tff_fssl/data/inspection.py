"""Finds problems of a data set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import hashlib
import math
import re
from typing import TYPE_CHECKING, NamedTuple
import unicodedata

import numpy as np

from tff_fssl.data import image_cache
from tff_fssl.data import names as data_names
from tff_fssl.hparams import UsageError

if TYPE_CHECKING:
  from tff_fssl.data import sources

# So many items of a list are in its sentence.
NUM_SHOWN = 3
# A trait reveals a class if its share among the class's examples differs from
# its share among all others by this much, and by so many standard errors.
_LEAST_DIFFERENCE, _LEAST_ERRORS = 0.2, 3.0
# Training stops if a larger share of the test examples is for training, too.
_MOST_LEAKED = 0.1
# A number whose range has fewer steps of float32 is told.
_LEAST_STEPS = 64
# Pixels of so few values, or of none brighter, are told.
_FEW_LEVELS, _DARK = 16, 64
# JPEG makes the channels of a gray pixel differ by up to this.
_GRAY = 4
# Two images are nearly the same if the root mean square of their differences is
# at most so many gray levels, and at most this share of their contrast. Of
# digits, the nearest two of training and test set differ by 15, of CIFAR-10 by
# 12 or more.
_NEAR, _OF_CONTRAST = 4.0, 0.2
# Words for an unknown class that cannot be a class.
_PLAIN = {'', '-1', '-1.0', 'unlabeled', 'unlabelled', 'unsupervised'}
# Separators of several classes in one cell.
_LISTS = ('|', ';', ',', '+', '/')
# Means of so many parts of each side find the images that may be near.
_PARTS = 4


class Problem(NamedTuple):
  """A problem of a data set.

  Attributes:
    text: One line.
    stops: Whether it makes training impossible.
    brief: A few words for the line at a run's start, by default `text`.
    misleads: Whether results would mean nothing: training stops, unless
      `--accept_findings` is given.
    items: What it is about, a line each.
  """

  text: str
  stops: bool = False
  brief: str = ''
  misleads: bool = False
  items: tuple[str, ...] = ()


def shown(items: Sequence[str]) -> str:
  """Joins the first items, and appends the number of the others."""
  more = len(items) - NUM_SHOWN
  others = [f'and {more:,} more'] if more > 0 else []
  return ', '.join([*items[:NUM_SHOWN], *others])


def class_counts(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """Counts examples of each class, int64 [num_classes]."""
  return np.bincount(
    labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes
  )


def label_problems(
  class_names: Sequence[str], train: np.ndarray, test: np.ndarray
) -> Iterator[Problem]:
  """Finds empty splits and missing classes.

  Args:
    class_names: The name of each class.
    train: Labels of training examples, integers [N]. -1 is unknown.
    test: Labels of test examples.

  Yields:
    The problems.
  """
  for split, labels in (('training', train), ('test', test)):
    if not len(labels):
      way = ''
      if split == 'test':
        way = (
          '; without a test split, --test_share takes a share of the training'
          ' examples'
        )
      yield Problem(f'the data have no {split} examples{way}', True)
  if len(class_names) < 2:
    names = ', '.join(class_names) or 'none'
    yield Problem(
      f'a classifier needs two classes or more; given: {names}', True
    )
  for split, labels, lowest in (
    ('training', train, data_names.UNKNOWN_LABEL),
    ('test', test, 0),
  ):
    wrong = (labels < lowest) | (labels >= len(class_names))
    if wrong.any():
      example = int(np.argmax(wrong))
      yield Problem(
        f'{int(wrong.sum()):,} {split} labels are no class (such as'
        f' {labels[example]}, of {split} example {example})',
        True,
      )
  for split, labels, stops in (
    ('training', train, True),
    ('test', test, False),
  ):
    counts = class_counts(labels, len(class_names))
    missing = [n for n, count in zip(class_names, counts) if not count]
    if missing and len(labels):
      meaning = '' if stops else '; no test accuracy includes them'
      yield Problem(
        f'classes without a {split} example: {shown(missing)}{meaning}',
        stops,
        f'{len(missing):,} classes without a {split} example',
      )
  yield from _name_problems(class_names)


def _name_problems(class_names: Sequence[str]) -> Iterator[Problem]:
  """Finds classes that seem to be one, or several."""
  alike: dict[str, list[str]] = {}
  for name in class_names:
    alike.setdefault(_spelling(name), []).append(name)
  several = [
    ' = '.join(map(repr, found)) for found in alike.values() if len(found) > 1
  ]
  if several:
    yield Problem(
      f'classes that seem to be one, in several spellings: {shown(several)};'
      ' each spelling is a class of its own',
      brief=f'{len(several):,} classes in several spellings',
    )
  lists = [
    name
    for name in class_names
    for separator in _LISTS
    if len(parts := name.split(separator)) > 1
    and any(part.strip() in class_names for part in parts)
  ]
  if lists:
    yield Problem(
      f'classes that list others: {shown(lists)}; each list is a class of its'
      ' own, for an example has one class',
      brief=f'{len(lists):,} classes that list others',
    )
  declared = [
    n for n in class_names if n.casefold() in data_names.UNKNOWN_WORDS
  ]
  if declared:
    yield Problem(
      f'classes whose name says that the class is not known: {shown(declared)};'
      ' they are trained and tested like others, since the data or'
      ' --class_words declare them',
      brief=f'{shown(declared)} taken for a class',
    )


def _spelling(name: str) -> str:
  """Returns what a name has in common with its other spellings."""
  name = unicodedata.normalize('NFKC', name)
  # Format characters are those that nobody sees.
  name = ''.join(c for c in name if unicodedata.category(c) != 'Cf')
  name = re.sub(r'[\s_-]+', ' ', name).strip().casefold()
  try:
    return repr(float(name))
  except ValueError:
    return name


def unknown_problems(words: Mapping[str, int]) -> Iterator[Problem]:
  """Tells which words were taken for an unknown class.

  Args:
    words: Word -> number of examples.

  Yields:
    A problem, unless all of them say so plainly.
  """
  others = [word for word in words if word.casefold() not in _PLAIN]
  if others:
    count = sum(words[word] for word in others)
    yield Problem(
      f'{count:,} examples are without a label, by the word'
      f' {" or ".join(map(repr, others[:NUM_SHOWN]))}; if that is a class,'
      f' give --class_words={others[0]}',
      brief=f'{count:,} labels unknown, by {shown(others)}',
    )


def owner_problems(
  train: np.ndarray, held: np.ndarray, is_drawn: bool, held_for: str = 'testing'
) -> Iterator[Problem]:
  """Finds clients with examples for training and for something else.

  Args:
    train: The client of each training example, integers [N], or -1.
    held: The client of each other example.
    is_drawn: Whether `--split_by` decides how these are drawn.
    held_for: What these are for.

  Yields:
    A problem, or none.
  """
  both = np.intersect1d(train[train >= 0], held[held >= 0])
  if len(both):
    way = '--split_by=client' if is_drawn else 'a split by client'
    yield Problem(
      f'{len(both):,} clients have examples for training and for {held_for}: if'
      f' examples of one client are alike, accuracy comes from memory; {way}'
      ' takes other clients',
      brief=f'{len(both):,} clients in training and {held_for}',
    )


def level_problems(num_flat: int, levels: Sequence[int]) -> Iterator[Problem]:
  """Finds images without content.

  Args:
    num_flat: The number of images of one color.
    levels: The different values of pixels, ascending, in [0, 255].

  Yields:
    The problems.
  """
  if num_flat:
    yield Problem(
      f'{num_flat:,} images are of one color, such as black ones',
      brief=f'{num_flat:,} images of one color',
    )
  if levels and (len(levels) <= _FEW_LEVELS or levels[-1] < _DARK):
    yield Problem(
      f'all pixels have {len(levels):,} different values, {levels[0]} to'
      f' {levels[-1]} of 255: are the images masks, or of fewer bits than their'
      ' files say?',
      brief=f'pixels of {len(levels):,} values, at most {levels[-1]}',
    )


def is_gray(images: np.ndarray) -> np.ndarray:
  """Tells which images are gray, bool [N].

  Args:
    images: uint8 [N, H, W, channels].

  Returns:
    Whether an image has one channel, or equal ones. Small differences are
    allowed, since JPEG makes them from gray.
  """
  parts = [
    (np.ptp(chunk, axis=-1) <= _GRAY).all(axis=(1, 2))
    for chunk in image_cache.chunks(images)
  ]
  return np.concatenate([np.zeros(0, bool), *parts])


def trait_problems(
  class_names: Sequence[str],
  labels: np.ndarray,
  traits: Mapping[str, np.ndarray],
) -> Iterator[Problem]:
  """Finds traits of files that reveal a class.

  Args:
    class_names: The name of each class.
    labels: The class of each example, integers [N]. -1 is unknown.
    traits: Trait ('gray') -> whether each example has it, bool [N].

  Yields:
    The problems. None of them stops training.
  """
  sizes = class_counts(labels, len(class_names))
  for trait, has in traits.items():
    counts = class_counts(labels[has], len(class_names))
    found = []
    all_with, everything = int(counts.sum()), int(sizes.sum())
    for name, size, count in zip(class_names, sizes.tolist(), counts.tolist()):
      others = everything - size
      if not size or not others:
        continue
      share, other = count / size, (all_with - count) / others
      # The standard error of a difference of shares, if both were equal.
      mean = all_with / everything
      error = np.sqrt(mean * (1 - mean) * (1 / size + 1 / others))
      difference = abs(share - other)
      if difference >= max(_LEAST_DIFFERENCE, _LEAST_ERRORS * error):
        found.append((difference, share, other, name))
    if found:
      _, share, other, name = max(found)
      yield Problem(
        f'{share:.0%} of {name} and {other:.0%} of the others are {trait}: a'
        ' network can tell classes by that instead of by the content of the'
        ' images, and its accuracy is misleading; convert all images to one'
        ' form',
        False,
      )


def refuse(where: str, problems: Iterable[Problem]) -> None:
  """Raises `UsageError` if a problem makes training impossible."""
  texts = [problem.text for problem in problems if problem.stops]
  if texts:
    raise UsageError(f'{where}: {"; ".join(texts)}; fix it, then retry')


def refuse_misleading(where: str, problems: Iterable[Problem]) -> None:
  """Raises `UsageError` if results would mean nothing."""
  texts = [problem.text for problem in problems if problem.misleads]
  if texts:
    raise UsageError(
      f'{where}: {"; ".join(texts)}; fix it, or train all the same with'
      ' --accept_findings'
    )


def brief(problems: Iterable[Problem]) -> str:
  """Names problems in one line, or returns ''."""
  return ', '.join(dict.fromkeys(p.brief or p.text for p in problems))


def checksum(*arrays: np.ndarray) -> str:
  """Computes SHA-256 of arrays: shapes, types and content."""
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(f'{array.dtype} {array.shape}'.encode())
    for chunk in image_cache.chunks(array):
      digest.update(np.ascontiguousarray(chunk).data)
  return digest.hexdigest()


def duplicate_problems(
  examples: Sequence[np.ndarray],
  labels: Sequence[np.ndarray],
  name: Callable[[int], str],
  may_repeat: bool = False,
) -> Iterator[Problem]:
  """Finds examples that repeat others.

  Args:
    examples: [N, ...] for training, [M, ...] for testing, as stored.
    labels: Their labels.
    name: Names an example by its number. Test examples follow from N.
    may_repeat: Whether different examples may be equal, as rows of a table.

  Yields:
    The problems. Training stops where more than a tenth of the test examples
    are for training, too, unless they may be.
  """
  num_train = len(examples[0])
  hashes = np.concatenate([_hashes(part) for part in examples])
  _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
  # The first example of each group, so a training example if it has one.
  original = first[group]
  number = np.arange(len(hashes))
  is_train, again = number < num_train, original < number
  y = np.concatenate(labels)
  is_known = (y >= 0) & (y[original] >= 0)
  for found, what, meaning in (
    (
      again & is_train,
      'training examples repeat another one',
      'they count more than others',
    ),
    (
      ~is_train & (original < num_train),
      'test examples are for training, too',
      'accuracy on them comes from memory',
    ),
    (
      again & is_known & (y != y[original]),
      'examples repeat one that has another class',
      'one of the two labels is wrong',
    ),
  ):
    if found.any():
      pairs = [f'{name(i)} = {name(original[i])}' for i in number[found][:4]]
      count = int(found.sum())
      more = f'{count:,} {what}, by their content: {shown(pairs[:3])}'
      more += ', ...' * (len(pairs) > 3)
      leaks = not is_train[found].any()
      yield Problem(
        f'{more}; {meaning}',
        brief=f'{count:,} {what}',
        misleads=leaks
        and not may_repeat
        and count > _MOST_LEAKED * len(examples[1]),
      )


def near_problems(
  examples: Sequence[np.ndarray], name: Callable[[int], str]
) -> Iterator[Problem]:
  """Finds test images that nearly repeat training images.

  Args:
    examples: As for `duplicate_problems`.
    name: Likewise.

  Yields:
    A problem, or none.
  """
  near = near_images(*examples)
  if near:
    num_train = len(examples[0])
    pairs = [f'{name(num_train + i)} ~ {name(j)}' for i, j in near.items()]
    yield Problem(
      f'{len(near):,} test images are nearly training images: {shown(pairs)};'
      ' accuracy on them comes from memory',
    )


def column_problems(x: np.ndarray) -> Iterator[Problem]:
  """Finds numbers of vectors without content.

  Args:
    x: float32 [N, D], N >= 1.

  Yields:
    The problems.
  """
  least, most = x.min(axis=0), x.max(axis=0)
  spread = most - least
  constant = np.flatnonzero(spread == 0).tolist()
  if constant:
    places = shown([str(i) for i in constant])
    yield Problem(
      f'{len(constant):,} of {x.shape[1]:,} numbers of a vector are the same in'
      f' all training examples (places {places}, from 0)',
      brief=f'{len(constant):,} constant numbers',
      misleads=len(constant) == x.shape[1],
    )
  step = np.spacing(np.maximum(np.abs(least), np.abs(most)))
  coarse = np.flatnonzero((spread > 0) & (spread < _LEAST_STEPS * step))
  for i in coarse[:NUM_SHOWN].tolist():
    yield Problem(
      f'number {i} of the vectors, from 0, goes from {least[i]:.9g} to'
      f' {most[i]:.9g}: float32 tells only {spread[i] / step[i]:.0f} steps'
      ' apart; subtract the least value',
      brief=f'number {i} too coarse in float32',
    )


def name_of(data: 'sources.DataSet') -> Callable[[int], str]:
  """Returns the function that names an example by its number.

  Args:
    data: The data set. Test examples follow training examples.
  """
  num_train = len(data.train)
  return data.place or (
    lambda i: f'test {i - num_train}' if i >= num_train else f'training {i}'
  )


def find_problems(
  data: 'sources.DataSet',
  most_bytes: float = math.inf,
  may_repeat: bool = False,
) -> list[Problem]:
  """Finds the problems of a data set, at a gigabyte of examples in a second.

  Args:
    data: The data set.
    most_bytes: Duplicates of larger data are not searched for.
    may_repeat: As for `duplicate_problems`.

  Returns:
    The problems.
  """
  x, y = (data.train.x, data.test.x), (data.train.y, data.test.y)
  problems = list(label_problems(data.class_names, *y))
  if sum(part.nbytes for part in x) <= most_bytes:
    problems += duplicate_problems(x, y, name_of(data), may_repeat)
  if data.train.kind == data_names.VECTORS and len(data.train):
    problems += column_problems(data.train.x[:, 0])
  return problems


def near_images(train: np.ndarray, test: np.ndarray) -> dict[int, int]:
  """Finds test images that differ little from a training image.

  A shift of brightness or weak noise, as of another compression, hides a copy
  from a hash. Differences of means of parts are at most those of the images, so
  that no near image is missed.

  Args:
    train: uint8 [N, H, W, channels]. Other examples have no near ones.
    test: uint8 [M, H, W, channels].

  Returns:
    Number of a test image -> that of a training image which is near, but not
    equal. Images that also equal one are left out.
  """
  if train.dtype != np.uint8 or not len(train) or not len(test):
    return {}
  # Slow to import. pylint: disable-next=import-outside-toplevel
  from scipy import spatial

  tree = spatial.cKDTree(_part_means(train))
  found = {}
  candidates: Sequence[list[int]] = tree.query_ball_point(
    _part_means(test), _NEAR, return_sorted=True
  )
  for i, numbers in enumerate(candidates):
    image = test[i].astype(np.float32)
    distances = {
      j: float(np.sqrt(np.mean(np.square(image - train[j])))) for j in numbers
    }
    most = min(_NEAR, _OF_CONTRAST * float(image.std()))
    near = [j for j, distance in distances.items() if distance <= most]
    if near and 0.0 not in distances.values():
      found[i] = near[0]
  return found


def _part_means(images: np.ndarray) -> np.ndarray:
  """Averages parts of images, weighted so that distances are comparable.

  Args:
    images: uint8 [N, H, W, channels].

  Returns:
    float32 [N, parts]. The distance of two rows is at most the root mean square
    of the differences of their images.
  """
  _, height, width, channels = images.shape
  rows, columns = (
    np.linspace(0, size, min(_PARTS, size) + 1).astype(int)
    for size in (height, width)
  )
  share = np.outer(np.diff(rows) / height, np.diff(columns) / width)
  result = []
  for chunk in image_cache.chunks(images):
    flat = chunk.reshape(len(chunk), height, width * channels)
    sums = np.add.reduceat(flat, rows[:-1], 1, dtype=np.uint32)
    sums = np.add.reduceat(sums, columns[:-1] * channels, 2)
    pixels = share * (height * width * channels)
    result.append((sums / pixels * np.sqrt(share)).reshape(len(chunk), -1))
  return np.concatenate(result).astype(np.float32)


def _hashes(examples: np.ndarray) -> np.ndarray:
  """Hashes each example, bytes [N]."""
  hashes = [
    # NumPy drops zeros at the end of `S17`, and never a dot.
    hashlib.blake2b(example.tobytes(), digest_size=16).digest() + b'.'
    for chunk in image_cache.chunks(examples)
    for example in chunk
  ]
  return np.array(hashes, 'S17')
