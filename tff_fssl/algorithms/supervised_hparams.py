"""Hyper-parameters of `supervised`. TensorFlow-free."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SupervisedHparams:
  """None of its own."""
