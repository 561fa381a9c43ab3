"""The interface between an algorithm and local training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple, TypeAlias

from tff_fssl.data import augment
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models.weights import Weights

# The broadcast model, where `Peer.starts_from` names weights.
MODEL = 'model'
# The kinds of view in `Stream.views`.
VIEW_KINDS = ('plain', 'weak', 'strong')

# A metric that is a mean: (sum, count), both float32 scalars. A step's count is
# at most the number of examples in its batch: clients whose counts are larger
# than what their data allow are rejected.
Ratio: TypeAlias = 'tuple[tf.Tensor, tf.Tensor]'


def ratio(total: tf.Tensor, count: tf.Tensor) -> Ratio:
  """A metric as the pair that is summed over batches and clients."""
  return (tf.cast(total, tf.float32), tf.cast(count, tf.float32))


def mean_metric(mean: tf.Tensor, size: tf.Tensor) -> Ratio:
  """A batch's mean (a loss) as a metric weighted by the batch's size."""
  size = tf.cast(size, tf.float32)
  return (tf.cast(mean, tf.float32) * size, size)


def check_name(
  name: str, known: Collection[str], where: str, what: str
) -> None:
  """Checks a name that an algorithm gives.

  Args:
    name: The name.
    known: The names that there are.
    where: Where the algorithm gives it.
    what: What the names stand for, in the plural.

  Raises:
    UsageError: If there is no such name.
  """
  if name not in known:
    raise UsageError(
      f'{where}={name!r}: there is no such name; the {what}:'
      f' {", ".join(known) or "none"}{closest(name, known)}'
    )


class Named(dict[str, Any]):
  """Values by their names; the error for another name lists these."""

  def __missing__(self, name: str) -> Any:
    known = ', '.join(self) or 'none'
    raise KeyError(
      f'{name!r}: there is no such name; there are: {known}'
      f'{closest(name, self)}'
    )


class Examples(NamedTuple):
  """Examples as a client holds them.

  Attributes:
    x: [N, ...] in its stored dtype (images: uint8 [N, H, W, C]).
    y: int32 [N]. For unlabelled examples, the hidden label, or -1 if it is
      unknown: for diagnostics only, never for training.
  """

  x: tf.Tensor
  y: tf.Tensor


class Clock(NamedTuple):
  """When a step is made.

  Attributes:
    round_num: int32 scalar; 1 is the first round in which clients train.
    step: int32 scalar, the step in this round's local training, from 0.
    num_steps: int32 scalar, the number of steps in it.
  """

  round_num: tf.Tensor
  step: tf.Tensor
  num_steps: tf.Tensor

  def progress(self, num_rounds: int) -> tf.Tensor:
    """The share of `num_rounds` rounds that is over: float32 in [0, 1]."""
    of_round = tf.cast(self.step, tf.float32) / tf.cast(
      tf.maximum(self.num_steps, 1), tf.float32
    )
    done = tf.cast(self.round_num - 1, tf.float32) + of_round
    return tf.clip_by_value(done / num_rounds, 0.0, 1.0)


class Stream(NamedTuple):
  """Examples that each batch takes from a client's data.

  Attributes:
    views: Name -> kind of view, one of `VIEW_KINDS`. Views of one kind have
      their own draws.
    labeled: Whether the examples are the labelled ones.
    partner_of: The name of another stream. Each of its examples in a batch gets
      a partner from this stream, drawn uniformly, with replacement, from all of
      the client's examples. '': this stream has batches of its own, cut from
      seeded permutations of the examples, pass after pass.
    episode: If not None, each batch is instead drawn afresh from all examples,
      without replacement, and a pass is one batch. Of a labelled stream: of
      each class as many examples for each group as the numbers say, (1, 2) for
      one support and two query examples (`Part.group`); the first groups get
      theirs first where a class has fewer. A client without labelled examples
      makes no step. Of an unlabelled stream, (): as many as a batch has.
  """

  views: Mapping[str, str]
  labeled: bool = False
  partner_of: str = ''
  episode: tuple[int, ...] | None = None


class Part(NamedTuple):
  """A stream's part of a batch, B examples.

  Attributes:
    views: Name -> preprocessed images float32 [B, ...].
    labels: int32 [B]; of unlabelled examples the hidden ones, for diagnostics
      only.
    weights: float32 [B]: 1, but 0 for the filler that stands in for examples
      that a client does not have. Losses and metrics must leave these out.
    of_example: `Prepared.of_example` for these examples, if unlabelled.
    group: Of labelled examples in an episode, int32 [B]: the index of the group
      that each was drawn for. Else None.
  """

  views: Mapping[str, tf.Tensor]
  labels: tf.Tensor
  weights: tf.Tensor
  of_example: Mapping[str, tf.Tensor] = {}
  group: tf.Tensor | None = None


class Batch(NamedTuple):
  """The input of a training step.

  Attributes:
    parts: Name of stream -> its part.
    constants: `Prepared.constants`.
    clock: When the step is made.
    seed: int32 [2], for the step's own draws; another one in each step.
  """

  parts: Mapping[str, Part]
  constants: Mapping[str, tf.Tensor]
  clock: Clock
  seed: tf.Tensor


class Prepared(NamedTuple):
  """Values that an algorithm computes from a client's data before training.

  Attributes:
    selected: int32 [M], indices of the unlabelled examples to train on.
    of_example: Name -> [N, ...], a value for each unlabelled example, which
      goes with it into batches (pseudo-labels, masks).
    constants: Name -> tensor, values that every batch contains.
    ratios: Name -> metric of the round, a mean over examples.
    ranges: Name -> float32 scalar in [0, 1] (thresholds, shares), reported as
      min, mean and max over clients; other values get the client rejected.
    weight: float32 scalar in [0, 1], the weight of the update in the
      aggregation, if the algorithm `weighs`; None: `client_weighting` decides.
    rate: float32 scalar, a factor of the round's learning rate; None: 1.
  """

  selected: tf.Tensor
  of_example: Mapping[str, tf.Tensor] = {}
  constants: Mapping[str, tf.Tensor] = {}
  ratios: Mapping[str, Ratio] = {}
  ranges: Mapping[str, tf.Tensor] = {}
  weight: tf.Tensor | None = None
  rate: tf.Tensor | None = None


class ClientData(NamedTuple):
  """What a client has at the start of a round.

  Attributes:
    weights: The weights that training starts from.
    labeled: Labelled examples, perhaps none.
    unlabeled: Unlabelled examples, perhaps none.
    received: Name -> tensor, what else the server sent.
    round_num: int32 scalar.
    seed: int32 [2], for draws before and after training.
    sets: Name -> the weights of a set that the server sent, from which peers
      start.
  """

  weights: Weights
  labeled: Examples
  unlabeled: Examples
  received: Mapping[str, tf.Tensor]
  round_num: tf.Tensor
  seed: tf.Tensor
  sets: Mapping[str, Weights] = {}


class Networks(NamedTuple):
  """The networks of a client.

  Attributes:
    local: The network that is trained and sent back.
    peers: Name -> a further network (a teacher, a helper).
  """

  local: adapter.Network
  peers: Mapping[str, adapter.Network] = {}

  @contextlib.contextmanager
  def draws(self, seed: tf.Tensor) -> Iterator[None]:
    """A context in which all networks draw from `seed`, int32 [2]."""
    with contextlib.ExitStack() as stack:
      for network in (self.local, *self.peers.values()):
        stack.enter_context(network.draws(seed))
      yield


class Peer(NamedTuple):
  """A further network of a client.

  Attributes:
    starts_from: The name of the server's weight set that it starts from; a
      name that the server never sends is an error. `MODEL`, and any set in a
      round in which the server does not send it: the local network's weights.
      Without effect with a `model_fn`.
    trained: Whether steps return gradients for it.
    uploaded: Whether its change is sent to the server, as part of the update.
    model_fn: The local network -> a Keras model of another kind. Such a peer
      starts from initial weights that are the same for all clients in all
      rounds, a function of the run's seed; it cannot be uploaded.
    start: (the weights from which it would start, what else the server sent) ->
      those from which it starts instead.
  """

  starts_from: str = MODEL
  trained: bool = False
  uploaded: bool = False
  model_fn: Callable[[adapter.Network], tf.keras.Model] | None = None
  start: Start | None = None


class Signal(NamedTuple):
  """A number that a client sends besides its update, for the server's use.

  The server gets the mean over the clients whose numbers are in range; the
  others are rejected. Signals are not released as metrics.

  Attributes:
    low: The least possible value.
    high: The greatest possible value, or a function of the number of classes
      that gives it.
  """

  low: float
  high: float | Callable[[int], float]

  def limits(self, num_classes: int) -> tuple[float, float]:
    """The least and the greatest possible value."""
    high = self.high(num_classes) if callable(self.high) else self.high
    return self.low, high


class StepResult(NamedTuple):
  """The result of a training step.

  Attributes:
    gradients: Gradients of the minimized loss, one per trainable variable of
      the local network; None if this step does not train it.
    ratios: Name -> metric of the batch.
    of_peers: Name of a trained peer -> gradients for it.
  """

  gradients: Sequence[tf.Tensor] | None
  ratios: Mapping[str, Ratio]
  of_peers: Mapping[str, Sequence[tf.Tensor]] = {}


class Finished(NamedTuple):
  """What a client sends besides its update.

  Attributes:
    signals: Name -> float32 scalar, for each of `LocalAlgorithm.signals`.
    row: Name -> tensor, what the server's exchange keeps of this client.
    ratios: Name -> metric of the round.
  """

  signals: Mapping[str, tf.Tensor] = {}
  row: Mapping[str, tf.Tensor] = {}
  ratios: Mapping[str, Ratio] = {}


Step = Callable[[Networks, Batch], StepResult]
# (the model's weights, what else the server sent) -> weights.
Start: TypeAlias = 'Callable[[Weights, Mapping[str, tf.Tensor]], Weights]'
Prepare = Callable[[Networks, ClientData, augment.Views], Prepared]
# (networks, data, views, summed ratios of the training) -> Finished.
Finish = Callable[
  [Networks, ClientData, augment.Views, Mapping[str, Ratio]], Finished
]


class LocalAlgorithm(NamedTuple):
  """The local part of an algorithm, as pure functions.

  Attributes:
    steps: Made one after another on each batch. They must leave the weights of
      all networks as they were: the loop clips and applies the gradients.
    streams: Name -> stream. At most one labelled and one unlabelled stream have
      batches of their own; the longer of the two decides the number of steps.
    prepare: Called once a round. None: all examples are selected, nothing is
      computed.
    after_step: Called after the steps of each batch; may assign to peers.
    finish: Called once after training. What it assigns to the networks is what
      is sent. None: they are sent as they are, and nothing else.
    peers: Name -> further network.
    signals: Name -> number that `finish` returns.
    weighs: Whether `prepare` sets the weight of the update.
    start: The weights that training starts from, to which the update and
      FedProx's term refer. None: the model's.
  """

  steps: tuple[Step, ...]
  streams: Mapping[str, Stream]
  prepare: Prepare | None = None
  after_step: Callable[[Networks, Batch], None] | None = None
  finish: Finish | None = None
  peers: Mapping[str, Peer] = {}
  signals: Mapping[str, Signal] = {}
  weighs: bool = False
  start: Start | None = None

  def check_names(self, sets: Collection[str], sender: str) -> None:
    """Checks that all that the algorithm refers to by a name exists.

    Args:
      sets: The names of the weight sets from which peers can start.
      sender: Where these come from, for messages.

    Raises:
      UsageError: If something does not exist.
    """
    for name, stream in self.streams.items():
      if stream.partner_of:
        others = [other for other in self.streams if other != name]
        check_name(
          stream.partner_of, others, f'stream {name!r}: partner_of', 'streams'
        )
      for view, kind in stream.views.items():
        check_name(
          kind, VIEW_KINDS, f'stream {name!r}, view {view!r}', 'kinds of view'
        )
    for name, peer in self.peers.items():
      if peer.model_fn is None:
        check_name(
          peer.starts_from,
          (MODEL, *sets),
          f'peer {name!r}: starts_from',
          f'weights that {sender}',
        )

  def own_stream(self, *, labeled: bool) -> str | None:
    """The labelled or unlabelled stream with batches of its own, if any."""
    names = [
      name
      for name, stream in self.streams.items()
      if stream.labeled == labeled and not stream.partner_of
    ]
    if len(names) > 1:
      raise ValueError(f'streams {names}: only one may have its own batches')
    return names[0] if names else None

  @property
  def draws_episodes(self) -> bool:
    """Whether labelled batches are episodes: see `Stream.episode`."""
    name = self.own_stream(labeled=True)
    return name is not None and self.streams[name].episode is not None

  @property
  def trains_on_unlabeled(self) -> bool:
    """Whether batches contain unlabelled examples."""
    return self.own_stream(labeled=False) is not None

  @property
  def trains_on_labels(self) -> bool:
    """Whether batches contain labelled examples."""
    return self.own_stream(labeled=True) is not None
