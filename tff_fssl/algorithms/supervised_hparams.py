"""Hyper-parameters of `supervised`. TensorFlow-free."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SupervisedHparams:
  """`supervised` has no hyper-parameters of its own."""
