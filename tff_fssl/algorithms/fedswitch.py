"""FedSwitch, and TS-Server EMA and TS-Client EMA, its baselines.

Zhao, Ghosh, Bharadwaj and Ma, "When does the student surpass the teacher?
Federated Semi-supervised Learning with Teacher-Student EMA", arXiv 2023
(2301.10114). There is no code of the authors.

In a round of TS-Server EMA:
1.  The server sends the student S and the teacher T.
2.  For each batch, a client predicts weak views by T. It makes a step of SGD on
    FixMatch's loss for S, with FedProx's term. With labels at the clients, the
    loss of a labelled batch is added.
3.  It sends the change of S. The server averages and, with labels at the
    server, trains S on them. Then T <- a T + (1 - a) S.

TS-Client EMA: After each batch T <- a' T + (1 - a') S. Clients send the change
of T, too. The server's T is the mean of the clients' teachers. With labels at
the server, the round ends with T <- a T + (1 - a) S. This is our choice:
without it, labels would reach T only through clients.

FedSwitch: The server decides which network labels, the teacher or the current
student. At clients, T follows S as in TS-Client EMA, but is not sent back. At
the server it follows S as in TS-Server EMA. Clients also send the divergences
of mean predictions for a batch from uniform, as means over batches: that of S
on strong views and, if they have T, that of T on weak views. With D_T, D_S the
means over clients, T labels the next round if and only if |D_T - beta| <
|D_S - beta|. T labels the first round.

The paper contradicts itself. docs/algorithms/fedswitch.md and its page of
details list all places, by these ids. Decided here:
C1  The closer network labels (eq. 3). Algorithms 1 and 2 have it inverted
    (`--fedswitch.labeler=algorithms`).
C2  A network is sent only if clients need it (text). Algorithms 1 and 2 always
    send T (`--fedswitch.labeler=algorithms`).
C4  T follows S at clients (text). In the algorithms it does so only at the
    server (`--fedswitch.local_ema_decay=1`).
C5  Divergences are means over batches (eq. 2), not sums.
C6  D_T in student rounds is the last one measured.
C8  D_S is of strong views (section 4.2), though S labels weak ones.
C9  The proximal term is mu/2 |S - S_round|^2, by `--proximal_strength`.
C13 The paper also calls the global teacher of TS-Client EMA an average of
    global students: that is `--fedswitch.labeler=teacher`.
C15 The loss on pseudo-labels is a mean over the batch, with a threshold.
C16 The divergences leave clients outside of the sum, so that `secure` and `dp`
    refuse them.

Choices where the paper is silent: T starts as S. A tie goes to the student. T
predicts with its own batch norm statistics, S with those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import divergence
from tff_fssl.semisup import moving_average
from tff_fssl.semisup import pseudo_labels

TEACHER = 'teacher'
# Values of --fedswitch.labeler, with TEACHER.
CLOSEST, ALGORITHMS, STUDENT = 'closest', 'algorithms', 'student'
# The two divergences, as uploads and as metrics.
_DIVERGENCES = ('student_divergence', 'teacher_divergence')
_MEASURED = 'is_measured'


class TeacherMemory(NamedTuple):
  """The server's memory.

  Attributes:
    teacher: The moving average of the students.
  """

  teacher: Weights


@dataclasses.dataclass(frozen=True)
class TsServerEma(base.Algorithm):
  """TS-Server EMA: the server keeps a teacher, which labels."""

  name = 'ts_server_ema'
  flags_of = 'fedswitch'
  paper = 'Zhao et al., arXiv 2023'
  unlabeled_views = base.WEAK_AND_STRONG
  # The paper's optimizers are plain SGD and FedAvg, with FedProx's term.
  round_defaults = {
    'client_epochs': 1,
    'server_epochs': 1,
    'max_gradient_norm': 0.0,
    'num_pretraining_rounds': 0,
    'proximal_strength': 0.01,
    'server_optimizer_momentum': 0.0,
  }
  tiny = {'confidence_threshold': 0.3}

  confidence_threshold: float = hparam(
    0.95,
    'Minimum probability of a pseudo-label (the paper tunes it and gives no'
    ' value; this is FixMatch, table 4).',
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'lambda_u, the weight of the loss on pseudo-labels relative to the loss on'
    ' labels (the paper gives no value; this is FixMatch, table 4).',
    minimum=0,
  )
  ema_decay: float = hparam(
    0.97,
    "alpha, the share of the old teacher in the server's moving average, a"
    ' round. The paper tunes it and gives no value; 0.5^(1 / (0.03 R)) halves'
    ' the weight of a student within 3% of R rounds: 0.89 for 200, 0.97 for'
    ' 800, 0.9986 for 16,000.',
    minimum=0,
    maximum=1,
  )

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts the teacher as the student."""
    del setup
    return base.ServerState(weights, TeacherMemory(weights))

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts the teacher in every round."""
    return {TEACHER: base.Broadcast(own_statistics=True)}

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Gives clients the teacher."""
    return {TEACHER: base.AuxiliaryNetwork()}

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes FixMatch's loss with the teacher's pseudo-labels (step 2)."""
    probs = self._teacher_probs(networks, batch)
    logits = batch.unlabeled.logits(networks.model, 'strong')
    return self._pseudo_label_loss(probs, logits, batch)

  def _pseudo_label_loss(
    self, probs: tf.Tensor, logits: tf.Tensor, batch: base.Batch
  ) -> base.Loss:
    """Computes the weighted loss on pseudo-labels of any network."""
    examples = batch.unlabeled
    loss, metrics = pseudo_labels.loss(
      probs,
      logits,
      examples.labels,
      examples.weights,
      self.confidence_threshold,
    )
    return self.unlabeled_loss_weight * loss, metrics

  def _teacher_probs(
    self, networks: base.Networks, batch: base.Batch
  ) -> tf.Tensor:
    """Predicts weak views by the teacher, as in evaluation: float32 [B, C]."""
    logits = networks[TEACHER].inference_logits(batch.unlabeled.views['weak'])
    return tf.nn.softmax(logits)

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Updates the student as FedAvg does, then moves the teacher to it."""
    state = super().update(state, aggregate, server)
    teacher = moving_average.follow(
      state.memory.teacher,
      state.weights,
      self.ema_decay,
      # In server pre-training the teacher is a copy of the student.
      started=server.round_num >= 1,
    )
    return state.remember(teacher=teacher)

  def other_predictions(
    self,
  ) -> Mapping[str, Callable[[base.ServerState], Weights]]:
    """Evaluates the teacher as well."""
    return {TEACHER: lambda state: state.memory.teacher}


_LOCAL_EMA_DECAY = (
  "alpha of the client's moving average, a batch; 1: the teacher stays as it"
  ' was sent. The paper has one alpha for both; at 0.999, five batches would'
  ' move the teacher by half a percent of the way to the student.'
)


@dataclasses.dataclass(frozen=True)
class TsClientEma(TsServerEma):
  """TS-Client EMA: clients train a teacher, too, and send it back."""

  name = 'ts_client_ema'
  flags_of = 'fedswitch'

  local_ema_decay: float = hparam(0.97, _LOCAL_EMA_DECAY, minimum=0, maximum=1)

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Makes clients upload the teacher."""
    return {TEACHER: base.AuxiliaryNetwork(uploaded=True)}

  def after_step(self, networks: base.Networks, batch: base.Batch) -> None:
    """Moves the client's teacher towards its student."""
    del batch
    moving_average.follow_network(
      networks[TEACHER], networks.model, self.local_ema_decay
    )

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Averages the teachers, too."""
    # Before the student: `super().update` lets the teacher follow it.
    average = aggregate.move(TEACHER, state.memory.teacher)
    state = super().update(state.remember(teacher=average), aggregate, server)
    if not self.round.labels_at_clients:
      return state
    # With labels at the clients, the teacher is the mean of the teachers. Only
    # the statistics follow the student.
    teacher = state.memory.teacher._replace(trainable=average.trainable)
    return state.remember(teacher=teacher)


class SwitchMemory(NamedTuple):
  """The memory of FedSwitch's server.

  Attributes:
    teacher: The moving average of the students.
    student_divergence: The last mean over clients, float32. NaN before there is
      one.
    teacher_divergence: The same for the teacher.
    by_teacher: float32, 1 if the teacher labels in the next round, else 0.
    teacher_sent: float32, 1 if clients get the teacher in the next round.
  """

  teacher: Weights
  student_divergence: tf.Tensor
  teacher_divergence: tf.Tensor
  by_teacher: tf.Tensor
  teacher_sent: tf.Tensor


@dataclasses.dataclass(frozen=True)
class FedSwitch(TsServerEma):
  """FedSwitch: teacher or student makes the pseudo-labels of a round."""

  name = 'fedswitch'
  capabilities = base.Capabilities(
    extra_uploads=('divergences of predictions from uniform',),
    signals='switches',
    without_signals='labeler=teacher',
  )
  metrics = (
    metrics_lib.client_metric(
      'student_divergence',
      "Divergence of the student's mean prediction for a batch from the uniform"
      ' distribution, mean over batches. (The switch compares means over'
      ' clients.)',
      metrics_lib.NATS,
      curve=metrics_lib.Curve('Divergence from uniform', 'student'),
    ),
    metrics_lib.client_metric(
      'teacher_divergence',
      "The same for the teacher's predictions of weak views; `nan` in rounds in"
      ' which clients do not get the teacher.',
      metrics_lib.NATS,
      curve=metrics_lib.Curve(
        'Divergence from uniform', 'teacher', metrics_lib.DASHED
      ),
    ),
    metrics_lib.client_metric(
      'labeled_by_teacher',
      'Share of batches that the teacher labels: 1 in a teacher round, 0 in a'
      ' student round.',
      metrics_lib.SHARE,
      curve=metrics_lib.Curve('Labelled by the teacher'),
      figure='by teacher',
    ),
  )

  local_ema_decay: float = hparam(
    0.97,
    _LOCAL_EMA_DECAY,
    minimum=0,
    maximum=1,
    when=lambda fedswitch: fedswitch.labeler != STUDENT,
  )
  labeler: str = hparam(
    CLOSEST,
    'Who makes the pseudo-labels of a round. closest: the one whose divergence'
    ' from uniform is closer to prior_divergence (eq. 3 and text); algorithms:'
    ' the other one, and the teacher is sent in each round, which costs what'
    ' the switch saves (algorithms 1 and 2); teacher, student: always this'
    ' one.',
    choices=(CLOSEST, ALGORITHMS, TEACHER, STUDENT),
  )
  prior_divergence: float = hparam(
    0.0,
    "beta, the divergence of clients' labels from equal shares of all C"
    ' classes, in nats: 0 for IID clients, at most log C. The paper gives no'
    ' value; the expected one of Dir(a) with 10 classes is 1.46 for a = 0.1,'
    ' 0.37 for a = 1 and 0.04 for a = 10. Labels cannot tell it: clients hold'
    ' equally many labels of each class.',
    minimum=0,
    maximum=25,
    when=lambda fedswitch: fedswitch.switches,
  )

  @property
  def switches(self) -> bool:
    """Tells whether the clients' divergences decide which network labels."""
    return self.labeler in (CLOSEST, ALGORITHMS)

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts with a teacher round, unless the student always labels."""
    del setup
    unknown = tf.constant(float('nan'))
    by_teacher = tf.constant(self.labeler != STUDENT)
    memory = SwitchMemory(
      weights, unknown, unknown, *self._next_round(by_teacher)
    )
    return base.ServerState(weights, memory)

  def _next_round(self, by_teacher: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the `by_teacher` and `teacher_sent` of a round."""
    is_sent = by_teacher | (self.labeler == ALGORITHMS)
    return tf.cast(by_teacher, tf.float32), tf.cast(is_sent, tf.float32)

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts the teacher only if clients need it (C2)."""
    when = state.memory.teacher_sent > 0.5
    return {
      TEACHER: base.Broadcast(when=when, own_statistics=True),
      'by_teacher': base.Broadcast(),
      'teacher_sent': base.Broadcast(),
    }

  def uploads(self, setup: base.Setup) -> Mapping[str, base.Upload]:
    """Declares divergences if they decide which network labels (C16)."""
    if not self.switches:
      return {}
    # Rounding may take a divergence this far out of [0, log C].
    report = base.Upload(-1e-4, math.log(setup.num_classes) + 1e-4)
    # Whether there are divergences.
    measured = base.Upload(0.0, 1.0)
    return {**dict.fromkeys(_DIVERGENCES, report), _MEASURED: measured}

  def prepare(self, client: base.Client) -> base.Prepared:
    """Adds the broadcast flags `by_teacher` and `teacher_sent`."""
    prepared = super().prepare(client)
    sent = {n: client.received[n] for n in ('by_teacher', 'teacher_sent')}
    return prepared._replace(values={**prepared.values, **sent})

  def unlabeled_loss(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.Loss:
    """Computes the loss on pseudo-labels, and divergences (steps 2 and 3)."""
    examples = batch.unlabeled
    probs, teacher = self._predict(networks, batch)
    logits = examples.logits(networks.model, 'strong')
    loss, metrics = self._pseudo_label_loss(probs, logits, batch)
    student = tf.nn.softmax(logits)
    # A batch without unlabelled examples has no divergence.
    count = tf.cast(tf.reduce_any(examples.weights > 0.0), tf.float32)
    counts = (count, count * batch.values['teacher_sent'])
    metrics['labeled_by_teacher'] = base.Mean(
      count * batch.values['by_teacher'], count
    )
    for name, predicted, size in zip(
      _DIVERGENCES, (student, teacher), counts, strict=True
    ):
      value = divergence.uniform_divergence(
        tf.stop_gradient(predicted), examples.weights
      )
      metrics[name] = base.Mean(tf.math.multiply_no_nan(value, size), size)
    return loss, metrics

  def _predict(
    self, networks: base.Networks, batch: base.Batch
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Predicts weak views by those networks that are needed.

    Args:
      networks: The client's networks.
      batch: The batch.

    Returns:
      (the predictions that label, the teacher's or arbitrary ones if it was not
      sent).
    """
    by_teacher, is_sent = (
      batch.values[name] > 0.5 for name in ('by_teacher', 'teacher_sent')
    )

    def label() -> tf.Tensor:
      return tf.nn.softmax(batch.unlabeled.logits(networks.model, 'weak'))

    def predict_by_both() -> tuple[tf.Tensor, tf.Tensor]:
      teacher = self._teacher_probs(networks, batch)
      if self.labeler != ALGORITHMS:
        # The teacher is sent only to label.
        return teacher, teacher
      return tf.cond(by_teacher, lambda: teacher, label), teacher

    probs, teacher = tf.cond(is_sent, predict_by_both, lambda: (label(),) * 2)
    return probs, teacher

  def after_step(self, networks: base.Networks, batch: base.Batch) -> None:
    """Moves the client's teacher towards its student (C4)."""
    del batch
    moving_average.follow_network(
      networks[TEACHER], networks.model, self.local_ema_decay
    )

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Uploads the means of the divergences over batches (C5)."""
    del client
    if not self.switches:
      return base.ClientOutput()
    uploads = {n: tf.math.divide_no_nan(*metrics[n]) for n in _DIVERGENCES}
    # A client without unlabelled examples has no divergence.
    _, num_batches = metrics[_DIVERGENCES[0]]
    uploads[_MEASURED] = tf.cast(num_batches > 0.0, tf.float32)
    return base.ClientOutput(uploads)

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Updates student and teacher, then decides which network labels next."""
    state = super().update(state, aggregate, server)
    by_teacher = tf.constant(self.labeler != STUDENT)
    if self.switches:
      by_teacher, divergences = self._switch(state.memory, aggregate)
      state = state.remember(**divergences)
    by_teacher, is_sent = self._next_round(by_teacher)
    return state.remember(by_teacher=by_teacher, teacher_sent=is_sent)

  def _switch(
    self, memory: SwitchMemory, aggregate: base.Aggregate
  ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Returns whether the teacher labels next, and the last divergences."""
    # Means over all reports. A client that lies may report a tiny share of
    # one: less than one client is nobody, and never a divisor.
    one = 1.0 / tf.maximum(aggregate.num_reports, 1.0)
    share = aggregate[_MEASURED]
    is_measured = share > 0.5 * one
    last = {}
    for name, is_sent in zip(
      _DIVERGENCES, (True, memory.teacher_sent > 0.5), strict=True
    ):
      last[name] = tf.where(
        is_measured & is_sent,
        aggregate[name] / tf.maximum(share, one),
        getattr(memory, name),
      )
    student, teacher = (
      tf.abs(last[name] - self.prior_divergence) for name in _DIVERGENCES
    )
    by_teacher = teacher < student
    if self.labeler == ALGORITHMS:
      by_teacher = tf.logical_not(by_teacher)
    # Without any divergence, the next round is like this one.
    same = memory.by_teacher > 0.5
    return tf.where(is_measured, by_teacher, same), last
