"""What every algorithm's round has in common, as hyper-parameters.

TensorFlow-free. Defaults are (FL)^2's published ones (paper, table 4; where
the authors' code differs from the paper, the field says so).
"""

import dataclasses

from tff_fssl import hparams
from tff_fssl.hparams import hparam

LABELS_AT_SERVER = 'labels_at_server'
LABELS_AT_CLIENTS = 'labels_at_clients'
# Where nobody knows how many examples a client can have.
MAX_CLIENT_EXAMPLES = 100_000


@dataclasses.dataclass(frozen=True)
class RoundHparams:
  """Hyper-parameters of a round, whatever the algorithm."""

  scenario: str = hparam(
    LABELS_AT_SERVER,
    'Who holds the labels: the server, which then trains on them each round,'
    ' or the clients, which then train on labelled and unlabelled data'
    ' jointly.',
    choices=(LABELS_AT_SERVER, LABELS_AT_CLIENTS),
  )
  client_epochs: int = hparam(
    5,
    'Passes over its data that a client makes in a round.',
    minimum=1,
    maximum=10_000,
  )
  client_batch_size: int = hparam(
    32,
    'Examples in a batch of unlabelled (or, where a client trains on'
    ' labels alone, labelled) data.',
    minimum=1,
    maximum=2**20,
  )
  client_labeled_batch_size: int = hparam(
    10,
    'Labelled examples beside each unlabelled batch, with labels at the'
    ' clients.',
    minimum=1,
    maximum=2**20,
  )
  client_learning_rate: float = hparam(
    0.03, "Learning rate of the clients' SGD.", minimum=0
  )
  server_epochs: int = hparam(
    5,
    'Passes over its labels that the server makes in a round.',
    minimum=1,
    maximum=10_000,
  )
  server_batch_size: int = hparam(
    10, 'Labelled examples in a batch at the server.', minimum=1, maximum=2**20
  )
  server_learning_rate: float = hparam(
    0.03,
    'Learning rate of the SGD with which the server trains on its labels.',
    minimum=0,
  )
  momentum: float = hparam(
    0.9, "Momentum of clients' and server's SGD.", minimum=0, maximum=1
  )
  server_keeps_momentum: bool = hparam(
    False,
    "Whether the momentum of the server's SGD outlives the round, as in the"
    " authors' code; else it starts at 0 each round, as clients' always does.",
  )
  nesterov: bool = hparam(True, "Whether that momentum is Nesterov's.")
  weight_decay: float = hparam(
    5e-4, 'L2 penalty added to the gradient, after clipping.', minimum=0
  )
  max_gradient_norm: float = hparam(
    1.0,
    "Gradients are clipped to this norm; 0 is off. In the authors'"
    ' code, not in the paper.',
    minimum=0,
  )
  proximal_strength: float = hparam(
    0.0,
    "FedProx: mu in the term mu/2 |w - w_round|^2 of each client's"
    ' loss. 0 is FedAvg.',
    minimum=0,
  )
  learning_rate_schedule: str = hparam(
    'constant',
    "Of clients' and server's rate over rounds. cosine: rate *"
    " (1 + cos(pi (round - 1) / schedule_rounds)) / 2, the paper's;"
    " constant: what the authors' code does (it never steps its scheduler).",
    choices=('constant', 'cosine'),
  )
  schedule_rounds: int = hparam(
    800, 'Rounds over which the cosine schedule falls to 0.', minimum=1
  )
  num_pretraining_rounds: int = hparam(
    10,
    'Rounds before round 1 in which the server trains alone'
    " (labels_at_server only). In the authors' code: 10 for CIFAR-10, 102"
    ' for SVHN-40, 16 for SVHN-250; in the paper: none.',
    minimum=0,
    maximum=10**6,
  )
  client_weighting: str = hparam(
    'uniform',
    'How clients count in the mean of their updates, where the'
    ' algorithm does not weigh them itself: equally, or by the examples they'
    ' trained on.',
    choices=('uniform', 'examples'),
  )
  max_client_examples: int = hparam(
    0,
    'The most examples that a client can have. A client that reports more'
    ' (counts, or with client_weighting=examples its weight) is rejected and'
    ' counted. 0: in a simulation, what the largest client has; in other'
    f' programs {MAX_CLIENT_EXAMPLES:,}, and there, with client_weighting='
    'examples, set it little above your largest client, since it bounds what a'
    ' lying client can weigh.',
    minimum=0,
    maximum=10**9,
  )
  server_optimizer: str = hparam(
    'sgd',
    'What applies the mean update: sgd (FedAvg, with momentum FedAvgM),'
    ' adam (FedAdam) or yogi (FedYogi).',
    choices=('sgd', 'adam', 'yogi'),
  )
  server_optimizer_learning_rate: float = hparam(
    1.0,
    'Learning rate of the server optimizer.',
    minimum=0,
    exclusive_minimum=True,
  )
  server_optimizer_momentum: float = hparam(
    0.5, 'Momentum of the server optimizer, if sgd.', minimum=0, maximum=1
  )
  batch_norm_statistics: str = hparam(
    'pooled',
    'Where evaluation and pseudo-labels take batch norm statistics'
    " from. pooled: static batch norm, moments of the cohort's and the"
    " server's examples after each round; median: the same, but of each"
    " client's moments the median over clients, which few lying clients cannot"
    ' move (the default with --aggregator=robust); batch_mean: the mean of'
    " batches' means and unbiased variances, each batch counting equally, as in"
    " the authors' code: the server's batches have server_batch_size examples,"
    " those of each client statistics_batch_size (in the authors' code, whose"
    ' batches of 2,048 mix clients, labels weigh less);'
    " moving_average: clients' moving averages, aggregated with their updates.",
    choices=('pooled', 'median', 'batch_mean', 'moving_average'),
  )
  statistics_batch_size: int = hparam(
    256,
    'Examples in a batch of the passes without training (pseudo-labels,'
    ' statistics).',
    minimum=1,
    maximum=2**20,
  )
  compute_dtype: str = hparam(
    'float32',
    'What the network computes in. bfloat16: faster where the processor has it;'
    ' weights, gradients, batch norm statistics, losses and evaluation stay'
    ' float32.',
    choices=('float32', 'bfloat16'),
  )
  jit_compile: bool = hparam(
    False,
    'Whether training steps are compiled with XLA (for GPUs; on CPUs'
    ' it is slower).',
  )

  def __post_init__(self):
    hparams.validate(self)
