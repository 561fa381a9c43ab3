"""Batches: partners, views, fillers."""

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.client import batches as batches_lib
from tff_fssl.data import augment
from tff_fssl.interface import base

_STREAM = base.Stream


def _noisy(images, seed):
  images = tf.cast(images, tf.float32)
  return images + tf.random.stateless_uniform(tf.shape(images), seed)


_VIEWS = augment.Views(lambda x: tf.cast(x, tf.float32), _noisy, _noisy)


def _examples(num, first=0):
  values = np.arange(first, first + num)
  return base.Examples(
    tf.constant(values[:, None], tf.float32), tf.constant(values, tf.int32)
  )


def _client(labeled, unlabeled, views=_VIEWS):
  return base.Client(
    None, None, labeled, unlabeled, {}, views, tf.constant(4), None
  )


def _all_batches(feed):
  return [
    feed.batch(feed.ahead(first), tf.constant(step))
    for first in range(0, int(feed.num_steps), feed.steps_at_once)
    for step in range(
      first, min(first + feed.steps_at_once, int(feed.num_steps))
    )
  ]


def _batches(streams, *, unlabeled=7, labeled=0, selected=None, epochs=1):
  indices = tf.range(unlabeled) if selected is None else tf.constant(selected)
  prepared = base.Prepared(
    tf.cast(indices, tf.int32),
    per_example={'tenfold': 10 * tf.range(unlabeled)},
  )
  feed = batches_lib.Feed(
    streams,
    _client(_examples(labeled, 100), _examples(unlabeled)),
    prepared,
    num_epochs=epochs,
    batch_sizes=(3, 2),
    seed=tf.constant([5, 6]),
    enabled=True,
  )
  return _all_batches(feed)


def test_so_many_steps_whatever_the_number_of_examples_is():
  feed = batches_lib.Feed(
    {'fix': _STREAM({'plain': 'plain'})},
    _client(_examples(0), _examples(7)),
    base.Prepared(),
    num_epochs=9,
    num_steps=5,
    batch_sizes=(3, 2),
    seed=tf.constant([5, 6]),
    enabled=True,
  )
  batches = _all_batches(feed)
  # Two passes: 3, 3 and 1 of the first, 3 and 3 of the second.
  sizes = [len(batch.streams['fix'].labels) for batch in batches]
  assert sizes == [3, 3, 1, 3, 3]


def test_partners_are_drawn_from_all_examples():
  streams = {
    'fix': _STREAM({'plain': 'plain'}),
    'mix': _STREAM({'plain': 'plain', 'weak': 'weak'}, partner_of='fix'),
  }
  batches = _batches(streams, selected=[1, 4, 5, 6], epochs=200)
  assert len(batches) == 400
  counts = np.zeros(7)
  for step, batch in enumerate(batches):
    fix, mix = batch.streams['fix'], batch.streams['mix']
    assert set(np.array(fix.labels)) <= {1, 4, 5, 6}
    assert fix.labels.shape == mix.labels.shape == mix.weights.shape
    for part in (fix, mix):
      np.testing.assert_array_equal(part.views['plain'][:, 0], part.labels)
      np.testing.assert_array_equal(
        part.per_example['tenfold'], 10 * part.labels
      )
    noise = mix.views['weak'] - mix.views['plain']
    assert np.all(noise >= 0) and np.all(noise < 1)
    np.add.at(counts, np.array(mix.labels), 1)
    assert int(batch.time.step) == step and int(batch.time.num_steps) == 400
  # Uniform: 800 draws of 7 examples; 4 standard deviations.
  np.testing.assert_allclose(counts, 800 / 7, atol=4 * np.sqrt(800 / 7))
  seeds = {tuple(np.array(batch.seed)) for batch in batches}
  assert len(seeds) == 400


def test_views_of_one_kind_have_their_own_draws():
  streams = {
    'a': _STREAM({'one': 'weak', 'two': 'weak', 'three': 'strong'}),
    'b': _STREAM({'one': 'weak', 'two': 'weak'}, labeled=True),
    'c': _STREAM({'one': 'weak'}, partner_of='a'),
    'd': _STREAM({'one': 'weak'}, labeled=True, partner_of='b'),
  }
  (batch,) = _batches(streams, unlabeled=2, labeled=2)
  noise = {
    float(np.round((part.views[view][0, 0] - np.float32(part.labels[0])), 4))
    for part in batch.streams.values()
    for view in part.views
  }
  assert len(noise) == 7


@pytest.mark.parametrize('unlabeled, labeled', [(0, 2), (2, 0)])
def test_what_a_client_does_not_have_is_a_filler(unlabeled, labeled):
  streams = {
    'u': _STREAM({'weak': 'weak'}),
    'l': _STREAM({'weak': 'weak'}, labeled=True),
    'p': _STREAM({'weak': 'weak'}, partner_of='l'),
  }
  (batch,) = _batches(streams, unlabeled=unlabeled, labeled=labeled)
  weights = {
    name: list(np.array(p.weights)) for name, p in batch.streams.items()
  }
  if unlabeled:
    assert weights == {'u': [1, 1], 'l': [0], 'p': [1]}
  else:
    assert weights == {'u': [0], 'l': [1, 1], 'p': [0, 0]}
  # Batch norm sees an example of the client's, not a blank one.
  filler = batch.streams['l' if unlabeled else 'u'].views['weak'][:, 0]
  first = 0.0 if unlabeled else 100.0
  assert filler.shape == [1] and first <= float(filler[0]) < first + 1.0


def test_no_example_at_all_is_no_step():
  assert not _batches({'u': _STREAM({'weak': 'weak'})}, unlabeled=0)
  assert not _batches({'u': _STREAM({'weak': 'weak'})}, selected=[])


def test_two_streams_with_batches_of_their_own_are_refused():
  streams = {name: _STREAM({'weak': 'weak'}) for name in ('a', 'b')}
  with pytest.raises(ValueError, match="'a', 'b'.*only one"):
    _batches(streams)


_EPISODE = {
  'labeled': _STREAM({'plain': 'plain'}, labeled=True, episode=(1, 2)),
  'unlabeled': _STREAM({'plain': 'plain'}, episode=()),
}


def _episodes(labels, unlabeled=7, epochs=40, seed=5):
  """Batches of clients whose labelled example i is [i], with these labels."""
  values = np.arange(len(labels), dtype=np.float32)[:, None]
  labeled = base.Examples(
    tf.constant(values), tf.constant(labels, tf.int32, [len(labels)])
  )
  feed = batches_lib.Feed(
    _EPISODE,
    _client(labeled, _examples(unlabeled)),
    base.Prepared(),
    num_epochs=epochs,
    batch_sizes=(3, 2),
    seed=tf.constant([seed, 6]),
    enabled=True,
  )
  return [batch.streams for batch in _all_batches(feed)]


def test_an_episode_has_so_many_examples_of_each_class_in_each_group():
  # Class 1 has five examples, class 3 two, class 4 one, 0 and 2 none.
  labels = [1, 3, 1, 4, 1, 3, 1, 1]
  batches = _episodes(labels)
  assert len(batches) == 40  # One a pass.
  seen = {0: set(), 1: set()}
  for batch in batches:
    part = batch['labeled']
    index = part.views['plain'][:, 0].numpy().astype(int)
    assert len(set(index)) == len(index)  # Support and query are disjoint.
    np.testing.assert_array_equal(part.labels, np.array(labels)[index])
    np.testing.assert_array_equal(part.weights, 1.0)
    drawn = sorted(zip(part.labels.numpy(), part.group.numpy()))
    assert drawn == [(1, 0), (1, 1), (1, 1), (3, 0), (3, 1), (4, 0)]
    for i, group in zip(index, part.group.numpy()):
      seen[group].add(i)
    unlabeled = batch['unlabeled']
    assert unlabeled.group is None
    assert len(set(unlabeled.labels.numpy())) == 3
  assert seen[0] == set(range(8))  # Each example is support at some time.
  assert seen[1] == set(range(8)) - {3}
  assert {
    int(label) for batch in batches for label in batch['unlabeled'].labels
  } == set(range(7))


def test_episodes_are_a_function_of_the_seed_and_the_step():
  def flat(batches):
    return [
      [int(v) for v in batch[name].views['plain'][:, 0]]
      for batch in batches
      for name in ('labeled', 'unlabeled')
    ]

  labels = [0] * 5 + [1] * 5
  first = flat(_episodes(labels, epochs=4))
  assert first == flat(_episodes(labels, epochs=4))
  assert first == flat(_episodes(labels, epochs=6))[:8]
  assert first != flat(_episodes(labels, epochs=4, seed=7))
  assert len(set(map(tuple, first))) > 6


def test_episodes_of_clients_that_lack_examples():
  assert not _episodes([])  # No labels: no episode.
  (batch,) = _episodes([2], unlabeled=0, epochs=1)
  assert batch['labeled'].group.numpy().tolist() == [0]
  np.testing.assert_array_equal(batch['unlabeled'].weights, [0.0])
  (batch,) = _episodes([2, 2], unlabeled=2, epochs=1)  # Fewer than a batch.
  np.testing.assert_array_equal(batch['unlabeled'].weights, [1.0, 1.0])


@pytest.mark.parametrize('episodes', [False, True])
def test_views_made_for_many_steps_at_once_are_those_of_each(
  monkeypatch, episodes
):
  def render(images, draws):
    return tf.cast(images, tf.float32) + tf.reduce_sum(draws, 1, keepdims=True)

  labeled = _examples(9, 100)
  labeled = labeled._replace(y=labeled.y % 3)
  views = augment.Views(
    _VIEWS.plain,
    augment.RandomView(1, render, 1),
    augment.RandomView(3, render, 2),
  )
  kinds = {'weak': 'weak', 'strong': 'strong', 'plain': 'plain'}
  streams = (
    {
      'l': _STREAM(kinds, labeled=True, episode=(1, 2)),
      'u': _STREAM(kinds, episode=()),
    }
    if episodes
    else {
      'u': _STREAM(kinds),
      'l': _STREAM(kinds, labeled=True),
      'p': _STREAM(kinds, labeled=True, partner_of='u'),
    }
  )

  @tf.function(reduce_retracing=True)
  def batch(first, step):
    feed = batches_lib.Feed(
      streams,
      _client(labeled, _examples(7), views),
      base.Prepared(per_example={'tenfold': 10 * tf.range(7)}),
      num_epochs=7,
      batch_sizes=(3, 2),
      seed=tf.constant([5, 6]),
      enabled=True,
    )
    assert feed.steps_at_once == batches_lib._MOST_STEPS
    ahead = feed.ahead(first)
    return feed.batch(ahead, step), ahead.end

  num_steps = int(batch(tf.constant(0), tf.constant(0))[0].time.num_steps)
  assert num_steps == (7 if episodes else 35)  # Batches of 2, 2, 2, 2 and 1.
  together = {}
  for first in range(0, num_steps, 16):
    for step in range(first, min(first + 16, num_steps)):
      together[step], end = batch(tf.constant(first), tf.constant(step))
      assert int(end) == min(first + 16, num_steps)
  monkeypatch.setattr(batches_lib, '_MOST_STEPS', 1)
  batch = tf.function(batch.python_function)
  for step, expected in together.items():
    one, end = batch(tf.constant(step), tf.constant(step))
    assert int(end) == step + 1
    tf.nest.map_structure(np.testing.assert_array_equal, one, expected)
  assert not np.array_equal(
    together[0].streams['u'].views['weak'],
    together[1].streams['u'].views['weak'],
  )
