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

from tff_fssl.algorithms import fixmatch_hparams
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.rounds import round_hparams as round_hparams_lib


def build_local_algorithm(
  hparams: fixmatch_hparams.FixMatchHparams,
  round_hparams: round_hparams_lib.RoundHparams,
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: step 2."""
  of_clients = terms.fixmatch(
    confidence_threshold=hparams.confidence_threshold,
    loss_weight=hparams.unlabeled_loss_weight,
  )
  if not round_hparams.labels_at_clients:
    return objective.minimize(of_clients)
  return objective.minimize(of_clients, objective.supervised())
