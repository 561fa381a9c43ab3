"""Algorithms made of a test's own functions."""

import dataclasses

import tensorflow as tf

from tff_fssl.interface import base
from tff_fssl.interface import round_hparams


def ones(networks):
  """A gradient of 1 for each weight of the model."""
  return [tf.ones_like(v) for v in networks.model.trainable_variables]


def zeros(networks):
  """A gradient that changes nothing."""
  return [tf.zeros_like(v) for v in networks.model.trainable_variables]


def stream(kind='weak', labeled=False):
  """A stream with one view, which has the name of its kind."""
  return base.Stream({kind: kind}, labeled=labeled)


def algorithm(scenario='labels_at_clients', **methods):
  """An algorithm with these functions for methods, without `self`."""

  def method(function):
    return lambda self, *args: function(*args)

  own = {name: method(function) for name, function in methods.items()}
  cls = dataclasses.dataclass(frozen=True)(
    type('Handmade', (base.Algorithm,), {'name': 'handmade', **own})
  )
  return cls(round=round_hparams.RoundHparams(scenario=scenario))
