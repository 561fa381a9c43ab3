"""MixMatch at clients, with FedAvg or FedProx.

Berthelot et al., "MixMatch: A Holistic Approach to Semi-Supervised Learning",
NeurIPS 2019.

In a round:
1.  The server broadcasts the model.
2.  For each batch, a client guesses labels from the mean prediction for several
    weak views of each unlabelled example, sharpened; mixes all views of all
    examples of the batch, labelled ones included, with one another; and learns
    the mixed labels, by cross-entropy where they are those of labelled
    examples, by squared error where they are guessed. The weight of the latter
    rises linearly over the first rounds. The optimizer is SGD.
3.  The server averages. With labels at the server, it then trains on them
    (cross-entropy, weak view, no mixing).

Choices and deviations: with labels at the server, clients mix unlabelled
examples among themselves, and their loss is the squared error alone. All mixed
examples go through the network as one batch, so that batch norm sees them
together (the authors interleave sub-batches). The ramp's length is 1/64 of the
paper's training, as in the authors' code, but in rounds. SGD with weight decay
in the gradient replaces Adam; there is no exponential moving average (EMA).
"""

from tff_fssl.algorithms import mixmatch_hparams
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.rounds import round_hparams as round_hparams_lib


def build_local_algorithm(
  hparams: mixmatch_hparams.MixMatchHparams,
  round_hparams: round_hparams_lib.RoundHparams,
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: step 2."""
  return objective.minimize(
    terms.mixmatch(
      labeled=round_hparams.labels_at_clients,
      num_views=hparams.num_views,
      temperature=hparams.temperature,
      concentration=hparams.mixup_concentration,
      loss_weight=hparams.unlabeled_loss_weight,
      ramp_rounds=hparams.ramp_rounds,
    )
  )
