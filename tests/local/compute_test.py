"""What algorithms compute for each example, on networks counted by hand."""

import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.algorithms import adapter as adapter_lib
from tff_fssl.algorithms import fixmatch
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import compute
from tff_fssl.local import inference
from tff_fssl.local import objective
from tff_fssl.models import adapter
from tff_fssl.models import flops
from tff_fssl.rounds.round_hparams import RoundHparams

Flops = flops.Flops
_LAYERS = tf.keras.layers
_STORED = tf.TensorSpec([None, *tiny_task.IMAGE_SHAPE], tf.uint8)
# `tiny_task.model_fn`: 4 x 4 outputs of a 3 x 3 kernel, 1 to 4 channels; 4 to 3
# units. The first layer needs no gradient of its input.
_FIRST, _SECOND = 2 * 16 * 9 * 4, 2 * 4 * 3
_FORWARD, _BACKWARD = _FIRST + _SECOND, _FIRST + 2 * _SECOND
_FIXMATCH = adapter_lib.to_parts(
  fixmatch.FixMatch(confidence_threshold=0.5)
).local
_WITH_LABELS = adapter_lib.to_parts(
  fixmatch.FixMatch(
    confidence_threshold=0.5, round=RoundHparams(scenario='labels_at_clients')
  )
).local


def _measure(algorithm, model_fn=tiny_task.model_fn, **options):
  with tf.Graph().as_default():
    network = adapter.Network(model_fn, image_shape=tiny_task.IMAGE_SHAPE)
    return compute.of_algorithm(
      network,
      algorithm,
      tiny_task.VIEWS,
      passes=compute.of_network(network, tiny_task.IMAGE_SHAPE),
      stored=_STORED,
      **options,
    )


def _exactly(number):
  return Flops(number, number)


def _dense_fn():
  return tf.keras.Sequential(
    [
      tf.keras.Input(tiny_task.IMAGE_SHAPE),
      _LAYERS.Flatten(),
      _LAYERS.Dense(7),
      _LAYERS.Dropout(0.5),
      _LAYERS.Dense(3),
    ]
  )


@pytest.mark.parametrize(
  'model_fn, first, second',
  [
    (tiny_task.model_fn, _FIRST, _SECOND),
    (_dense_fn, 2 * 36 * 7, 2 * 7 * 3),
  ],
)
def test_networks_counted_by_hand(model_fn, first, second):
  cost = _measure(objective.SUPERVISED, model_fn)
  assert cost.forward == first + second
  assert cost.backward == first + 2 * second
  assert cost.labeled == _exactly(cost.forward + cost.backward)
  assert cost.unlabeled == cost.once == _exactly(0)
  assert cost.passes(2, 3) == 2 * cost.forward + 3 * cost.backward


def test_labelled_and_unlabelled_examples_are_told_apart():
  cost = _measure(_WITH_LABELS)
  assert cost.unlabeled == _exactly(cost.passes(2, 1))
  assert cost.labeled == _exactly(cost.passes(1, 1))
  assert _measure(_FIXMATCH).unlabeled == cost.unlabeled


def test_branches_of_a_step():
  def step(networks, batch):
    (learn,) = objective.SUPERVISED.steps
    result = learn(networks, batch)
    images = batch.parts[objective.LABELED].views['weak']
    more = tf.cond(
      batch.clock.step > 3,
      lambda: tf.reduce_sum(networks.local.logits(images, training=True)),
      lambda: 0.0,
    )
    ratios = {**result.ratios, 'more': algorithm_lib.ratio(more, 1.0)}
    return result._replace(ratios=ratios)

  cost = _measure(objective.SUPERVISED._replace(steps=(step,)))
  least = _FORWARD + _BACKWARD
  assert cost.labeled == Flops(least, least + _FORWARD)


def test_what_is_computed_once_a_round():
  """`prepare` in batches; its results reach the steps; so does `received`."""

  def prepare(networks, data, views):
    logits = inference.weak_logits(
      networks.local, data.weights, data.unlabeled.x, views, data.seed, 5
    )
    return algorithm_lib.Prepared(
      tf.range(tf.shape(logits)[0]),
      of_example={'logits': logits * data.received['scale']},
      constants={'scale': data.received['scale']},
    )

  def finish(networks, data, views, ratios):
    logits = inference.weak_logits(
      networks.peers['other'],
      data.weights,
      data.unlabeled.x,
      views,
      data.seed,
      5,
    )
    total, _ = ratios['loss']
    return algorithm_lib.Finished({'sum': tf.reduce_sum(logits) + total})

  def step(networks, batch):
    part = batch.parts[objective.UNLABELED]
    with tf.GradientTape() as tape:
      logits = networks.local.logits(part.views['weak'], training=True)
      aims = part.of_example['logits'] * batch.constants['scale']
      loss = tf.reduce_sum(tf.square(logits - aims))
    ratios = {'loss': algorithm_lib.ratio(loss, 1.0)}
    return algorithm_lib.StepResult(
      networks.local.gradients(tape, loss), ratios
    )

  algorithm = algorithm_lib.LocalAlgorithm(
    steps=(step, step),
    streams={objective.UNLABELED: algorithm_lib.Stream({'weak': 'weak'})},
    prepare=prepare,
    finish=finish,
    peers={'other': algorithm_lib.Peer()},
    signals={'sum': algorithm_lib.Signal(0.0, 1.0)},
  )
  cost = _measure(algorithm, received={'scale': tf.TensorSpec([])})
  assert cost.once == _exactly(2 * _FORWARD)
  assert cost.unlabeled == _exactly(cost.passes(2, 2))


def test_recurrent_networks_are_not_measured():
  def model_fn():
    return tf.keras.Sequential(
      [
        tf.keras.Input(tiny_task.IMAGE_SHAPE),
        _LAYERS.Reshape([6, 6]),
        _LAYERS.SimpleRNN(4),
        _LAYERS.Dense(3),
      ]
    )

  with pytest.raises(flops.UnknownFlopsError, match='while'):
    _measure(objective.SUPERVISED, model_fn)
