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

import dataclasses
from typing import ClassVar

from tff_fssl import metrics as metrics_lib
from tff_fssl.algorithms import base
from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import supervised
from tff_fssl.algorithms import uda

_PAPER = 'Jeong et al., ICLR 2021 (a baseline of FedMatch)'
_CAPABILITIES = base.Capabilities(
  scenarios=(base.LABELS_AT_CLIENTS,),
  trains_clients=(base.LABELS_AT_CLIENTS,),
  client_state=True,
  per_client_broadcast=True,
  weight_sets_down=0,
  weight_sets_up=0,
)


@dataclasses.dataclass(frozen=True)
class LocalSupervised(supervised.Supervised):
  """Labels only by each client alone, without federation."""

  name = 'local_supervised'
  paper = _PAPER
  scenarios = (base.LABELS_AT_CLIENTS,)
  capabilities = _CAPABILITIES
  alone = True


@dataclasses.dataclass(frozen=True)
class LocalUda(uda.Uda):
  """UDA by each client alone, without federation."""

  name = 'local_uda'
  paper = _PAPER
  scenarios = (base.LABELS_AT_CLIENTS,)
  capabilities = _CAPABILITIES
  compute = base.Compute(base.Passes(2, 1))
  # The server does not train.
  metrics: ClassVar[tuple[metrics_lib.Metric, ...]] = tuple(
    metric
    for metric in uda.Uda.metrics
    if not metric.column.startswith('finalizer/')
  )
  alone = True


@dataclasses.dataclass(frozen=True)
class LocalFixMatch(fixmatch.FixMatch):
  """FixMatch by each client alone, without federation."""

  name = 'local_fixmatch'
  tiny = {'confidence_threshold': 0.3}
  paper = _PAPER
  scenarios = (base.LABELS_AT_CLIENTS,)
  capabilities = _CAPABILITIES
  compute = base.Compute(base.Passes(2, 1))
  alone = True
