"""What algorithms compute for each example, on networks counted by hand."""

import handmade
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import supervised
from tff_fssl.client import compute
from tff_fssl.interface import base
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.models import adapter
from tff_fssl.models import flops
from tff_fssl.models import inference

Flops = flops.Flops
_LAYERS = tf.keras.layers
_STORED = tf.TensorSpec([None, *tiny_task.IMAGE_SHAPE], tf.uint8)
# `tiny_task.model_fn`: 4 x 4 outputs of a 3 x 3 kernel, 1 to 4 channels; 4 to 3
# units. The first layer needs no gradient of its input.
_FIRST, _SECOND = 2 * 16 * 9 * 4, 2 * 4 * 3
_FORWARD, _BACKWARD = _FIRST + _SECOND, _FIRST + 2 * _SECOND
_FIXMATCH = fixmatch.FixMatch(confidence_threshold=0.5)
_SUPERVISED = supervised.Supervised(
  round=RoundHparams(scenario='labels_at_clients')
)
_WITH_LABELS = fixmatch.FixMatch(
  confidence_threshold=0.5, round=RoundHparams(scenario='labels_at_clients')
)


def _measure(algorithm, model_fn=tiny_task.model_fn, **options):
  with tf.Graph().as_default():
    network = adapter.Network(model_fn, image_shape=tiny_task.IMAGE_SHAPE)
    return compute.measure_algorithm(
      network,
      algorithm,
      tiny_task.VIEWS,
      passes=compute.measure_network(network, tiny_task.IMAGE_SHAPE),
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
  cost = _measure(_SUPERVISED, model_fn)
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
    result = _SUPERVISED.step(networks, batch)
    images = batch.labeled.views['weak']
    more = tf.cond(
      batch.time.step > 3,
      lambda: tf.reduce_sum(networks.model.logits(images, training=True)),
      lambda: 0.0,
    )
    metrics = {**result.metrics, 'more': base.Mean.ratio(more, 1.0)}
    return result._replace(metrics=metrics)

  cost = _measure(handmade.algorithm(step=step))
  least = _FORWARD + _BACKWARD
  assert cost.labeled == Flops(least, least + _FORWARD)


def test_what_is_computed_once_a_round():
  """`prepare` in batches; its results reach the steps; so does `received`."""

  def predict(network, client):
    return inference.weak_logits(
      network, client.unlabeled.x, client.views, client.seed, 5
    )

  def prepare(client):
    scale = client.received['scale']
    return base.Prepared(
      per_example={'logits': predict(client.networks.model, client) * scale},
      values={'scale': scale},
    )

  def finish(client, metrics):
    logits = predict(client.networks['other'], client)
    total, _ = metrics['loss']
    return base.ClientOutput({'sum': tf.reduce_sum(logits) + total})

  def step(networks, batch):
    part = batch.unlabeled
    with tf.GradientTape() as tape:
      logits = networks.model.logits(part.views['weak'], training=True)
      aims = part.per_example['logits'] * batch.values['scale']
      loss = tf.reduce_sum(tf.square(logits - aims))
    metrics = {'loss': base.Mean.ratio(loss, 1.0)}
    return base.StepResult(networks.model.gradients(tape, loss), metrics)

  algorithm = handmade.algorithm(
    step=step,
    streams=lambda: {base.UNLABELED: handmade.stream()},
    prepare=prepare,
    finish=finish,
    networks=lambda: {'other': base.AuxiliaryNetwork()},
    uploads=lambda setup: {'sum': base.Upload(0.0, 1.0)},
  )
  cost = _measure(algorithm, received={'scale': tf.TensorSpec([])})
  assert cost.once == _exactly(2 * _FORWARD)
  assert cost.unlabeled == _exactly(cost.passes(1, 1))


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
    _measure(_SUPERVISED, model_fn)
