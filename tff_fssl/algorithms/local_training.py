"""Local training: each client alone, without federation. Labels at clients.

The baselines Local-SL, Local-UDA and Local-FixMatch of Jeong, Yoon, Yang and
Hwang, "Federated Semi-Supervised Learning with Inter-Client Consistency &
Disjoint Learning" (FedMatch), ICLR 2021. Whatever a federated algorithm gains
over them, it gains from other clients. FedMatch's Local-SL has all labels:
that is `local_supervised` with `--full_labels`.

In a round, of each client of the cohort:
1.  It starts from its own model; in its first round, from the initial weights,
    which are the same for all.
2.  It trains as `supervised`, `uda` or `fixmatch` would, with all flags of
    local training; the proximal term (`--proximal_strength`) refers to the
    model that it starts from.
3.  With static batch norm it gathers the statistics of its own examples.
4.  It keeps its model. Nothing is sent, and nothing is averaged.

All clients' own models are evaluated on the same test (and validation)
examples: eval.csv has the mean, the standard deviation and the worst decile of
their accuracies, and the mean of their losses. A client that has not taken part
yet counts with the initial weights. There is no common model to export; the
checkpoint holds the clients' own, and `programs/evaluate.py` evaluates them.

Choices, since FedMatch says nothing about them: a cohort is drawn for each
round, as for the federated algorithms, so that budgets are equal; momentum
starts at 0 in each round; the threshold of UDA's training signal annealing
rises with the program's rounds, not with those of the client.

The simulation keeps the clients' models in a table at the server, which stands
for their own disks, hence 0 bytes of communication. It costs clients * weights
* 4 bytes, in memory (a few times) and in each checkpoint: 600 MB for 100
clients with a WRN-28-2. More than 1.5 GB are refused. An evaluation costs as
many passes over the test set as there are clients; see
`--rounds_per_evaluation`.
"""

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tff_fssl.algorithms import local_training_hparams
from tff_fssl.algorithms import supervised_hparams
from tff_fssl.finalizers import server_algorithm
from tff_fssl.hparams import UsageError
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models import adapter
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import round_hparams as round_hparams_lib

RoundHparams = round_hparams_lib.RoundHparams

# TensorFlow's messages, and so values between computations, end at 2 GB.
_MAX_BYTES = 1.5e9
# Names of what a client is sent and sends.
_WEIGHTS, _NUM_ROUNDS = 'own_weights', 'own_num_rounds'


def build_supervised(
  hparams: supervised_hparams.SupervisedHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part of `local_supervised`."""
  del hparams  # It has no choices.
  return _keeping(round_hparams, objective.supervised())


def build_uda(
  hparams: local_training_hparams.LocalUdaHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part of `local_uda`."""
  return _keeping(
    round_hparams,
    terms.uda(
      confidence_threshold=hparams.confidence_threshold,
      temperature=hparams.temperature,
      loss_weight=hparams.unlabeled_loss_weight,
    ),
    terms.annealed_supervised(
      schedule=hparams.tsa, num_rounds=hparams.tsa_rounds
    ),
  )


def build_fixmatch(
  hparams: local_training_hparams.LocalFixMatchHparams,
  round_hparams: RoundHparams,
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part of `local_fixmatch`."""
  return _keeping(
    round_hparams,
    terms.fixmatch(
      confidence_threshold=hparams.confidence_threshold,
      loss_weight=hparams.unlabeled_loss_weight,
    ),
    objective.supervised(),
  )


def _keeping(
  round_hparams: RoundHparams, *summed: objective.Term
) -> algorithm_lib.LocalAlgorithm:
  """Steps on the sum of terms, from the client's own model: steps 1 to 4."""
  kind = round_hparams.batch_norm_statistics

  def finish(networks, data, views, ratios):
    del ratios
    network = networks.local
    weights = adapter.Weights(
      tuple(v.read_value() for v in network.trainable_variables),
      tuple(v.read_value() for v in network.non_trainable_variables),
      data.weights.statistics_count,
    )
    if network.is_static:
      sums = statistics.gather(
        network,
        weights,
        tf.concat([data.labeled.x, data.unlabeled.x], axis=0),
        views,
        kind=kind,
        batch_size=round_hparams.statistics_batch_size,
      )
      weights = statistics.put(network, weights, sums, kind=kind)
    return algorithm_lib.Finished(row={_WEIGHTS: _values(weights)})

  return objective.minimize(*summed)._replace(start=_own, finish=finish)


def build_server(
  hparams: Any, round_hparams: RoundHparams
) -> server_algorithm.ServerAlgorithm:
  """The server's part: the common model stays the initial one."""
  del hparams, round_hparams
  return server_algorithm.ServerAlgorithm(
    update=lambda model, aggregated, tools: model
  )


def build_exchange(
  hparams: Any, round_hparams: RoundHparams
) -> exchange_lib.BuildExchange:
  """The table of the clients' models; zeros for those without one yet."""
  del hparams, round_hparams

  def build(population):
    num = population.num_clients
    size = sum(
      spec.shape.num_elements() for spec in _stored(population.weights)
    )
    if num * size * 4 > _MAX_BYTES:
      raise UsageError(
        f'--num_clients={num}: their own models of {size:,} weights are'
        f' {num * size * 4 / 1e9:.1f} GB; at most {_MAX_BYTES / 1e9} GB are'
        f' possible, {int(_MAX_BYTES / 4 / size)} clients; take fewer clients'
        ' or a smaller --model'
      )

    def accept(table, rows, model, round_num):
      del model, round_num
      index = rows.client_id[:, None]
      return collections.OrderedDict(
        own_weights=tf.tensor_scatter_nd_update(
          table[_WEIGHTS], index, rows.values[_WEIGHTS]
        ),
        own_num_rounds=tf.tensor_scatter_nd_add(
          table[_NUM_ROUNDS], index, tf.ones_like(rows.client_id)
        ),
      )

    return exchange_lib.Exchange(
      initialize=lambda: collections.OrderedDict(
        own_weights=tf.zeros([num, size]),
        own_num_rounds=tf.zeros([num], tf.int32),
      ),
      message=lambda table, model, round_num: table,
      # A false id gets some row; what its client sends is rejected.
      receive=lambda table, client_id: _row(
        table, tf.clip_by_value(client_id, 0, num - 1)
      ),
      row_specs={_WEIGHTS: tf.TensorSpec([size], tf.float32)},
      accept=accept,
      num_clients=num,
    )

  return build


def build_prediction(
  hparams: Any, round_hparams: RoundHparams
) -> server_model.Prediction:
  """Each client predicts by its own model."""
  del hparams, round_hparams
  return server_model.Prediction(
    member=lambda model, table, client_id: _own(
      model.weights, _row(table, client_id)
    )
  )


def build_alone(hparams: Any, round_hparams: RoundHparams) -> bool:
  """`assemble.Parts.alone`."""
  del hparams, round_hparams
  return True


def _stored(weights: adapter.Weights) -> list[Any]:
  """What a row holds: all of float32. Training changes nothing else."""
  return [t for t in tf.nest.flatten(weights) if t.dtype == tf.float32]


def _values(weights: adapter.Weights) -> tf.Tensor:
  """What a row holds of weights, one after another: float32 [D]."""
  return tf.concat([tf.reshape(t, [-1]) for t in _stored(weights)], axis=0)


def _row(
  table: Mapping[str, tf.Tensor], client_id: tf.Tensor
) -> dict[str, tf.Tensor]:
  """What the table holds of a client."""
  return {name: values[client_id] for name, values in table.items()}


def _own(
  weights: adapter.Weights, row: Mapping[str, tf.Tensor]
) -> adapter.Weights:
  """A client's own weights; `weights`, the common ones, if it has none yet."""
  is_new = tf.equal(row[_NUM_ROUNDS], 0)
  sizes = [tensor.shape.num_elements() for tensor in _stored(weights)]
  pieces = iter(tf.split(row[_WEIGHTS], sizes))

  def own(common):
    if common.dtype != tf.float32:
      return common
    return tf.where(is_new, common, tf.reshape(next(pieces), common.shape))

  return tf.nest.map_structure(own, weights)
