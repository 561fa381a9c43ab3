"""Local training: each client alone, without federation. Labels at clients.

The baselines Local-SL, Local-UDA and Local-FixMatch of Jeong, Yoon, Yang and
Hwang, "Federated Semi-Supervised Learning with Inter-Client Consistency &
Disjoint Learning" (FedMatch), ICLR 2021. The gain of a federated algorithm over
them is the gain from other clients. FedMatch's Local-SL has all labels, like
`local_supervised` with `--full_labels`.

In a round, each client of the cohort works alone:
1.  It starts from its own model. In its first round it starts from the initial
    weights, which are the same for all clients.
2.  It trains as `supervised`, `uda` or `fixmatch` would, with all flags of
    local training. The proximal term (`--proximal_strength`) refers to the
    model that it starts from.
3.  With static batch norm it gathers the statistics of its own examples.
4.  It keeps its model. Nothing is sent, and nothing is averaged.

All clients' own models are evaluated on the same test (and validation)
examples. eval.csv has the mean, the standard deviation and the worst decile of
their accuracies, and the mean of their losses. A client that has not taken part
yet counts with the initial weights. There is no common model to export. The
checkpoint holds the clients' own models, and `programs/evaluate.py` evaluates
them.

Choices, since FedMatch does not specify them: A cohort is drawn for each round,
as for the federated algorithms, so that budgets are equal. Momentum starts at 0
in each round. The threshold of UDA's training signal annealing rises with the
rounds of the run, not with those of the client.

The simulation keeps the clients' models in a table at the server, which stands
for their own disks, hence 0 bytes of communication. It costs clients * weights
* 4 bytes, in memory (a few times) and in each checkpoint: 600 MB for 100
clients with a WRN-28-2. More than 1.5 GB are refused. An evaluation passes over
the test set once for each client. See `--rounds_per_evaluation`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

from tff_fssl import metrics as metrics_lib
from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import own_models
from tff_fssl.algorithms import supervised
from tff_fssl.algorithms import uda
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models import statistics
from tff_fssl.models.weights import Weights

_PAPER = 'Jeong et al., ICLR 2021 (a baseline of FedMatch)'


class _Alone(base.Algorithm):
  """Algorithms in which each client trains and predicts by its own model.

  A table at the server stands for the clients' own disks.
  """

  scenarios = (base.LABELS_AT_CLIENTS,)
  paper = _PAPER
  alone = True

  def start(
    self, name: str, weights: Weights, received: Mapping[str, Any]
  ) -> Weights:
    """Starts from the client's own model (step 1)."""
    if name != base.MODEL:
      return super().start(name, weights, received)
    own: Weights = own_models.read_own(weights, received)
    return own

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Keeps the model, with statistics of the client's examples (3 and 4)."""
    del metrics
    network = client.networks.model
    weights = network.weights_now()
    if network.is_static:
      # Other statistics are part of the trained weights.
      weights = statistics.renewed(
        network,
        weights,
        tf.concat([client.labeled.x, client.unlabeled.x], axis=0),
        client.views,
        kind=self.round.batch_norm_statistics,
        batch_size=self.round.statistics_batch_size,
      )
    return base.ClientOutput(own_models.make_row(weights))

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Keeps the initial weights, since there is no common model."""
    del aggregate, server
    return state

  def exchange(self) -> exchange_lib.BuildExchange:
    """Builds the table of the clients' models."""
    return own_models.build_exchange

  def prediction(self) -> server_model.Prediction:
    """Predicts by each client's own model."""
    return server_model.Prediction(
      member=lambda model, table, client_id: own_models.read_own(
        model.weights, own_models.row_of(table, client_id)
      )
    )


@dataclasses.dataclass(frozen=True)
class LocalSupervised(_Alone, supervised.Supervised):
  """Labels only by each client alone, without federation."""

  name = 'local_supervised'


@dataclasses.dataclass(frozen=True)
class LocalUda(_Alone, uda.Uda):
  """UDA by each client alone, without federation."""

  name = 'local_uda'
  flags_of = 'uda'
  # Without the server's metrics, since it does not train.
  metrics: ClassVar[tuple[metrics_lib.Metric, ...]] = tuple(
    metric
    for metric in uda.Uda.metrics
    if not metric.column.startswith('finalizer/')
  )


@dataclasses.dataclass(frozen=True)
class LocalFixMatch(_Alone, fixmatch.FixMatch):
  """FixMatch by each client alone, without federation."""

  name = 'local_fixmatch'
  flags_of = 'fixmatch'
  tiny = {'confidence_threshold': 0.3}
