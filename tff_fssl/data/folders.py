"""Folders of images as data sets: `--dataset=folder:PATH`. TF-free."""

import collections
import dataclasses
import functools
import os
from typing import Any, NamedTuple, cast

from tff_fssl.data import data_hparams
from tff_fssl.data import image_cache
from tff_fssl.data import inspection
from tff_fssl.data import listings
from tff_fssl.data import names
from tff_fssl.data import pictures
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError

DataHparams = data_hparams.DataHparams
_USES = {
  'image_size',
  'resize',
  'color',
  'flip',
  'max_unreadable',
  'cache_dir',
}
_REMEMBERED = 128


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FolderInfo(names.DataSetInfo):
  """A folder of images.

  Attributes:
    listing: Its images.
    settings: How they are read.
  """

  listing: listings.Listing
  settings: DataHparams

  @property
  def form(self) -> pictures.Form:
    """What the images become."""
    return pictures.Form(self.example_shape, self.settings.resize)


def describe(name: str, data_dir: str, settings: DataHparams) -> FolderInfo:
  """Lists a folder, whatever may be wrong with it.

  Args:
    name: `names.FOLDER` and the folder's path.
    data_dir: Where a relative path starts; '': the current folder.
    settings: How images are read.

  Returns:
    What is known without opening an image.

  Raises:
    UsageError: If the folder cannot be read, or is of another kind.
  """
  path = os.path.expanduser(name.removeprefix(names.FOLDER))
  if not path:
    raise UsageError(f'--dataset={name}: give the folder, {names.FOLDER}PATH')
  root = os.path.join(os.path.expanduser(data_dir), path)
  try:
    listing = listings.read(root, settings.test_share)
  except UsageError as error:
    raise UsageError(f'--dataset={name}: {error}') from error
  return FolderInfo(
    name=name,
    num_classes=len(listing.class_names),
    example_shape=settings.image_shape(),
    num_train=len(listing.train),
    num_test=len(listing.test),
    flip=settings.flip,
    mean=(),
    std=(),
    loader=f'{__name__}:load',
    uses=frozenset(_USES | ({'test_share'} if listing.uses_share else set())),
    listing=listing,
    settings=settings,
  )


class Decoded(NamedTuple):
  """What came of a folder's images.

  Attributes:
    data: The data set.
    unreadable: Path -> reason of the files that are not part of it.
    sizes: (height, width, whether it was enlarged, how many images) of all
      sizes of stored images.
  """

  data: sources.DataSet
  unreadable: dict[str, str]
  sizes: list[tuple[int, int, bool, int]]


def find(name: str, data_dir: str, settings: DataHparams) -> FolderInfo:
  """Like `describe`; also refuses what cannot be trained on."""
  info = describe(name, data_dir, settings)
  inspection.refuse(f'--dataset={name}', info.listing.problems())
  return info


def load(info: names.DataSetInfo, data_dir: str | None) -> sources.DataSet:
  """Decodes the images, once; see `sources.load`."""
  del data_dir  # The listing knows the folder.
  data, unreadable, _ = decode(cast(FolderInfo, info))
  settings = cast(FolderInfo, info).settings
  if len(unreadable) > settings.max_unreadable:
    shown = inspection.shown([f'{p}: {why}' for p, why in unreadable.items()])
    raise UsageError(
      f'--dataset={info.name}: {len(unreadable):,} image files cannot be read'
      f' ({shown}); repair or remove them, or leave them out with'
      f' --max_unreadable={len(unreadable)}'
    )
  inspection.refuse(
    f'--dataset={info.name}',
    inspection.label_problems(data.class_names, data.train.y, data.test.y),
  )
  return data


def decode(info: FolderInfo) -> Decoded:
  """Decodes the images, once.

  Args:
    info: The folder.

  Returns:
    All of those that can be read, however few.

  Raises:
    UsageError: If the cache cannot be written or read.
  """
  listing = info.listing
  rows = [*listing.train, *listing.test]
  cached = image_cache.open_or_make(
    info.settings.cache_folder,
    image_cache.key_of(
      os.path.realpath(listing.root),
      info.form,
      listing.class_names,
      listing.client_names,
      len(listing.train),
      rows,
    ),
    info.example_shape,
    len(rows),
    lambda writer: _decode(info, writer),
  )
  try:
    facts = cached.facts
    num_train = int(facts['num_train'])
    y = cached.integers('y', info.num_classes)
    owners = cached.integers('owners', max(1, len(listing.client_names)))
    unreadable = {str(k): str(v) for k, v in facts['unreadable'].items()}
    sizes = [(int(h), int(w), bool(e), int(n)) for h, w, e, n in facts['sizes']]
    if len(y) != len(cached.images) or len(owners) != num_train:
      raise ValueError('counts differ')
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise image_cache.foreign(cached) from error
  test_share = f'{info.settings.test_share:g} of each class is for testing'
  data = sources.DataSet(
    name=info.name,
    train=sources.Examples(cached.images[:num_train], y[:num_train]),
    test=sources.Examples(cached.images[num_train:], y[num_train:]),
    num_classes=info.num_classes,
    class_names=listing.class_names,
    example_shape=info.example_shape,
    notes=f'{listing.root}, by {listing.kind}'
    + (f'; {test_share}' if listing.uses_share else ''),
    owners=owners if listing.client_names else None,
    client_names=listing.client_names,
    mean=cached.mean,
    std=cached.std,
  )
  return Decoded(data, unreadable, sizes)


def _decode(
  info: FolderInfo, writer: image_cache.Writer
) -> tuple[int, int, dict[str, Any]]:
  """Puts all images that can be read, those for training first."""
  listing, form = info.listing, info.form
  rows = [*listing.train, *listing.test]
  num_train = 0
  kept: list[listings.Row] = []
  unreadable: dict[str, str] = {}
  sizes: collections.Counter[tuple[int, int, bool]] = collections.Counter()

  # Several rows of a manifest may name the same file.
  read_file = functools.lru_cache(_REMEMBERED)(pictures.read)

  def read(row):
    return read_file(os.path.join(listing.root, row.path), form)

  with sources.progress(len(rows)) as progress:
    for position, (row, picture) in enumerate(
      pictures.read_all(rows, read, form)
    ):
      if isinstance(picture, str):
        unreadable[row.path] = picture
      else:
        writer.put(len(kept), picture.pixels)
        kept.append(row)
        sizes.update([(*picture.stored, picture.is_enlarged)])
        num_train += position < len(listing.train)
      progress.update()
  facts = {
    'num_train': num_train,
    'y': [row.label for row in kept],
    'owners': [row.owner for row in kept[:num_train]],
    'unreadable': unreadable,
    'sizes': [[*size, count] for size, count in sorted(sizes.items())],
  }
  return len(kept), num_train, facts
