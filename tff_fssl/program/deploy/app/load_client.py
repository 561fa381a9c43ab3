"""The data of this client: the one function to edit, if any."""

from collections.abc import Mapping
from typing import Any

from fssl_app import readers
from fssl_app import work
import numpy as np

# x: images uint8 [N, height, width, channels], vectors float32 [N, views,
# numbers], or texts int32 [N, words]; y: classes int [N].
Labeled = tuple[np.ndarray, np.ndarray]


def load_client(
  node_config: Mapping[str, Any],
) -> tuple[Labeled | None, np.ndarray | None]:
  """Loads the examples of this client.

  It is called once in each phase of a round, and must return the same examples
  in the same order as long as a round lasts.

  Args:
    node_config: What `flower-supernode --node-config` gives.

  Returns:
    ((x, y) with labels, or None; x without labels, or None).
  """
  return readers.read(
    work.setting(node_config, 'data'), work.setting(node_config, 'program', '')
  )
