"""Clients that train alone: each goes on from its own model.

Nothing is averaged. A table at the server stands for the clients' own disks.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from tff_fssl.data import augment
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.rounds import own_models
from tff_fssl.rounds import parts as parts_lib
from tff_fssl.rounds import round_hparams as round_hparams_lib


def separate(
  parts: parts_lib.Parts, hparams: round_hparams_lib.RoundHparams
) -> parts_lib.Parts:
  """Makes each client train, and predict by, a model of its own.

  Args:
    parts: An algorithm whose clients need nothing but the model.
    hparams: The round's hyper-parameters.

  Returns:
    The same algorithm without federation.
  """

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
        kind=hparams.batch_norm_statistics,
        batch_size=hparams.statistics_batch_size,
      )
    return algorithm_lib.Finished(row=own_models.to_row(weights))

  return dataclasses.replace(
    parts,
    local=parts.local._replace(start=own_models.of_client, finish=finish),
    # The common model stays the initial one.
    server=server_algorithm.ServerAlgorithm(
      update=lambda model, aggregated, tools: model
    ),
    # Zeros for clients without a model yet.
    exchange=own_models.build_exchange,
    prediction=server_model.Prediction(
      member=lambda model, table, client_id: own_models.of_client(
        model.weights, own_models.row_of(table, client_id)
      )
    ),
    alone=True,
  )
