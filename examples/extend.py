"""`tff-fssl` with a data set, a network, an aggregator and more.

docs/extending.md explains it. The first four in one run:

  python examples/extend.py train --dataset=parity --model=one_layer --norm=gn \
    --aggregator=clipped --algorithm=fixmatch_confidence --num_labels=40 \
    --num_clients=20 --clients_per_round=5 --total_rounds=20
"""

import dataclasses
import sys

from tff_fssl import metrics
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.data import sources
from tff_fssl.hparams import hparam
from tff_fssl.hparams import validate
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
  import tensorflow as tf

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
  metrics=(
    metrics.of_clients(
      'confidence',
      'Largest probability of a weak view, mean over examples.',
      metrics.SHARE,
      curve=metrics.Curve('Confidence'),
      figure='sure',
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class TeacherHparams:
  """Hyper-parameters of `momentum_teacher`."""

  decay: float = hparam(
    0.9, 'Decay of the moving average, a round.', minimum=0, maximum=1
  )
  confidence_threshold: float = hparam(
    0.95, 'A pseudo-label is used if it is as probable.', minimum=0, maximum=1
  )

  def __post_init__(self):
    validate(self, 'momentum_teacher.')


def build_teacher_clients(hparams, round_hparams):
  """FixMatch, with pseudo-labels by the teacher that the server sent."""
  import tensorflow as tf

  from tff_fssl.local import algorithm
  from tff_fssl.local import objective
  from tff_fssl.semisup import diagnostics
  from tff_fssl.semisup import losses
  from tff_fssl.semisup import thresholds

  def step(networks, batch):
    network, teacher = networks.local, networks.peers['teacher']
    part = batch.parts['unlabeled']
    probs = tf.nn.softmax(teacher.logits(part.views['weak'], training=True))
    labels = thresholds.pseudo_labels(probs)
    mask = thresholds.fixed_mask(probs, hparams.confidence_threshold)
    kept = tf.cast(mask, tf.float32) * part.weights
    with tf.GradientTape() as tape:
      logits = network.logits(part.views['strong'], training=True)
      entropies = losses.cross_entropy(labels, logits)
      loss = losses.masked_mean(kept * entropies, part.weights)
    ratios = diagnostics.pseudo_label_ratios(labels, part.labels, kept)
    return algorithm.StepResult(network.gradients(tape, loss), ratios)

  views = {'weak': 'weak', 'strong': 'strong'}
  local = algorithm.LocalAlgorithm(
    steps=(step,),
    step_ratios=diagnostics.names(diagnostics.PSEUDO_LABEL),
    streams={'unlabeled': algorithm.Stream(views)},
    peers={'teacher': algorithm.Peer(starts_from='teacher')},
  )
  if not round_hparams.labels_at_clients:
    return local
  return objective.plus(local, objective.supervised())


def build_teacher_server(hparams, round_hparams):
  """FedAvg's server, which keeps a moving average of its models."""
  from tff_fssl.finalizers import server_algorithm
  from tff_fssl.models import server_model
  from tff_fssl.semisup import moving_average

  del round_hparams

  def start(weights):
    return server_model.ServerModel(*weights).with_sets(teacher=weights)

  def update(model, aggregated, tools):
    weights = tools.train(tools.apply(model.weights, aggregated.update))
    teacher = model.sets['teacher']
    average = moving_average.moving_average(
      teacher.trainable, weights.trainable, hparams.decay
    )
    teacher = teacher._replace(trainable=tuple(average))
    return model.with_weights(weights).with_sets(teacher=teacher)

  return server_algorithm.ServerAlgorithm(
    start, update, statistics_of=('teacher',)
  )


def build_teacher_prediction(hparams, round_hparams):
  """The model predicts, and the teacher is evaluated as well."""
  from tff_fssl.models import server_model

  del hparams, round_hparams
  return server_model.Prediction(
    also={'teacher': server_model.of_set('teacher')}
  )


registry.REGISTRY['momentum_teacher'] = registry.Algorithm(
  'momentum_teacher',
  'FixMatch with pseudo-labels by a moving average of the models.',
  TeacherHparams,
  local_algorithm=f'{__name__}:build_teacher_clients',
  other_parts={
    'server': f'{__name__}:build_teacher_server',
    'prediction': f'{__name__}:build_teacher_prediction',
  },
  capabilities=registry.Capabilities(weight_sets_down=2),
  tiny_hparams={'confidence_threshold': 0.35},
)


if __name__ == '__main__':
  sys.exit(cli.main())
