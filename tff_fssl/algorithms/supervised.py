"""Labels only: the baseline, and with all labels the upper bound.

McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017; with `proximal_strength`, Li et al.,
"Federated Optimization in Heterogeneous Networks", MLSys 2020.

With labels at the server, only the server trains, and a round needs no clients;
any that take part send no update. With labels at the clients, they train on
their labelled examples and ignore the others. With `--full_labels` all their
examples are labelled, which is the upper bound.
"""

from tff_fssl.algorithms import supervised_hparams
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.rounds import round_hparams as round_hparams_lib


def build_local_algorithm(
  hparams: supervised_hparams.SupervisedHparams,
  round_hparams: round_hparams_lib.RoundHparams,
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part."""
  del hparams, round_hparams  # It has no choices.
  return objective.SUPERVISED
