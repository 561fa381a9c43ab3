"""Texts as numbers of words, and views of them.

A text is int32 [L]: the numbers of its first L words, in [1, vocabulary), then
0. A word's number is a hash of it: there is no list of words, which could tell
what clients wrote, and two words may share a number. Texts are in lower case;
words are runs of letters, marks and digits, so that languages which do not put
spaces between words need them put there.

Every view maps a batch int32 [B, L] to float32 [B, L], the numbers of words as
networks take them (all below 2^24, so exact), in the graph. A weak view lacks
some words, each with the same probability (random deletion of EDA, Wei and Zou
2019; never all). A strong view, with its own draws:

1.  words are replaced as by UDA (Xie et al. 2020, appendix B; its code): word i
    with probability min(p (C - t_i) / Z, 1), where t_i is its TF-IDF in this
    text, C the greatest of them and Z the mean of C - t_i; so that key words
    stay. What replaces it is drawn in proportion to max S - S(w), S(w) the mean
    of w's TF-IDF over texts: of words that say little. Deviations: words are
    hashed; document frequencies are of training texts' first L words;
2.  some words, drawn one by one, change places with each other, where EDA swaps
    pairs one after another;
3.  words are deleted.

UDA's replacement needs to know in how many training texts a word is. The
program counts in all of them, as it measures mean and deviation of images;
where the aggregator protects clients, only in those that no client holds. A
deployment could also sum clients' counts securely.
"""

from __future__ import annotations

import numpy as np

from tff_fssl.data import augment
from tff_fssl.data import image_cache
from tff_fssl.lazy import tf

_NO_WORD = r'[^\pL\pM\pN]+'


def tokens(texts: tf.Tensor, vocabulary_size: int, max_words: int) -> tf.Tensor:
  """Numbers the words of texts, also in a graph that is exported.

  Args:
    texts: string [N], UTF-8. What is not becomes replacement characters.
    vocabulary_size: How many numbers there are, with 0.
    max_words: L, of how many words a text may have. Others are left out.

  Returns:
    int32 [N, L].
  """
  texts = tf.strings.unicode_transcode(texts, 'UTF-8', 'UTF-8')
  texts = tf.strings.lower(texts, encoding='utf-8')
  words = tf.strings.split(tf.strings.regex_replace(texts, _NO_WORD, ' '))
  numbers = tf.ragged.map_flat_values(
    tf.strings.to_hash_bucket_fast, words[:, :max_words], vocabulary_size - 1
  )
  whole = (numbers + 1).to_tensor(shape=[None, max_words])
  return tf.cast(whole, tf.int32)


def build_views(
  x: np.ndarray,
  vocabulary_size: int,
  *,
  weak_deletion: float = 0.1,
  strong_replacement: float = 0.5,
  strong_swaps: float = 0.1,
  strong_deletion: float = 0.1,
) -> augment.Views:
  """Builds the views of a data set's texts.

  Args:
    x: int32 [N, L], texts in which words are counted. N may be 0 without
      replacement.
    vocabulary_size: How many numbers there are, with 0.
    weak_deletion: Share of the words that a weak view lacks, in [0, 1].
    strong_replacement: p, share of the words of a strong view that UDA's method
      replaces.
    strong_swaps: Share of the words of a strong view that change places.
    strong_deletion: Share of the words that it lacks.

  Returns:
    The views.
  """
  length = x.shape[1]
  rarity, cumulative = _statistics(x, vocabulary_size)

  def plain(words: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.ensure_shape(words, [None, length]), tf.float32)

  def accepts(words: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all((words >= 0) & (words < vocabulary_size))

  def weak(words: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    return plain(_delete(words, draws, weak_deletion))

  def strong(words: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    whether, which, swaps, deletions = tf.split(draws, 4, axis=1)
    probability = strong_replacement * _replaceable(words, rarity)
    others = tf.searchsorted(cumulative, tf.reshape(which, [-1]), side='right')
    others = tf.reshape(others, tf.shape(words))
    words = tf.where(whether < probability, others, words)
    words = _swap(words, swaps, strong_swaps)
    return plain(_delete(words, deletions, strong_deletion))

  return augment.Views(
    plain,
    augment.RandomView(length, weak, augment.WEAK_SALT),
    augment.RandomView(4 * length, strong, augment.STRONG_SALT),
    accepts,
  )


def _statistics(
  x: np.ndarray, vocabulary_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Measures words for UDA's replacement.

  Args:
    x: int32 [N, L], texts.
    vocabulary_size: How many numbers there are.

  Returns:
    (inverse document frequency, cumulative probability of replacing another
    word), both float32 [vocabulary_size].
  """
  num_texts = np.zeros(vocabulary_size)
  shares = np.zeros(vocabulary_size)
  for texts in image_cache.chunks(x):
    texts = np.sort(texts, axis=1)
    is_first = np.diff(texts, axis=1, prepend=0) > 0
    num_texts += np.bincount(texts[is_first], minlength=vocabulary_size)
    lengths = np.maximum(np.sum(texts > 0, axis=1, keepdims=True), 1)
    share = np.broadcast_to(1 / lengths, texts.shape)[texts > 0]
    shares += np.bincount(texts[texts > 0], share, vocabulary_size)
  rarity = np.log(max(len(x), 1) / np.maximum(num_texts, 1))
  score = shares * rarity
  weight = np.where(num_texts > 0, score.max() - score, 0)
  if not weight.sum():  # All words are alike.
    weight = num_texts
  cumulative = np.cumsum(weight / max(weight.sum(), 1e-12))
  # The word of the greatest draw exists, however sums are rounded.
  last = int(np.max(np.nonzero(weight)[0], initial=0))
  cumulative[last:] = 1
  return rarity.astype(np.float32), cumulative.astype(np.float32)


def _replaceable(words: tf.Tensor, rarity: np.ndarray) -> tf.Tensor:
  """Computes (C - t_i) / Z of each word, float32 [B, L], 0 without a word."""
  is_word = tf.cast(words > 0, tf.float32)
  length = tf.reduce_sum(is_word, axis=1, keepdims=True)
  in_order = tf.sort(words, axis=1)
  count = tf.searchsorted(in_order, words, side='right') - tf.searchsorted(
    in_order, words, side='left'
  )
  frequency = tf.math.divide_no_nan(tf.cast(count, tf.float32), length)
  of_text = is_word * frequency * tf.gather(tf.constant(rarity), words)
  below = tf.reduce_max(of_text, axis=1, keepdims=True) - of_text
  below *= is_word
  mean = tf.reduce_sum(below, axis=1, keepdims=True) / tf.maximum(length, 1.0)
  return tf.math.divide_no_nan(below, mean)


def _swap(words: tf.Tensor, draws: tf.Tensor, share: float) -> tf.Tensor:
  """Lets a share of the words change places with each other."""
  place = tf.cast(tf.range(words.shape[1]), tf.float32)
  moves = (draws < share) & (words > 0)
  # Words that move come first, in the order of places and in one of draws.
  before = tf.argsort(tf.where(moves, place, words.shape[1] + place), axis=1)
  after = tf.argsort(tf.where(moves, draws, 1.0 + place), axis=1)
  back = tf.argsort(before, axis=1)
  source = tf.gather(after, back, axis=1, batch_dims=1)
  return tf.gather(words, source, axis=1, batch_dims=1)


def _delete(words: tf.Tensor, draws: tf.Tensor, share: float) -> tf.Tensor:
  """Deletes a share of the words, but never all of them."""
  draws = tf.where(words > 0, draws, -1.0)
  last = tf.reduce_max(draws, axis=1, keepdims=True)
  keeps = (words > 0) & ((draws >= share) | (draws >= last))
  order = tf.argsort(tf.cast(~keeps, tf.int32), axis=1, stable=True)
  return tf.gather(tf.where(keeps, words, 0), order, axis=1, batch_dims=1)
