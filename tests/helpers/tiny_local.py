"""Local training of one client of the tiny task, for every algorithm."""

import collections
import functools

import tensorflow as tf
import tiny_task

from tff_fssl.algorithms import registry
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import training
from tff_fssl.models import adapter
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import round_hparams as round_hparams_lib


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
) -> tuple[algorithm_lib.LocalAlgorithm, training.LocalResult]:
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
  parts = entry.build_parts(
    entry.hparams(**{**entry.tiny_hparams, **own}),
    round_hparams_lib.RoundHparams(scenario=scenario),
  )
  # Nobody knows the client yet, so that it starts from the model.
  algorithm = parts.local._replace(start=None)
  network = adapter.Network(
    tiny_task.network_fn(name, norm),
    seed=5,
    track_moving_averages=norm == 'bn',
  )
  peers, initial = {}, {}
  for peer, how in algorithm.peers.items():
    other = how.model_fn and functools.partial(how.model_fn, network)
    peers[peer] = adapter.Network(
      other or functools.partial(tiny_task.model_fn, norm),
      seed=5,
      track_moving_averages=norm == 'bn' and not other,
    )
    if other:
      initial[peer] = peers[peer].initial_weights
  received = {}
  if algorithm.peers:
    received |= parts.server.start(network.initial_weights()).control
  if parts.exchange is not None:
    exchange = parts.exchange(
      exchange_lib.Population(
        1,
        network.weight_specs,
        num_classes=tiny_task.NUM_CLASSES,
        num_outputs=network.num_outputs,
      )
    )
    sent = exchange.message(exchange.initialize(), None, tf.constant(1))
    received |= exchange.receive(sent, tf.constant(0))
  labeled, unlabeled = (
    algorithm_lib.Examples(*map(tf.constant, element[kind].values()))
    for kind in ('labeled', 'unlabeled')
  )
  result = training.LocalTraining(
    network, algorithm, tiny_task.VIEWS, config, peers, initial
  ).run(
    network.initial_weights(),
    labeled,
    unlabeled,
    learning_rate=tf.constant(learning_rate),
    seed=tf.constant(seed),
    received=received,
  )
  return algorithm, result
