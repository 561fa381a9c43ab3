"""Local training of one client of the tiny task, for every algorithm."""

import collections
import functools

import tensorflow as tf
import tiny_task

from tff_fssl.algorithms import registry
from tff_fssl.client import training
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.models import adapter
from tff_fssl.rounds import states as states_lib


def train(
  name: str,
  scenario: str,
  element: collections.OrderedDict,
  config: training.LoopConfig,
  *,
  norm: str = 'none',
  learning_rate: float = 0.1,
  seed: tuple[int, int] = (3, 1),
  **own,
) -> tuple[base.Algorithm, training.LocalResult]:
  """Trains a client in round 1, with what a server would have sent it.

  Args:
    name: The algorithm's.
    scenario: Where the labels are.
    element: The client's data.
    config: The configuration of the loop.
    norm: 'bn': with moving averages; 'none'.
    learning_rate: Of the client.
    seed: Of the client.
    **own: Values of the algorithm's hyper-parameters beside `tiny_hparams`.

  Returns:
    The algorithm and the result.
  """
  entry = registry.REGISTRY[name]
  algorithm = entry.configure(
    entry.hparams(**{**entry.tiny_hparams, **own}),
    round_hparams_lib.RoundHparams(scenario=scenario),
  )
  network = adapter.Network(
    tiny_task.network_fn(name, norm),
    seed=5,
    track_moving_averages=norm == 'bn',
  )
  auxiliary, initial = {}, {}
  for name, declared in algorithm.networks().items():
    other = declared.build and functools.partial(declared.build, network)
    auxiliary[name] = adapter.Network(
      other or functools.partial(tiny_task.model_fn, norm),
      seed=5,
      track_moving_averages=norm == 'bn' and not other,
    )
    if other:
      initial[name] = auxiliary[name].initial_weights
  setup = base.Setup(
    1,
    network.weight_specs,
    {name: auxiliary[name].weight_specs for name in initial},
    num_classes=tiny_task.NUM_CLASSES,
    num_outputs=network.num_outputs,
    feature_size=lambda: network.feature_size,
  )
  states = states_lib.States(algorithm, setup)
  received = dict(states.start(network.initial_weights()).control)
  # Networks that were not sent have the model's weights.
  received |= {
    name: network.initial_weights() for name in auxiliary if name not in initial
  }
  if build := algorithm.exchange():
    exchange = build(setup)
    sent = exchange.message(exchange.initialize(), None, tf.constant(1))
    received |= exchange.receive(sent, tf.constant(0))
  labeled, unlabeled = (
    base.Examples(*map(tf.constant, element[kind].values()))
    for kind in ('labeled', 'unlabeled')
  )
  result = training.LocalTraining(
    network, algorithm, tiny_task.VIEWS, config, auxiliary, initial
  ).run(
    network.initial_weights(),
    labeled,
    unlabeled,
    learning_rate=tf.constant(learning_rate),
    seed=tf.constant(seed),
    received=received,
  )
  return algorithm, result
