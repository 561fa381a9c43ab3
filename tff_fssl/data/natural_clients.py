"""The clients that a data set itself knows, by their names. TF-free."""

from collections.abc import Iterator, Mapping

import numpy as np

from tff_fssl.data import sources
from tff_fssl.hparams import UsageError

# (x uint8 [N, H, W, C], y int32 [N])
_Pair = tuple[np.ndarray, np.ndarray]


class NaturalClients(Mapping[str, tuple[_Pair, _Pair]]):
  """Client's name -> its (labelled, unlabelled) training examples.

  Both are pairs as `clients.make_example` takes them; examples are read when a
  client is asked for. Those whose label is not known are unlabelled, with -1.
  """

  def __init__(self, data: sources.DataSet):
    """Sorts examples by client.

    Args:
      data: A data set with owners; those of nobody are left out.

    Raises:
      UsageError: If it says nothing of clients.
    """
    if data.owners is None:
      raise UsageError(
        f'data set {data.name} does not say whose its examples are; a manifest'
        ' with a column client does'
      )
    self._train = data.train
    order = np.argsort(data.owners, kind='stable')
    starts = np.searchsorted(
      data.owners[order], np.arange(len(data.client_names) + 1)
    )
    self._held = {
      name: order[start:stop]
      for name, start, stop in zip(data.client_names, starts, starts[1:])
    }

  def __getitem__(self, name: str) -> tuple[_Pair, _Pair]:
    """The examples of a client; raises KeyError if there is none."""
    held = self._held[name]
    is_known = self._train.y[held] >= 0
    return self._examples(held[is_known]), self._examples(held[~is_known])

  def _examples(self, held: np.ndarray) -> _Pair:
    return self._train.x[held], self._train.y[held]

  def __iter__(self) -> Iterator[str]:
    """The names."""
    return iter(self._held)

  def __len__(self) -> int:
    """The number of clients."""
    return len(self._held)
