"""FedCon: consistency of two networks, at server and clients.

Long, Che, Wang, Ye, Luo, Wu, Xiao and Ma, "FedCon: A Contrastive Framework for
Federated Semi-Supervised Learning", arXiv 2021 (2109.04533). Details are from
the authors' code (github.com/zewei-long/fedcon-pytorch). Of the paper, only the
abstract was available. Labels at the server.

The network is a backbone f and a head, the last layer. In a round:
1.  The server sends f. The head never leaves the server.
2.  A client has a target network f' and a projector h, an MLP with one hidden
    layer and batch norm. By default (`client_state=none`) f' starts as f, and h
    from initial weights that all clients share. With `table`, a client that
    took part before resumes with its own f' and h.
3.  For each batch, with two weak views x1, x2 of each example, f and h make a
    step of SGD on D(h(f(x1)), f'(x2)) / 2 + D(h(f(x2)), f'(x1)) / 2, where D is
    minus the mean cosine. Then f' <- a f' + (1 - a) f. There are no negative
    examples: this is BYOL.
4.  The server averages the changes of f.
5.  The server trains f and head, the online network, on its labels. The loss is
    the cross-entropy of both views, plus w(round) times the mean KL divergence
    from the target network's prediction for the other view. After each step,
    the server's target network follows the online one.

The first round of pre-training is the authors' first training at the server.

Deviations from the authors' code:
*   The server's targets come from the target network. The authors' code never
    uses it (`server_target=online`).
*   A client's state is its own. In the authors' code it is the state of the
    client that trained before on a batch of that number.
*   Clients train with SGD. LARS with the authors' schedule (its warm-up starts
    at 0 in each round) moves weights by less than 2e-5 of their norm a round.
*   The server's moving average follows each step. The authors' average precedes
    the step, and so lags by a step.
*   The head is the network's last layer. The authors' head is an MLP (for
    CIFAR-10 4,096 - 1,024 - 512 - 10, with dropout).
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.algorithms import own_models
from tff_fssl.algorithms.fedcon import two_views
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import setup as setup_lib
from tff_fssl.lazy import tf
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import annealing
from tff_fssl.semisup import moving_average

TARGET, PROJECTOR = two_views.TARGET, two_views.PROJECTOR
# Values of --fedcon.client_state and --fedcon.server_target.
NONE, TABLE = 'none', 'table'
EMA, ONLINE = 'ema', 'online'
# The share of the trained network in the server's moving average falls to 0
# over 20,000 steps, and rises again. Rounds begin at multiples of 1,000 steps.
_PERIOD, _STEPS_PER_ROUND = 20_000.0, 1_000.0

_METRICS = (
  metrics_lib.client_metric(
    'loss_similarity',
    'D, minus the cosine between the prediction from one view and the target of'
    ' the other one, mean over both directions: from 1 to -1.',
    better=metrics_lib.LOWER,
    curve=metrics_lib.Curve(metrics_lib.LOSS_AT_CLIENTS, 'similarity'),
    figure='loss',
  ),
  metrics_lib.client_metric(
    'feature_deviation',
    'Standard deviation of features over the examples of a batch, after these'
    ' were scaled to length 1, times the square root of their number: 1 if they'
    ' point everywhere, 0 if the backbone has collapsed.',
    better=metrics_lib.HIGHER,
    curve=metrics_lib.Curve('Spread of features'),
    figure='spread',
  ),
  metrics_lib.Metric(
    'finalizer/server_loss_consistency',
    'Divergence of the online predictions from those of the target for the'
    ' other view, on labelled examples, before it is weighted.',
    metrics_lib.NATS,
    metrics_lib.LOWER,
  ),
)


class FedConMemory(NamedTuple):
  """The server's memory: the target network, which clients never receive."""

  target: Weights


@dataclasses.dataclass(frozen=True)
class FedCon(base.Algorithm):
  """FedCon: consistency of two networks, at server and clients."""

  name = 'fedcon'
  paper = 'Long et al., arXiv 2021'
  scenarios = (base.LABELS_AT_SERVER,)
  unlabeled_views = two_views.VIEWS
  head_stays = True
  capabilities = base.Capabilities(without_signals='client_state=none')
  round_defaults = {
    'client_batch_size': 50,
    'client_epochs': 1,
    'max_gradient_norm': 0.0,
    'momentum': 0.5,
    'nesterov': False,
    'num_pretraining_rounds': 1,
    'server_batch_size': 10,
    'server_epochs': 1,
    'server_learning_rate': 0.01,
    'server_optimizer_momentum': 0.0,
    'weight_decay': 0.0,
  }
  tiny = {'hidden_size': 8, 'ramp_rounds': 1}
  metrics = _METRICS

  # Clients (steps 2 and 3).
  hidden_size: int = hparam(
    512,
    "Width of the projector's hidden layer. The authors' code has 12,288, which"
    ' makes 100.7 million weights of it for their network for CIFAR-10, 89'
    ' times the backbone.',
    minimum=1,
    maximum=2**16,
  )
  client_state: str = hparam(
    NONE,
    'What a client keeps from round to round. none: nothing; its target starts'
    ' as the backbone that it receives, its projector from initial weights that'
    ' all clients share. table: target and projector, by its identity, as the'
    ' paper has it.',
    choices=(NONE, TABLE),
  )
  target_decay: float = hparam(
    0.999,
    "The share of the old target in a client's moving average, a batch (value:"
    " the authors' code).",
    minimum=0,
    maximum=1,
  )
  # The server (step 5).
  server_consistency_weight: float = hparam(
    1.0,
    "The weight of the consistency of two views in the server's loss, after the"
    " ramp (value: the authors' code).",
    minimum=0,
  )
  ramp_rounds: int = hparam(
    100,
    'Rounds over which that weight rises, as exp(-5 (1 - t)^2), t from 0 to 1;'
    " 0: it does not rise (value: the authors' code).",
    minimum=0,
    maximum=10**7,
  )
  server_target: str = hparam(
    EMA,
    "Which network's predictions are the target of that consistency. ema: the"
    ' moving average of the trained one; online: the trained one itself'
    " (the authors' code, in which the moving average is never used).",
    choices=(EMA, ONLINE),
  )

  server_target_decay: float = hparam(
    0.9996,
    "tau, the least share of the old target in the server's moving average, a"
    ' batch. It rises to 1 by round 20, falls to this again by round 40, and'
    " so on (the authors' code, where the average has no effect). With few"
    ' batches a round, the default leaves the target near the initial weights.',
    minimum=0,
    maximum=1,
  )

  @property
  def keeps_state(self) -> bool:
    """Tells whether clients keep networks of their own between rounds."""
    return self.client_state == TABLE

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts the target as the model."""
    del setup
    return base.ServerState(weights, FedConMemory(weights))

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Gives clients a target and a projector, an MLP (step 2)."""
    return {
      TARGET: base.AuxiliaryNetwork(),
      PROJECTOR: base.AuxiliaryNetwork(
        trained=True, build=two_views.build_projector(self.hidden_size)
      ),
    }

  def start(
    self, name: str, weights: Weights, received: Mapping[str, Any]
  ) -> Weights:
    """Resumes target and projector from the client's last round, if kept."""
    # Otherwise the target starts from the model, the projector from its seed.
    if name == base.MODEL or not self.keeps_state:
      return super().start(name, weights, received)
    own: Weights = own_models.read_own(
      weights, received, is_last=name == PROJECTOR
    )
    return own

  def unlabeled_step(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.StepResult:
    """Makes a step of backbone and projector on two views (step 3)."""
    return two_views.similarity_step(networks, batch)

  def after_step(self, networks: base.Networks, batch: base.Batch) -> None:
    """Moves the target towards the backbone (step 3)."""
    del batch
    moving_average.follow_network(
      networks[TARGET], networks.model, self.target_decay
    )

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Keeps target and projector for the client's next round."""
    del metrics
    if not self.keeps_state:
      return base.ClientOutput()
    # Their statistics are gathered with the model's, and count as often.
    count = client.weights.statistics_count
    kept = (
      client.networks[name].weights_now()._replace(statistics_count=count)
      for name in (TARGET, PROJECTOR)
    )
    return base.ClientOutput(own_models.make_row(tuple(kept)))

  def exchange(self) -> exchange_lib.BuildExchange | None:
    """Builds the table that stands for the clients' disks in a simulation."""
    return _build_table if self.keeps_state else None

  def server_trainer(self) -> base.Algorithm:
    """Trains two networks on labels (step 5)."""
    return _ServerTrainer(round=self.round, fedcon=self)

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Averages the backbone, then trains it with its target on labels."""
    weights = server.apply(state.weights, aggregate.update)
    # The fields of the memory are the networks of `_ServerTrainer`, by name.
    weights, networks = server.train_networks(weights, state.memory._asdict())
    return state._replace(weights=weights).remember(**networks)


def _build_table(setup: setup_lib.Setup) -> exchange_lib.Exchange:
  kept = (setup.weights, setup.of_peers[PROJECTOR])
  # Real clients keep both on disk, so that their transfer is not counted.
  table = own_models.build_exchange(setup, kept)
  return table._replace(is_clients_own=True)


@dataclasses.dataclass(frozen=True)
class _ServerTrainer(base.Algorithm):
  """The server's training on two views of each labelled example (step 5)."""

  labeled_views = two_views.VIEWS

  fedcon: FedCon = dataclasses.field(
    default=None,  # type: ignore[assignment]
    kw_only=True,
    metadata={'is_flag': False},
  )

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Starts the target from the server's memory."""
    return {TARGET: base.AuxiliaryNetwork()}

  def labeled_step(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.StepResult:
    """Adds the consistency of two views to their cross-entropy."""
    rising = ramp(batch.time.round_num, self.fedcon.ramp_rounds)
    return two_views.consistency_step(
      networks,
      batch,
      weight=self.fedcon.server_consistency_weight * rising,
      is_online=self.fedcon.server_target == ONLINE,
    )

  def after_step(self, networks: base.Networks, batch: base.Batch) -> None:
    """Moves the target by a share that falls and rises with the steps."""
    share = server_share(batch.time, self.fedcon.server_target_decay)
    for new, old in zip(
      networks.model.trainable_variables,
      networks[TARGET].trainable_variables,
      strict=True,
    ):
      old.assign_add(tf.cast(share, old.dtype) * (new - old))


def ramp(round_num: tf.Tensor, num_rounds: int) -> tf.Tensor:
  """Computes w = exp(-5 (1 - t)^2), t = round / num_rounds, clipped to [0, 1].

  Args:
    round_num: int32 scalar. Negative numbers count as 0.
    num_rounds: Rounds of the ramp. With 0, w is 1.

  Returns:
    float32 scalar.
  """
  if not num_rounds:
    return tf.constant(1.0)
  progress = tf.cast(tf.maximum(round_num, 0), tf.float32) / num_rounds
  return annealing.sigmoid_ramp(progress)


def server_share(time: base.StepTime, decay: float) -> tf.Tensor:
  """Computes the share of the trained network in the server's moving average.

  It is (1 - decay) (cos(pi k / 20,000) + 1) / 2 with k = 1,000 round + step.

  Args:
    time: The time of the step.
    decay: The least share of the old average, in [0, 1].

  Returns:
    float32 scalar.
  """
  # Pre-training comes before round 1.
  rounds = tf.cast(tf.maximum(time.round_num, 0), tf.float32)
  step = _STEPS_PER_ROUND * rounds + tf.cast(time.step, tf.float32)
  return (1.0 - decay) * (tf.cos(math.pi * step / _PERIOD) + 1.0) / 2.0
