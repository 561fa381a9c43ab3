"""What can be wrong with a data set. TensorFlow-free."""

from collections.abc import Sequence
import hashlib
from typing import NamedTuple

import numpy as np

from tff_fssl.data import image_cache
from tff_fssl.hparams import UsageError

_NUM_SHOWN = 3


class Problem(NamedTuple):
  """Something that is wrong.

  Attributes:
    text: What, in one line.
    stops: Whether training is not possible.
  """

  text: str
  stops: bool


def shown(items: Sequence[str], separator: str = ', ') -> str:
  """The first items, and how many more there are."""
  more = len(items) - _NUM_SHOWN
  return separator.join(items[:_NUM_SHOWN]) + (
    f'{separator}and {more:,} more' if more > 0 else ''
  )


def class_counts(labels: np.ndarray, num_classes: int) -> np.ndarray:
  """int64 [num_classes]: examples of each class; other labels do not count."""
  return np.bincount(
    labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes
  )


def label_problems(
  class_names: Sequence[str], train: np.ndarray, test: np.ndarray
) -> list[Problem]:
  """Finds empty splits and missing classes.

  Args:
    class_names: The name of each class.
    train: Labels of training examples, integers [N]; -1 is unknown.
    test: Labels of test examples.

  Returns:
    What is wrong.
  """
  problems = [
    Problem(f'there are no {split} images', True)
    for split, labels in (('training', train), ('test', test))
    if not len(labels)
  ]
  if len(class_names) < 2:
    names = ', '.join(class_names) or 'none'
    problems.append(
      Problem(f'a classifier needs two classes or more; given: {names}', True)
    )
  for split, labels, lowest in (('training', train, -1), ('test', test, 0)):
    wrong = (labels < lowest) | (labels >= len(class_names))
    if wrong.any():
      example = int(np.argmax(wrong))
      problems.append(
        Problem(
          f'{int(wrong.sum()):,} {split} labels are not of a class (such as'
          f' {labels[example]}, of {split} image {example})',
          True,
        )
      )
  for split, labels, stops in (
    ('training', train, True),
    ('test', test, False),
  ):
    counts = class_counts(labels, len(class_names))
    missing = [n for n, count in zip(class_names, counts) if not count]
    if missing and len(labels):
      problems.append(
        Problem(f'classes without a {split} image: {shown(missing)}', stops)
      )
  return problems


def refuse(where: str, problems: Sequence[Problem]) -> None:
  """Raises `UsageError` if a problem stops training."""
  texts = [problem.text for problem in problems if problem.stops]
  if texts:
    raise UsageError(f'{where}: {"; ".join(texts)}; put this right')


def duplicate_problems(train: np.ndarray, test: np.ndarray) -> list[Problem]:
  """Finds images that are there more than once, by a hash of their pixels.

  Args:
    train: uint8 [N, H, W, C].
    test: uint8 [M, H, W, C].

  Returns:
    What is wrong.
  """
  of_train, of_test = map(_hashes, (train, test))
  unique, counts = np.unique(of_train, return_counts=True)
  problems = []
  again = int((counts - 1).sum())
  if again:
    first = int(np.argmax(of_train == unique[np.argmax(counts)]))
    problems.append(
      Problem(
        f'{again:,} training images repeat the pixels of another one (image'
        f' {first} is there {counts.max():,} times)',
        False,
      )
    )
  in_both = np.isin(of_test, unique)
  if in_both.any():
    position = int(np.argmax(in_both))
    other = int(np.argmax(of_train == of_test[position]))
    problems.append(
      Problem(
        f'{int(in_both.sum()):,} test images are training images as well (test'
        f' image {position} is training image {other})',
        False,
      )
    )
  return problems


def _hashes(images: np.ndarray) -> np.ndarray:
  """A hash of each image, bytes [N]."""
  hashes = [
    hashlib.blake2b(image.tobytes(), digest_size=16).digest()
    for chunk in image_cache.chunks(images)
    for image in chunk
  ]
  # `S16` would drop zeros at the end.
  return np.array([h + b'.' for h in hashes], 'S17')
