"""Texts and vectors, their views and a network, all tiny; two classes."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tff_fssl.data import augment
from tff_fssl.data import clients
from tff_fssl.data import text_views
from tff_fssl.data import vector_views
from tff_fssl.models import networks

NUM_CLASSES = 2
_WORDS, _VOCABULARY = 6, 300
_TEXTS = np.arange(1, 49, dtype=np.int32).reshape(8, _WORDS)
_VECTORS = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 1, 4)


class Kind(NamedTuple):
  """One kind of examples.

  Attributes:
    x: Eight examples.
    views: Their views.
    network: Builds a network, for a `norm`.
    hostile: Values that none may have.
  """

  x: np.ndarray
  views: augment.Views
  network: Callable[..., tf.keras.Model]
  hostile: tuple[float, ...]


KINDS = {
  'texts': Kind(
    _TEXTS,
    text_views.build_views(_TEXTS, _VOCABULARY),
    functools.partial(
      networks.build_network,
      'text_cnn',
      (_WORDS,),
      NUM_CLASSES,
      vocabulary_size=_VOCABULARY,
    ),
    (-1, _VOCABULARY, 2**31 - 1, -(2**31)),
  ),
  'vectors': Kind(
    _VECTORS,
    vector_views.build_views((0.0,) * 4, (1.0,) * 4),
    functools.partial(networks.build_network, 'mlp', (4,), NUM_CLASSES),
    (np.nan, np.inf, -np.inf, 3e38, 1e6),
  ),
}


def element(x: np.ndarray, index: int = 0, labeled: bool = False):
  """A client's element, with labels if asked for."""
  y = np.arange(len(x), dtype=np.int32) % NUM_CLASSES
  return clients.make_example(
    seed=np.array([index, 1], np.int32),
    labeled=(x, y) if labeled else None,
    unlabeled=(x, y),
  )
