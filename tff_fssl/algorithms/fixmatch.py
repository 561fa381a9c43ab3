"""FixMatch at clients, with FedAvg or FedProx.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency
and Confidence", NeurIPS 2020.

In a round:
1.  The server broadcasts the model.
2.  For each batch, a client makes pseudo-labels from the weak view with its
    current weights, and keeps those whose probability reaches the threshold.
    The loss is the cross-entropy of the strong view with the kept
    pseudo-labels, summed over these and divided by the size of the whole batch.
    With labels at the clients, the cross-entropy of a labelled batch is added.
    The optimizer is SGD.
3.  The server averages. With labels at the server, it then trains on them.

Deviations: batch norm sees weak, strong and labelled views as separate batches
(FixMatch interleaves them on its accelerators). There is no exponential moving
average (EMA) of the weights.
"""

from typing import Any

import tensorflow_federated as tff

from tff_fssl.algorithms import fixmatch_hparams
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models import adapter
from tff_fssl.rounds import assemble
from tff_fssl.rounds import round_hparams as round_hparams_lib


def local_algorithm(
  hparams: fixmatch_hparams.FixMatchHparams, *, labeled: bool
) -> algorithm_lib.LocalAlgorithm:
  """FixMatch's client step; `labeled`: whether clients hold labels."""
  of_clients = terms.fixmatch(
    confidence_threshold=hparams.confidence_threshold,
    loss_weight=hparams.unlabeled_loss_weight,
  )
  if not labeled:
    return objective.minimize(of_clients)
  return objective.minimize(of_clients, objective.supervised())


def build_fixmatch(
  model_fn: adapter.ModelFn,
  *,
  hparams: fixmatch_hparams.FixMatchHparams,
  round_hparams: round_hparams_lib.RoundHparams,
  **parts: Any,
) -> tff.learning.templates.LearningProcess:
  """Builds the process; `parts` are other arguments of `build_process`."""
  labeled = round_hparams.scenario == round_hparams_lib.LABELS_AT_CLIENTS
  return assemble.build_process(
    model_fn,
    local_algorithm(hparams, labeled=labeled),
    hparams=round_hparams,
    **parts,
  )
