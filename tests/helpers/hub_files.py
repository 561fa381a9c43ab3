"""Small data sets as Hugging Face's hub has them: Parquet with a schema."""

from collections.abc import Sequence
import io
import json
import pathlib
from typing import Any

import numpy as np
from PIL import Image
import pyarrow as pa
from pyarrow import parquet


def png(seed: int, size: tuple[int, int] = (6, 5)) -> bytes:
  """A picture of random gray pixels; `size` is (width, height)."""
  pixels = np.random.default_rng(seed).integers(0, 256, size[::-1], np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'PNG')
  return file.getvalue()


def images(count: int, seed: int = 0) -> list[dict[str, Any]]:
  """Values of a column of images."""
  return [
    {'bytes': png(1_000 * seed + i), 'path': f'{i}.png'} for i in range(count)
  ]


def write(
  path: pathlib.Path,
  columns: dict[str, Sequence[Any]],
  class_names: Sequence[str] = ('cat', 'dog'),
  label: str = 'label',
) -> None:
  """Writes columns with what the library `datasets` says of them.

  Args:
    path: The file.
    columns: Name -> values; those that begin with 'im' are images.
    class_names: Names of classes; () if the labels are of no such type.
    label: The column of labels.
  """
  features: dict[str, Any] = {
    name: {'_type': 'Image'} for name in columns if name.startswith('im')
  }
  if class_names:
    features[label] = {'_type': 'ClassLabel', 'names': list(class_names)}
  table = pa.table(dict(columns)).replace_schema_metadata(
    {'huggingface': json.dumps({'info': {'features': features}})}
  )
  path.parent.mkdir(parents=True, exist_ok=True)
  parquet.write_table(table, path, row_group_size=3)
