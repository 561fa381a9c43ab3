"""The networks of a process, on models made for each property."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.algorithms import supervised
from tff_fssl.hparams import UsageError
from tff_fssl.interface import round_hparams
from tff_fssl.models import model_fns
from tff_fssl.rounds import network_factory

_LAYERS = tf.keras.layers


def _factory(model_fn=tiny_task.model_fn, num_classes=3, seed=5, **settings):
  return network_factory.NetworkFactory(
    model_fn,
    round_hparams.RoundHparams(
      scenario=round_hparams.LABELS_AT_CLIENTS, **settings
    ),
    image_shape=tiny_task.IMAGE_SHAPE,
    num_classes=num_classes,
    seed=seed,
  )


def test_properties_of_static_batch_norm():
  factory = _factory()
  assert (factory.num_classes, factory.num_outputs) == (3, 3)
  # Kernel, scale, offset, and the last layer's two.
  assert factory.num_trainable == len(factory.weight_specs.trainable) == 5
  assert factory.has_batch_norm and factory.is_static
  assert not factory.tracks_moving_averages
  # Of mean and variance, only the variance cannot be negative.
  assert list(factory.variances) == [1]


def test_moving_averages_are_not_gathered():
  factory = _factory(batch_norm_statistics='moving_average')
  assert factory.tracks_moving_averages and not factory.is_static


def test_a_model_without_batch_norm():
  factory = _factory(functools.partial(tiny_task.model_fn, 'none'))
  assert not (factory.has_batch_norm or factory.is_static)


def test_the_head_is_the_last_layer():
  head = _factory().head
  assert {i: tuple(spec.shape) for i, spec in head.items()} == {
    3: (4, 3),
    4: (3,),
  }


def test_initial_weights_are_those_of_the_seed():
  def kernel(seed):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      weights = _factory(seed=seed).make_initial().initial_weights()
      session.run(tf.compat.v1.global_variables_initializer())
      return session.run(weights.trainable[0])

  np.testing.assert_array_equal(kernel(5), kernel(5))
  assert np.any(kernel(5) != kernel(6))


def test_without_classifier_the_outputs_are_embeddings():
  @dataclasses.dataclass(frozen=True)
  class Embeds(supervised.Supervised):
    embeds = True

  without = network_factory.network_fn(tiny_task.model_fn, Embeds())
  assert isinstance(without, model_fns.EmbeddingFn)
  factory = _factory(without)
  assert (factory.num_classes, factory.num_outputs) == (3, 4)
  plain = network_factory.network_fn(
    tiny_task.model_fn, supervised.Supervised()
  )
  assert plain is tiny_task.model_fn


@pytest.mark.parametrize('num_classes', [2, 4])
def test_another_number_of_classes_is_refused(num_classes):
  with pytest.raises(UsageError, match=f'3.*{num_classes}|{num_classes}.*3'):
    _factory(num_classes=num_classes)


def test_a_network_of_another_kind_starts_anew_each_time():
  def build(local):
    del local
    return tf.keras.Sequential(
      [tf.keras.Input([4]), _LAYERS.Dense(2, use_bias=False)]
    )

  factory = _factory()
  (spec,) = factory.specs_of(build).trainable
  assert tuple(spec.shape) == (4, 2)
  network, initial = factory.make_other(build, factory.make())
  (variable,) = network.trainable_variables
  first = variable.numpy()
  variable.assign(tf.zeros_like(variable))
  np.testing.assert_array_equal(initial().trainable[0], first)
