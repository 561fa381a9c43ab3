"""What clients hand over is not believed."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms import registry
from tff_fssl.data import clients
from tff_fssl.data import text_views
from tff_fssl.data import vector_views
from tff_fssl.models import networks
from tff_fssl.rounds import client_data
from tff_fssl.rounds.round_hparams import RoundHparams

_WORDS, _VOCABULARY = 6, 300
_TEXTS = np.arange(1, 49, dtype=np.int32).reshape(8, _WORDS)
_VECTORS = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 1, 4)
_KINDS = {
  'texts': (
    _TEXTS,
    text_views.build_views(_TEXTS, _VOCABULARY),
    functools.partial(
      networks.build_network,
      'text_cnn',
      (_WORDS,),
      2,
      vocabulary_size=_VOCABULARY,
    ),
  ),
  'vectors': (
    _VECTORS,
    vector_views.build_views((0.0,) * 4, (1.0,) * 4),
    functools.partial(networks.build_network, 'mlp', (4,), 2),
  ),
}
_HOSTILE = {
  'texts': (-1, _VOCABULARY, 2**31 - 1, -(2**31)),
  'vectors': (np.nan, np.inf, -np.inf, 3e38, 1e6),
}


def _element(x, index=0):
  return clients.make_example(
    seed=np.array([index, 1], np.int32),
    labeled=None,
    unlabeled=(x, np.zeros(len(x), np.int32)),
  )


@pytest.mark.parametrize('kind', list(_KINDS))
def test_values_that_cannot_be_reject_the_whole_client(kind):
  x, views, _ = _KINDS[kind]
  read = tf.function(
    functools.partial(
      client_data.read_client, num_classes=2, accepts=views.accepts
    )
  )
  for value in _HOSTILE[kind]:
    wrong = x.copy()
    wrong[3, ..., 2] = value
    data, usable = read(tf.data.Dataset.from_tensors(_element(wrong)))
    assert not usable and not len(data['unlabeled']['x'])
  data, usable = read(tf.data.Dataset.from_tensors(_element(x)))
  assert usable and len(data['unlabeled']['x']) == len(x)


@pytest.mark.parametrize('kind,norm', [('texts', 'bn'), ('vectors', 'none')])
def test_a_round_counts_such_clients_and_goes_on(kind, norm):
  x, views, model_fn = _KINDS[kind]
  process = registry.REGISTRY['fixmatch'].build(
    functools.partial(model_fn, norm=norm),
    views=views,
    element_spec=clients.element_spec(x.shape[1:]),
    server_data_fn=clients.build_server_data_fn(x, np.arange(8) % 2),
    round_hparams=RoundHparams(
      num_pretraining_rounds=0, client_epochs=1, server_epochs=1
    ),
    seed=1,
    num_classes=2,
  )
  results = []
  for value in (*_HOSTILE[kind][:2], None):
    wrong = x.copy()
    if value is not None:
      wrong[3, ..., 2] = value
    cohort = [
      tf.data.Dataset.from_tensors(_element(part, i))
      for i, part in enumerate((wrong, x))
    ]
    result = process.next(process.initialize(), cohort)
    metrics = result.metrics['client_work']['train']
    results.append(metrics['num_rejected_clients'])
    weights = tf.nest.flatten(result.state.global_model_weights)
    assert all(np.isfinite(w).all() for w in weights)
  assert results == [1, 1, 0]


def test_a_placeholder_is_rejected_for_all_kinds():
  for x, views, _ in _KINDS.values():
    spec = clients.element_spec(x.shape[1:])
    element = clients.unusable_example(spec)
    assert isinstance(element, collections.OrderedDict)
    _, usable = client_data.read_client(
      tf.data.Dataset.from_tensors(element), 2, views.accepts
    )
    assert not usable
