"""Numbers of words, and views of texts."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.data import text_views

_SEED = tf.constant([3, 4])
_SIZE = 300


def _texts(num=200, length=12, seed=0):
  """Texts of 4 to `length` words; word w is in about 1 / w of them."""
  rng = np.random.default_rng(seed)
  x = np.minimum(rng.zipf(1.5, (num, length)), _SIZE - 1).astype(np.int32)
  lengths = rng.integers(4, length + 1, (num, 1))
  return np.where(np.arange(length) < lengths, x, 0).astype(np.int32)


def _views(**strengths):
  nothing = {
    'weak_deletion': 0.0,
    'strong_replacement': 0.0,
    'strong_swaps': 0.0,
    'strong_deletion': 0.0,
  }
  return text_views.build_views(_texts(), _SIZE, **{**nothing, **strengths})


def test_tokens():
  texts = ["Don't PANIC,\tdon\u2019t!", '', ' \n', 'Ünïcödé ünÏCÖDÉ 42']
  numbers = text_views.tokens(texts, 1_000, 5).numpy()
  assert numbers.shape == (4, 5) and numbers.dtype == np.int32
  first, *empty, last = numbers
  assert first[0] == first[3] and first[1] == first[4] and first.all()
  assert not np.any(empty)
  assert last[0] == last[1] != last[2] and not last[3:].any()
  # A word has the same number anywhere and always.
  assert text_views.tokens(['panic'], 1_000, 5)[0, 0] == first[2] == 957


def test_tokens_of_anything():
  texts = [b'\xff\xfe\x00 \x80', 'a' * 10**6, 'x ' * 10**5, '\0', '\u202e a']
  numbers = text_views.tokens(texts, 256, 8).numpy()
  assert numbers.min() >= 0 and numbers.max() < 256
  assert (numbers[2] > 0).all()


def test_nothing_to_do_leaves_texts_as_they_are():
  x, views = tf.constant(_texts()), _views()
  for view in (views.plain(x), views.weak(x, _SEED), views.strong(x, _SEED)):
    assert view.dtype == tf.float32
    np.testing.assert_array_equal(view, x)


def _words(row):
  return [word for word in row if word]


def _is_part(part, whole):
  """Whether the words of `part` are in `whole` in this order."""
  rest = iter(whole)
  return all(word in rest for word in part)


def test_deletion_keeps_order_and_never_all():
  x = _texts(2_000)
  shares = {}
  for share in (0.3, 1.0):
    seen = _views(weak_deletion=share).weak(tf.constant(x), _SEED).numpy()
    for before, after in zip(x, seen):
      kept = _words(after)
      assert 1 <= len(kept) and not after[len(kept) :].any()
      assert _is_part(kept, _words(before))
    shares[share] = (seen > 0).sum() / (x > 0).sum()
  assert abs(shares[0.3] - 0.7) < 0.02
  assert shares[1.0] == len(x) / (x > 0).sum()
  empty = tf.zeros([2, 12], tf.int32)
  assert not _views(weak_deletion=1.0).weak(empty, _SEED).numpy().any()


def test_swaps_move_words_of_a_text_only():
  x = _texts(500)
  seen = _views(strong_swaps=0.5).strong(tf.constant(x), _SEED).numpy()
  np.testing.assert_array_equal(np.sort(seen), np.sort(x))
  np.testing.assert_array_equal(seen > 0, x > 0)
  moved = (seen != x).sum() / (x > 0).sum()
  assert 0.1 < moved < 0.5


def test_replacement_is_udas():
  x = _texts(400)
  p = 0.3
  views = _views(strong_replacement=p)
  stats = _texts()
  # By the definition of UDA's code, with words instead of their numbers.
  documents = [_words(row) for row in stats]
  count = collections.Counter(w for d in documents for w in set(d))
  idf = {w: np.log(len(documents) / c) for w, c in count.items()}
  score = collections.Counter()
  for document in documents:
    for word in document:
      score[word] += idf[word] / len(document)
  most = max(score.values())
  likely = np.zeros(_SIZE)
  for word, value in score.items():
    likely[word] = most - value
  likely /= likely.sum()
  replaced = np.zeros(x.shape)
  into = np.zeros(_SIZE)
  num_draws = 300
  draw = tf.function(views.strong)
  for seed in range(num_draws):
    seen = draw(tf.constant(x), tf.constant([seed, 0])).numpy().astype(int)
    replaced += seen != x
    into += np.bincount(seen[seen != x], minlength=_SIZE)
    assert ((seen > 0) == (x > 0)).all()
  expected = np.zeros(x.shape)
  for row, text in enumerate(x):
    words = _words(text)
    rare = [idf.get(w, np.log(len(documents))) for w in words]
    tf_idf = np.array([words.count(w) * r for w, r in zip(words, rare)])
    below = tf_idf.max() - tf_idf
    if below.sum():
      chance = np.minimum(p * len(words) * below / below.sum(), 1)
      # A word may be replaced by itself.
      expected[row, : len(words)] = chance * (1 - likely[words])
  np.testing.assert_allclose(replaced / num_draws, expected, atol=0.15)
  np.testing.assert_allclose(
    (replaced / num_draws).mean(), expected.mean(), atol=0.005
  )
  assert not into[(likely == 0)].any()
  assert into[likely == likely.max()].max() > into[likely > 0].min()


def test_words_that_are_all_alike_can_be_replaced():
  x = np.full((3, 5), 7, np.int32)
  views = text_views.build_views(x, _SIZE, strong_replacement=1.0)
  seen = views.strong(tf.constant(x), _SEED).numpy()
  assert set(np.unique(seen)) <= {0, 7}


def test_draws_follow_the_seed_and_the_example_alone():
  x = tf.repeat(tf.range(1, 13)[tf.newaxis], 6, axis=0)
  views = text_views.build_views(_texts(), _SIZE, weak_deletion=0.5)
  for view in (views.weak, views.strong):
    first = view(x, _SEED).numpy()
    np.testing.assert_array_equal(first, view(x, _SEED))
    assert len(np.unique(first, axis=0)) > 1
    alone = view.render(x[2:3], view.draw(6, _SEED)[2:3])
    np.testing.assert_array_equal(alone, first[2:3])


@pytest.mark.parametrize('word', [-1, _SIZE, 2**31 - 1, -(2**31)])
def test_words_out_of_range_are_not_accepted(word):
  x, views = _texts(), _views()
  assert views.accepts(tf.constant(x)) and views.accepts(tf.constant(x[:0]))
  x[3, 2] = word
  assert not views.accepts(tf.constant(x))
