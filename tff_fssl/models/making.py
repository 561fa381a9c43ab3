"""Creation of Keras's variables and layers: initial values, precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any

from tff_fssl.lazy import tf


def seeded_creator(
  seed: int | None, created: list[tf.Variable]
) -> Callable[..., tf.Variable]:
  """Makes a variable creator that sets initial values.

  Args:
    seed: Seed of the initial values. None: zeros, which are cheap.
    created: The list to which the creator appends its variables.

  Returns:
    The creator.
  """
  num_seeded = 0

  def create(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
  ) -> tf.Variable:
    nonlocal num_seeded
    initial_value = kwargs['initial_value']
    if isinstance(initial_value, functools.partial):
      if seed is None:
        # The round's weights overwrite it, so that drawing it would be waste.
        shape = initial_value.args[0] if initial_value.args else kwargs['shape']
        dtype = initial_value.keywords.get('dtype', tf.float32)
        kwargs['initial_value'] = functools.partial(tf.zeros, shape, dtype)
      elif hasattr(initial_value.func, 'get_config'):
        initializer: Any = initial_value.func
        config = initializer.get_config()
        if 'seed' in config:
          # Seeds follow the variable's place, not its name, since Keras's names
          # count all layers that the process ever built. Only random variables
          # count, since in eager mode Keras adds counters of its own.
          config['seed'] = (seed * 1_000_003 + num_seeded) % (2**31 - 1)
          kwargs['initial_value'] = functools.partial(
            type(initializer).from_config(config),
            *initial_value.args,
            **initial_value.keywords,
          )
          num_seeded += 1
    created.append(next_creator(**kwargs))
    return created[-1]

  return create


@contextlib.contextmanager
def policy(compute_dtype: str) -> Iterator[None]:
  """Enters a context in which Keras's layers compute in `compute_dtype`."""
  if compute_dtype == 'float32':
    # The policy that the caller has set stays.
    yield
    return
  before = tf.keras.mixed_precision.global_policy()
  tf.keras.mixed_precision.set_global_policy(f'mixed_{compute_dtype}')
  try:
    yield
  finally:
    tf.keras.mixed_precision.set_global_policy(before)
