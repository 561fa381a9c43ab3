"""The interface of an algorithm: its methods, and the types they exchange.

An algorithm is one class. Its fields are its hyper-parameters, from which its
flags are made. Its methods are the steps of a round, in the order of their
definitions in `Algorithm`. The base class is FedAvg on labelled examples. A
paper overrides the methods that it changes. `fixmatch.py` is the smallest
example.

Shapes: B examples in a batch, N examples of a client, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from tff_fssl import hparams as hparams_lib
from tff_fssl import metrics as metrics_lib
from tff_fssl.data import augment
from tff_fssl.interface import channels
from tff_fssl.interface import entry
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import groups as groups_lib
from tff_fssl.interface import names
from tff_fssl.interface import round_hparams
from tff_fssl.interface import setup as setup_lib
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import inference
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, all_finite, select
from tff_fssl.semisup import losses
from tff_fssl.semisup import means

RoundHparams = round_hparams.RoundHparams
Broadcast = channels.Broadcast
Upload = channels.Upload
SUM, ROWS = channels.SUM, channels.ROWS
Setup = setup_lib.Setup
Capabilities = entry.Capabilities
Mean = means.Mean
Tensors: TypeAlias = 'Mapping[str, tf.Tensor]'

LABELS_AT_SERVER = round_hparams.LABELS_AT_SERVER
LABELS_AT_CLIENTS = round_hparams.LABELS_AT_CLIENTS
LABELED, UNLABELED = 'labeled', 'unlabeled'
WEAK = {'weak': 'weak'}
WEAK_AND_STRONG = {'weak': 'weak', 'strong': 'strong'}


Metrics: TypeAlias = 'dict[str, Mean]'
# A differentiable scalar, its weight included, and the metrics of the batch.
Loss: TypeAlias = 'tuple[tf.Tensor, Metrics]'
# The name of the network that the server sends, among a client's networks.
MODEL = channels.MODEL


class Descend(Protocol):
  """A step of a network, within `Algorithm.step`."""

  def __call__(
    self,
    name: str,
    gradients: Sequence[tf.Tensor],
    rate_factor: tf.Tensor | float = 1.0,
    /,
  ) -> None:
    """Moves a network at once, by the clients' optimizer.

    Args:
      name: `MODEL`, or the name of a trained auxiliary network. The model's
        later passes draw anew, so move it outside of `tf.cond`.
      gradients: float32, one per trainable variable.
      rate_factor: float32 scalar, a factor of the learning rate.
    """


def _no_training(*_: Any) -> None:
  raise RuntimeError('networks.descend: only steps of a training move networks')


class Examples(NamedTuple):
  """Examples as a client stores them.

  Attributes:
    x: [N, ...] in the stored type. Images are uint8 [N, H, W, channels].
    y: int32 [N]. For unlabelled examples the hidden label, or -1 if it is not
      known. Only metrics read hidden labels, and ablations that say so
      (`--fl2.consistency_on=correct`).
  """

  x: tf.Tensor
  y: tf.Tensor


class Stream(NamedTuple):
  """The examples that each batch takes from a client's data.

  Attributes:
    views: Name -> kind of view: `plain`, `weak` or `strong`. Views of one kind
      are drawn independently.
    labeled: Whether these are the labelled examples.
    partner_of: The name of another stream. Each of its examples gets a partner
      from this stream, drawn with replacement. With '' the stream has batches
      of its own, cut from seeded permutations of the examples.
    episode: None: batches are cut from permutations. Else each batch is an
      episode, drawn anew from all examples: of each class of labelled ones, so
      many for each group. (1, 2) draws one support and two query examples of
      each class. For unlabelled examples, ().
  """

  views: Mapping[str, str]
  labeled: bool = False
  partner_of: str = ''
  episode: tuple[int, ...] | None = None


class BatchExamples(NamedTuple):
  """The examples of one stream in a batch.

  Attributes:
    views: Name -> network inputs, float32 [B, ...].
    labels: int32 [B]. For unlabelled examples, hidden labels (`Examples.y`).
    weights: float32 [B], 1, or 0 for fillers that stand in for examples which
      the client does not have. Losses and metrics must ignore fillers.
    per_example: `Prepared.per_example`, for these examples.
    group: int32 [B], the group of each example in an episode. None without
      episodes.
  """

  views: Tensors
  labels: tf.Tensor
  weights: tf.Tensor
  per_example: Tensors = {}
  group: tf.Tensor | None = None

  @property
  def size(self) -> tf.Tensor:
    """Counts the examples that are not fillers: float32 scalar."""
    return tf.reduce_sum(self.weights)

  def logits(self, network: adapter.Network, view: str) -> tf.Tensor:
    """Computes logits in training mode, without fillers: float32 [B, C]."""
    return network.logits(self.views[view], training=True, weights=self.weights)


class StepTime(NamedTuple):
  """The time of a step.

  Attributes:
    round_num: int32 scalar. Clients train from round 1 on.
    step: int32 scalar, counts this client's steps in this round from 0.
    num_steps: int32 scalar, the steps of the whole round.
  """

  round_num: tf.Tensor
  step: tf.Tensor
  num_steps: tf.Tensor

  def progress(self, num_rounds: int) -> tf.Tensor:
    """Computes the elapsed share of `num_rounds` rounds, in [0, 1]."""
    # A client without examples makes no steps.
    within = tf.cast(self.step, tf.float32) / tf.cast(
      tf.maximum(self.num_steps, 1), tf.float32
    )
    elapsed = tf.cast(self.round_num - 1, tf.float32) + within
    return tf.clip_by_value(elapsed / num_rounds, 0.0, 1.0)


class Batch(NamedTuple):
  """The input of a step.

  Attributes:
    streams: Name of a stream -> its examples.
    values: `Prepared.values`, as the steps before have changed them.
    time: The time of the step.
    seed: int32 [2], for the step's own random draws.
  """

  streams: Mapping[str, BatchExamples]
  values: Tensors
  time: StepTime
  seed: tf.Tensor

  @property
  def labeled(self) -> BatchExamples:
    """Returns the labelled examples."""
    return self.streams[LABELED]

  @property
  def unlabeled(self) -> BatchExamples:
    """Returns the unlabelled examples."""
    return self.streams[UNLABELED]


@dataclasses.dataclass(frozen=True)
class Networks:
  """The networks of a client: `networks.model`, `networks['teacher']`.

  Attributes:
    model: The network that the client trains for the server.
    auxiliary: Name -> auxiliary network (`Algorithm.networks`).
    descend: Moves a network within a step. See `Descend`.
  """

  model: adapter.Network
  auxiliary: Mapping[str, adapter.Network]
  descend: Descend = _no_training

  def __getitem__(self, name: str) -> adapter.Network:
    return self.auxiliary[name]


class AuxiliaryNetwork(NamedTuple):
  """A network of a client in addition to the model.

  Attributes:
    trained: Whether steps move it, by `Networks.descend`.
    uploaded: Whether its change is uploaded and averaged like the model's.
    build: A function from the client's model to another Keras model. Its
      initial weights are a function of the run's seed, the same for all clients
      in all rounds.
  """

  trained: bool = False
  uploaded: bool = False
  build: Callable[[adapter.Network], tf.keras.Model] | None = None


@dataclasses.dataclass(frozen=True)
class Client:
  """A client in a round, before or after its steps.

  Attributes:
    networks: Its networks, with their current weights.
    weights: The model's weights that it started from.
    labeled: Its labelled examples, possibly none.
    unlabeled: Its unlabelled examples, possibly none.
    received: Name of a broadcast -> value. A network that was not sent has the
      model's weights. Any other value that was not sent is 0.
    views: Makes network inputs of stored examples.
    round_num: int32 scalar.
    seed: int32 [2], for random draws outside of steps.
    values: In `finish`, `Prepared.values` as the steps have changed them.
  """

  networks: Networks
  weights: Weights
  labeled: Examples
  unlabeled: Examples
  received: Mapping[str, Any]
  views: augment.Views
  round_num: tf.Tensor
  seed: tf.Tensor
  values: Tensors = dataclasses.field(default_factory=dict)

  def predict(self, batch_size: int, *, own_moments: bool = False) -> tf.Tensor:
    """Predicts a weak view of each unlabelled example by the model.

    Args:
      batch_size: Examples in a forward pass.
      own_moments: Whether batch norm normalizes by the moments of each pass,
        instead of the received statistics.

    Returns:
      Probabilities, float32 [N, C].
    """
    logits = inference.weak_logits(
      self.networks.model,
      self.unlabeled.x,
      self.views,
      self.seed,
      batch_size,
      own_moments=own_moments,
    )
    return tf.nn.softmax(logits)


class Prepared(NamedTuple):
  """Values that a client computes before its first step.

  Attributes:
    selected: int32 [M], indices of the unlabelled examples to train on. None
      selects all of them.
    per_example: Name -> [N, ...], a value for each unlabelled example, such as
      its pseudo-label.
    values: Name -> tensor, which steps and `finish` get. Each step may replace
      it by one of the same type.
    metrics: Name -> metric of the round.
    ranges: Name -> float32 scalar in [0, 1], reported as minimum, mean and
      maximum over clients. A client with another value is rejected.
    weight: float32 scalar in [0, 1], the weight of the client's update. With
      None, `RoundHparams.client_weighting` decides. See
      `Algorithm.sets_weights`.
    learning_rate_factor: float32 scalar, for all steps of the round. None
      stands for 1.
    num_epochs: int32 scalar, at most `RoundHparams.client_epochs`, which None
      stands for. `RoundHparams.client_steps` overrides it.
  """

  selected: tf.Tensor | None = None
  per_example: Tensors = {}
  values: Tensors = {}
  metrics: Mapping[str, Mean] = {}
  ranges: Tensors = {}
  weight: tf.Tensor | None = None
  learning_rate_factor: tf.Tensor | None = None
  num_epochs: tf.Tensor | None = None


class StepResult(NamedTuple):
  """The result of a step. The loop clips and applies the gradients.

  Attributes:
    gradients: float32, one per trainable variable of the model. None if the
      step does not train it, or has moved it by `Networks.descend`.
    metrics: Metrics of the batch.
    values: New values of some of `Batch.values`.
  """

  gradients: Sequence[tf.Tensor] | None
  metrics: Metrics
  values: Tensors = {}


class ClientOutput(NamedTuple):
  """A client's uploads and metrics at the end of its round.

  Attributes:
    uploads: Name -> value, for each of `Algorithm.uploads` and for each value
      that the `exchange` keeps of the client.
    metrics: Metrics of the round.
    weight: As `Prepared.weight`, which None stands for.
  """

  uploads: Tensors = {}
  metrics: Mapping[str, Mean] = {}
  weight: tf.Tensor | None = None


class ServerState(NamedTuple):
  """The server's state between rounds, without optimizer states.

  Attributes:
    weights: The model.
    memory: The algorithm's own NamedTuple, or (). In a discarded round, only
      `Algorithm.after_round` changes it.
  """

  weights: Weights
  memory: Any = ()

  def remember(self, **values: Any) -> ServerState:
    """Returns the state with some fields of the memory replaced."""
    return self._replace(memory=self.memory._replace(**values))


@dataclasses.dataclass(frozen=True)
class Aggregate:
  """All that a round's clients have sent: `aggregate[name]`.

  The names are those of uploaded auxiliary networks, for their combined
  changes, and of `Algorithm.uploads`, for what `Upload.how` says.

  Attributes:
    update: The combined change of the model, weights before training minus
      weights after it. NaN if no client's weight was positive. () with groups,
      which use `by_group`.
    values: Name -> value. With groups, without networks.
    num_reports: float32 scalar, the clients that report.
    by_group: Computes the combined updates of each of several groups.
  """

  update: tuple[tf.Tensor, ...]
  values: Mapping[str, Any]
  num_reports: tf.Tensor
  by_group: Callable[[], groups_lib.ByGroup]

  def __getitem__(self, name: str) -> Any:
    return self.values[name]

  def move(self, name: str, old: Weights) -> Weights:
    """Applies the combined change of a network, unless it is not finite."""
    new = tuple(w - c for w, c in zip(old.trainable, self[name], strict=True))
    # The change is NaN if no client's weight was positive.
    new = select(all_finite(new), new, lambda: tuple(old.trainable))
    return old._replace(trainable=new)


class Server:
  """The server in a round: its optimizer and its labelled examples.

  Attributes:
    round_num: int32 scalar, below 1 in server pre-training.
    seed: int32 [2], for random draws of `Algorithm.update`.
    setup: What was known before the first round.
  """

  round_num: tf.Tensor
  seed: tf.Tensor
  setup: Setup

  def apply(self, weights: Weights, update: Sequence[tf.Tensor]) -> Weights:
    """Applies an update by the server's optimizer, once a round."""
    raise NotImplementedError

  def train(self, weights: Weights, copy: int = 0) -> Weights:
    """Trains on the server's labels.

    Without labels at the server, it returns the weights unchanged.

    Args:
      weights: The weights to start from.
      copy: The number of the training in this round. Each draws its own batches
        and views.

    Returns:
      The trained weights.
    """
    raise NotImplementedError

  def train_networks(
    self, weights: Weights, networks: Mapping[str, Weights]
  ) -> tuple[Weights, Mapping[str, Weights]]:
    """Trains the model together with `server_trainer`'s networks."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """An algorithm, with hyper-parameters as fields and steps as methods.

  Without changes, this class is FedAvg on labelled examples. In a round:

  1.  The server broadcasts its model and `broadcasts`.
  2.  Each client starts its `networks`, and calls `prepare`.
  3.  For each batch of its `streams` it makes a `step` on `unlabeled_loss` and
      `labeled_loss`, then calls `after_step`.
  4.  It uploads the change of its model, and the values that `finish` returns
      for the declared `uploads`.
  5.  The server combines the uploads and calls `update`.

  What the server remembers is its memory, one for all clients. What belongs to
  one client is a row of the table of an `exchange`.

  Methods that take tensors run inside TensorFlow graphs. All are pure functions
  of `self` and their arguments. Only `after_step` and `finish` may assign to
  networks. A step may move them by `networks.descend`.

  Class attributes:
    name: The value of `--algorithm` and the prefix of the algorithm's flags.
    flags_of: Another algorithm, which has all of its flags. It then reads these
      instead of flags of its own. Subclasses do not inherit this.
    paper: Authors, venue and year.
    scenarios: Where the labels may be.
    trains_clients: The scenarios in which clients train. None: all of them.
    labeled_views: See `Stream.views`.
    unlabeled_views: The same for unlabelled examples. {} if clients use none.
    embeds: Whether networks are used without their classifier, their last
      layer, so that their outputs are embeddings.
    head_stays: Whether the model's last layer stays at the server. Clients get
      zeros for it and send no change of it.
    alone: Whether each client keeps a model of its own, without federation.
    round_defaults: The paper's values of fields of `RoundHparams`.
    norm: The paper's normalization layers. With '', the program's default.
    normalization: The authors' normalization of images. With '', the program's
      default.
    capabilities: Demands on a deployment that methods do not tell.
    metrics: Declarations of the metrics that only this algorithm reports.
    tiny: Hyper-parameters by which tests reach all of the code with a few
      examples and an untrained network.

  Attributes:
    round: Hyper-parameters that all algorithms share, such as the place of the
      labels and the number of epochs. By default, the paper's.
  """

  name: ClassVar[str] = ''
  flags_of: ClassVar[str] = ''
  paper: ClassVar[str] = ''
  scenarios: ClassVar[tuple[str, ...]] = (LABELS_AT_SERVER, LABELS_AT_CLIENTS)
  trains_clients: ClassVar[tuple[str, ...] | None] = None
  labeled_views: ClassVar[Mapping[str, str]] = WEAK
  unlabeled_views: ClassVar[Mapping[str, str]] = {}
  embeds: ClassVar[bool] = False
  head_stays: ClassVar[bool] = False
  alone: ClassVar[bool] = False
  round_defaults: ClassVar[Mapping[str, Any]] = {}
  norm: ClassVar[str] = ''
  normalization: ClassVar[str] = ''
  capabilities: ClassVar[Capabilities] = Capabilities()
  metrics: ClassVar[tuple[metrics_lib.Metric, ...]] = ()
  tiny: ClassVar[Mapping[str, Any]] = {}

  # None becomes the paper's values, so that `Fl2().round` is complete.
  round: RoundHparams = dataclasses.field(
    default=None,  # type: ignore[assignment]
    kw_only=True,
    metadata={'is_flag': False},
  )

  def __post_init__(self) -> None:
    if self.round is None:
      values = {'scenario': self.scenarios[0], **self.round_defaults}
      object.__setattr__(self, 'round', RoundHparams(**values))
    hparams_lib.validate(self, self.prefix())
    self.check()

  @classmethod
  def prefix(cls) -> str:
    """Returns the prefix of the flags."""
    return f'{vars(cls).get("flags_of", cls.name)}.'

  def check(self) -> None:
    """Raises `UsageError` for values that contradict each other."""

  # The server, before a round.

  def initial_state(self, weights: Weights, setup: Setup) -> ServerState:
    """Makes the state before the first round, or from a user's weights."""
    del setup
    return ServerState(weights)

  def broadcasts(self, state: ServerState) -> Mapping[str, Broadcast]:
    """Returns the values that clients receive in addition to the model."""
    del state
    return {}

  # A client.

  def networks(self) -> Mapping[str, AuxiliaryNetwork]:
    """Declares the auxiliary networks of a client."""
    return {}

  def uploads(self, setup: Setup) -> Mapping[str, Upload]:
    """Declares the values that clients send in addition to changes."""
    del setup
    return {}

  def is_possible(self, uploads: Tensors) -> tf.Tensor:
    """Tells whether an honest client can have sent these `uploads` together.

    A client of which this is false is rejected.

    Args:
      uploads: Name -> value, of one client.

    Returns:
      bool scalar.
    """
    del uploads
    return tf.constant(True)

  @property
  def sets_weights(self) -> bool:
    """Tells whether the algorithm sets the weight of the client's update."""
    return False

  def streams(self) -> dict[str, Stream]:
    """Declares the examples of a client's batch."""
    streams, unlabeled = {}, self.unlabeled_stream()
    if unlabeled is not None:
      streams[UNLABELED] = unlabeled
    # Clients that do not train still need a batch's type.
    if self.round.labels_at_clients or not streams:
      streams[LABELED] = self.labeled_stream()
    return streams

  def unlabeled_stream(self) -> Stream | None:
    """Declares the unlabelled examples of a batch, if clients use some."""
    return Stream(self.unlabeled_views) if self.unlabeled_views else None

  def labeled_stream(self) -> Stream:
    """Declares the labelled examples of a batch, also of the server's."""
    return Stream(self.labeled_views, labeled=True)

  def start(
    self, name: str, weights: Weights, received: Mapping[str, Any]
  ) -> Weights:
    """Returns the weights that a network of a client starts from.

    An auxiliary network starts from the broadcast of its name, if there is one.

    Args:
      name: `MODEL`, or the name of an auxiliary network.
      weights: The weights of the model: for the model, those that were
        received, and for others, those that it starts from. For a network with
        a `build`, its own initial weights.
      received: `Client.received`.

    Returns:
      The weights.
    """
    return weights if name == MODEL else received.get(name, weights)

  def prepare(self, client: Client) -> Prepared:
    """Computes values that all steps of the round use."""
    del client
    return Prepared()

  def unlabeled_loss(self, networks: Networks, batch: Batch) -> Loss:
    """Computes the loss on unlabelled examples."""
    raise NotImplementedError

  def labeled_loss(self, networks: Networks, batch: Batch) -> Loss:
    """Computes the mean cross-entropy of labelled examples."""
    examples = batch.labeled
    return cross_entropy_loss(examples.logits(networks.model, 'weak'), examples)

  def unlabeled_step(self, networks: Networks, batch: Batch) -> StepResult:
    """Differentiates `unlabeled_loss`."""
    return minimize(self.unlabeled_loss, networks, batch)

  def labeled_step(self, networks: Networks, batch: Batch) -> StepResult:
    """Differentiates `labeled_loss`, at clients and at the server."""
    return minimize(self.labeled_loss, networks, batch)

  def step(self, networks: Networks, batch: Batch) -> StepResult:
    """Adds the gradients of a batch's unlabelled and labelled examples."""
    results = []
    if UNLABELED in batch.streams:
      results.append(self.unlabeled_step(networks, batch))
    if LABELED in batch.streams:
      results.append(self.labeled_step(networks, batch))
    return add_results(*results)

  def after_step(self, networks: Networks, batch: Batch) -> None:
    """Changes auxiliary networks after the gradients were applied."""

  def finish(self, client: Client, metrics: Mapping[str, Mean]) -> ClientOutput:
    """Computes the uploads, and metrics of the whole round.

    Assignments to networks become part of the uploaded change.

    Args:
      client: The client after its last step.
      metrics: The metrics of its steps, summed.

    Returns:
      A value for each of `uploads`.
    """
    del client, metrics
    return ClientOutput()

  # The server, after a round.

  def server_trainer(self) -> Algorithm:
    """Returns the algorithm with the `labeled_step` of the server's training.

    Its `networks` start from the server's memory, by name.
    """
    return self

  @property
  def num_trainings(self) -> int:
    """Returns the number of calls of `Server.train` in a round."""
    return 1

  def update(
    self, state: ServerState, aggregate: Aggregate, server: Server
  ) -> ServerState:
    """Applies the clients' update, then trains on the server's labels."""
    weights = server.apply(state.weights, aggregate.update)
    return state._replace(weights=server.train(weights))

  def after_round(self, memory: Any, round_num: tf.Tensor) -> Any:
    """Changes in the memory what is due by the round's number.

    It follows `update`. Unlike that, it is called in discarded rounds, too.

    Args:
      memory: `ServerState.memory`.
      round_num: int32 scalar, of the round that ends.

    Returns:
      The memory.
    """
    del round_num
    return memory

  def exchange(self) -> exchange_lib.BuildExchange | None:
    """Returns the function that makes the table which the server keeps."""
    return None

  def prediction(self) -> server_model.Prediction | None:
    """Returns the prediction that replaces the model's own, if there is one."""
    return None

  def groups(self) -> groups_lib.Groups | None:
    """Declares the groups of clients that are combined separately."""
    return None

  # Evaluation.

  def predicting_weights(self, state: ServerState) -> Weights:
    """Returns the weights that predict, and that are exported."""
    return state.weights

  def other_predictions(self) -> Mapping[str, Callable[[ServerState], Weights]]:
    """Returns other weights to evaluate, such as a teacher's, by name."""
    return {}


def minimize(
  loss_fn: Callable[[Networks, Batch], Loss], networks: Networks, batch: Batch
) -> StepResult:
  """Differentiates a loss with respect to the model's weights."""
  with tf.GradientTape() as tape:
    loss, metrics = loss_fn(networks, batch)
  return StepResult(networks.model.gradients(tape, loss), metrics)


def add_results(first: StepResult, *others: StepResult) -> StepResult:
  """Adds gradients of the model, and merges other values."""
  for other in others:
    # Steps that move the model one after the other use `Networks.descend`.
    assert first.gradients is not None and other.gradients is not None
    gradients = [
      a + b for a, b in zip(first.gradients, other.gradients, strict=True)
    ]
    first = first._replace(
      gradients=gradients,
      metrics=names.join('metrics', first.metrics, other.metrics),
      values={**first.values, **other.values},
    )
  return first


def cross_entropy_loss(logits: tf.Tensor, examples: BatchExamples) -> Loss:
  """Computes the mean cross-entropy with labels, and the accuracy.

  Args:
    logits: float32 [B, C].
    examples: Labelled examples.

  Returns:
    The loss and the metrics `loss_labeled` and `labeled_accuracy`.
  """
  entropies = losses.cross_entropy(examples.labels, logits)
  loss = losses.masked_mean(entropies, examples.weights)
  correct = tf.cast(
    tf.equal(tf.argmax(logits, -1, tf.int32), examples.labels), tf.float32
  )
  return loss, {
    'loss_labeled': Mean.weighted(loss, examples.size),
    'labeled_accuracy': Mean(
      tf.reduce_sum(correct * examples.weights), examples.size
    ),
  }
