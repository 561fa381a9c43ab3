"""Texts as numbers of words, and views of them.

A text is int32 [L]: the numbers of its first L words, in [1, vocabulary), then
zeros. A word's number is its hash, and two words may share a number. No list of
words exists, since it could reveal the texts of clients. Texts are in lower
case. Words are runs of letters, marks and digits. For languages that
write no spaces between words, each letter or digit can be a word.

Every view maps a batch int32 [B, L] to float32 [B, L], the numbers of words as
networks take them (all below 2^24, so exact), in the graph. A weak view deletes
each word with the same probability, but never all words (random deletion of
EDA, Wei and Zou 2019). A strong view has its own draws and three steps:

1.  Words are replaced as by UDA (Xie et al. 2020, appendix B, and its code).
    Word i is replaced with probability min(p (C - t_i) / Z, 1). Here t_i is its
    TF-IDF in this text, C the greatest TF-IDF and Z the mean of C - t_i, so
    that key words stay. The new word w is drawn in proportion to max S - S(w),
    where S(w) is the mean of w's TF-IDF over texts, so that new words are
    uninformative. Unlike in UDA, words are hashed, and document frequencies
    are of training texts' first L words.
2.  Some words, drawn one by one, change places with each other. EDA swaps pairs
    one after another instead.
3.  Words are deleted.

UDA's replacement needs the number of training texts with each word. The program
counts in all training texts, as it measures mean and deviation of images. If
the aggregator protects clients, it counts only in texts that no client holds. A
deployment could also sum clients' counts securely.
"""

from __future__ import annotations

import numpy as np

from tff_fssl.data import augment
from tff_fssl.data import data_hparams
from tff_fssl.data import image_cache
from tff_fssl.lazy import tf

_NO_WORD, _CHARACTER = r'[^\pL\pM\pN]+', r'([\pL\pN]\pM*)'


def tokens(
  texts: tf.Tensor,
  vocabulary_size: int,
  max_words: int,
  unit: str = data_hparams.WORDS,
) -> tf.Tensor:
  """Maps words of texts to numbers, also in an exported graph.

  Args:
    texts: string [N]. Invalid UTF-8 becomes replacement characters.
    vocabulary_size: The number of different numbers, with 0.
    max_words: L, the greatest number of words. Further words are ignored.
    unit: `data_hparams.WORDS`, or `CHARACTERS`, each of which is then a word.

  Returns:
    int32 [N, L].

  Examples:
    >>> import tensorflow as tf
    >>> from tff_fssl.data import text_views
    >>> texts = tf.constant(['A cat, a CAT.', 'Dogs'])
    >>> text_views.tokens(texts, vocabulary_size=1000, max_words=5).numpy()
    array([[958,  93, 958,  93,   0],
           [838,   0,   0,   0,   0]], dtype=int32)
  """
  texts = tf.strings.unicode_transcode(texts, 'UTF-8', 'UTF-8')
  texts = tf.strings.lower(texts, encoding='utf-8')
  texts = tf.strings.regex_replace(texts, _NO_WORD, ' ')
  if unit == data_hparams.CHARACTERS:
    texts = tf.strings.regex_replace(texts, _CHARACTER, r'\1 ')
  words = tf.strings.split(texts)
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
    vocabulary_size: The number of different numbers, with 0.
    weak_deletion: Share of words that a weak view deletes, in [0, 1].
    strong_replacement: p, share of a strong view's words that UDA's method
      replaces, in [0, 1].
    strong_swaps: Share of the words of a strong view that change places, in
      [0, 1].
    strong_deletion: Share of words that a strong view deletes, in [0, 1].

  Returns:
    The views.

  Examples:
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> from tff_fssl.data import text_views
    >>> x = np.array([[1, 2, 3, 4, 5, 0], [1, 6, 7, 8, 0, 0]], np.int32)
    >>> views = text_views.build_views(x, vocabulary_size=9, weak_deletion=0.5)
    >>> print(views.weak(x, tf.constant([0, 2])).numpy())
    [[2. 5. 0. 0. 0. 0.]
     [6. 0. 0. 0. 0. 0.]]
    >>> print(views.strong(x, tf.constant([0, 2])).numpy())
    [[1. 2. 3. 4. 5. 0.]
     [4. 6. 7. 8. 0. 0.]]
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
    vocabulary_size: The number of different numbers.

  Returns:
    The inverse document frequency of each word, and the cumulative probability
    of being the new word, both float32 [vocabulary_size].
  """
  num_texts = np.zeros(vocabulary_size)
  shares = np.zeros(vocabulary_size)
  for texts in image_cache.chunks(x):
    texts = np.sort(texts, axis=1)
    # After sorting, each different word of a text counts once.
    is_first = np.diff(texts, axis=1, prepend=0) > 0
    num_texts += np.bincount(texts[is_first], minlength=vocabulary_size)
    lengths = np.maximum(np.sum(texts > 0, axis=1, keepdims=True), 1)
    share = np.broadcast_to(1 / lengths, texts.shape)[texts > 0]
    shares += np.bincount(texts[texts > 0], share, vocabulary_size)
  rarity = np.log(max(len(x), 1) / np.maximum(num_texts, 1))
  score = shares * rarity
  weight = np.where(num_texts > 0, np.max(score) - score, 0)
  # All words are alike.
  if not weight.sum():
    weight = num_texts
  cumulative = np.cumsum(weight / max(weight.sum(), 1e-12))
  # Rounded sums may end below 1, and a greater draw would find no word.
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
  scores = is_word * frequency * tf.gather(tf.constant(rarity), words)
  below = tf.reduce_max(scores, axis=1, keepdims=True) - scores
  below *= is_word
  mean = tf.reduce_sum(below, axis=1, keepdims=True) / tf.maximum(length, 1.0)
  return tf.math.divide_no_nan(below, mean)


def _swap(words: tf.Tensor, draws: tf.Tensor, share: float) -> tf.Tensor:
  """Permutes a share of the words."""
  place = tf.cast(tf.range(words.shape[1]), tf.float32)
  moves = (draws < share) & (words > 0)
  # Moving words come first, once in the order of places, once in that of draws.
  before = tf.argsort(tf.where(moves, place, words.shape[1] + place), axis=1)
  after = tf.argsort(tf.where(moves, draws, 1.0 + place), axis=1)
  back = tf.argsort(before, axis=1)
  source = tf.gather(after, back, axis=1, batch_dims=1)
  return tf.gather(words, source, axis=1, batch_dims=1)


def _delete(words: tf.Tensor, draws: tf.Tensor, share: float) -> tf.Tensor:
  """Deletes a share of the words, but never all."""
  # The word with the largest draw always stays.
  draws = tf.where(words > 0, draws, -1.0)
  last = tf.reduce_max(draws, axis=1, keepdims=True)
  keeps = (words > 0) & ((draws >= share) | (draws >= last))
  order = tf.argsort(tf.cast(~keeps, tf.int32), axis=1, stable=True)
  return tf.gather(tf.where(keeps, words, 0), order, axis=1, batch_dims=1)
