"""Decoding of a data set's images, once, for the readers of all formats."""

import collections
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import dataclasses
import itertools
import os
import sys
from typing import Any, NamedTuple, cast

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import image_cache
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data import sources
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

DataHparams = data_hparams.DataHparams
TESTS = ('test', 'validation', 'valid', 'val', 'dev')
UNLABELED = ('unlabeled', 'unlabelled', 'unsupervised')
MAX_CLASSES = 100_000
# Flags that change the rows, or the decoding of their images.
_DECISIVE = {
  'image_size',
  'resize',
  'color',
  'test_share',
  'image_field',
  'label_field',
  'client_field',
  'split_preset',
  'svhn_extra',
}
SHAPED = frozenset({'image_size', 'resize', 'color', 'flip', 'cache_dir'})
_USUAL_IMAGES = 'image pixels img image/encoded image/encoded_jpeg'.split()
_USUAL_LABELS = 'label class labels fine_label image/class/label'.split()
# The number of images that are read to find their common size. Help states it.
_NUM_TRIED = 16
# More unreadable rows are recorded only if a flag allows more.
_MAX_UNREADABLE = 1_000


class Row(NamedTuple):
  """An image with its class and its owner.

  Attributes:
    name: Its place in the data. A hash of it can decide its split.
    image: An image for `pictures.read`.
    label: The class's number or name, or None if unknown.
    owner: The client's number or name, or None if it belongs to nobody.
    problem: The reason why it cannot be read. Image and label are then ignored.
  """

  name: str
  image: pictures.Stored
  label: int | str | None = None
  owner: int | str | None = None
  problem: str = ''


class Rows(NamedTuple):
  """The rows of a data set, open for reading.

  Attributes:
    most: An upper bound of the number of rows.
    read: Yields the rows for testing (True) or training, always in one order.
    class_names: The name of each class, or () if labels are names.
    client_names: The name of each client, or () if owners are names.
    has_test: Whether the data have a test split.
  """

  most: int
  read: Callable[[bool], Iterator[Row]]
  class_names: Sequence[str] = ()
  client_names: Sequence[str] = ()
  has_test: bool = True


class Split(NamedTuple):
  """A split of some files.

  Attributes:
    num_rows: The number of its rows.
    read: Yields its rows, always in the same order.
  """

  num_rows: int
  read: Callable[[], Iterator[Row]]


@dataclasses.dataclass(frozen=True)
class Found:
  """A data set of images that was found.

  Attributes:
    name: The value of `--dataset`.
    root: Its folder, or its only file.
    key: Facts that, besides settings, determine the rows, for JSON.
    settings: The flags for reading.
    open: Opens the rows, or raises `UsageError` if they are of another kind.
    uses: As in `names.DataSetInfo`.
    notes: A remark for all results, by default `root`.
    shape: Shape of the images, by default the shape of the first images.
    moments: (mean, deviation) of channels, by default measured.
  """

  name: str
  root: str
  key: Any
  settings: DataHparams
  open: Callable[[], Rows]
  uses: frozenset[str]
  notes: str = ''
  shape: tuple[int, ...] | None = None
  moments: tuple[tuple[float, ...], ...] = ()

  @property
  def num_bytes(self) -> int:
    """Returns the size of its files, if `key` begins with `file_states`."""
    return sum(size for _, size, _ in self.key[0])


class Decoded(NamedTuple):
  """The images of a data set after decoding.

  Attributes:
    data: The data set.
    unreadable: Name -> reason, of the rows that were skipped.
    sizes: (height, width, whether it was enlarged, number of images) of all
      sizes of stored images.
    has_test: As in `Rows`.
  """

  data: sources.DataSet
  unreadable: dict[str, str]
  sizes: list[tuple[int, int, bool, int]]
  has_test: bool


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ImagesInfo(names.DataSetInfo):
  """A data set of images.

  Attributes:
    settings: The flags for reading.
    decode: Decodes all readable images, once, or raises `UsageError`.
  """

  settings: DataHparams
  decode: Callable[[], Decoded]
  loader: str = f'{__name__}:load'


def load(info: names.DataSetInfo, data_dir: str | None) -> sources.DataSet:
  """Decodes a data set, and rejects one that cannot be trained on."""
  # The reader that found it knows the folder.
  del data_dir
  info = cast(ImagesInfo, info)
  data, unreadable, *_ = info.decode()
  if len(unreadable) > info.settings.max_unreadable:
    reasons = [f'{row}: {why}' for row, why in unreadable.items()]
    raise UsageError(
      f'--dataset={info.name}: {len(reasons):,} images cannot be read'
      f' ({inspection.shown(reasons)}); repair the files, or skip these images'
      f' with --max_unreadable={len(reasons)}'
    )
  inspection.refuse(
    f'--dataset={info.name}',
    inspection.label_problems(data.class_names, data.train.y, data.test.y),
  )
  return data


def find(found: Found) -> ImagesInfo:
  """Decodes a data set to find its facts.

  Args:
    found: The data set.

  Returns:
    Its facts.

  Raises:
    UsageError: If it cannot be trained on, or its cache cannot be written.
  """
  decoded = decode(found)
  data = decoded.data
  info = ImagesInfo(
    name=found.name,
    num_classes=data.num_classes,
    example_shape=data.example_shape,
    num_train=len(data.train),
    num_test=len(data.test),
    flip=found.settings.flip,
    mean=(),
    std=(),
    uses=found.uses - ({'test_share'} if decoded.has_test else set()),
    settings=found.settings,
    decode=lambda: decoded,
  )
  load(info, None)
  return info


def file_states(paths: Iterable[str]) -> tuple[tuple[str, int, int], ...]:
  """Returns (path, size, time) of each file, or raises `files.FileError`."""

  def state(path):
    with files.open_binary(path) as file:
      found = os.fstat(file.fileno())
    return path, found.st_size, found.st_mtime_ns

  return tuple(map(state, paths))


def choose_field(
  found: Collection[str], given: str, flag: str, usual: Collection[str] = ()
) -> str:
  """Chooses the field with images, labels or clients.

  Args:
    found: The names of all fields.
    given: The value of the flag that names it, perhaps ''.
    flag: The name of this flag.
    usual: Names to try if the flag is not given.

  Returns:
    The name.

  Raises:
    UsageError: If the field does not exist.
  """
  fields = ', '.join(sorted(found)) or 'none'
  if given and given not in found:
    raise UsageError(
      f'--{flag}={given}: there is no such field; fields are {fields}'
      f'{closest(given, found)}'
    )
  name = given or next((name for name in usual if name in found), '')
  if not name:
    raise UsageError(f'its fields are {fields}; name the right one by --{flag}')
  return name


def choose_fields(
  found: Collection[str], image: str, label: str
) -> tuple[str, str]:
  """Chooses (image, label) by `choose_field`."""
  return (
    choose_field(found, image, 'image_field', _USUAL_IMAGES),
    choose_field(found, label, 'label_field', _USUAL_LABELS),
  )


def parse_label(value: Any) -> int | str | None:
  """Converts a file's label to a `Row`'s, or raises ValueError."""
  if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
    value = value.item()
  if isinstance(value, bytes):
    # Its error is a ValueError.
    value = value.decode()
  if value is None or isinstance(value, str):
    return value or None
  if not isinstance(value, int):
    raise ValueError('its label is neither a whole number nor a text')
  if not names.UNKNOWN_LABEL <= value < MAX_CLASSES:
    raise ValueError(f'its label is {value}')
  return None if value == names.UNKNOWN_LABEL else int(value)


def make_row(
  name: str, image: pictures.Stored, label: Any, owner: str | None = None
) -> Row:
  """Makes a row. An unreadable label becomes its problem."""
  try:
    return Row(name, image, parse_label(label), owner)
  except ValueError as error:
    return Row(name, b'', problem=files.first_line(error))


def open_splits(
  splits: Mapping[str, Split],
  settings: DataHparams,
  class_names: Sequence[str] = (),
) -> Rows:
  """Chooses the splits for training and testing.

  Args:
    splits: The splits by their names.
    settings: The share for testing, if the data have no test split.
    class_names: As in `Rows`.

  Returns:
    The rows. Their names begin with those of their splits.

  Raises:
    UsageError: If no split is for training.
  """
  found = [name for name, split in splits.items() if split.num_rows]
  # A single split of any name is for training.
  first = found[0] if len(found) == 1 else table.TRAIN
  if first not in found:
    raise UsageError(
      f'it has no split {table.TRAIN!r}, but {", ".join(found) or "no rows"}'
    )
  others = [name for name in found if name in UNLABELED and name != first]

  def has_labels(split):
    # The first row may be unreadable, which says nothing of the others. If all
    # are, they are reported.
    labels = (row.label for row in split.read() if not row.problem)
    return next(labels, 0) is not None

  # Test splits may be published without labels, and are then useless.
  test = next(
    (
      name
      for name in TESTS
      if name in found and name != first and has_labels(splits[name])
    ),
    '',
  )

  def read(for_test):
    for name in (test,) if for_test and test else (first, *others):
      for row in splits[name].read():
        row = row._replace(name=f'{name} {row.name}')
        if name in UNLABELED:
          row = row._replace(label=None)
        if test and for_test and row.label is None:
          problem = row.problem or 'a test image needs a label'
          row = row._replace(problem=problem)
        # Only rows with labels can be for testing.
        if test or for_test == (
          row.label is not None
          and table.is_in_share(row.name, settings.test_share)
        ):
          yield row

  used = [first, *others, *([test] if test else [])]
  most = sum(splits[name].num_rows for name in used)
  return Rows(most, read, class_names, has_test=bool(test))


def decode(found: Found) -> Decoded:
  """Decodes all readable images of a data set, once.

  Args:
    found: The data set.

  Returns:
    All readable images, perhaps none.

  Raises:
    UsageError: If the files cannot be read, or the cache cannot be written.
  """
  settings = found.settings
  flags = {n: getattr(settings, n) for n in sorted(found.uses & _DECISIVE)}
  root = os.path.realpath(found.root)
  key = image_cache.key_of(root, found.key, flags)
  folder = settings.cache_folder
  cached = image_cache.find(folder, key)
  if cached is None:
    try:
      rows = found.open()
      shape = found.shape or _image_shape(rows, settings)
    except UsageError as error:
      raise UsageError(f'--dataset={found.name}: {error}') from error
    form = pictures.Form(shape, settings.resize)
    put_all = lambda put: _decode(found, rows, form, put)
    cached = image_cache.make(folder, key, shape, rows.most, put_all)
  return _load_cached(found, cached)


def _image_shape(rows: Rows, settings: DataHparams) -> tuple[int, int, int]:
  """Finds the shape of images by the first ones."""
  shapes, reasons = [], []
  every = itertools.chain(rows.read(False), rows.read(True))
  for row in itertools.islice(every, _NUM_TRIED):
    try:
      if row.problem:
        raise files.FileError('', row.problem)
      # Paths come only from readers that know the shape.
      image = cast(bytes | np.ndarray, row.image)
      shapes.append(pictures.stored_shape(image))
    except files.FileError as error:
      reasons.append(f'{row.name}: {error.reason}')
  if not shapes:
    raise UsageError('; '.join(reasons[:1]) or 'it has no rows')
  height, width = shapes[0][:2]
  if any(shape[:2] != (height, width) for shape in shapes):
    height = width = -1
  is_gray = all(shape[2] == 1 for shape in shapes)
  return settings.image_shape((height, width, 1 if is_gray else 3))


def _decode(
  found: Found, rows: Rows, form: pictures.Form, put: image_cache.Put
) -> tuple[int, int, dict[str, Any]]:
  """Writes all readable images, training images first."""
  labels: list[int | str | None] = []
  owners: list[int | str | None] = []
  unreadable: dict[str, str] = {}
  sizes: collections.Counter[tuple[int, int, bool]] = collections.Counter()
  num_classes = len(rows.class_names)
  most = max(_MAX_UNREADABLE, found.settings.max_unreadable)

  def read(row):
    if row.problem:
      raise files.FileError('', row.problem)
    if num_classes and isinstance(row.label, int) and row.label >= num_classes:
      reason = f'its label is {row.label}, of {num_classes} classes'
      raise files.FileError('', reason)
    return pictures.read(row.image, form)

  with _progress(rows.most) as progress:
    for for_test in (False, True):
      # Images come in the order of rows, although threads read them, since
      # partitions depend on the order.
      for row, picture in pictures.read_all(rows.read(for_test), read, form):
        progress.update()
        if isinstance(picture, str):
          unreadable[row.name] = picture
          if len(unreadable) > most:
            raise UsageError(
              f'--dataset={found.name}: more than {most:,} images cannot be'
              f' read, such as {row.name}: {picture}'
            )
          continue
        put(len(labels), picture.pixels)
        labels.append(row.label)
        if not for_test:
          owners.append(row.owner)
        sizes.update([(*picture.stored, picture.is_enlarged)])
  y, class_names = _number(labels, rows.class_names)
  owner_numbers, client_names = _number(owners, rows.client_names)
  facts = {
    'y': y,
    'class_names': class_names,
    'owners': owner_numbers,
    'client_names': client_names,
    'unreadable': unreadable,
    'sizes': [[*size, count] for size, count in sorted(sizes.items())],
    'has_test': rows.has_test,
  }
  return len(y), len(owners), facts


def _number(
  values: Sequence[int | str | None], known: Sequence[str]
) -> tuple[list[int], tuple[str, ...]]:
  """Returns the number of each value, -1 for None, and the numbers' names."""
  given = [value for value in values if value is not None]
  # With one text among numbers, all are names.
  if all(isinstance(value, int) for value in given):
    numbers = [-1 if value is None else int(value) for value in values]
    known = known or [str(i) for i in range(max(numbers, default=-1) + 1)]
  else:
    known = table.sorted_names({str(value) for value in given})
    places = {name: i for i, name in enumerate(known)}
    numbers = [-1 if value is None else places[str(value)] for value in values]
  return numbers, tuple(known)


def _load_cached(found: Found, cached: image_cache.Cached) -> Decoded:
  """Makes the data set of decoded images."""
  facts = cached.facts
  class_names, client_names = (
    tuple(facts[name]) for name in ('class_names', 'client_names')
  )
  y, owners = (np.array(facts[name], np.int32) for name in ('y', 'owners'))
  num_train = len(owners)
  share = f'; {found.settings.test_share:g} of the images are for testing'
  mean, std = found.moments or (cached.mean, cached.std)
  data = sources.DataSet(
    name=found.name,
    train=sources.Examples(cached.images[:num_train], y[:num_train]),
    test=sources.Examples(cached.images[num_train:], y[num_train:]),
    num_classes=len(class_names),
    class_names=class_names,
    example_shape=cached.images.shape[1:],
    notes=(found.notes or found.root) + ('' if facts['has_test'] else share),
    owners=owners if client_names else None,
    client_names=client_names,
    mean=mean,
    std=std,
  )
  sizes = [tuple(size) for size in facts['sizes']]
  return Decoded(data, facts['unreadable'], sizes, facts['has_test'])


def _progress(num_images: int) -> Any:
  """Makes a progress bar of read images, on standard error."""
  import tqdm  # pylint: disable=import-outside-toplevel

  # In a file, it appears after a minute, and once a minute.
  seconds = 0.1 if sys.stderr.isatty() else 60
  return tqdm.tqdm(
    total=num_images,
    desc='Reading images',
    unit='',
    unit_scale=True,
    delay=seconds,
    mininterval=seconds,
    maxinterval=2 * seconds,
    leave=False,
    dynamic_ncols=True,
  )
