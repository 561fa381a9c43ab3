"""The server's memory: frequencies of classes, and the two projections."""

from __future__ import annotations

from typing import NamedTuple

from tff_fssl import seeds
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models.weights import all_finite
from tff_fssl.semisup import frequencies

PRIOR, COUNTS, CLASSIFIER = 'prior', 'counts', 'classifier'
FEATURES, PROXIES = 'features', 'proxies'
# The trainable weights of each projection, in Keras's order.
WEIGHTS = {
  FEATURES: ('features_kernel', 'features_bias'),
  PROXIES: ('proxies_kernel',),
}


class Memory(NamedTuple):
  """The memory, all of which clients receive.

  Attributes:
    prior: float32 [C], the frequencies of classes, of sum 1.
    features_kernel: float32 [D, D], of the projection of features.
    features_bias: float32 [D].
    proxies_kernel: float32 [D, D], of the projection of proxies.
  """

  prior: tf.Tensor
  features_kernel: tf.Tensor
  features_bias: tf.Tensor
  proxies_kernel: tf.Tensor


def specs(setup: base.Setup) -> dict[str, tf.TensorSpec]:
  """Returns the specs of the projections' weights."""
  size = setup.feature_size()
  return {
    'features_kernel': tf.TensorSpec([size, size]),
    'features_bias': tf.TensorSpec([size]),
    'proxies_kernel': tf.TensorSpec([size, size]),
  }


def initial(setup: base.Setup) -> Memory:
  """Makes the first memory: equal frequencies, PyTorch's initial weights."""
  seed = seeds.fold_in(seeds.server_seed(setup.seed, 0), seeds.MEMORY)
  limit = setup.feature_size() ** -0.5
  weights = {
    name: tf.random.stateless_uniform(
      spec.shape, seeds.fold_in(seed, i), -limit, limit
    )
    for i, (name, spec) in enumerate(specs(setup).items())
  }
  num_classes = setup.num_classes
  return Memory(tf.fill([num_classes], 1.0 / num_classes), **weights)


def follow(memory: Memory, means: base.Tensors, decay: float) -> Memory:
  """Moves the memory by what clients sent, unless that is not finite.

  Args:
    memory: The memory before the round.
    means: Means over clients of their counts of classes, and of the changes of
      the projections' weights.
    decay: The share of the old frequencies in the new ones.

  Returns:
    The memory after the round.
  """
  old = memory._asdict()
  new = {name: old[name] - means[name] for name in old if name != PRIOR}
  new[PRIOR] = frequencies.follow(memory.prior, means[COUNTS], decay)
  usable = all_finite([*means.values(), *new.values()])
  return Memory(**{n: tf.where(usable, new[n], old[n]) for n in old})
