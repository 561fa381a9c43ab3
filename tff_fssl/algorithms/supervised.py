"""Labels only: the baseline, and with all labels the upper bound.

McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017. With `proximal_strength`, Li et al.,
"Federated Optimization in Heterogeneous Networks", MLSys 2020.

With labels at the server, only the server trains, and a round needs no clients.
Clients that take part send no update. With labels at the clients, they train on
their labelled examples and ignore the others. With `--full_labels` all their
examples are labelled, which gives the upper bound.
"""

from __future__ import annotations

import dataclasses

from tff_fssl.interface import base


@dataclasses.dataclass(frozen=True)
class Supervised(base.Algorithm):
  """Labels only: FedAvg at clients, or training at the server only."""

  name = 'supervised'
  paper = 'McMahan et al., AISTATS 2017; Li et al., MLSys 2020'
  # With labels at the server, clients have nothing to train on.
  trains_clients = (base.LABELS_AT_CLIENTS,)
