"""UDA at clients, with FedAvg or FedProx.

Xie et al., "Unsupervised Data Augmentation for Consistency Training", NeurIPS
2020.

In a round:
1.  The server broadcasts the model.
2.  For each batch, a client predicts the weak views with its current weights.
    Examples whose largest probability exceeds a threshold are kept. The loss is
    the KL divergence from their sharpened predictions to those for the strong
    views, summed over the kept ones and divided by the size of the batch. With
    labels at the clients, the cross-entropy of a labelled batch is added. The
    optimizer is SGD.
3.  The server averages. With labels at the server, it then trains on them.

Wherever labels are trained on, training signal annealing (TSA) leaves out those
that are learned already, by a threshold that rises over the rounds.

Choices, since the paper is not federated: the threshold rises with the rounds
(the server broadcasts the number of the round), and steps within it; before
round 1 nothing is left out. FedMatch's authors ran their UDA baseline with the
`exp` schedule, hence the default; the CIFAR-10 scripts of UDA's authors have no
TSA. There is no exponential moving average (EMA) of the weights.
"""

from tff_fssl.algorithms import uda_hparams
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.rounds import round_hparams as round_hparams_lib


def build_local_algorithm(
  hparams: uda_hparams.UdaHparams,
  round_hparams: round_hparams_lib.RoundHparams,
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: step 2."""
  of_clients = terms.uda(
    confidence_threshold=hparams.confidence_threshold,
    temperature=hparams.temperature,
    loss_weight=hparams.unlabeled_loss_weight,
  )
  if not round_hparams.labels_at_clients:
    return objective.minimize(of_clients)
  return objective.minimize(of_clients, _labeled(hparams))


def build_server_training(
  hparams: uda_hparams.UdaHparams,
  round_hparams: round_hparams_lib.RoundHparams,
) -> algorithm_lib.LocalAlgorithm:
  """What the server does with its labels: step 3."""
  del round_hparams
  return objective.minimize(_labeled(hparams))


def _labeled(hparams: uda_hparams.UdaHparams) -> objective.Term:
  """The term on labels, with TSA."""
  return terms.annealed_supervised(
    schedule=hparams.tsa, num_rounds=hparams.tsa_rounds
  )
