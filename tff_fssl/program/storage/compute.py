"""compute.json: the compute of clients and server in a round."""

import dataclasses
import json
import math
import os

from tff_fssl import durable
from tff_fssl import files

_FORMAT = 'tff_fssl.compute'
_PREFIXES = ((1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'))


@dataclasses.dataclass(frozen=True)
class Compute:
  """FLOPs, or numbers of forward passes that cost as much.

  Attributes:
    forward_flops: FLOPs of a forward pass over one example: one
      forward-equivalent.
    client: The most forward-equivalents of a client of mean size in a round.
    client_least: The least, if it keeps all its examples.
    client_authors: The most that the authors' code would spend, or None if not
      known.
    server: Forward-equivalents of the server in a round.
  """

  forward_flops: float
  client: float
  client_least: float
  client_authors: float | None
  server: float

  def flops(self, forward_equivalents: float) -> float:
    """Converts a number of forward passes to FLOPs."""
    return self.forward_flops * forward_equivalents

  def describe(self) -> str:
    """Describes it in a sentence, for the start of a run."""
    parts = []
    if self.client:
      authors = ''
      if self.client_authors is not None:
        authors = f"; the authors' code {self.client_authors:,.0f}"
      parts.append(
        f'at most {flops_text(self.flops(self.client))} a client and round'
        f' ({self.client:,.0f} forward-equivalents{authors})'
      )
    if self.server:
      flops = flops_text(self.flops(self.server))
      parts.append(f'server {flops} a round ({self.server:,.0f})')
    return ', '.join(parts)


def write(path: str, compute: Compute) -> None:
  """Writes the file, or raises `UsageError` if the disk refuses."""
  content = {'format': _FORMAT, **dataclasses.asdict(compute)}
  durable.write_file(path, [(json.dumps(content, indent=2) + '\n').encode()])


def read(path: str) -> Compute | None:
  """Reads the file.

  Args:
    path: The file.

  Returns:
    The content. None if there is no file, as in runs of older versions.

  Raises:
    FileError: If it is not such a file.
  """
  if not os.path.lexists(path):
    return None
  values = files.read_json(path, limit=2**16)
  if values.pop('format', None) != _FORMAT:
    raise files.FileError(path, f'its format is not {_FORMAT!r}')
  names = {field.name for field in dataclasses.fields(Compute)}
  if values.keys() != names:
    raise files.FileError(path, f'it must have {", ".join(sorted(names))}')
  for name, value in values.items():
    if value is None and name == 'client_authors':
      continue
    # In Python, True is an int.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
      raise files.FileError(path, f'{name} must be a number of at least 0')
  return Compute(**values)


def flops_text(number: float) -> str:
  """Formats FLOPs: '4.2 GFLOP'."""
  for factor, prefix in _PREFIXES:
    if number >= factor:
      return f'{number / factor:.3g} {prefix}FLOP'
  return f'{number:,.0f} FLOP'
