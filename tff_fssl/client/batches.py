"""Batches of a client's data: seeded orders, partners and views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from tff_fssl import loops
from tff_fssl import seeds
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import names as names_lib
from tff_fssl.lazy import tf
from tff_fssl.models import inference
from tff_fssl.seeds import fold_in


def own_stream(
  streams: Mapping[str, base.Stream], *, labeled: bool
) -> str | None:
  """Finds the labelled or unlabelled stream with batches of its own.

  Args:
    streams: The streams of a batch.
    labeled: Whether to find the labelled stream.

  Returns:
    The name, or None if there is no such stream.

  Raises:
    ValueError: If several streams have batches of their own.
  """
  names = [
    name
    for name, stream in streams.items()
    if stream.labeled == labeled and not stream.partner_of
  ]
  if len(names) > 1:
    raise ValueError(f'streams {names}: only one may have its own batches')
  return names[0] if names else None


def trains_on(streams: Mapping[str, base.Stream], *, labeled: bool) -> bool:
  """Tells whether batches contain labelled, or unlabelled, examples."""
  return own_stream(streams, labeled=labeled) is not None


def draws_episodes(streams: Mapping[str, base.Stream]) -> bool:
  """Tells whether labelled batches are episodes: see `Stream.episode`."""
  name = own_stream(streams, labeled=True)
  return name is not None and streams[name].episode is not None


# Limits of the views that are made in advance: at most 16 steps, and fewer for
# larger images.
_MOST_STEPS, _MOST_BYTES = 16, 16 * 2**20


class _Drawn(NamedTuple):
  """The draws for a stream's part of a batch, or of several batches.

  Attributes:
    index: int32 [B], its examples.
    size: int32 [1], B. For several batches, int32 [batches].
    views: Name of a random view -> float32 [B, K], or its seed, int32 [2], if
      it is no `augment.RandomView`.
    group: int32 [B]. () without episodes.
  """

  index: Any
  size: Any
  views: dict[str, Any]
  group: Any = ()


# A `_Drawn` of `tf.TensorArray`s by the name of the stream.
_Kept: TypeAlias = 'dict[str, _Drawn]'


class Ahead(NamedTuple):
  """The batches of several successive steps, whose views were made at once.

  Attributes:
    first: int32 scalar, the first step.
    end: int32 scalar, the step after the last one.
    parts: Name of stream -> the examples of all these steps, in their order.
    starts: Name of stream -> int32 [steps + 1], the index in `parts` of each
      step's first example, and the number of all examples.
  """

  first: tf.Tensor
  end: tf.Tensor
  parts: Mapping[str, base.BatchExamples]
  starts: Mapping[str, tf.Tensor]


class _Order:
  """Seeded permutations of a stream's examples, cut into batches."""

  def __init__(
    self,
    indices: tf.Tensor,
    batch_size: int,
    num_steps: tf.Tensor,
    seed: tf.Tensor,
  ):
    self.is_empty = tf.equal(tf.shape(indices)[0], 0)
    self._size = tf.maximum(tf.shape(indices)[0], 1)
    self._batch_size = batch_size
    self._steps_per_pass = inference.num_batches(self._size, batch_size)
    # A graph cannot make batches of nothing: a client without examples yields
    # example 0, with weight 0.
    padded = tf.cond(
      self.is_empty, lambda: tf.zeros([1], tf.int32), lambda: indices
    )
    num_passes = inference.num_batches(num_steps, self._steps_per_pass)
    # Sorting random keys permutes the rows of all passes in one operation.
    # `tf.random.shuffle` is not stateless.
    keys = tf.random.stateless_uniform([num_passes, self._size], seed)
    self._order = tf.gather(padded, tf.argsort(keys, axis=-1, stable=True))

  def batch(self, step: tf.Tensor) -> tf.Tensor:
    """Returns the indices of a step's examples, int32 [<= batch_size]."""
    start = (step % self._steps_per_pass) * self._batch_size
    row = self._order[step // self._steps_per_pass]
    return row[start : start + self._batch_size]


class _Draws:
  """Unlabelled batches of episodes, each drawn anew without replacement."""

  def __init__(self, indices: tf.Tensor, batch_size: int, seed: tf.Tensor):
    self.is_empty = tf.equal(tf.shape(indices)[0], 0)
    self._indices = inference.zero_row(indices, self.is_empty)
    self._batch_size, self._seed = batch_size, seed

  def batch(self, step: tf.Tensor) -> tf.Tensor:
    """Returns the indices of a step's examples, int32 [<= batch_size]."""
    seed = fold_in(self._seed, step)
    keys = tf.random.stateless_uniform(tf.shape(self._indices), seed)
    order = tf.argsort(keys, stable=True)
    return tf.gather(self._indices, order[: self._batch_size])


class _Episodes:
  """Labelled batches of episodes: some examples of each class in each group."""

  def __init__(
    self, labels: tf.Tensor, sizes: tuple[int, ...], seed: tf.Tensor
  ):
    self.is_empty = tf.equal(tf.size(labels), 0)
    self._labels = inference.zero_row(labels, self.is_empty)
    self._sizes, self._seed = sizes, seed

  def draw(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws an episode.

    Args:
      step: int32 scalar.

    Returns:
      (indices, group of each), int32 [B], in order of classes.
    """
    seed = fold_in(self._seed, step)
    keys = tf.random.stateless_uniform(tf.shape(self._labels), seed)
    order = tf.argsort(keys, stable=True)
    # A stable sort by class keeps the random order within each class.
    order = tf.gather(
      order, tf.argsort(tf.gather(self._labels, order), stable=True)
    )
    # The position of each example among those of its class decides its group.
    # Examples beyond the last group are not drawn.
    of_class = tf.gather(self._labels, order)
    first = tf.searchsorted(of_class, of_class)
    place = tf.range(tf.size(of_class)) - first
    ends = tf.cumsum(tf.constant(self._sizes, tf.int32))
    group = tf.searchsorted(ends, place, side='right')
    drawn = group < len(self._sizes)
    return tf.boolean_mask(order, drawn), tf.boolean_mask(group, drawn)


def _words(x: tf.Tensor) -> tf.Tensor | None:
  """Packs four bytes each into an int32, since GPUs do not gather uint8.

  Args:
    x: [N, ...].

  Returns:
    int32 [N, size / 4, rounded up], or None if x is not uint8 of a known size.
  """
  num_bytes = x.shape[1:].num_elements()
  if x.dtype != tf.uint8 or num_bytes is None:
    return None
  rows = tf.reshape(x, [-1, num_bytes])
  if missing := -num_bytes % 4:
    rows = tf.pad(rows, [[0, 0], [0, missing]])
  return tf.bitcast(
    tf.reshape(rows, [-1, (num_bytes + missing) // 4, 4]), tf.int32
  )


class _Source:
  """Labelled or unlabelled examples of a client, never empty.

  A client without such examples gets a filler in their place: one of its other
  examples, since batch norm sees fillers in batches with examples of both
  kinds.
  """

  def __init__(
    self,
    examples: base.Examples,
    others: base.Examples,
    per_example: Mapping[str, tf.Tensor],
  ):
    self.is_empty = tf.equal(tf.shape(examples.x)[0], 0)
    no_others = tf.equal(tf.shape(others.x)[0], 0)
    self.examples = base.Examples(
      tf.cond(
        self.is_empty,
        lambda: inference.zero_row(others.x, no_others)[:1],
        lambda: examples.x,
      ),
      inference.zero_row(examples.y, self.is_empty),
    )
    self._per_example = {
      name: inference.zero_row(values, self.is_empty)
      for name, values in per_example.items()
    }
    self._words = _words(self.examples.x)

  def _gather(self, index: tf.Tensor) -> tf.Tensor:
    """Gathers stored examples, [B, ...]."""
    if self._words is None:
      return tf.gather(self.examples.x, index)
    shape = self.examples.x.shape[1:]
    parts = tf.bitcast(tf.gather(self._words, index), tf.uint8)
    parts = tf.reshape(parts, [tf.size(index), -1])
    return tf.reshape(parts[:, : shape.num_elements()], [-1, *shape])

  def draw(self, num: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws `num` indices uniformly with replacement."""
    return tf.random.stateless_uniform(
      [num], seed, 0, tf.shape(self.examples.x)[0], tf.int32
    )

  def part(
    self,
    drawn: _Drawn,
    is_filler: tf.Tensor,
    stream: base.Stream,
    views: augment.Views,
  ) -> base.BatchExamples:
    """Builds a stream's part of a batch from its draws."""
    index = drawn.index
    images = self._gather(index)

    def make_view(name: str, kind: str) -> tf.Tensor:
      if kind == 'plain':
        return views.plain(images)
      view = getattr(views, kind)
      render = view.render if _shares(view) else view
      return render(images, drawn.views[name])

    return base.BatchExamples(
      views={
        name: make_view(name, kind) for name, kind in stream.views.items()
      },
      labels=tf.gather(self.examples.y, index),
      weights=tf.fill(tf.shape(index), tf.where(is_filler, 0.0, 1.0)),
      per_example={
        k: tf.gather(v, index) for k, v in self._per_example.items()
      },
      group=None if isinstance(drawn.group, tuple) else drawn.group,
    )


def _shares(view: object) -> bool:
  """Tells whether one call can render images with different seeds."""
  return isinstance(view, augment.RandomView)


def _slice(
  part: base.BatchExamples, start: tf.Tensor, end: tf.Tensor
) -> base.BatchExamples:
  """Slices all fields of a part."""
  group = part.group
  return base.BatchExamples(
    views=names_lib.Named(
      (name, view[start:end]) for name, view in part.views.items()
    ),
    labels=part.labels[start:end],
    weights=part.weights[start:end],
    per_example={k: v[start:end] for k, v in part.per_example.items()},
    group=None if group is None else group[start:end],
  )


class Feed:
  """The batches of one client's training in one round.

  Attributes:
    num_steps: int32 scalar, the number of steps in the whole training.
    end: int32 scalar, the number of steps that are made. A straggler makes only
      the first ones.
    steps_at_once: The number of steps whose views are made at once.
    values: `Batch.values` of the first step.
  """

  def __init__(
    self,
    streams: Mapping[str, base.Stream],
    client: base.Client,
    prepared: base.Prepared,
    *,
    num_epochs: int | tf.Tensor,
    batch_sizes: tuple[int, int],
    seed: tf.Tensor,
    enabled: tf.Tensor | bool,
    share: tf.Tensor | None = None,
    num_steps: int = 0,
  ):
    """Draws the orders.

    Args:
      streams: The streams of a batch.
      client: The client before its first step.
      prepared: The algorithm's values before training.
      num_epochs: Passes over the longer of the streams with batches of their
        own, unless `prepared` says how many. The other stream repeats.
      batch_sizes: The numbers of unlabelled and of labelled examples in a
        batch. The last batch of a pass may be smaller.
      seed: int32 [2].
      enabled: bool scalar. If false, the training has no steps.
      share: float32 scalar in [0, 1], the share of the steps that is made, at
        least one. None: all. A straggler has the orders and `StepTime`s of the
        whole training, since it did not plan to stop early.
      num_steps: The number of steps, instead of `num_epochs`. 0: by epochs.
    """
    self._streams, self._views = streams, client.views
    self._seed = seed
    self._round_num = client.round_num
    # Key: whether the examples are labelled.
    self._own = {
      kind: own_stream(streams, labeled=kind) for kind in (False, True)
    }
    selected = prepared.selected
    if selected is None:
      selected = tf.range(tf.shape(client.unlabeled.x)[0])
    indices = {
      False: selected,
      True: tf.range(tf.shape(client.labeled.x)[0]),
    }
    sizes = dict(zip((False, True), batch_sizes))
    self.values: base.Tensors = names_lib.Named(prepared.values)
    steps = self._steps_per_epoch(indices, sizes)
    if prepared.num_epochs is not None:
      num_epochs = tf.minimum(prepared.num_epochs, num_epochs)
    # A client that has nothing to train on makes no step.
    steps = (
      num_steps * tf.minimum(steps, 1) if num_steps else num_epochs * steps
    )
    self.num_steps = tf.where(enabled, steps, 0)
    self.end = self.num_steps
    if share is not None:
      part = tf.cast(tf.cast(self.num_steps, tf.float32) * share, tf.int32)
      self.end = tf.minimum(tf.maximum(part, 1), self.num_steps)
    self._orders = self._make_orders(client, indices, sizes)
    used = {stream.labeled for stream in self._streams.values()}
    self._sources = {
      labeled: _Source(
        client.labeled if labeled else client.unlabeled,
        client.unlabeled if labeled else client.labeled,
        {} if labeled else prepared.per_example,
      )
      for labeled in used
    }
    # Streams with batches of their own come first, since the number of partners
    # is the number of their examples.
    self._ordered = sorted(
      self._streams.items(), key=lambda s: bool(s[1].partner_of)
    )
    self.steps_at_once = self._steps_at_once(sizes)

  def _make_orders(
    self,
    client: base.Client,
    indices: Mapping[bool, tf.Tensor],
    sizes: Mapping[bool, int],
  ) -> dict[str, _Order | _Draws | _Episodes]:
    """Draws the orders of streams with batches of their own."""
    purposes = {False: seeds.ORDER_UNLABELED, True: seeds.ORDER_LABELED}
    orders: dict[str, _Order | _Draws | _Episodes] = {}
    for labeled, name in self._own.items():
      if name is None:
        continue
      of_order = fold_in(self._seed, purposes[labeled])
      groups = self._streams[name].episode
      if groups is None:
        orders[name] = _Order(
          indices[labeled], sizes[labeled], self.num_steps, of_order
        )
      elif labeled:
        orders[name] = _Episodes(client.labeled.y, groups, of_order)
      else:
        orders[name] = _Draws(indices[labeled], sizes[labeled], of_order)
    return orders

  def _steps_at_once(self, sizes: Mapping[bool, int]) -> int:
    """Chooses the number of steps whose views are made at once.

    A view consists of many small operations, whose cost hardly depends on the
    number of images.

    Args:
      sizes: Whether examples are labelled -> examples in a batch.

    Returns:
      The number, from 1 to 16.
    """
    num_bytes = 0
    for stream in self._streams.values():
      pixels = self._sources[stream.labeled].examples.x.shape[1:].num_elements()
      for kind in stream.views.values():
        # Unknown sizes cannot be bounded, and other views take one seed for a
        # whole batch.
        if pixels is None or not (
          kind == 'plain' or _shares(getattr(self._views, kind))
        ):
          return 1
        num_bytes += 4 * pixels * sizes[stream.labeled]
    return max(1, min(_MOST_STEPS, _MOST_BYTES // max(num_bytes, 1)))

  def _steps_per_epoch(
    self, indices: Mapping[bool, tf.Tensor], sizes: Mapping[bool, int]
  ) -> tf.Tensor:
    """Counts the steps of a pass over the longer stream.

    Args:
      indices: Whether examples are labelled -> their indices.
      sizes: Whether examples are labelled -> examples in a batch.

    Returns:
      int32 scalar.
    """
    steps, num_episodes = tf.constant(0), None
    for labeled, name in self._own.items():
      if name is None:
        continue
      num = tf.shape(indices[labeled])[0]
      of_stream = inference.num_batches(num, sizes[labeled])
      if self._streams[name].episode is not None:
        # An epoch of a stream of episodes is one episode.
        of_stream = tf.minimum(num, 1)
        num_episodes = of_stream if labeled else num_episodes
      steps = tf.maximum(steps, of_stream)
    # An episode needs labelled examples, so a client without them makes no
    # steps.
    return steps if num_episodes is None else steps * num_episodes

  def ahead(self, first: tf.Tensor) -> Ahead:
    """Makes the batches of the next `steps_at_once` steps, fewer at the end.

    Args:
      first: int32 scalar in [0, end), the first step.

    Returns:
      The batches, from which `batch` cuts one.
    """
    end = tf.minimum(first + self.steps_at_once, self.end)
    if self.steps_at_once == 1:
      drawn = self._draw(first)
    else:
      drawn = self._draw_all(first, end)
    parts = {
      name: self._sources[stream.labeled].part(
        drawn[name], self._is_filler(name), stream, self._views
      )
      for name, stream in self._ordered
    }
    starts = {
      name: tf.pad(tf.cumsum(of_stream.size), [[1, 0]])
      for name, of_stream in drawn.items()
    }
    return Ahead(first, end, parts, starts)

  def batch(self, ahead: Ahead, step: tf.Tensor) -> base.Batch:
    """Cuts the batch of a step, int32 scalar, from those made in advance."""
    i = step - ahead.first
    parts = names_lib.Named(
      (name, _slice(part, ahead.starts[name][i], ahead.starts[name][i + 1]))
      for name, part in ahead.parts.items()
    )
    return base.Batch(
      parts,
      self.values,
      base.StepTime(self._round_num, step, self.num_steps),
      fold_in(fold_in(self._seed, seeds.STEP), step),
    )

  def _is_filler(self, name: str) -> tf.Tensor:
    """Tells whether a stream's examples are fillers: bool scalar."""
    if name in self._orders:
      return self._orders[name].is_empty
    return self._sources[self._streams[name].labeled].is_empty

  def _draw(self, step: tf.Tensor) -> dict[str, _Drawn]:
    """Draws the indices and views of each stream for a step."""
    drawn: dict[str, _Drawn] = {}
    for name, stream in self._ordered:
      order, group = self._orders.get(name), ()
      if order is None:
        index = self._sources[stream.labeled].draw(
          tf.size(drawn[stream.partner_of].index),
          self._stream_seed(seeds.PARTNERS, name, step),
        )
      elif isinstance(order, _Episodes):
        index, group = order.draw(step)
      else:
        index = order.batch(step)
      views = {}
      for i, (of_view, kind) in enumerate(stream.views.items()):
        if kind != 'plain':
          view, seed = (
            getattr(self._views, kind),
            self._view_seed(name, i, step),
          )
          views[of_view] = (
            view.draw(tf.size(index), seed) if _shares(view) else seed
          )
      drawn[name] = _Drawn(index, tf.shape(index), views, group)
    return drawn

  def _draw_all(self, first: tf.Tensor, end: tf.Tensor) -> dict[str, _Drawn]:
    """Makes the draws of the steps [first, end) and concatenates them."""

    def array(size: int | None = None) -> tf.TensorArray:
      """Makes an array of int32 [B], or of float32 [B, size]."""
      return tf.TensorArray(
        tf.int32 if size is None else tf.float32,
        size=end - first,
        # Batches differ in size, so the first dimension is not inferred.
        infer_shape=False,
        element_shape=[None, *([] if size is None else [size])],
      )

    kept = {
      name: _Drawn(
        array(),
        array(),
        {
          view: array(getattr(self._views, kind).num_draws)
          for view, kind in stream.views.items()
          if kind != 'plain'
        },
        array() if stream.labeled and stream.episode is not None else (),
      )
      for name, stream in self._streams.items()
    }

    def draw(step: tf.Tensor, kept: _Kept) -> _Kept:
      drawn = self._draw(step)
      written: _Kept = tf.nest.map_structure(
        lambda array, values: array.write(step - first, values), kept, drawn
      )
      return written

    kept = loops.fold(draw, kept, start=first, end=end)
    drawn: dict[str, _Drawn] = tf.nest.map_structure(
      lambda array: array.concat(), kept
    )
    return drawn

  def num_examples(self, parts: Mapping[str, base.BatchExamples]) -> tf.Tensor:
    """Counts the examples of a batch without fillers and partners: float32."""
    own = [parts[name].weights for name in self._orders]
    return tf.add_n([tf.reduce_sum(weights) for weights in own])

  def _stream_seed(self, purpose: int, name: str, step: tf.Tensor) -> tf.Tensor:
    """Derives the seed of a stream in a step."""
    rank = list(self._streams).index(name)
    # 1000 keeps the streams' numbers apart from those of views.
    return fold_in(fold_in(fold_in(self._seed, purpose), step), 1000 + rank)

  def _view_seed(self, name: str, index: int, step: tf.Tensor) -> tf.Tensor:
    """Derives the seed of a stream's view in a step."""
    if name not in self._orders:
      return fold_in(self._stream_seed(seeds.VIEWS, name, step), index)
    # Labelled streams have the numbers 0, -1, ..., and unlabelled ones 1, 2,
    # ..., so that no two views share a seed.
    number = -index if self._streams[name].labeled else 1 + index
    return fold_in(fold_in(fold_in(self._seed, seeds.VIEWS), step), number)
