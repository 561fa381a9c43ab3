"""Folders of images: `--dataset=folder:PATH`.

A folder contains class folders, clients' folders with class folders, or a
manifest. No image is opened before the images are decoded.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import operator
import os
import pathlib
import stat
from typing import Any, NamedTuple, cast

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data import sources
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError

TRAIN, TEST = table.TRAIN, table.TEST
# Names of the folders of splits, in lower case.
_SPLITS = {'train': TRAIN, 'training': TRAIN, 'test': TEST, 'testing': TEST}
_CLIENTS, _SERVER = 'clients', 'server'
_MANIFESTS = ('manifest.csv', 'manifest.parquet')
_PATH = 'path'
# So many values of a trait are looked at.
_MAX_TRAITS = 20
_CLASS_FOLDERS, _CLIENT_FOLDERS = 'class folders', "clients' folders"
_LAYOUTS = (
  f'it must have class folders (CLASS/*.jpg, or {TRAIN}/CLASS/*.jpg and'
  f' {TEST}/CLASS/*.jpg), clients ({_CLIENTS}/NAME/CLASS/*.jpg) or a'
  f' {_MANIFESTS[0]}'
)
# Files that programs leave in folders of images.
_LITTER = frozenset({'thumbs.db', 'desktop.ini', '__macosx'})
# What to do with endings that Pillow does not read.
_CONVERT = {
  '.dcm': 'convert DICOM to 16-bit PNG, as dcm2pnm or pydicom does',
  '.dicom': 'convert DICOM to 16-bit PNG, as dcm2pnm or pydicom does',
  '.heic': 'convert HEIC to JPEG, as heif-convert does',
  '.heif': 'convert HEIF to JPEG, as heif-convert does',
  '.nii': 'write slices of NIfTI volumes as PNG',
  '.gz': 'unpack them',
  '.zip': 'unpack them',
  '.svs': 'cut whole slides into tiles',
}


class Image(NamedTuple):
  """An image in a folder.

  Attributes:
    path: The path, relative to the folder or absolute.
    label: The class's number, or -1 if unknown.
    owner: The client's number, or -1 if it belongs to nobody.
    state: Size, time and mode of the file, or () if it is missing.
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
    kind: 'class folders', "clients' folders" or the name of the manifest.
    train: Images for training.
    test: Images for testing, all with a label.
    marks: Classes, clients and splits of all images.
    left_out: Files that are no images, by their names.
  """

  root: str
  kind: str
  train: tuple[Image, ...]
  test: tuple[Image, ...]
  marks: table.Marks
  left_out: tuple[str, ...]

  def rows(self) -> images.Rows:
    """Returns the images as rows."""

    def read(for_test):
      for image in self.test if for_test else self.train:
        yield images.Row(
          image.path,
          pathlib.Path(self.root, image.path),
          None if image.label < 0 else image.label,
          None if image.owner < 0 else image.owner,
        )

    return images.Rows(
      len(self.train) + len(self.test),
      read,
      self.marks.class_names,
      self.marks.client_names,
      has_test='test_share' not in self.marks.uses,
    )

  def is_at_server(self, path: str) -> bool:
    """Tells whether an image is in the folder of the server."""
    folder = path.partition(os.sep)[0]
    return self.kind == _CLIENT_FOLDERS and folder == _SERVER

  def problems(self) -> Iterator[inspection.Problem]:
    """Finds files that are left out, by their endings."""
    endings = collections.Counter(
      os.path.splitext(path)[1].lower() for path in self.left_out
    )
    if endings:
      count = f'{len(self.left_out):,}'
      each = [f'{n:,} {end or "without"}' for end, n in endings.most_common()]
      ways = dict.fromkeys(_CONVERT[e] for e in endings if e in _CONVERT)
      yield inspection.Problem(
        '; '.join(
          [
            f'{count} files are left out, since Pillow reads no such ending'
            f' ({inspection.shown(each)})',
            *ways,
          ]
        ),
        brief=f'{count} files left out ({inspection.shown(each)})',
      )

  def unused(self) -> Iterator[inspection.Problem]:
    """Finds images that are not used, and classes without an image."""
    class_names = self.marks.class_names
    by_folders = self.kind == _CLASS_FOLDERS
    used = {
      os.path.normpath(os.path.join(self.root, image.path))
      for image in (*self.train, *self.test)
    }
    counts: dict[str, int] = {}
    empty = []
    levels = [self.root]
    if by_folders:
      splits = _split_folders(files.list_folder(self.root))
      if TRAIN in splits:
        levels = [os.path.join(self.root, name) for name in splits.values()]
    for folder, inner, found in os.walk(self.root):
      inner[:] = sorted(n for n in inner if not is_litter(n))
      if folder in levels:
        empty += [
          name
          for name in inner
          if name not in class_names
          and name.casefold() not in names.UNKNOWN_FOLDERS
        ]
      count = sum(
        not is_litter(name)
        and pictures.is_image(name)
        and os.path.normpath(os.path.join(folder, name)) not in used
        for name in found
      )
      if count:
        counts[os.path.relpath(folder, self.root)] = count
    if counts:
      where = [f'{count:,} in {folder}' for folder, count in counts.items()]
      rule = f'{self.kind} does not name them'
      if self.kind == _CLIENT_FOLDERS:
        rule = f'only those in {_CLIENTS}/NAME/CLASS are read, and the like'
      if by_folders:
        rule = (
          'only images directly in a class folder are read; move them, or, if'
          f' these are clients, move their folders into {_CLIENTS}/'
        )
      yield inspection.Problem(
        f'{sum(counts.values()):,} image files are not used'
        f' ({inspection.shown(where)}): {rule}',
        brief=f'{sum(counts.values()):,} images not used',
      )
    if empty and by_folders:
      yield inspection.Problem(
        f'class folders without an image: {inspection.shown(empty)}; they are'
        f' ignored, and the network has {len(class_names)} outputs',
        brief=f'{len(empty):,} empty class folders',
      )

  def traits(self, data: sources.DataSet) -> Iterator[inspection.Problem]:
    """Finds traits of the files that reveal a class."""
    place = cast(Callable[[int], str], data.place)
    found = pictures.traits_of(
      os.path.join(self.root, place(i)) for i in range(len(data.train))
    )
    texts: dict[str, list[Any]] = {
      '{} files': [one.encoding for one in found],
      '{} in their files': [one.size for one in found],
      'partly transparent': [one.is_transparent or None for one in found],
    }
    traits = {}
    for text, values in texts.items():
      counts = collections.Counter(v for v in values if v is not None)
      for value, _ in counts.most_common(_MAX_TRAITS):
        traits[text.format(value)] = np.array([v == value for v in values])
    return inspection.trait_problems(data.class_names, data.train.y, traits)


def find(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> sources.Info:
  """Lists a folder, without opening an image (see `sources.describe`)."""
  root = table.resolve_path(name, data_dir, names.FOLDER)
  try:
    listing = read(root, settings)
  except UsageError as error:
    raise UsageError(f'--dataset={name}: {error}') from error
  marks = listing.marks
  facts = marks.info(
    name=name,
    example_shape=settings.image_shape(),
    flip=settings.flip,
    uses=images.SHAPED | {'max_unreadable'},
  )
  facts['problems'] = (*facts['problems'], *listing.problems())
  at_server = [listing.is_at_server(image.path) for image in listing.train]
  known = [image.label >= 0 for image in listing.train]
  facts['num_server'] = sum(map(operator.and_, at_server, known))
  facts['has_clients'] = not all(at_server)
  if listing.kind == _CLIENT_FOLDERS and facts['has_clients']:
    facts['partition'] = names.NATURAL
  if not listing.train:
    # Where clients have the images, those for testing tell the classes.
    facts['problems'] = tuple(
      inspection.label_problems(marks.class_names, marks.y, marks.y)
    )
  found = images.Found(
    name=name,
    root=root,
    key=(
      marks.class_names,
      marks.client_names,
      len(listing.train),
      (*listing.train, *listing.test),
    ),
    settings=settings,
    open=listing.rows,
    uses=facts['uses'],
    notes=f'{root}, by {listing.kind}',
    shape=facts['example_shape'],
  )

  def decode() -> sources.DataSet:
    data, unreadable = images.decode(found)
    paths = [image.path for image in (*listing.train, *listing.test)]
    read = [path for path in paths if path not in unreadable]
    data = dataclasses.replace(data, place=read.__getitem__)
    server = [*map(listing.is_at_server, read[: len(data.train)])]
    if any(server) or not server:
      data = dataclasses.replace(data, server=np.array(server, bool))
    return data

  return sources.Info(
    **facts,
    read=decode,
    about={'by': listing.kind, 'where': os.path.abspath(root)},
    look=lambda data: (*listing.unused(), *listing.traits(data)),
  )


class _Entry(NamedTuple):
  """An image as it is found, with '' for unknown facts."""

  path: str
  name: str = ''
  label: str = ''
  client: str = ''
  split: str = ''


def read(root: str, settings: data_hparams.DataHparams) -> Listing:
  """Lists the images of a folder.

  Args:
    root: The folder.
    settings: The share of the images for testing, if neither folders nor the
      manifest have splits.

  Returns:
    The listing.

  Raises:
    UsageError: If the folder cannot be read, or is of another kind.
  """
  inside = files.list_folder(root)
  manifests = [name for name in _MANIFESTS if name in inside]
  if len(manifests) == 2:
    raise UsageError(f'{root}: has {" and ".join(manifests)}; remove one')
  if manifests:
    kind = manifests[0]
    where = os.path.join(root, kind)
    found, places = _read_manifest(root, kind)
    entries = found
  else:
    kind, where = _CLASS_FOLDERS, root
    folders = {n for n in inside if inside[n] and not is_litter(n)}
    # Deployed clients are elsewhere.
    alone = {_SERVER, _split_folders(inside).get(TEST)}
    if _CLIENTS in folders or folders and folders <= alone:
      kind = _CLIENT_FOLDERS
      found = list(_list_clients(root, inside, settings))
    else:
      found = list(_list_classes(root, inside, settings))
    entries = [entry for entry in found if pictures.is_image(entry.path)]
    places = [entry.path for entry in entries]
  left_out = tuple(
    entry.path
    for entry in (found if len(entries) < len(found) else ())
    if not pictures.is_image(entry.path)
  )
  if not entries:
    few = f' ({inspection.shown(left_out)} are none)' if left_out else ''
    raise UsageError(f'{root}: has no images{few}; {_LAYOUTS}')
  paths, contents, labels, clients, splits = zip(*entries)
  # An image's split depends on a hash of its name, so that none is opened.
  marks = table.mark(
    where,
    labels,
    clients,
    splits,
    contents,
    settings,
    unknown=names.UNKNOWN_WORDS if manifests else names.UNKNOWN_FOLDERS,
    place=places.__getitem__,
  )
  # A manifest may name one file in several rows.
  states = {path: _state(os.path.join(root, path)) for path in set(paths)}
  listed = tuple(
    Image(paths[i], int(marks.y[i]), int(marks.owners[i]), states[paths[i]])
    for i in marks.order
  )
  train, test = listed[: marks.num_train], listed[marks.num_train :]
  return Listing(root, kind, train, test, marks, left_out)


def is_litter(name: str) -> bool:
  """Tells by a name whether a program has left a file or folder."""
  return name.startswith('.') or name.casefold() in _LITTER


def _split_folders(inside: Mapping[str, bool]) -> dict[str, str]:
  """Finds the folders of splits: 'train' or 'test' -> name."""
  return {
    _SPLITS[name.casefold()]: name
    for name, is_folder in inside.items()
    if is_folder and name.casefold() in _SPLITS
  }


def _list_classes(
  root: str, inside: Mapping[str, bool], settings: data_hparams.DataHparams
) -> Iterator[_Entry]:
  """Lists the files in class folders."""
  splits = _split_folders(inside)
  if TRAIN not in splits:
    yield from _class_files(root, '', settings)
    return
  for split, folder in splits.items():
    marked = split if len(splits) > 1 else ''
    yield from _class_files(root, folder, settings, split=marked)
  for name, is_folder in inside.items():
    if is_folder and settings.is_unknown(name, names.UNKNOWN_FOLDERS):
      for file in _list_folder(root, name):
        yield _Entry(os.path.join(name, file), label=name, split=TRAIN)


def _list_clients(
  root: str, inside: Mapping[str, bool], settings: data_hparams.DataHparams
) -> Iterator[_Entry]:
  """Lists the files of clients, of the server and for testing."""
  test = _split_folders(inside).get(TEST)
  split = TRAIN if test else ''
  for client in (
    _list_folder(root, _CLIENTS, folders=True) if inside.get(_CLIENTS) else ()
  ):
    folder = os.path.join(_CLIENTS, client)
    yield from _class_files(root, folder, settings, client=client, split=split)
  if inside.get(_SERVER):
    yield from _class_files(root, _SERVER, settings, split=split)
  if test:
    yield from _class_files(root, test, settings, split=TEST)


def _class_files(
  root: str,
  folder: str,
  settings: data_hparams.DataHparams,
  *,
  client: str = '',
  split: str = '',
) -> Iterator[_Entry]:
  """Lists the files in the class folders of a folder.

  Names of entries do not have the name of a split, so that the same share of
  images is drawn for testing wherever they are. Those of clients do.
  """
  for label in _list_folder(root, folder, folders=True):
    is_unknown = settings.is_unknown(label, names.UNKNOWN_FOLDERS)
    if is_unknown and split == TEST:
      continue
    for name in _list_folder(root, os.path.join(folder, label)):
      yield _Entry(
        os.path.join(folder, label, name),
        f'{client}/{label}/{name}' if client else f'{label}/{name}',
        label,
        client,
        TRAIN if is_unknown and split else split,
      )


def _list_folder(root: str, folder: str, folders: bool = False) -> list[str]:
  """Lists the names of the files, or of the folders, in a folder."""
  inside = files.list_folder(os.path.join(root, folder))
  return [
    name
    for name, is_folder in inside.items()
    if is_folder == folders and not is_litter(name)
  ]


def _read_manifest(root: str, kind: str) -> tuple[list[_Entry], list[str]]:
  """Reads (rows, their names in messages), or raises `UsageError`."""
  path = os.path.join(root, kind)
  optional = (table.CLIENT, table.SPLIT)
  found = table.read(path, (_PATH, table.LABEL), optional)
  paths = found.column(_PATH)
  columns = map(found.column, (table.LABEL, *optional))
  for image, place in zip(paths, found.places):
    if not image or '\0' in image:
      raise UsageError(
        f'{path}, {place}: {_PATH} is empty or not the name of a file'
      )
  beside = _Beside(root)
  places = [beside.find(image) for image in paths]
  return list(map(_Entry, places, paths, *columns)), found.places


class _Beside:
  """Finds the file that a path in a manifest means."""

  def __init__(self, root: str):
    self._root = root
    # Folder -> name without ending, in lower case -> names.
    self._inside: dict[str, dict[str, list[str]]] = {}

  def find(self, path: str) -> str:
    """Finds a file whose path lacks its ending, or is Windows's.

    Args:
      path: A cell of the manifest.

    Returns:
      It, if there is such a file. Else the only image whose name differs in its
      ending, and the case of letters, alone. Else the cell.
    """
    if os.path.lexists(os.path.join(self._root, path)):
      return path
    plain = path.replace('\\', '/')
    if os.path.lexists(os.path.join(self._root, plain)):
      return plain
    folder, name = os.path.split(plain)
    if folder not in self._inside:
      by_stem = self._inside.setdefault(folder, {})
      try:
        inside = files.list_folder(os.path.join(self._root, folder))
      except files.FileError:
        # It is reported when the image is read.
        return path
      for other in inside:
        if pictures.is_image(other):
          stem = os.path.splitext(other)[0].casefold()
          by_stem.setdefault(stem, []).append(other)
    stem = name if not pictures.is_image(name) else os.path.splitext(name)[0]
    found = self._inside[folder].get(stem.casefold(), [])
    return os.path.join(folder, found[0]) if len(found) == 1 else path


def _state(path: str) -> tuple[int, ...]:
  """Returns facts that change when a file changes."""
  try:
    found = os.stat(path)
  except (OSError, ValueError):
    # The error is reported when the image is read.
    return ()
  size = found.st_size if stat.S_ISREG(found.st_mode) else -1
  return size, found.st_mtime_ns, found.st_mode
