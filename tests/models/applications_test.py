"""Every network of `keras.applications`: built, and one step of training."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

from tff_fssl.algorithms import supervised
from tff_fssl.client import optimizer
from tff_fssl.client import training
from tff_fssl.data import augment
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.models import adapter

_NAMES = sorted(
  name
  for name, value in vars(tf.keras.applications).items()
  if inspect.isfunction(value)
)
# The least that Keras allows; 32 for the others.
_SIDES = {'InceptionResNetV2': 75, 'InceptionV3': 75, 'Xception': 71}
# On two images, whose last maps are 1 x 1, batch norm makes the gradients of
# these as large as 1e18 and more, also in Keras's own training; their norm may
# overflow.
_NEED_EIGHT_IMAGES = (
  'EfficientNetB6',
  'EfficientNetB7',
  'EfficientNetV2L',
  'EfficientNetV2M',
  'EfficientNetV2S',
)
_CLASSES = 10


def _pixels(x, seed=None):
  del seed
  return tf.cast(x, tf.float32) / 127.5 - 1.0


def _rows(repository):
  """The rows of the table in docs/models.md, by network."""
  page = repository / 'docs' / 'models.md'
  rows = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in page.read_text(encoding='utf-8').splitlines()
    if line.startswith('| `')
  ]
  return {row[0].strip('`'): row[1:] for row in rows}


def test_the_table_has_every_network(repository):
  assert list(_rows(repository)) == _NAMES


@pytest.mark.slow
@pytest.mark.parametrize('name', _NAMES)
def test_one_step(name, repository):
  row = _rows(repository)[name]
  side = _SIDES.get(name, 32)
  shape = (side, side, 3)
  rng = np.random.default_rng(0)
  size = 8 if name in _NEED_EIGHT_IMAGES else 2
  x = rng.integers(0, 256, [size, *shape]).astype(np.uint8)
  y = np.arange(size).astype(np.int32)
  with tf.Graph().as_default():
    network = adapter.Network(
      lambda: getattr(tf.keras.applications, name)(
        input_shape=shape,
        weights=None,
        classes=_CLASSES,
        classifier_activation=None,
      ),
      seed=0,
      num_classes=_CLASSES,
      image_shape=shape,
    )
    local = training.LocalTraining(
      network,
      supervised.Supervised(
        round=round_hparams.RoundHparams(scenario='labels_at_clients')
      ),
      augment.Views(_pixels, _pixels, _pixels),
      training.LoopConfig(1, size, size, optimizer.Sgd(max_gradient_norm=1.0)),
    )

    @tf.function
    def run():
      result = local.run(
        network.initial_weights(),
        base.Examples(tf.constant(x), tf.constant(y)),
        base.Examples(tf.constant(x[:0]), tf.constant(y[:0])),
        learning_rate=tf.constant(0.01),
        seed=tf.constant([1, 2]),
      )
      norm = tf.linalg.global_norm(result.update)
      return result.is_finite, norm, result.metrics['loss_labeled']

    result = run()
    config = tf.compat.v1.ConfigProto()
    # For one step, it would take longer than it saves.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.compat.v1.Session(config=config) as session:
      session.run([v.value.initializer for v in network.model.variables])
      is_finite, norm, loss = session.run(result)
  assert is_finite
  # Gradients were clipped to 1.
  assert 0.0 < norm <= 0.01001
  assert 0.0 < loss[0] < 100.0 * loss[1]
  num_weights = sum(int(np.prod(v.shape)) for v in network.model.variables)
  assert row[0] == f'{num_weights:,}'
  assert row[1] == str(side)
  assert ('dropout' in row[2]) == network.is_random
  assert ('batch norm' in row[2]) == bool(network.batch_norm_layers)
