"""Lists the images of a folder: class folders, or a manifest. TF-free.

No image is opened here.
"""

from collections.abc import Iterable, Iterator, Mapping
import csv
import dataclasses
import hashlib
import io
import os
import stat
from typing import Any, NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl.data import inspection
from tff_fssl.data import pictures
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest

_CSV, _PARQUET = 'manifest.csv', 'manifest.parquet'
TRAIN, TEST, _UNLABELED = 'train', 'test', 'unlabeled'
_PATH, _LABEL, _CLIENT, _SPLIT = 'path', 'label', 'client', 'split'
_COLUMNS = (_PATH, _LABEL, _CLIENT, _SPLIT)
_CLASS_FOLDERS = 'class folders'
_SEPARATORS = (';', '\t', '|')
_LAYOUTS = (
  f'it must hold class folders (CLASS/*.jpg, or {TRAIN}/CLASS/*.jpg and'
  f' {TEST}/CLASS/*.jpg) or a {_CSV}'
)


class Row(NamedTuple):
  """An image.

  Attributes:
    path: Relative to the folder, or absolute.
    label: The class's number, or -1 if it is not known.
    owner: The client's number, or -1 if nobody's.
    state: Size, time and mode of the file; () if it is missing.
  """

  path: str
  label: int
  owner: int
  state: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Listing:
  """The images of a folder.

  Attributes:
    root: The folder.
    kind: What says so: 'class folders' or the manifest's name.
    train: Images for training.
    test: Images for testing, all with a label.
    class_names: The name of each class.
    client_names: The name of each client; () if there are none.
    uses_share: Whether a share decides which images are for testing.
    num_ignored: How many files are no images, by their names.
  """

  root: str
  kind: str
  train: tuple[Row, ...]
  test: tuple[Row, ...]
  class_names: tuple[str, ...]
  client_names: tuple[str, ...]
  uses_share: bool
  num_ignored: int

  def labels(self, split: str) -> np.ndarray:
    """The labels of 'train' or 'test', int32 [N]."""
    return np.array([row.label for row in getattr(self, split)], np.int32)

  def problems(self) -> list[inspection.Problem]:
    """What is wrong, as far as it is known without opening an image."""
    return inspection.label_problems(
      self.class_names, self.labels(TRAIN), self.labels(TEST)
    )

  def unused(self) -> list[inspection.Problem]:
    """Images that are not part of the data set; classes without an image."""
    by_folders = self.kind == _CLASS_FOLDERS
    used = {
      os.path.normpath(os.path.join(self.root, row.path))
      for row in (*self.train, *self.test)
    }
    counts: dict[str, int] = {}
    empty = []
    levels = [self.root]
    if by_folders and os.path.isdir(os.path.join(self.root, TRAIN)):
      levels = [os.path.join(self.root, split) for split in (TRAIN, TEST)]
    for folder, inner, names in os.walk(self.root):
      inner[:] = sorted(n for n in inner if not n.startswith('.'))
      if folder in levels:
        empty += [name for name in inner if name not in self.class_names]
      found = [
        name
        for name in names
        if not name.startswith('.')
        and pictures.is_image(name)
        and os.path.normpath(os.path.join(folder, name)) not in used
      ]
      if found:
        counts[os.path.relpath(folder, self.root)] = len(found)
    problems = []
    if counts:
      where = [f'{count:,} in {folder}' for folder, count in counts.items()]
      rule = f'{self.kind} does not name them'
      if by_folders:
        rule = 'images are read that lie in a class folder itself; move them'
      problems.append(
        inspection.Problem(
          f'{sum(counts.values()):,} image files are not used'
          f' ({inspection.shown(where)}): {rule}',
          False,
        )
      )
    if empty and by_folders:
      problems.append(
        inspection.Problem(
          f'class folders without an image: {inspection.shown(empty)}; they are'
          f' no classes, and the network has {len(self.class_names)} outputs',
          False,
        )
      )
    return problems


class _Image(NamedTuple):
  """An image as it is found; label, client and split may be ''."""

  path: str
  label: str
  client: str = ''
  split: str = ''
  name: str = ''


def read(root: str, test_share: float) -> Listing:
  """Lists the images of a folder.

  Args:
    root: The folder.
    test_share: Share of the images that are for testing, where neither folders
      nor manifest say so.

  Returns:
    The listing.

  Raises:
    UsageError: If the folder cannot be read, or is of another kind.
  """
  entries = entries_of(root)
  manifests = [name for name in (_CSV, _PARQUET) if name in entries]
  if len(manifests) == 2:
    raise UsageError(f'{root}: has {_CSV} and {_PARQUET}; remove one of them')
  num_ignored = 0
  if manifests:
    kind = manifests[0]
    images = list(_of_manifest(root, kind))
  else:
    kind = _CLASS_FOLDERS
    found = list(_of_folders(root, entries))
    images = [image for image in found if pictures.is_image(image.path)]
    num_ignored = len(found) - len(images)
  if not images:
    raise UsageError(f'{root}: has no images; {_LAYOUTS}')
  return _listing(root, kind, images, test_share, num_ignored)


def entries_of(folder: str) -> dict[str, bool]:
  """Name -> whether it is a folder, sorted; hidden ones are left out."""
  try:
    with os.scandir(folder) as found:
      return {
        entry.name: entry.is_dir()
        for entry in sorted(found, key=lambda entry: entry.name)
        if not entry.name.startswith('.')
      }
  except OSError as error:
    raise files.FileError(folder, files.reason_of(error)) from error
  except ValueError as error:
    raise files.FileError(folder, 'no folder can have this name') from error


def _of_folders(root: str, entries: Mapping[str, bool]) -> Iterator[_Image]:
  """The files in class folders."""
  if not entries.get(TRAIN):
    yield from _of_classes(root, '', entries, '')
    return
  has_test = bool(entries.get(TEST))
  for split in (TRAIN, TEST) if has_test else (TRAIN,):
    inside = entries_of(os.path.join(root, split))
    yield from _of_classes(root, split, inside, split if has_test else '')
  if entries.get(_UNLABELED):
    for name, is_folder in entries_of(os.path.join(root, _UNLABELED)).items():
      if not is_folder:
        yield _Image(os.path.join(_UNLABELED, name), '', '', TRAIN)


def _of_classes(
  root: str, parent: str, entries: Mapping[str, bool], split: str
) -> Iterator[_Image]:
  for label, is_folder in entries.items():
    folder = os.path.join(parent, label)
    if not is_folder:
      continue
    for name, is_inner in entries_of(os.path.join(root, folder)).items():
      if not is_inner:
        yield _Image(
          os.path.join(folder, name), label, '', split, f'{label}/{name}'
        )


def _of_manifest(root: str, name: str) -> Iterator[_Image]:
  """The rows of a manifest; raises `UsageError`."""
  path = os.path.join(root, name)
  if name == _CSV:
    columns, rows = read_csv(path)
  else:
    columns, rows = _read_parquet(path)
  unknown = [column for column in columns if column not in _COLUMNS]
  missing = [column for column in _COLUMNS[:2] if column not in columns]
  if missing or unknown or len(set(columns)) < len(columns):
    hint = closest(unknown[0], missing or _COLUMNS) if unknown else ''
    raise UsageError(
      f'{path}: its columns are {", ".join(columns) or "none"}; there must be'
      f' {_PATH} and {_LABEL}, and there may be {_CLIENT} and {_SPLIT}{hint}'
    )
  for number, values in rows:
    where = f'{path}, row {number}'
    if len(values) != len(columns):
      raise UsageError(
        f'{where}: has {len(values)} values for {len(columns)} columns'
      )
    image = _Image(**dict(zip(columns, map(str.strip, values))))
    if not image.path or '\0' in image.path:
      raise UsageError(f'{where}: {_PATH} is empty or is no name of a file')
    if image.split not in ('', TRAIN, TEST):
      raise UsageError(
        f'{where}: {_SPLIT} is {image.split!r}; allowed are {TRAIN}, {TEST}'
        ' and nothing'
      )
    if image.split == TEST and not image.label:
      raise UsageError(f'{where}: a test image needs a label')
    yield image._replace(name=image.path)


def read_csv(path: str) -> tuple[list[str], Iterable[tuple[int, list[str]]]]:
  """(columns, (number, values) of each row); raises `UsageError`."""
  text = files.read_text(path).removeprefix('\ufeff')
  reader = csv.reader(io.StringIO(text, newline=''), strict=True)
  try:
    rows = [(reader.line_num, row) for row in reader if row]
  except csv.Error as error:
    raise UsageError(f'{path}, line {reader.line_num}: {error}') from error
  if not rows:
    return [], []
  header = rows[0][1]
  separator = next((s for s in _SEPARATORS if s in header[0]), '')
  if len(header) == 1 and separator:
    raise UsageError(
      f'{path}: its columns are separated by {separator!r} ({header[0]}); they'
      " must be separated by ','"
    )
  return [name.strip() for name in rows[0][1]], rows[1:]


def _read_parquet(
  path: str,
) -> tuple[list[str], Iterable[tuple[int, list[str]]]]:
  from pyarrow import parquet  # pylint: disable=import-outside-toplevel

  with files.open_binary(path) as file:
    try:
      table = parquet.read_table(file).to_pydict()
    except Exception as error:  # pylint: disable=broad-except
      # Of pyarrow, of many classes.
      reason = f'it is not Parquet ({files.first_line(error)})'
      raise files.FileError(path, reason) from error
  rows = zip(*([_text(value) for value in of] for of in table.values()))
  return list(table), enumerate(map(list, rows), 1)


def _text(value: Any) -> str:
  # A column of numbers in which some are missing comes as floats.
  if isinstance(value, float):
    if value != value:
      return ''
    return str(int(value)) if value.is_integer() else str(value)
  return '' if value is None else str(value)


def _listing(
  root: str,
  kind: str,
  images: list[_Image],
  test_share: float,
  num_ignored: int,
) -> Listing:
  """Numbers classes and clients, and splits."""
  class_names = sorted_names({image.label for image in images})
  client_names = sorted_names({image.client for image in images})
  classes = {name: i for i, name in enumerate(class_names)}
  clients = {name: i for i, name in enumerate(client_names)}
  states: dict[str, tuple[int, ...]] = {}
  splits: dict[str, list[Row]] = {TRAIN: [], TEST: []}
  for image in images:
    if image.path not in states:
      states[image.path] = _state(os.path.join(root, image.path))
    split = image.split
    if not split:
      # What has no label can only be trained on.
      in_test = bool(image.label) and in_share(image.name, test_share)
      split = TEST if in_test else TRAIN
    splits[split].append(
      Row(
        image.path,
        classes.get(image.label, -1),
        clients.get(image.client, -1),
        states[image.path],
      )
    )
  return Listing(
    root,
    kind,
    tuple(splits[TRAIN]),
    tuple(splits[TEST]),
    class_names,
    client_names,
    any(image.label and not image.split for image in images),
    num_ignored,
  )


def sorted_names(found: set[str]) -> tuple[str, ...]:
  """Names but '', numbers by their size."""
  names = sorted(found - {''})
  if all(name.isascii() and name.isdigit() for name in names):
    names.sort(key=lambda name: (len(name.lstrip('0')), name.lstrip('0')))
  return tuple(names)


def _state(path: str) -> tuple[int, ...]:
  """What changes when a file changes."""
  try:
    found = os.stat(path)
  except (OSError, ValueError):
    return ()
  size = found.st_size if stat.S_ISREG(found.st_mode) else -1
  return size, found.st_mtime_ns, found.st_mode


def in_share(name: str | bytes, share: float) -> bool:
  """Whether a name is in a share of all names; depends on nothing else."""
  if isinstance(name, str):
    name = name.encode(errors='surrogateescape')
  digest = hashlib.blake2b(name, digest_size=8).digest()
  return int.from_bytes(digest, 'big') < share * 2**64
