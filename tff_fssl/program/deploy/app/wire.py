"""Values as records of Flower, read without believing the sender."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from flwr.app import Array
from flwr.app import ArrayRecord
from flwr.app import ConfigRecord
from flwr.app import RecordDict
from fssl_app import artefact
import numpy as np

_VALUES, _ABOUT = 'values', 'about'
# Of values without a fixed size, such as the graph of a data set.
_MOST_BYTES = 2**30
_RAW = 'raw'


def encode(about: Mapping[str, Any], values: Sequence[Any]) -> RecordDict:
  """Makes the content of a message."""
  arrays = {}
  for position, value in enumerate(values):
    if isinstance(value, bytes):
      array = Array('string', (), _RAW, value)
    else:
      value = np.asarray(value)
      array = Array(value.dtype.name, value.shape, _RAW, value.tobytes())
    arrays[str(position)] = array
  return RecordDict(
    {_VALUES: ArrayRecord(arrays), _ABOUT: ConfigRecord(dict(about))}
  )


def about_of(content: RecordDict) -> dict[str, Any]:
  """Reads what a message says that it is about. Empty if it does not."""
  record = content.get(_ABOUT)
  return dict(record) if isinstance(record, ConfigRecord) else {}


def decode(
  content: RecordDict, specs: Sequence[Mapping[str, Any]]
) -> list[Any] | None:
  """Reads the values of a message.

  Bytes are read as numbers of the expected type, and only if they are as many
  as expected, and booleans 0 or 1. Nothing else in the message decides how they
  are read.

  Args:
    content: The content of the message.
    specs: The expected dtype and shape of each value.

  Returns:
    The values, or None if they have another form.
  """
  record = content.get(_VALUES)
  if not isinstance(record, ArrayRecord) or len(record) != len(specs):
    return None
  values: list[Any] = []
  for position, spec in enumerate(specs):
    array = record.get(str(position))
    if array is None or not isinstance(array.data, bytes):
      return None
    if spec['dtype'] == 'string':
      if len(array.data) > _MOST_BYTES:
        return None
      values.append(array.data)
      continue
    dtype, shape = np.dtype(spec['dtype']), tuple(array.shape)
    wanted = spec['shape']
    # Two negative sizes would have a product that fits.
    if len(shape) != len(wanted) or any(
      n < 0 or (most is not None and n != most)
      for n, most in zip(shape, wanted)
    ):
      return None
    # For bytes that do not fit their shape, NumPy would raise.
    size = math.prod(shape) * dtype.itemsize
    if len(array.data) != size or size > _MOST_BYTES:
      return None
    try:
      value = np.frombuffer(array.data, dtype).reshape(shape)
    except ValueError:  # Nothing, but of a size that no array can have.
      return None
    if not artefact.has_valid_bits(value):
      return None
    values.append(value)
  return values
