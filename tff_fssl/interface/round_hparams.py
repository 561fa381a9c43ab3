"""Hyper-parameters that the rounds of all algorithms share.

Defaults are (FL)^2's published ones (paper, table 4). Where the authors' code
differs from the paper, the field says so.
"""

import dataclasses

from tff_fssl import hparams
from tff_fssl.data import names as data_names
from tff_fssl.hparams import hparam
from tff_fssl.models import names as model_names

LABELS_AT_SERVER = data_names.LABELS_AT_SERVER
LABELS_AT_CLIENTS = data_names.LABELS_AT_CLIENTS
# The times at which the statistics of static batch norm are gathered.
OWN, TRAINING = 'own', 'training'
# The default where the size of the largest client is not known.
MAX_CLIENT_EXAMPLES = 100_000


@dataclasses.dataclass(frozen=True)
class RoundHparams:
  """Hyper-parameters of a round, independent of the algorithm."""

  scenario: str = hparam(
    LABELS_AT_SERVER,
    'Where the labels are: at the server, which then trains on them each round,'
    ' or at the clients, which then train on labelled and unlabelled data'
    ' jointly.',
    choices=data_names.SCENARIOS,
    group='A round',
  )
  client_epochs: int = hparam(
    5,
    'Epochs that a client trains in a round.',
    minimum=1,
    maximum=10_000,
    when=lambda own: own.client_steps == 0,
  )
  client_steps: int = hparam(
    0,
    'Steps that a client trains in a round, whatever the number of its examples'
    ' is. 0: those of --client_epochs.',
    minimum=0,
    maximum=10**5,
  )
  client_batch_size: int = hparam(
    32,
    'Unlabelled examples in a batch at a client; labelled ones if it trains on'
    ' labels only.',
    minimum=1,
    maximum=2**20,
  )
  client_labeled_batch_size: int = hparam(
    10,
    'Labelled examples that go with each unlabelled batch, if labels are at the'
    ' clients.',
    minimum=1,
    maximum=2**20,
    # An episode sets the number of labelled examples itself.
    when=lambda own: own.labels_at_clients and not own.has_episodes,
  )
  client_optimizer: str = hparam(
    'sgd',
    'The optimizer with which clients train: sgd, rmsprop (decay 0.9, epsilon'
    ' 1e-7, no momentum) or adam (betas 0.9 and 0.999, epsilon 1e-8). What it'
    ' remembers starts at 0 each round.',
    choices=('sgd', 'rmsprop', 'adam'),
  )
  client_learning_rate: float = hparam(
    0.03, "Learning rate of the clients' optimizer.", minimum=0
  )
  server_epochs: int = hparam(
    5,
    'Epochs that the server trains on its labels in a round.',
    minimum=1,
    maximum=10_000,
    when=lambda own: own.scenario == LABELS_AT_SERVER,
  )
  server_batch_size: int = hparam(
    10,
    'Labelled examples in a batch at the server.',
    minimum=1,
    maximum=2**20,
    when=lambda own: own.scenario == LABELS_AT_SERVER,
  )
  server_learning_rate: float = hparam(
    0.03,
    'Learning rate of the SGD with which the server trains on its labels.',
    minimum=0,
    when=lambda own: own.scenario == LABELS_AT_SERVER,
  )
  momentum: float = hparam(
    0.9,
    'Momentum of SGD at clients and server.',
    minimum=0,
    maximum=1,
    when=lambda own: own.uses_sgd,
  )
  server_keeps_momentum: bool = hparam(
    False,
    "Whether the server's SGD keeps its momentum from round to round, as in the"
    " authors' code. If false, it starts at 0 each round. At clients it always"
    ' starts at 0.',
    when=lambda own: own.scenario == LABELS_AT_SERVER,
  )
  nesterov: bool = hparam(
    True,
    "Whether that momentum is Nesterov's.",
    when=lambda own: own.uses_sgd,
  )
  weight_decay: float = hparam(
    5e-4, 'L2 penalty added to the gradient, after clipping.', minimum=0
  )
  max_gradient_norm: float = hparam(
    1.0,
    'Gradients are clipped to this norm; 0 turns clipping off. It is in the'
    " authors' code but not in the paper.",
    minimum=0,
  )
  proximal_strength: float = hparam(
    0.0,
    'mu of FedProx, which adds mu/2 |w - w_round|^2 to the loss of each client;'
    ' 0 is FedAvg.',
    minimum=0,
  )
  learning_rate_schedule: str = hparam(
    'constant',
    'How the learning rates of clients and server change over rounds. cosine:'
    ' rate * (1 + cos(pi (round - 1) / schedule_rounds)) / 2, as in the paper;'
    " constant: no change, as in the authors' code (it never steps its"
    ' scheduler); plateau: divided by schedule_divisor when the validation loss'
    ' has not fallen in schedule_patience evaluations (Serra et al. 2018).',
    choices=('constant', 'cosine', 'plateau'),
  )
  schedule_rounds: int = hparam(
    800,
    'Rounds over which the cosine schedule falls to 0.',
    minimum=1,
    when=lambda own: own.learning_rate_schedule == 'cosine',
  )
  schedule_patience: int = hparam(
    5,
    'Evaluations in a row, without a lower validation loss than the lowest one,'
    ' after which learning rates fall.',
    minimum=1,
    when=lambda own: own.follows_loss,
  )
  schedule_divisor: float = hparam(
    3.0,
    'What learning rates are then divided by.',
    minimum=1,
    when=lambda own: own.follows_loss,
  )
  num_pretraining_rounds: int = hparam(
    10,
    'Rounds before round 1 in which only the server trains (with'
    " labels_at_server). The authors' code has 10 for CIFAR-10, 102 for SVHN-40"
    ' and 16 for SVHN-250; the paper has none.',
    minimum=0,
    maximum=10**6,
    when=lambda own: own.scenario == LABELS_AT_SERVER,
  )
  client_weighting: str = hparam(
    'uniform',
    'The weight of a client in the mean of updates, if the algorithm sets none.'
    ' uniform: the same for all; examples: the number of examples that it'
    ' trained on.',
    choices=('uniform', 'examples'),
    when=lambda own: not own.trains_alone and not own.sets_weights,
  )
  pseudo_label_quota: bool = hparam(
    False,
    'Whether a client trains on its most confident unlabelled examples alone,'
    ' so many of each predicted class that all clients together have about as'
    ' many of every class: FedCoPL. All clients of the last round counted the'
    ' predictions. It costs a further pass over the unlabelled examples.',
    when=lambda own: (
      not own.full_labels and own.learns_unlabeled and not own.trains_alone
    ),
  )
  max_client_examples: int = hparam(
    0,
    'The most examples that a client can have. A client that reports more (as a'
    ' count, or with client_weighting=examples as its weight) is rejected and'
    ' counted. 0: in a simulation, the size of the largest client (refused with'
    ' --aggregator=secure and dp, which tell of no client); in other'
    f' programs, {MAX_CLIENT_EXAMPLES:,}. With client_weighting=examples set it'
    ' there to slightly more than your largest client has, since it bounds the'
    ' weight that a lying client can claim.',
    minimum=0,
    maximum=10**9,
  )
  min_clients: int = hparam(
    0,
    'A round with fewer usable clients is discarded: the server does not train,'
    ' and the model, the server optimizer and the records of clients stay as'
    ' they are. Events that the round number schedules still take place'
    " (sending ProtoFSSL's prototypes, choosing FedMatch's helpers). A usable"
    ' client reports, with data and an update that can be used; under'
    ' --aggregator=secure and dp, every client that reports is usable. 0: the'
    ' server also continues alone. With --dropout_probability or'
    ' --availability_file, unless given: 1.',
    minimum=0,
    maximum=10**6,
    when=lambda own: own.aggregates,
  )
  server_optimizer: str = hparam(
    'sgd',
    'The optimizer that applies the mean update: sgd (FedAvg; with momentum,'
    ' FedAvgM), adam (FedAdam) or yogi (FedYogi).',
    choices=('sgd', 'adam', 'yogi'),
    when=lambda own: not own.trains_alone,
  )
  server_optimizer_learning_rate: float = hparam(
    1.0,
    'Learning rate of the server optimizer.',
    minimum=0,
    exclusive_minimum=True,
    when=lambda own: not own.trains_alone,
  )
  server_optimizer_momentum: float = hparam(
    0.5,
    'Momentum of the server optimizer sgd.',
    minimum=0,
    maximum=1,
    when=lambda own: not own.trains_alone and own.server_optimizer == 'sgd',
  )
  batch_norm_statistics: str = hparam(
    model_names.POOLED,
    'The batch norm statistics that evaluation and pseudo-labels use. pooled:'
    ' static batch norm, the moments of all examples of cohort and server,'
    ' gathered after each round; median: the same, but the median over clients'
    ' of their moments, which a few lying clients cannot move (the default with'
    " --aggregator=robust); batch_mean: the mean of all batches' means and"
    " unbiased variances, each batch counting equally, as in the authors' code."
    ' The batches have server_batch_size examples at the server and'
    " statistics_batch_size at a client (in the authors' code, whose batches of"
    ' 2,048 mix clients, labelled examples count less). moving_average: the'
    ' moving averages of the clients, aggregated with their updates.',
    choices=model_names.STATISTICS,
    when=lambda own: own.norm in model_names.BATCH_NORMS,
  )
  statistics_phase: str = hparam(
    OWN,
    'When the statistics of static batch norm are gathered. own: in a second'
    " client phase, of the round's new weights; training: while clients train,"
    ' of the weights that they were sent, so that clients are needed once, but'
    ' statistics are one update old.',
    choices=(OWN, TRAINING),
    when=lambda own: (
      own.aggregates and own.norm == model_names.STATIC_BATCH_NORM
    ),
  )
  statistics_batch_size: int = hparam(
    256,
    'Examples in a batch of passes that do not train (for pseudo-labels and'
    ' statistics).',
    minimum=1,
    maximum=2**20,
  )
  average_decay: float = hparam(
    0.0,
    'If above 0, the model that is the exponential moving average of the'
    " rounds' models, with this decay, is evaluated as well (eval.csv:"
    ' test/average/accuracy). It changes no other result. With static batch'
    ' norm it costs a further pass over the data in each round.',
    minimum=0,
    maximum=1,
    when=lambda own: not own.trains_alone,
  )
  compute_dtype: str = hparam(
    'float32',
    'The type in which the network computes. bfloat16 is faster on processors'
    ' that support it, and much slower on others; weights, gradients, batch'
    ' norm statistics, losses and evaluation stay float32.',
    choices=('float32', 'bfloat16'),
  )
  jit_compile: bool = hparam(
    False,
    'Whether training steps are compiled with XLA (meant for GPUs; slower on'
    ' CPUs).',
  )

  def __post_init__(self) -> None:
    hparams.validate(self)

  @property
  def uses_sgd(self) -> bool:
    """Tells whether clients or the server train by SGD."""
    return not self.labels_at_clients or self.client_optimizer == 'sgd'

  @property
  def follows_loss(self) -> bool:
    """Tells whether learning rates follow the loss on validation examples."""
    return self.learning_rate_schedule == 'plateau'

  @property
  def labels_at_clients(self) -> bool:
    """Tells whether clients hold the labels."""
    return self.scenario == LABELS_AT_CLIENTS

  @property
  def first_round(self) -> int:
    """Returns the first round's number, below 1 with server pre-training."""
    return 1 if self.labels_at_clients else 1 - self.num_pretraining_rounds

  @property
  def most_client_examples(self) -> int:
    """Returns the most examples that a client can have."""
    return self.max_client_examples or MAX_CLIENT_EXAMPLES

  def client_batch_sizes(self, trains_on_unlabeled: bool) -> tuple[int, int]:
    """Returns the unlabelled and labelled examples in a client's batch."""
    if trains_on_unlabeled:
      return self.client_batch_size, self.client_labeled_batch_size
    # Clients that train on labels only use full batches of them.
    return self.client_batch_size, self.client_batch_size
