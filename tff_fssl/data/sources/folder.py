"""Folders of images: `--dataset=folder:PATH`.

A folder contains class folders, or a manifest. No image is opened before the
images are decoded.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import os
import pathlib
import stat
from typing import NamedTuple

import numpy as np

from tff_fssl import files
from tff_fssl.data import data_hparams
from tff_fssl.data import inspection
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data.sources import images
from tff_fssl.data.sources import table
from tff_fssl.hparams import UsageError

TRAIN, TEST, _UNLABELED = table.TRAIN, table.TEST, 'unlabeled'
_MANIFESTS = ('manifest.csv', 'manifest.parquet')
_PATH = 'path'
_CLASS_FOLDERS = 'class folders'
_LAYOUTS = (
  f'it must have class folders (CLASS/*.jpg, or {TRAIN}/CLASS/*.jpg and'
  f' {TEST}/CLASS/*.jpg) or a {_MANIFESTS[0]}'
)


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
    kind: 'class folders' or the name of the manifest.
    train: Images for training.
    test: Images for testing, all with a label.
    marks: Classes, clients and splits of all images.
    num_ignored: The number of files that are no images, by their names.
  """

  root: str
  kind: str
  train: tuple[Image, ...]
  test: tuple[Image, ...]
  marks: table.Marks
  num_ignored: int

  def labels(self, split: str) -> np.ndarray:
    """Returns the labels of 'train' or 'test', int32 [N]."""
    return self.marks.y[self.marks.in_test == (split == TEST)]

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
      has_test=not self.marks.uses_share,
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
    if by_folders and os.path.isdir(os.path.join(self.root, TRAIN)):
      levels = [os.path.join(self.root, split) for split in (TRAIN, TEST)]
    for folder, inner, found in os.walk(self.root):
      inner[:] = sorted(n for n in inner if not n.startswith('.'))
      if folder in levels:
        empty += [name for name in inner if name not in class_names]
      count = sum(
        not name.startswith('.')
        and pictures.is_image(name)
        and os.path.normpath(os.path.join(folder, name)) not in used
        for name in found
      )
      if count:
        counts[os.path.relpath(folder, self.root)] = count
    if counts:
      where = [f'{count:,} in {folder}' for folder, count in counts.items()]
      rule = f'{self.kind} does not name them'
      if by_folders:
        rule = 'only images directly in a class folder are read; move them'
      yield inspection.Problem(
        f'{sum(counts.values()):,} image files are not used'
        f' ({inspection.shown(where)}): {rule}',
        False,
      )
    if empty and by_folders:
      yield inspection.Problem(
        f'class folders without an image: {inspection.shown(empty)}; they are'
        f' ignored, and the network has {len(class_names)} outputs',
        False,
      )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FolderInfo(images.ImagesInfo):
  """A folder of images.

  Attributes:
    listing: Its images.
  """

  listing: Listing


def find(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> FolderInfo:
  """Finds a folder, and rejects one that cannot be trained on."""
  info = describe(name, data_dir, settings)
  inspection.refuse(f'--dataset={name}', info.listing.marks.problems())
  return info


def describe(
  name: str, data_dir: str, settings: data_hparams.DataHparams
) -> FolderInfo:
  """Lists a folder, even if it has problems.

  Args:
    name: `names.FOLDER` and the folder's path.
    data_dir: The start of relative paths. '': the current folder.
    settings: The flags for reading.

  Returns:
    The facts that are known without opening an image.

  Raises:
    UsageError: If the folder cannot be read, or is of another kind.
  """
  root = table.resolve_path(name, data_dir, names.FOLDER)
  try:
    listing = read(root, settings.test_share)
  except UsageError as error:
    raise UsageError(f'--dataset={name}: {error}') from error
  marks = listing.marks
  facts = marks.info(
    name=name,
    example_shape=settings.image_shape(),
    flip=settings.flip,
    uses=images.SHAPED | marks.uses | {'max_unreadable'},
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
  return FolderInfo(
    **facts,
    settings=settings,
    decode=lambda: images.decode(found),
    listing=listing,
  )


class _Entry(NamedTuple):
  """An image as it is found, with '' for unknown facts."""

  path: str
  name: str = ''
  label: str = ''
  client: str = ''
  split: str = ''


def read(root: str, test_share: float) -> Listing:
  """Lists the images of a folder.

  Args:
    root: The folder.
    test_share: Share of the images for testing, if neither folders nor the
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
    found, places = _read_manifest(os.path.join(root, kind))
    entries, where = found, os.path.join(root, kind)
  else:
    kind, where = _CLASS_FOLDERS, root
    found = list(_list_classes(root, inside))
    entries = [entry for entry in found if pictures.is_image(entry.path)]
    places = [entry.path for entry in entries]
  if not entries:
    raise UsageError(f'{root}: has no images; {_LAYOUTS}')
  paths, contents, labels, clients, splits = zip(*entries)
  # An image's split depends on a hash of its name, so that none is opened.
  marks = table.mark(
    where,
    labels,
    clients,
    splits,
    contents,
    test_share,
    place=places.__getitem__,
  )
  # A manifest may name one file in several rows.
  states = {path: _state(os.path.join(root, path)) for path in set(paths)}
  listed = tuple(
    Image(paths[i], int(marks.y[i]), int(marks.owners[i]), states[paths[i]])
    for i in marks.order
  )
  train, test = listed[: marks.num_train], listed[marks.num_train :]
  ignored = len(found) - len(entries)
  return Listing(root, kind, train, test, marks, ignored)


def _list_classes(root: str, inside: Mapping[str, bool]) -> Iterator[_Entry]:
  """Lists the files in class folders."""
  splits = ['']
  if inside.get(TRAIN):
    splits = [TRAIN, TEST] if inside.get(TEST) else [TRAIN]
  for split in splits:
    for label in _list_folder(root, split, folders=True):
      for name in _list_folder(root, os.path.join(split, label)):
        yield _Entry(
          os.path.join(split, label, name),
          f'{label}/{name}',
          label,
          split=split if len(splits) > 1 else '',
        )
  # Without train/, a folder of this name is a class.
  if inside.get(TRAIN) and inside.get(_UNLABELED):
    for name in _list_folder(root, _UNLABELED):
      yield _Entry(os.path.join(_UNLABELED, name), split=TRAIN)


def _list_folder(root: str, folder: str, folders: bool = False) -> list[str]:
  """Lists the names of the files, or of the folders, in a folder."""
  inside = files.list_folder(os.path.join(root, folder))
  return [name for name, is_folder in inside.items() if is_folder == folders]


def _read_manifest(path: str) -> tuple[list[_Entry], list[str]]:
  """Reads (rows, their names in messages), or raises `UsageError`."""
  optional = (table.CLIENT, table.SPLIT)
  found = table.read(path, (_PATH, table.LABEL), optional)
  paths = found.column(_PATH)
  columns = map(found.column, (table.LABEL, *optional))
  for image, place in zip(paths, found.places):
    if not image or '\0' in image:
      raise UsageError(
        f'{path}, {place}: {_PATH} is empty or not the name of a file'
      )
  return list(map(_Entry, paths, paths, *columns)), found.places


def _state(path: str) -> tuple[int, ...]:
  """Returns facts that change when a file changes."""
  try:
    found = os.stat(path)
  except (OSError, ValueError):
    # The error is reported when the image is read.
    return ()
  size = found.st_size if stat.S_ISREG(found.st_mode) else -1
  return size, found.st_mtime_ns, found.st_mode
