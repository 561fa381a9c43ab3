"""What Keras's variables and layers are made with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
from typing import Any

from tff_fssl.lazy import tf


def seeded_creator(
  seed: int | None, created: list[tf.Variable]
) -> Callable[..., tf.Variable]:
  """A variable creator: initial values from `seed`, or cheap zeros if None.

  Args:
    seed: The seed.
    created: To which it adds what it creates.

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
        # About to be overwritten by the weights that the round broadcast.
        shape = initial_value.args[0] if initial_value.args else kwargs['shape']
        dtype = initial_value.keywords.get('dtype', tf.float32)
        kwargs['initial_value'] = functools.partial(tf.zeros, shape, dtype)
      elif hasattr(initial_value.func, 'get_config'):
        initializer: Any = initial_value.func
        config = initializer.get_config()
        if 'seed' in config:
          # A function of the place, not of the name: names that Keras makes up
          # count all layers that the process ever built. Only random ones
          # count: in eager mode Keras adds counters of its own.
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
  """In here, layers are made under Keras's policy for `compute_dtype`."""
  if compute_dtype == 'float32':
    yield  # Whatever policy the caller has set.
    return
  before = tf.keras.mixed_precision.global_policy()
  tf.keras.mixed_precision.set_global_policy(f'mixed_{compute_dtype}')
  try:
    yield
  finally:
    tf.keras.mixed_precision.set_global_policy(before)
