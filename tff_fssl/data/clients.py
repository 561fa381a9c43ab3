"""The examples that clients and the server train on.

A client's data are one element, `OrderedDict(seed, labeled, unlabeled)`.
`labeled` and `unlabeled` are `OrderedDict(x, y)`. Labels of unlabelled examples
are for diagnostics only. -1 means "not known".
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import hashlib
import os
import pathlib
from typing import Any

import numpy as np

from tff_fssl import durable
from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import pictures
from tff_fssl.data import seeds
from tff_fssl.data import sources
from tff_fssl.data.sources import images
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf

# The label of an example whose label is not known.
UNKNOWN_LABEL = names.UNKNOWN_LABEL
# Larger labelled sets would make the server's graph slow to build and to copy.
MAX_CONSTANT_BYTES = 16 * 2**20
# (x uint8 [N, H, W, C], y int32 [N])
_Pair = tuple[np.ndarray, np.ndarray]


def element_spec(
  example_shape: tuple[int, ...], *, stragglers: bool = False
) -> collections.OrderedDict[str, Any]:
  """Returns the type of a client's one element, for any number of examples.

  Args:
    example_shape: (height, width, channels) of images, (views, numbers) of
      vectors, or (words,) of texts.
    stragglers: Whether an element contains the share of steps that its client
      makes.

  Returns:
    Nested `tf.TensorSpec`s: seed int32 [2], labeled and unlabeled. Both have x,
    uint8 [None, H, W, C], float32 [None, V, D] or int32 [None, L], and y, int32
    [None]. With `stragglers` they also have share, float32 [], the share of its
    local steps that the client makes, in [0, 1] (at least one step).

  Examples:
    >>> from tff_fssl.data import clients
    >>> spec = clients.element_spec((32, 32, 3))
    >>> spec['seed']
    TensorSpec(shape=(2,), dtype=tf.int32, name=None)
    >>> spec['unlabeled']['x']
    TensorSpec(shape=(None, 32, 32, 3), dtype=tf.uint8, name=None)
  """
  examples = collections.OrderedDict(
    x=tf.TensorSpec([None, *example_shape], names.kind_of(example_shape).dtype),
    y=tf.TensorSpec([None], tf.int32),
  )
  spec = collections.OrderedDict(
    seed=tf.TensorSpec([2], tf.int32),
    labeled=examples,
    unlabeled=examples.copy(),
  )
  if stragglers:
    spec['share'] = tf.TensorSpec([], tf.float32)
  return spec


def client_seed(seed: int, round_num: int, client_id: int) -> np.ndarray:
  """Derives the seed of all randomness of a client in a round.

  Args:
    seed: The seed of the run, any integer.
    round_num: The round number, 0 or negative in pre-training.
    client_id: The client's number, any integer.

  Returns:
    int32 [2].

  Examples:
    >>> from tff_fssl.data import clients
    >>> for round_num, client_id in ((1, 0), (1, 1), (2, 0)):
    ...   print(clients.client_seed(0, round_num, client_id))
    [-1564790824    -9488062]
    [-1685111624  1471205143]
    [-1867900464   449509514]
  """
  return seeds.seed_pair(seed, seeds.Purpose.CLIENT_ROUND, round_num, client_id)


def make_example(
  *,
  seed: np.ndarray,
  labeled: tuple[np.ndarray, np.ndarray] | None,
  unlabeled: tuple[np.ndarray, np.ndarray | None] | None,
  num_classes: int | None = None,
) -> collections.OrderedDict[str, Any]:
  """Makes a client's element from plain arrays.

  Args:
    seed: int32 [2], a different one each round (see `client_seed`).
    labeled: (x, y integers [N]), x as in `sources.Examples`, or None if the
      client has no labelled examples.
    unlabeled: (x, y) as for `labeled`, or (x, None) if true labels are not
      known, or None if the client has no unlabelled examples. `labeled` or
      `unlabeled` must be given.
    num_classes: The limit of labels. None: labels are not checked here, and the
      process rejects clients with labels that the model does not have.

  Returns:
    Nested arrays that match `element_spec`.

  Raises:
    UsageError: If shapes, types or labels do not match.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import clients
    >>> images = np.zeros([3, 8, 8, 1], np.uint8)
    >>> seed = clients.client_seed(0, round_num=1, client_id=3)
    >>> element = clients.make_example(
    ...   seed=seed, labeled=None, unlabeled=(images, None)
    ... )
    >>> element['unlabeled']['y']  # Not known.
    array([-1, -1, -1], dtype=int32)
    >>> element['labeled']['x'].shape
    (0, 8, 8, 1)
  """
  given = [pair for pair in (labeled, unlabeled) if pair is not None]
  if not given:
    raise UsageError('neither labelled nor unlabelled examples were given')
  first = np.asarray(given[0][0])
  # Absent examples have the shape and type of the given ones.
  like = np.zeros((0, *first.shape[1:]), first.dtype)

  def examples(pair, lowest):
    if pair is None:
      pair = like, None
    x, y = pair
    if y is None:
      y = np.full(len(x), UNKNOWN_LABEL, np.int32)
    checked = sources.Examples(np.asarray(x), y)
    if checked.x.shape[1:] != like.shape[1:]:
      raise UsageError(
        f'labelled examples are {list(like.shape[1:])}, unlabelled ones'
        f' {list(checked.x.shape[1:])}: they must have one shape'
      )
    if num_classes is not None:
      sources.check_labels(checked.y, lowest, num_classes)
    return collections.OrderedDict(x=checked.x, y=checked.y)

  seed = np.asarray(seed)
  if seed.shape != (2,) or seed.dtype != np.int32:
    raise UsageError(
      f"a client's seed must be int32 [2], not {seed.dtype} {seed.shape}"
    )
  return collections.OrderedDict(
    seed=seed,
    labeled=examples(labeled, 0),
    unlabeled=examples(unlabeled, UNKNOWN_LABEL),
  )


def unusable_example(element_spec: Any) -> collections.OrderedDict[str, Any]:
  """Makes a placeholder for a client whose data cannot be used.

  Args:
    element_spec: A result of the function `element_spec`.

  Returns:
    One example with an impossible label. All of our processes reject it, and
    count the client as rejected.
  """
  element = tf.nest.map_structure(
    lambda s: np.zeros([d or 0 for d in s.shape], s.dtype.as_numpy_dtype),
    element_spec,
  )
  x, y = element['unlabeled']['x'], element['unlabeled']['y']
  if 'client_id' in element:
    # The number of no client, so that nobody's rows are touched.
    element['client_id'] = np.int32(-1)
  element['unlabeled'] = collections.OrderedDict(
    x=np.zeros([1, *x.shape[1:]], x.dtype),
    y=np.full([1], UNKNOWN_LABEL - 1, y.dtype),
  )
  return element


@dataclasses.dataclass(frozen=True)
class Streaming:
  """The schedule by which a client's unlabelled examples arrive.

  With `full_labels`, which labels these, it is that of all its examples.

  FedMatch's Streaming-NonIID (Jeong et al., 2021) has 10 steps of 10 rounds.
  Parts are a function of the seed, the client and the round's number, so that a
  resumed run has the same parts.

  Attributes:
    steps: The number of equal parts into which each client's examples are cut
      at random, >= 1. 1: clients always have all.
    rounds: The number of rounds of each part, >= 1.
    cycles: Whether the first part follows the last one. Otherwise the last part
      stays.
    seed: Any integer.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data.clients import Streaming
    >>> streaming = Streaming(steps=3, rounds=10)
    >>> for round_num in (1, 10, 11, 21, 99):
    ...   print(round_num, streaming.part(np.arange(6), 0, round_num))
    1 [2 5]
    10 [2 5]
    11 [3 4]
    21 [0 1]
    99 [0 1]
  """

  steps: int = 1
  rounds: int = 1
  cycles: bool = False
  seed: int = 0

  @property
  def last_begins(self) -> int:
    """Returns the first round with the last part."""
    return (self.steps - 1) * self.rounds + 1

  def step(self, round_num: int) -> int:
    """Returns the part of a round >= 1, in [0, steps)."""
    step = (round_num - 1) // self.rounds
    return step % self.steps if self.cycles else min(step, self.steps - 1)

  def part(
    self, examples: np.ndarray, client_id: int, round_num: int
  ) -> np.ndarray:
    """Returns a client's examples in a round.

    Args:
      examples: int64 [N], all such examples of the client, ascending.
      client_id: The client.
      round_num: The round, >= 1.

    Returns:
      int64, ascending: floor(N / steps) examples, or one more.
    """
    if self.steps == 1:
      return examples
    # One order for all rounds, so that parts do not overlap.
    rng = seeds.generator(self.seed, seeds.Purpose.STREAMING, client_id)
    order = rng.permutation(len(examples))
    step = self.step(round_num)
    start, stop = (len(examples) * s // self.steps for s in (step, step + 1))
    return examples[np.sort(order[start:stop])]


def client_examples(
  data: sources.DataSet,
  partition: partition_lib.Partition,
  client_id: int,
  round_num: int = 1,
  streaming: Streaming = Streaming(),
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
  """Returns the examples of a client of a partition in a round.

  Args:
    data: The data set.
    partition: A partition of its training examples.
    client_id: In [0, partition.num_clients).
    round_num: The round, >= 1.
    streaming: The schedule of the client's examples.

  Returns:
    (labeled, unlabeled), each (x, y) as for `make_example`, copied. `labeled`
    has the partition's wrong labels.

  Raises:
    UsageError: If there is no such client.

  Examples:
    >>> from tff_fssl.data import clients
    >>> from tff_fssl.data import partition_draw
    >>> from tff_fssl.data import sources
    >>> from tff_fssl.data.partition_settings import PartitionSettings
    >>> data = sources.load('digits')
    >>> settings = PartitionSettings(10, num_clients=20, num_labels=50)
    >>> partition = partition_draw.build_partition(data.train.y, settings)
    >>> labeled, unlabeled = clients.client_examples(
    ...   data, partition, client_id=3
    ... )
    >>> len(labeled[0]), len(unlabeled[0])  # The server has the labels.
    (0, 69)
  """
  if not 0 <= client_id < partition.num_clients:
    raise UsageError(
      f'client {client_id}: clients are 0 to {partition.num_clients - 1}'
    )
  labeled = _labeled_examples(partition, client_id, round_num, streaming)
  unlabeled = unlabeled_examples(partition, client_id, round_num, streaming)
  x, y = data.train.x, data.train.y
  given = partition.given_labels(y, labeled)
  return (x[labeled], given), (x[unlabeled], y[unlabeled])


def _labeled_examples(
  partition: partition_lib.Partition,
  client_id: int,
  round_num: int,
  streaming: Streaming,
) -> np.ndarray:
  """Returns the indices of what a client trains on with labels in a round."""
  labeled = partition.client_labeled[client_id]
  if partition.settings.full_labels:
    labeled = streaming.part(labeled, client_id, round_num)
  return labeled


def unlabeled_examples(
  partition: partition_lib.Partition,
  client_id: int,
  round_num: int,
  streaming: Streaming,
) -> np.ndarray:
  """Returns the indices of what a client trains on without labels in a round.

  Args:
    partition: The partition.
    client_id: In [0, partition.num_clients).
    round_num: The round, >= 1.
    streaming: The schedule of the client's examples.

  Returns:
    int64 [N].
  """
  unlabeled = streaming.part(
    partition.client_unlabeled[client_id], client_id, round_num
  )
  if partition.settings.labeled_also_unlabeled:
    labeled = _labeled_examples(partition, client_id, round_num, streaming)
    unlabeled = np.concatenate([unlabeled, labeled])
  return unlabeled


def client_test_examples(
  data: sources.DataSet, partition: partition_lib.Partition, client_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the examples that a client holds out for evaluation.

  Args:
    data: The data set.
    partition: A partition of its training examples, with `client_test`.
    client_id: In [0, partition.num_clients).

  Returns:
    (x, y) as for `make_example`, with the true labels, copied.
  """
  held = partition.client_test[client_id]
  return data.train.x[held], data.train.y[held]


def build_server_data_fn(
  x: np.ndarray,
  y: np.ndarray,
  directory: str | os.PathLike[str] | None = None,
) -> Callable[[], tf.data.Dataset]:
  """Builds the function that reads the server's data in a TensorFlow graph.

  Up to `MAX_CONSTANT_BYTES` of data become constants of the graph. Larger data
  are written to a file, which the graph reads when it runs, so the file must
  not be removed. Equal examples are written only once.

  Args:
    x: As in `sources.Examples`.
    y: Integers [N].
    directory: The folder for the file of large data.

  Returns:
    A function without arguments, called inside a graph (or eagerly), that
    returns a data set of one element, `OrderedDict(x, y)`.

  Raises:
    UsageError: If types or shapes are wrong, or the data are large and no
      folder is given.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import clients
    >>> images, labels = np.zeros([3, 8, 8, 1], np.uint8), np.arange(3)
    >>> server_data_fn = clients.build_server_data_fn(images, labels)
    >>> (element,) = server_data_fn()
    >>> print(element['x'].shape, element['y'].numpy())
    (3, 8, 8, 1) [0 1 2]
  """
  examples = sources.Examples(np.ascontiguousarray(x), y)
  if examples.x.nbytes <= MAX_CONSTANT_BYTES:
    return lambda: tf.data.Dataset.from_tensors(
      collections.OrderedDict(x=examples.x, y=examples.y)
    )
  if directory is None:
    raise UsageError(
      f'{examples.x.nbytes / 2**20:.0f} MB of labelled examples at the server'
      f' are too large for a graph (over {MAX_CONSTANT_BYTES // 2**20} MB):'
      ' give the folder (directory) in which to store them as a file'
    )
  content = examples.x.tobytes()
  name = f'server_examples_{hashlib.sha256(content).hexdigest()[:16]}.bin'
  path = os.path.join(os.path.abspath(directory), name)
  # An existing file may be torn or edited, so its content counts.
  if not os.path.isfile(path) or pathlib.Path(path).read_bytes() != content:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    durable.write_file(path, [content])
  shape, dtype = examples.x.shape, examples.x.dtype

  def read(path):
    values = tf.io.decode_raw(tf.io.read_file(path), dtype)
    return collections.OrderedDict(
      x=tf.reshape(values, shape), y=tf.constant(examples.y)
    )

  return lambda: tf.data.Dataset.from_tensors(path).map(read)


class NaturalClients(Mapping[str, tuple[_Pair, _Pair]]):
  """A mapping of clients' names to their (labelled, unlabelled) examples.

  Both are pairs as for `make_example`. Examples are read when a client
  is accessed. Examples of unknown label are unlabelled, with -1.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import clients
    >>> from tff_fssl.data import sources
    >>> x, y = np.zeros([3, 8, 8, 1], np.uint8), np.array([1, -1, 0])
    >>> data = sources.DataSet(
    ...   name='mine',
    ...   train=sources.Examples(x, y),
    ...   test=sources.Examples(x[:0], y[:0]),
    ...   num_classes=2,
    ...   class_names=('cat', 'dog'),
    ...   example_shape=(8, 8, 1),
    ...   owners=np.array([0, 0, 1]),
    ...   client_names=('ann', 'bob'),
    ... )
    >>> people = clients.NaturalClients(data)
    >>> for name, ((_, labels), (_, unknown)) in people.items():
    ...   print(name, labels, unknown)
    ann [1] [-1]
    bob [0] []
  """

  def __init__(self, data: sources.DataSet):
    """Sorts examples by client.

    Args:
      data: A data set with owners. Examples without an owner are skipped.

    Raises:
      UsageError: If the data set does not record clients.
    """
    if data.owners is None:
      raise UsageError(
        f'data set {data.name} does not record the clients of its examples;'
        ' a manifest with a column client does'
      )
    self._train = data.train
    # A client's examples stay in their stored order.
    order = np.argsort(data.owners, kind='stable')
    starts = np.searchsorted(
      data.owners[order], np.arange(len(data.client_names) + 1)
    )
    self._held = {
      name: order[start:stop]
      for name, start, stop in zip(data.client_names, starts, starts[1:])
    }

  def __getitem__(self, name: str) -> tuple[_Pair, _Pair]:
    """Returns the examples of a client, or raises KeyError."""
    held = self._held[name]
    return _split_by_label(self._train.x[held], self._train.y[held])

  def __iter__(self) -> Iterator[str]:
    """Yields the names."""
    return iter(self._held)

  def __len__(self) -> int:
    """Returns the number of clients."""
    return len(self._held)


class ClientDataClients(Mapping[str, tuple[_Pair, _Pair]]):
  """The mapping of `NaturalClients` for a `tff.simulation.datasets.ClientData`.

  A client's dataset is read when the client is accessed, and not kept.
  `clientdata:PATH` reads TFF's files faster, and from memory that is mapped.
  """

  def __init__(
    self,
    client_data: Any,
    settings: data_hparams.DataHparams | None = None,
  ):
    """Looks at the first client's first example.

    Args:
      client_data: The clients. Their examples are mappings. One field is an
        image (pixels from 0 to 255, floats from 0 to 1, or the content of a
        file), one the class, an integer, or -1.
      settings: The names of these fields, and the reading of images. None:
        `DataHparams()`.

    Raises:
      UsageError: If no client has examples, or they lack such fields.
    """
    self._client_data = client_data
    settings = settings or data_hparams.DataHparams()
    self._names = tuple(map(str, client_data.client_ids))
    # Lazily: the first clients may have no examples, and one is enough.
    rows = (row for name in self._names for row in self._rows(name))
    first: Any = next(rows, None)
    if not isinstance(first, Mapping) or not first:
      raise UsageError(
        'ClientData: has no examples, or they are not mappings of fields'
      )
    self._image, self._label = images.choose_fields(
      first, settings.image_field, settings.label_field
    )
    shape = pictures.stored_shape(self._image_of(first))
    self.image_shape = settings.image_shape(shape)
    self._form = pictures.Form(self.image_shape, settings.resize)

  def _rows(self, name: str) -> Iterator[Any]:
    dataset = self._client_data.create_tf_dataset_for_client(name)
    return dataset.as_numpy_iterator()

  def _image_of(self, row: Mapping[str, Any]) -> Any:
    image = row[self._image]
    return pictures.parse_bytes(image) if isinstance(image, bytes) else image

  def __getitem__(self, name: str) -> tuple[_Pair, _Pair]:
    """Returns the examples of a client, or raises KeyError.

    Raises:
      UsageError: If an image or a label cannot be used. Names the client.
    """
    if name not in self._names:
      raise KeyError(name)
    x, y = [], []
    for number, row in enumerate(self._rows(name)):
      try:
        picture = pictures.read(self._image_of(row), self._form)
        x.append(picture.pixels)
        label = images.parse_label(row[self._label])
        if isinstance(label, str):
          raise ValueError(f'its label is {label!r}, not an integer')
        y.append(names.UNKNOWN_LABEL if label is None else label)
      except ValueError as error:
        reason = getattr(error, 'reason', None) or files.first_line(error)
        raise UsageError(
          f'ClientData: client {name}, example {number}: {reason}'
        ) from error
    stacked = np.stack(x) if x else np.zeros((0, *self.image_shape), np.uint8)
    return _split_by_label(stacked, np.array(y, np.int32))

  def __iter__(self) -> Iterator[str]:
    """Yields the names."""
    return iter(self._names)

  def __len__(self) -> int:
    """Returns the number of clients."""
    return len(self._names)


def _split_by_label(x: np.ndarray, y: np.ndarray) -> tuple[_Pair, _Pair]:
  """Splits examples into those with a known label and the others."""
  is_known = y >= 0
  return (x[is_known], y[is_known]), (x[~is_known], y[~is_known])
