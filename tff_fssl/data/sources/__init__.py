"""Data sets as arrays, and the readers of their formats.

Each module of this package with a function `find` reads one format. `find`
chooses the module, and `load` also reads the examples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any, cast

import numpy as np

from tff_fssl.data import data_hparams
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import import_function

# By name, since readers import this module.
_BY_PREFIX = {
  names.FOLDER: 'folder:find',
  names.CLIENT_DATA: 'client_data:find',
  names.HUB: 'hub:find',
  names.FEATURES: 'vectors:find',
  names.TEXT: 'text:find',
  names.IDX: 'idx:find',
  names.ONLY_CLASSES: 'images:find_classes',
  names.AG_NEWS: 'text:find_ag_news',
}


def _convert_labels(labels: Any) -> np.ndarray:
  """Converts integer labels to int32.

  Args:
    labels: Integers of any width (NumPy's default is int64), perhaps empty.

  Returns:
    int32, of the same shape.

  Raises:
    UsageError: If they are not integers, or not in int32's range.
  """
  labels = np.asarray(labels)
  if labels.dtype == np.int32:
    return labels
  if labels.size and not np.issubdtype(labels.dtype, np.integer):
    raise UsageError(f'labels must be integers, not {labels.dtype}')
  info = np.iinfo(np.int32)
  if labels.size and (labels.min() < info.min or labels.max() > info.max):
    raise UsageError(
      f'labels go from {labels.min()} to {labels.max()}: must be in the range'
      ' of int32'
    )
  return labels.astype(np.int32)


def check_labels(
  labels: np.ndarray, lowest: int, num_classes: int, what: str = 'labels'
) -> None:
  """Rejects labels outside of a range.

  Args:
    labels: Integers.
    lowest: The lowest label: 0, or -1 if labels may be unknown.
    num_classes: The limit of labels.
    what: Names the labels in messages.

  Raises:
    UsageError: If a label is out of range.
  """
  if labels.size and (labels.min() < lowest or labels.max() >= num_classes):
    raise UsageError(
      f'{what} go from {labels.min()} to {labels.max()}; allowed are {lowest}'
      f' to {num_classes - 1}'
    )


@dataclasses.dataclass(frozen=True)
class Examples:
  """Labelled images, vectors or texts.

  Attributes:
    x: uint8 [N, H, W, C], float32 [N, V, D] or int32 [N, L], see
      `names.KINDS`. May be mapped from a file.
    y: int32 [N], in [0, number of classes), or -1 if unknown. Other integer
      types are converted.
  """

  x: np.ndarray
  y: np.ndarray

  def __post_init__(self):
    object.__setattr__(self, 'y', _convert_labels(self.y))
    if not 2 <= self.x.ndim <= 4 or self.x.dtype != self.kind.dtype:
      raise UsageError(
        f'examples must be {", ".join(map(str, names.KINDS[:-1]))} or'
        f' {names.KINDS[-1]}, not {self.x.dtype} {list(self.x.shape)}'
      )
    if self.y.shape != self.x.shape[:1]:
      raise UsageError(
        f'labels of {len(self.x)} {self.kind.noun} must be integers'
        f' [{len(self.x)}], not'
        f' {list(self.y.shape)}'
      )

  def __len__(self) -> int:
    return len(self.y)

  @property
  def kind(self) -> names.Kind:
    """Returns their kind."""
    return names.kind_of(self.x.shape[1:])


@dataclasses.dataclass(frozen=True)
class DataSet:
  """A data set, in memory or mapped from a file.

  Attributes:
    name: Its name.
    train: Training examples, in their stored order. Labels may be unknown.
    test: Test examples, in their stored order, all with a label.
    num_classes: The number of classes.
    class_names: One name per class.
    example_shape: (height, width, channels), (views, numbers) or (words,).
    notes: A remark for all results on these data, or ''.
    owners: int32 [number of training examples], the client of each example, as
      an index into `client_names`, or -1. None: the data have no clients.
    client_names: The name of each natural client.
    server: bool [number of training examples], those that the data set puts at
      the server. None: it does not say.
    mean: Per channel, subtracted from pixels scaled to [0, 1], or per number of
      vectors. `load` always gives it, except for texts.
    std: Per channel or number, divisor of the result.
    problems: What its reader has found.
    place: Names an example by its number, test examples after training ones.
      None: they have no names.
    about: Further facts, by their names, for people.
    bit_depth: The bits that images of 16 bits use.
  """

  name: str
  train: Examples
  test: Examples
  num_classes: int
  class_names: tuple[str, ...]
  example_shape: tuple[int, ...]
  notes: str = ''
  owners: np.ndarray | None = None
  client_names: tuple[str, ...] = ()
  server: np.ndarray | None = None
  mean: tuple[float, ...] = ()
  std: tuple[float, ...] = ()
  problems: tuple[inspection.Problem, ...] = ()
  place: Callable[[int], str] | None = None
  about: Mapping[str, str] = dataclasses.field(default_factory=dict)
  bit_depth: int = 16

  def __post_init__(self):
    for split, examples, lowest in (
      ('train', self.train, names.UNKNOWN_LABEL),
      ('test', self.test, 0),
    ):
      if examples.x.shape[1:] != tuple(self.example_shape):
        raise UsageError(
          f'data set {self.name}: {split} examples are'
          f' {list(examples.x.shape[1:])}, instead of'
          f' {list(self.example_shape)}'
        )
      what = f'data set {self.name}: {split} labels'
      check_labels(examples.y, lowest, self.num_classes, what)
    if self.owners is not None and (
      self.owners.shape != self.train.y.shape
      or not np.issubdtype(self.owners.dtype, np.integer)
      or self.owners.min(initial=-1) < -1
      or self.owners.max(initial=-1) >= len(self.client_names)
    ):
      raise UsageError(
        f'data set {self.name}: owners must be integers [{len(self.train)}],'
        f' from -1 to {len(self.client_names) - 1}'
      )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Info(names.DataSetInfo):
  """The facts of a data set that a reader has found.

  Attributes:
    read: Reads all readable examples.
    problems: What was found without reading examples.
    about: Facts for people, by their names.
    look: Finds further problems of the data set that was read, perhaps in
      minutes.
  """

  read: Callable[[], DataSet]
  problems: tuple[inspection.Problem, ...] = ()
  about: Mapping[str, str] = dataclasses.field(default_factory=dict)
  look: Callable[[DataSet], Iterable[inspection.Problem]] = lambda data: ()
  loader: str = f'{__name__}:load_info'


def load_info(info: names.DataSetInfo, data_dir: str | None) -> DataSet:
  """Reads the data set of an `Info` (see `load`)."""
  # The reader knows the folder.
  del data_dir
  return cast(Info, info).read()


def find(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> names.DataSetInfo:
  """Finds a data set, and rejects one that cannot be trained on.

  See `describe`.
  """
  info = describe(name, data_dir, settings)
  if isinstance(info, Info):
    inspection.refuse(f'--dataset={name}', info.problems)
  return info


def describe(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> names.DataSetInfo:
  """Finds a data set, even if it has problems.

  This reads folders, JSON and files of vectors or texts, but no images. Only
  the images of `clientdata:` and `huggingface:` are decoded, when they are
  found for the first time.

  Args:
    name: The value of `--dataset` (see `load`).
    data_dir: `--data_dir`, perhaps ''.
    settings: How examples are read.

  Returns:
    Its facts, for `load_found`.

  Raises:
    UsageError: If there is no such data set, or it is of another kind.
  """
  known = names.DATA_SETS.get(name)
  if known is not None and known.loader:
    return known
  start, colon, _ = name.partition(':')
  reader = _BY_PREFIX.get(start + colon, 'tfds:find')
  find_fn = import_function(f'{__name__}.{reader}')
  return find_fn(name, data_dir, settings)


def load(
  name: str,
  data_dir: str | None = None,
  settings: data_hparams.DataHparams | None = None,
) -> DataSet:
  """Loads a data set, without the network.

  Args:
    name: A value of `--dataset`: one of `names.DATA_SETS`, `folder:PATH`,
      `features:PATH`, `text:PATH`, `ag_news`, `clientdata:PATH`,
      `huggingface:OWNER/NAME`, or a data set of TFDS in `data_dir`.
    data_dir: The folder of TFDS's and the hub's data sets, by default their
      own. `digits` needs no folder. A relative PATH starts there.
    settings: The flags for reading. None: `DataHparams()`.

  Returns:
    The data set, with the same arrays every time. Images are decoded once, into
    `DataHparams.cache_dir`, and mapped from there.

  Raises:
    UsageError: If the name is unknown, or the data set is missing, damaged or
      of another kind.

  Examples:
    >>> from tff_fssl.data import sources
    >>> data = sources.load('digits')
    >>> data.train.x.shape, len(data.test), data.num_classes
    ((1437, 8, 8, 1), 360, 10)
  """
  settings = settings or data_hparams.DataHparams()
  return load_found(find(name, data_dir or '', settings), data_dir)


def load_found(info: names.DataSetInfo, data_dir: str | None) -> DataSet:
  """Loads a data set that `find` found (see `load`)."""
  load_fn = import_function(info.loader)
  data = load_fn(info, data_dir)
  inspection.refuse(f'--dataset={info.name}', data.problems)
  # Some readers measure the moments, which facts then lack.
  if data.mean:
    return data
  return dataclasses.replace(data, mean=info.mean, std=info.std)


def find_problems(
  info: names.DataSetInfo,
  data: DataSet,
  *,
  inside: bool = True,
  most_bytes: float = math.inf,
) -> list[inspection.Problem]:
  """Lists what its reader, and a look at its examples, have found.

  Args:
    info: The facts of the data set.
    data: The data set.
    inside: Whether its examples are looked at.
    most_bytes: As for `inspection.find_problems`.

  Returns:
    The problems, each once.
  """
  known: Sequence[inspection.Problem] = ()
  is_table = False
  if isinstance(info, Info):
    known, is_table = info.problems, 'columns' in info.about
  looked = (
    inspection.find_problems(data, most_bytes, is_table) if inside else []
  )
  return list(dict.fromkeys([*known, *data.problems, *looked]))


def load_digits(info: names.DataSetInfo, data_dir: str | None) -> DataSet:
  """Loads scikit-learn's 1,797 digits, every fifth of a class for testing."""
  # The digits are part of scikit-learn.
  del data_dir
  from sklearn import datasets  # pylint: disable=import-outside-toplevel

  digits = datasets.load_digits()
  # Values are counts of set pixels in 4 x 4 blocks, 0 to 16.
  images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
  labels = digits.target.astype(np.int32)
  # Every fifth example, sorted by class: a stratified split without draws.
  in_test = np.zeros(len(labels), bool)
  in_test[np.argsort(labels, kind='stable')[::5]] = True
  return DataSet(
    name=info.name,
    train=Examples(images[~in_test], labels[~in_test]),
    test=Examples(images[in_test], labels[in_test]),
    num_classes=info.num_classes,
    class_names=tuple(str(c) for c in digits.target_names),
    example_shape=info.example_shape,
    notes="scikit-learn's 8 x 8 digits; every fifth of a class is for testing",
  )
