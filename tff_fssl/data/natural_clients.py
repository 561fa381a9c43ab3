"""The natural clients of a data set, by name."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data import sources
from tff_fssl.data.sources import images
from tff_fssl.hparams import UsageError

# (x uint8 [N, H, W, C], y int32 [N])
_Pair = tuple[np.ndarray, np.ndarray]


class NaturalClients(Mapping[str, tuple[_Pair, _Pair]]):
  """A mapping of clients' names to their (labelled, unlabelled) examples.

  Both are pairs as for `clients.make_example`. Examples are read when a client
  is accessed. Examples of unknown label are unlabelled, with -1.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data import natural_clients
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
    >>> clients = natural_clients.NaturalClients(data)
    >>> for name, ((_, labels), (_, unknown)) in clients.items():
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
    is_known = self._train.y[held] >= 0
    return self._examples(held[is_known]), self._examples(held[~is_known])

  def _examples(self, held: np.ndarray) -> _Pair:
    return self._train.x[held], self._train.y[held]

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
    labels = np.array(y, np.int32)
    is_known = labels >= 0
    return (stacked[is_known], labels[is_known]), (
      stacked[~is_known],
      labels[~is_known],
    )

  def __iter__(self) -> Iterator[str]:
    """Yields the names."""
    return iter(self._names)

  def __len__(self) -> int:
    """Returns the number of clients."""
    return len(self._names)
