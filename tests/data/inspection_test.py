"""Problems of data sets."""

import numpy as np
import pytest

from tff_fssl.data import inspection
from tff_fssl.hparams import UsageError


def _texts(problems):
  return [problem.text for problem in problems]


def test_shown():
  assert inspection.shown(['a', 'b', 'c']) == 'a, b, c'
  assert inspection.shown(list('abcde')) == 'a, b, c, and 2 more'


def test_good_labels_have_no_problems():
  train, test = np.array([0, 1, -1, 1]), np.array([1, 0])
  assert not list(inspection.label_problems(['a', 'b'], train, test))


@pytest.mark.parametrize(
  'class_names, train, test, words, stops',
  [
    (['a', 'b'], [0, 1], [], 'no test examples', True),
    (['a'], [0], [0], 'two classes or more; given: a', True),
    (['a', 'b'], [0, 1, 2], [0, 1], '1 training labels are no class', True),
    (['a', 'b'], [0, 1], [0, -1], 'such as -1, of test example 1', True),
    (['a', 'b'], [0, 0], [0, 1], 'without a training example: b', True),
    (['a', 'b'], [0, 1], [0, 0], 'without a test example: b', False),
  ],
)
def test_problems_of_labels(class_names, train, test, words, stops):
  problems = inspection.label_problems(
    class_names, np.array(train, int), np.array(test, int)
  )
  (found,) = [p for p in problems if words in p.text]
  assert found.stops is stops


def test_only_problems_that_stop_are_refused():
  inspection.refuse('x', [inspection.Problem('odd', False)])
  with pytest.raises(UsageError, match='x: bad; worse; fix it, then retry'):
    inspection.refuse(
      'x',
      [inspection.Problem(text, True) for text in ('bad', 'worse')]
      + [inspection.Problem('odd', False)],
    )


def test_gray_images():
  images = np.zeros([3, 2, 2, 3], np.uint8)
  images[1, 0, 0] = [10, 14, 12]
  images[2, 0, 0] = [10, 15, 12]
  np.testing.assert_array_equal(inspection.is_gray(images), [True, True, False])
  assert inspection.is_gray(images[..., :1]).all()
  assert inspection.is_gray(images[:0]).shape == (0,)


def test_traits_that_reveal_a_class():
  labels = np.repeat([0, 1, -1], [50, 50, 20])
  is_png = labels == 1
  traits = {'PNG': is_png}
  problems = [*inspection.trait_problems(['cat', 'dog'], labels, traits)]
  (text,) = _texts(problems)
  assert '100% of dog and 0% of the others are PNG' in text
  assert not problems[0].stops
  even = np.arange(120) % 2 == 0
  assert not [*inspection.trait_problems(['cat', 'dog'], labels, {'PNG': even})]


def test_duplicates():
  train = np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1)
  train[3] = train[0]
  test = np.array([1, 9, 9], np.uint8).reshape(3, 1, 1, 1)
  problems = inspection.duplicate_problems(
    (train, test), (np.array([0, 1, 1, 1]), np.array([1, 0, 0])), 'n{}'.format
  )
  first, second, third = _texts(problems)
  assert first.startswith('1 training examples repeat another one')
  assert 'n3 = n0' in first
  assert second.startswith('1 test examples are for training, too')
  assert 'n4 = n1' in second
  assert third.startswith('1 examples repeat one that has another class')


def test_checksums_depend_on_shape_type_and_content():
  x = np.arange(6, dtype=np.int32)
  others = [x + 1, x.reshape(2, 3), x.astype(np.int64)]
  digests = {inspection.checksum(a) for a in (x, *others)}
  assert len(digests) == 4
  assert inspection.checksum(x.copy()) == inspection.checksum(x)
  assert inspection.checksum(x[::2]) == inspection.checksum(x[::2].copy())
