"""`tff-fssl` with a data set, a network, an aggregator and more.

docs/extending.md explains it. The first four in one run:

  python examples/extend.py train --dataset=parity --model=one_layer --norm=gn \
    --aggregator=clipped --algorithm=fixmatch_confidence --num_labels=40 \
    --num_clients=20 --clients_per_round=5 --total_rounds=20
"""

import dataclasses
import sys
from typing import NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.data import sources
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf, tff
from tff_fssl.models import names as model_names
from tff_fssl.models.weights import Weights
from tff_fssl.program import cli
from tff_fssl.semisup import moving_average
from tff_fssl.semisup import pseudo_labels


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
    example_shape=info.example_shape,
  )


data_names.DATA_SETS['parity'] = data_names.DataSetInfo(
  name='parity',
  num_classes=2,
  example_shape=(8, 8, 1),
  num_train=1_437,
  num_test=360,
  flip=False,
  mean=(0.3058,),
  std=(0.3761,),
  loader=f'{__name__}:load_parity',
)


def build_one_layer(images, num_classes, norm):
  """A hidden layer of 64; `norm` is 'bn', 'gn' or 'none'."""
  x = tf.keras.layers.Flatten(name='flatten')(images)
  x = tf.keras.layers.Dense(64, name='hidden')(x)
  if norm == 'bn':
    x = tf.keras.layers.BatchNormalization(name='norm')(x)
  elif norm == 'gn':
    x = tf.keras.layers.GroupNormalization(8, name='norm')(x)
  x = tf.keras.layers.ReLU(name='relu')(x)
  return tf.keras.layers.Dense(num_classes, name='logits')(x)


model_names.MODELS['one_layer'] = model_names.ModelInfo(
  summary='a hidden layer of 64', builder=f'{__name__}:build_one_layer'
)


def build_clipped(hparams, **sizes):
  """The weighted mean of updates whose L2 norm is clipped to 1."""
  del hparams, sizes  # --aggregator's flags; the cohort's size and the like.
  return tff.aggregators.clipping_factory(1.0, tff.aggregators.MeanFactory())


aggregator_hparams.AGGREGATORS['clipped'] = aggregator_hparams.Aggregator(
  summary='the mean of updates clipped to norm 1',
  builder=f'{__name__}:build_clipped',
)


@dataclasses.dataclass(frozen=True)
class ConfidentFixMatch(fixmatch.FixMatch):
  """FixMatch that also reports its confidence."""

  name = 'fixmatch_confidence'
  metrics = (
    metrics_lib.client_metric(
      'confidence',
      'Largest probability of a weak view, mean over examples.',
      metrics_lib.SHARE,
      curve=metrics_lib.Curve('Confidence'),
      figure='sure',
    ),
  )

  def unlabeled_loss(self, networks, batch):
    """Adds the mean confidence in weak views to the metrics."""
    loss, metrics = super().unlabeled_loss(networks, batch)
    logits = batch.unlabeled.logits(networks.model, 'weak')
    confidence = tf.reduce_max(tf.nn.softmax(logits), -1)
    total = tf.reduce_sum(confidence * batch.unlabeled.weights)
    metrics['confidence'] = base.Mean(total, batch.unlabeled.size)
    return loss, metrics


registry.register(ConfidentFixMatch)


class Memory(NamedTuple):
  """What the server keeps: the moving average of its models."""

  teacher: Weights


@dataclasses.dataclass(frozen=True)
class MomentumTeacher(base.Algorithm):
  """FixMatch with pseudo-labels by a moving average of the models."""

  name = 'momentum_teacher'
  unlabeled_views = base.WEAK_AND_STRONG
  tiny = {'confidence_threshold': 0.35}

  decay: float = hparam(
    0.9, 'Decay of the moving average, a round.', minimum=0, maximum=1
  )
  confidence_threshold: float = hparam(
    0.95, 'Minimum probability of a pseudo-label.', minimum=0, maximum=1
  )

  def initial_state(self, weights, setup):
    """Starts the teacher as the model."""
    return base.ServerState(weights, Memory(weights))

  def broadcasts(self, state):
    """Sends the teacher, and keeps its batch norm statistics up to date."""
    return {'teacher': base.Broadcast(own_statistics=True)}

  def networks(self):
    """Gives each client a network that starts as the teacher."""
    return {'teacher': base.AuxiliaryNetwork()}

  def unlabeled_loss(self, networks, batch):
    """Learns on strong views what the teacher predicts for weak ones."""
    examples = batch.unlabeled
    probs = tf.nn.softmax(examples.logits(networks['teacher'], 'weak'))
    logits = examples.logits(networks.model, 'strong')
    return pseudo_labels.loss(
      probs,
      logits,
      examples.labels,
      examples.weights,
      self.confidence_threshold,
    )

  def update(self, state, aggregate, server):
    """Updates the model as FedAvg does; then the teacher follows it."""
    state = super().update(state, aggregate, server)
    teacher = moving_average.follow(
      state.memory.teacher,
      state.weights,
      self.decay,
      started=server.round_num >= 1,
    )
    return state.remember(teacher=teacher)

  def other_predictions(self):
    """Evaluates the teacher as well: `test/teacher/accuracy`."""
    return {'teacher': lambda state: state.memory.teacher}


registry.register(MomentumTeacher)


if __name__ == '__main__':
  sys.exit(cli.main())
