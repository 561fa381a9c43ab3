"""`tff-fssl` with a data set, a network, an aggregator and a metric more.

docs/extending.md explains it. All four in one run:

  python examples/extend.py train --dataset=parity --model=mlp --norm=gn \
    --aggregator=clipped --algorithm=fixmatch_confidence --num_labels=40 \
    --num_clients=20 --clients_per_round=5 --total_rounds=20
"""

import dataclasses
import sys

from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.data import sources
from tff_fssl.models import names as model_names
from tff_fssl.program.commands import cli


def load_parity(info, data_dir):
  """scikit-learn's digits; class 1 are the odd ones."""
  del data_dir  # The folder of --data_dir, or None: nothing is read from it.
  digits = sources.load('digits')
  train, test = (
    sources.Examples(x=part.x, y=part.y % 2)
    for part in (digits.train, digits.test)
  )
  return sources.DataSet(
    name=info.name,
    train=train,
    test=test,
    num_classes=info.num_classes,
    class_names=('even', 'odd'),
    image_shape=info.image_shape,
  )


data_names.DATA_SETS['parity'] = data_names.DataSetInfo(
  name='parity',
  num_classes=2,
  image_shape=(8, 8, 1),
  num_train=1_437,
  num_test=360,
  flip=False,
  mean=(0.3058,),
  std=(0.3761,),
  loader=f'{__name__}:load_parity',
)


def build_mlp(images, num_classes, norm):
  """A hidden layer of 64; `norm` is 'bn', 'gn' or 'none'."""
  import tensorflow as tf

  x = tf.keras.layers.Flatten(name='flatten')(images)
  x = tf.keras.layers.Dense(64, name='hidden')(x)
  if norm == 'bn':
    x = tf.keras.layers.BatchNormalization(name='norm')(x)
  elif norm == 'gn':
    x = tf.keras.layers.GroupNormalization(8, name='norm')(x)
  x = tf.keras.layers.ReLU(name='relu')(x)
  return tf.keras.layers.Dense(num_classes, name='logits')(x)


model_names.MODELS['mlp'] = model_names.ModelInfo(
  summary='a hidden layer of 64', builder=f'{__name__}:build_mlp'
)


def build_clipped(hparams, **sizes):
  """The weighted mean of updates whose L2 norm is clipped to 1."""
  import tensorflow_federated as tff

  del hparams, sizes  # --aggregator's flags; the cohort's size and the like.
  return tff.aggregators.clipping_factory(1.0, tff.aggregators.MeanFactory())


aggregator_hparams.AGGREGATORS['clipped'] = aggregator_hparams.Aggregator(
  summary='the mean of updates clipped to norm 1',
  builder=f'{__name__}:build_clipped',
)


def build_fixmatch_confidence(hparams, round_hparams):
  """FixMatch, with the mean confidence in weak views as a further metric."""
  import tensorflow as tf

  from tff_fssl.algorithms import fixmatch
  from tff_fssl.local import algorithm

  plain = fixmatch.build_local_algorithm(hparams, round_hparams)

  def step(networks, batch):
    images = batch.parts['unlabeled'].views['weak']
    logits = networks.local.logits(images, training=True)
    confidence = tf.reduce_max(tf.nn.softmax(logits), -1)
    metric = algorithm.ratio(tf.reduce_sum(confidence), tf.size(confidence))
    result = plain.steps[0](networks, batch)
    return result._replace(ratios={**result.ratios, 'confidence': metric})

  return plain._replace(
    steps=(step,), step_ratios=(*plain.step_ratios, 'confidence')
  )


registry.REGISTRY['fixmatch_confidence'] = dataclasses.replace(
  registry.REGISTRY['fixmatch'],
  name='fixmatch_confidence',
  summary='FixMatch that also reports its confidence.',
  local_algorithm=f'{__name__}:build_fixmatch_confidence',
)


if __name__ == '__main__':
  sys.exit(cli.main())
