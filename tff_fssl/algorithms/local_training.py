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

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tff_fssl.algorithms import local_training_hparams
from tff_fssl.algorithms import supervised_hparams
from tff_fssl.data import augment
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import own_models
from tff_fssl.rounds import round_hparams as round_hparams_lib

RoundHparams = round_hparams_lib.RoundHparams


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

  def finish(
    networks: algorithm_lib.Networks,
    data: algorithm_lib.ClientData,
    views: augment.Views,
    ratios: Mapping[str, algorithm_lib.Ratio],
  ) -> algorithm_lib.Finished:
    del ratios
    network = networks.local
    weights = network.weights_now(data.weights.statistics_count)
    if network.is_static:
      weights = statistics.renewed(
        network,
        weights,
        tf.concat([data.labeled.x, data.unlabeled.x], axis=0),
        views,
        kind=kind,
        batch_size=round_hparams.statistics_batch_size,
      )
    return algorithm_lib.Finished(row=own_models.to_row(weights))

  return objective.minimize(*summed)._replace(
    start=own_models.of_client, finish=finish
  )


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

  return own_models.build_exchange


def build_prediction(
  hparams: Any, round_hparams: RoundHparams
) -> server_model.Prediction:
  """Each client predicts by its own model."""
  del hparams, round_hparams
  return server_model.Prediction(
    member=lambda model, table, client_id: own_models.of_client(
      model.weights, own_models.row_of(table, client_id)
    )
  )


def build_alone(hparams: Any, round_hparams: RoundHparams) -> bool:
  """`parts.Parts.alone`."""
  del hparams, round_hparams
  return True
