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
  'bit_depth',
  'class_words',
  'test_share',
  'image_field',
  'label_field',
  'client_field',
  'split_preset',
  'svhn_extra',
}
SHAPED = frozenset(
  {'image_size', 'resize', 'color', 'bit_depth', 'flip', 'cache_dir'}
  | {'max_megapixels'}
)
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
    word: The word by which the label is unknown, if it is a word.
  """

  name: str
  image: pictures.Stored
  label: int | str | None = None
  owner: int | str | None = None
  problem: str = ''
  word: str = ''


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
    key: Facts that, besides settings, determine the rows, for JSON. `find`
      needs it to begin with `file_states`.
    settings: The flags for reading.
    open: Opens the rows, or raises `UsageError` if they are of another kind.
    uses: As in `names.DataSetInfo`.
    notes: A remark for all results, by default `root`.
    shape: Shape of the images, by default the shape of the first images.
    moments: (mean, deviation) of channels, by default measured.
    partition: The default of --partition.
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
  partition: str = names.IID


def find(found: Found) -> sources.Info:
  """Decodes a data set to find its facts.

  Args:
    found: The data set.

  Returns:
    Its facts.

  Raises:
    UsageError: If its files or its cache cannot be read or written.
  """
  cached = _decoded(found)
  data = _data_set(found, cached)
  has_test = cached.facts['has_test']
  size = sum(size for _, size, _ in found.key[0])
  return sources.Info(
    name=found.name,
    num_classes=data.num_classes,
    example_shape=data.example_shape,
    num_train=len(data.train),
    num_test=len(data.test),
    flip=found.settings.flip,
    mean=(),
    std=(),
    uses=found.uses - ({'test_share'} if has_test else set()),
    partition=found.partition,
    read=lambda: data,
    problems=data.problems,
    about={'where': f'{os.path.abspath(found.root)} ({size / 1e6:,.1f} MB)'},
  )


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
  """Converts a stored label to an integer or a text, or raises ValueError."""
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
  settings: DataHparams,
  name: str,
  image: pictures.Stored,
  label: Any,
  owner: str | None = None,
) -> Row:
  """Makes a row. An unreadable label becomes its problem."""
  try:
    parsed = parse_label(label)
  except ValueError as error:
    return Row(name, b'', problem=files.first_line(error))
  if isinstance(parsed, str) and settings.is_unknown(parsed):
    return Row(name, image, None, owner, word=parsed)
  return Row(name, image, parsed, owner)


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


def find_classes(
  name: str, data_dir: str, settings: DataHparams
) -> sources.Info:
  """Describes the images of `classes:NAME,NAME`, which only clients have.

  Args:
    name: The value of `--dataset`.
    data_dir: Not read.
    settings: The flags for reading.

  Returns:
    The facts of the images of deployed clients.

  Raises:
    UsageError: If the classes are less than two different ones.
  """
  del data_dir
  listed = name.removeprefix(names.ONLY_CLASSES).split(',')
  class_names = tuple(part.strip() for part in listed)
  if len(class_names) < 2 or len(set(class_names) - {''}) < len(class_names):
    raise UsageError(
      f'--dataset={name}: give two classes or more, each once, with commas'
      f' between them: {names.ONLY_CLASSES}cat,dog'
    )
  shape = settings.image_shape()
  nothing = sources.Examples(np.zeros((0, *shape), np.uint8), np.zeros(0, int))
  data = sources.DataSet(
    name=name,
    train=nothing,
    test=nothing,
    num_classes=len(class_names),
    class_names=class_names,
    example_shape=shape,
    server=np.zeros(0, bool),
    bit_depth=settings.bit_depth or pictures.MAX_DEPTH,
  )
  return sources.Info(
    name=name,
    num_classes=len(class_names),
    example_shape=shape,
    num_train=0,
    num_test=0,
    flip=settings.flip,
    mean=(),
    std=(),
    uses=SHAPED - {'cache_dir', 'max_megapixels'},
    has_clients=False,
    read=lambda: data,
  )


def decode(found: Found) -> tuple[sources.DataSet, Collection[str]]:
  """Decodes all readable images of a data set, once.

  Args:
    found: The data set.

  Returns:
    All readable images, perhaps none, and the names of the rows that are not
    readable.

  Raises:
    UsageError: If the files cannot be read, or the cache cannot be written.
  """
  cached = _decoded(found)
  return _data_set(found, cached), cached.facts['unreadable']


def _decoded(found: Found) -> image_cache.Cached:
  """Opens the decoded images, which are made the first time."""
  settings = found.settings
  flags = {n: getattr(settings, n) for n in sorted(found.uses & _DECISIVE)}
  root = os.path.realpath(found.root)
  key = image_cache.key_of(root, found.key, flags)
  folder = settings.cache_folder
  cached = image_cache.find(folder, key)
  if cached is None:
    with pictures.quiet(settings.max_megapixels):
      try:
        rows = found.open()
        shape = found.shape or _image_shape(rows, settings)
      except UsageError as error:
        raise UsageError(f'--dataset={found.name}: {error}') from error
      put_all = lambda put: _decode(found, rows, shape, put)
      cached = image_cache.make(folder, key, shape, rows.most, put_all)
  return cached


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
  found: Found, rows: Rows, shape: tuple[int, ...], put: image_cache.Put
) -> tuple[int, int, dict[str, Any]]:
  """Writes all readable images, training images first."""
  settings = found.settings
  depth = settings.bit_depth or pictures.MAX_DEPTH
  form = pictures.Form(shape, settings.resize, depth)
  result = _decode_once(found, rows, form, put)
  used = min((d for d in pictures.DEPTHS if d >= result[2]['depth']), default=0)
  # Whether 16 bits are used shows only when all images are read.
  if result[2]['depth'] and not settings.bit_depth and used < depth:
    result = _decode_once(found, rows, form._replace(depth=used), put)
  return result


def _decode_once(
  found: Found, rows: Rows, form: pictures.Form, put: image_cache.Put
) -> tuple[int, int, dict[str, Any]]:
  """Writes all readable images of a form."""
  labels: list[int | str | None] = []
  owners: list[int | str | None] = []
  unreadable: dict[str, str] = {}
  sizes: collections.Counter[tuple[int, int, bool]] = collections.Counter()
  words: collections.Counter[str] = collections.Counter()
  levels = np.zeros(256, np.int64)
  depth = num_flat = num_stacks = 0
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
        words.update([row.word] if row.word else [])
        depth = max(depth, picture.depth)
        num_stacks += picture.is_stack
        levels += np.bincount(picture.pixels.ravel(), minlength=256)
        # A gray or colored area has one value in each channel.
        num_flat += np.ptp(picture.pixels, axis=(0, 1)).max() == 0
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
    'words': dict(words),
    'levels': np.flatnonzero(levels).tolist(),
    'num_flat': int(num_flat),
    'num_stacks': num_stacks,
    'depth': depth,
    'form_depth': form.depth,
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


def _data_set(found: Found, cached: image_cache.Cached) -> sources.DataSet:
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
  return dataclasses.replace(
    data,
    problems=(
      *_decoding_problems(found.settings, data, facts),
      *inspection.label_problems(
        data.class_names,
        # Where clients have the images, those for testing tell the classes.
        data.train.y if num_train else data.test.y,
        data.test.y,
      ),
    ),
    bit_depth=facts['form_depth'],
    about=_stored_sizes(facts['sizes']),
  )


def _stored_sizes(sizes: Sequence[Sequence[int]]) -> dict[str, str]:
  """Describes the sizes of stored images."""
  if not sizes:
    return {}
  height, width, *_ = zip(*sizes)
  text = f'{min(height)} x {min(width)}'
  if len(sizes) > 1:
    text += f' to {max(height)} x {max(width)} ({len(sizes):,} sizes)'
  return {'stored': text}


def _decoding_problems(
  settings: DataHparams, data: sources.DataSet, facts: Mapping[str, Any]
) -> Iterator[inspection.Problem]:
  """Finds images that are small, or cannot be read."""
  enlarged = sum(count for *_, is_larger, count in facts['sizes'] if is_larger)
  if enlarged:
    height, width, _ = data.example_shape
    yield inspection.Problem(
      f'{enlarged:,} images are smaller than {height} x {width}, and are'
      ' enlarged, which blurs them and adds no detail; --image_size sets'
      ' another size',
      brief=f'{enlarged:,} images enlarged',
    )
  yield from inspection.unknown_problems(facts['words'])
  yield from inspection.level_problems(facts['num_flat'], facts['levels'])
  if facts['depth'] and facts['form_depth'] < pictures.MAX_DEPTH:
    depth = facts['form_depth']
    yield inspection.Problem(
      f'files of 16 bits use {depth}: the value {2**depth - 1:,} is white;'
      ' --bit_depth sets another number',
      brief=f'{depth} of 16 bits used',
    )
  if facts['num_stacks']:
    yield inspection.Problem(
      f'{facts["num_stacks"]:,} files have several pages or frames, of which'
      ' the first is read: write each that matters to a file of its own',
      brief=f'{facts["num_stacks"]:,} files of several pages',
    )
  items = tuple(f'{row}: {why}' for row, why in facts['unreadable'].items())
  if items:
    too_many = len(items) > settings.max_unreadable
    yield inspection.Problem(
      f'{len(items):,} images cannot be read ({inspection.shown(items)}); '
      + (
        'repair the files, or skip these images with'
        f' --max_unreadable={len(items)}'
        if too_many
        else 'they are skipped'
      ),
      stops=too_many,
      brief=f'{len(items):,} images unreadable',
      items=items,
    )


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
