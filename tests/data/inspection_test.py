"""Problems of data sets."""

import numpy as np
import pytest

from tff_fssl.data import inspection
from tff_fssl.data import sources
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


@pytest.mark.parametrize('shape', [(8, 8, 1), (9, 7, 3), (2, 3, 1)])
def test_near_copies(shape):
  rng = np.random.default_rng(0)
  train = rng.integers(3, 250, (50, *shape), np.uint8)
  test = rng.integers(3, 250, (9, *shape), np.uint8)
  assert not inspection.near_images(train, test)
  test[2] = train[7] + 1  # Brighter.
  test[4] = train[9] + rng.integers(-3, 4, shape)  # Another compression.
  test[5] = train[11]  # A copy is another problem.
  test[6] = train[12] // 2
  assert inspection.near_images(train, test) == {2: 7, 4: 9}
  (found,) = _texts(inspection.near_problems((train, test), 'n{}'.format))
  assert '2 test images are nearly training images: n52 ~ n7, n54' in found


def test_images_without_contrast_are_not_near_all_others():
  train = np.random.default_rng(0).integers(100, 104, (50, 8, 8, 1), np.uint8)
  test = np.random.default_rng(1).integers(100, 104, (5, 8, 8, 1), np.uint8)
  assert not inspection.near_images(train, test)


def test_digits_are_not_near():
  digits = sources.load('digits')
  assert not inspection.near_images(digits.train.x, digits.test.x)


@pytest.mark.slow
def test_natural_images_are_not_near(tfds_dir):
  data = sources.load('cifar10', tfds_dir)
  assert not inspection.near_images(data.train.x, data.test.x)


def test_only_images_are_near():
  vectors = np.zeros((4, 1, 3), np.float32)
  assert not inspection.near_images(vectors, vectors + 1e-3)


def test_checksums_depend_on_shape_type_and_content():
  x = np.arange(6, dtype=np.int32)
  others = [x + 1, x.reshape(2, 3), x.astype(np.int64)]
  digests = {inspection.checksum(a) for a in (x, *others)}
  assert len(digests) == 4
  assert inspection.checksum(x.copy()) == inspection.checksum(x)
  assert inspection.checksum(x[::2]) == inspection.checksum(x[::2].copy())


@pytest.mark.parametrize(
  'names',
  [
    ('cat', 'Cat'),
    ('1', '1.0'),
    ('01', '1'),
    ('no finding', 'No_Finding'),
    ('cat', 'cat\u200b'),
    ('\u00e9t\u00e9', 'e\u0301te\u0301'),
    ('\uff11', '1'),
  ],
)
def test_spellings_of_one_class(names):
  labels = np.array([0, 1, 2])
  (problem,) = inspection.label_problems([*names, 'other'], labels, labels)
  assert 'in several spellings' in problem.text and not problem.stops


def test_classes_that_list_others():
  names = ['Edema', 'Mass', 'Edema|Mass', 'and/or']
  labels = np.arange(4)
  (problem,) = inspection.label_problems(names, labels, labels)
  assert 'classes that list others: Edema|Mass;' in problem.text


def test_clients_on_both_sides():
  train, test = np.array([0, 1, 1, -1]), np.array([1, 2, -1])
  (problem,) = inspection.owner_problems(train, test, True)
  assert problem.text.startswith('1 clients') and '--split_by' in problem.text
  assert not [*inspection.owner_problems(train, test[1:], True)]
  (problem,) = inspection.owner_problems(train, test, False, 'validation')
  assert problem.brief == '1 clients in training and validation'
  assert '--split_by' not in problem.text


def test_constant_and_coarse_numbers():
  x = np.zeros((100, 3), np.float32)
  x[:, 1] = 1.7e9 + np.arange(100)
  x[:, 2] = np.arange(100)
  constant, coarse = inspection.column_problems(x)
  assert '1 of 3 numbers' in constant.text and not constant.misleads
  assert 'number 1' in coarse.text and 'float32 tells only' in coarse.text
  assert next(inspection.column_problems(x[:, :1])).misleads


def test_copies_of_the_test_set_mislead():
  x = np.arange(40, dtype=np.float32).reshape(40, 1)
  test = x[:20] + 0.5
  y = np.zeros(40, int), np.zeros(20, int)
  for copies, misleads in ((2, False), (3, True)):
    test[:copies] = x[:copies]
    (problem,) = inspection.duplicate_problems((x, test), y, str)
    assert problem.misleads == misleads
    if misleads:
      with pytest.raises(UsageError, match='--accept_findings'):
        inspection.refuse_misleading('a', [problem])
