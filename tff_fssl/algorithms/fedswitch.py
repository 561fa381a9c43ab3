"""FedSwitch: teacher or student labels, whichever fits clients' data better.

Zhao, Ghosh, Bharadwaj and Ma, "When does the student surpass the teacher?
Federated Semi-supervised Learning with Teacher-Student EMA", arXiv 2023
(2301.10114). There is no code of the authors.

In a round:
1.  The server sends the student S; in a teacher round also the teacher T.
2.  For each batch, a client makes pseudo-labels from weak views, by T in a
    teacher round and by S as it is now in a student round. It makes a step of
    SGD on FixMatch's loss for S (with labels at the clients, plus the loss of a
    labelled batch; with FedProx's term), then T <- a' T + (1 - a') S.
3.  It sends the change of S, and how far mean predictions for a batch diverge
    from uniform: those of S (strong views) and, if it has it, T (weak views),
    means over batches. Its T is dropped.
4.  The server averages the changes. With labels at the server, it trains S on
    them. Then T <- a T + (1 - a) S, in every round.
5.  With D_T, D_S the means over clients: the next round is a teacher round if
    and only if |D_T - beta| < |D_S - beta|. The first one is.

The paper contradicts itself. docs/algorithms/fedswitch.md lists all places, by
these ids; what is decided here:
C1  The closer one labels (eq. 3); algorithms 1 and 2 have it inverted
    (`--fedswitch.labeler=farthest`).
C2  What is not needed is not sent (text); algorithms 1 and 2 always send T
    (`--fedswitch.teacher_probe=always_send`).
C4  T follows S at clients (text); in the algorithms only at the server
    (`--fedswitch.local_ema_decay=1`).
C5  Divergences are means over batches (eq. 2), not sums.
C6  D_T in student rounds is the last one measured (`teacher_probe`).
C8  D_S is of strong views (section 4.2), though S labels weak ones
    (`student_view`).
C9  The proximal term is mu/2 |S - S_round|^2, by `--proximal_strength`.
C15 The loss on pseudo-labels is a mean over the batch, with a threshold.
C16 The divergences leave clients beside the sum: `secure` and `dp` refuse them.

Choices where the paper is silent: T starts as S; a tie goes to the student; T
predicts with its own batch norm statistics, S with those of the batch.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import math

from tff_fssl.algorithms import fedswitch_hparams
from tff_fssl.data import augment
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import teaching
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.semisup import divergence

FedSwitchHparams = fedswitch_hparams.FedSwitchHparams
ServerModel = server_algorithm.ServerModel
Networks = algorithm_lib.Networks
Batch = algorithm_lib.Batch
_BY_TEACHER = 'labeled_by_teacher'
_DIVERGENCES = ('student_divergence', 'teacher_divergence')


def _predict(
  hparams: FedSwitchHparams, networks: Networks, batch: Batch
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
  """(predictions to label with; the teacher's, if it was sent; the student's).

  Of weak views. The student's are made only where they are needed.
  """
  images = batch.parts[objective.UNLABELED].views['weak']
  by_teacher, is_sent = (
    batch.constants[name] > 0.5 for name in ('by_teacher', 'teacher_sent')
  )

  def student() -> tf.Tensor:
    return tf.nn.softmax(networks.local.logits(images, training=True))

  of_student = student() if hparams.student_view == 'weak' else None

  def label() -> tf.Tensor:
    return student() if of_student is None else tf.identity(of_student)

  def with_teacher() -> tuple[tf.Tensor, tf.Tensor]:
    of_teacher = teaching.teacher_probs(networks, batch)
    if not hparams.measuring_period:  # Then it is sent only to label.
      return of_teacher, of_teacher
    return tf.cond(by_teacher, lambda: of_teacher, label), of_teacher

  probs, of_teacher = tf.cond(is_sent, with_teacher, lambda: (label(),) * 2)
  return probs, of_teacher, of_student


def build_local_algorithm(
  hparams: FedSwitchHparams, round_hparams: round_hparams_lib.RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: steps 2 and 3."""

  def step(networks: Networks, batch: Batch) -> algorithm_lib.StepResult:
    weights = batch.parts[objective.UNLABELED].weights
    probs, of_teacher, of_student = _predict(hparams, networks, batch)
    result, of_strong = teaching.learn(hparams, networks, batch, probs)
    # A batch of labelled examples alone has no divergence.
    count = tf.cast(tf.reduce_any(weights > 0.0), tf.float32)
    counts = (count, count * batch.constants['teacher_sent'])
    of_both = (of_strong if of_student is None else of_student, of_teacher)
    ratios = {_BY_TEACHER: (count * batch.constants['by_teacher'], count)}
    for name, of_one, size in zip(_DIVERGENCES, of_both, counts, strict=True):
      value = divergence.from_uniform(of_one, weights, hparams.divergence_of)
      ratios[name] = (tf.math.multiply_no_nan(value, size), size)
    return result._replace(ratios={**result.ratios, **ratios})

  def finish(
    networks: Networks,
    data: algorithm_lib.ClientData,
    views: augment.Views,
    ratios: Mapping[str, algorithm_lib.Ratio],
  ) -> algorithm_lib.Finished:
    del networks, data, views
    signals = {n: tf.math.divide_no_nan(*ratios[n]) for n in _DIVERGENCES}
    # 0 of a client without unlabelled examples.
    is_measured = tf.cast(ratios[_DIVERGENCES[0]][1] > 0.0, tf.float32)
    return algorithm_lib.Finished({**signals, 'is_measured': is_measured})

  local = teaching.clients(
    step,
    labels_at_clients=round_hparams.labels_at_clients,
    local_decay=hparams.local_ema_decay,
    ratios=(*_DIVERGENCES, _BY_TEACHER),
  )
  if not hparams.switches:
    return local
  # Rounding may take them this far out of [0, log C].
  signal = algorithm_lib.Signal(-1e-4, lambda c: math.log(c) + 1e-4)
  signals = dict.fromkeys(_DIVERGENCES, signal)
  signals['is_measured'] = algorithm_lib.Signal(0.0, 1.0)
  return local._replace(finish=finish, signals=signals)


def _control(
  hparams: FedSwitchHparams, by_teacher: tf.Tensor, round_num: tf.Tensor | int
) -> collections.OrderedDict[str, tf.Tensor]:
  """Of a round: whether the teacher labels, and whether it is sent."""
  is_sent = by_teacher
  if hparams.measuring_period:
    is_sent |= tf.equal(round_num % hparams.measuring_period, 0)
  return collections.OrderedDict(
    by_teacher=tf.cast(by_teacher, tf.float32),
    teacher_sent=tf.cast(is_sent, tf.float32),
  )


def _switch(
  hparams: FedSwitchHparams,
  model: ServerModel,
  aggregated: server_algorithm.Aggregated,
) -> tuple[tf.Tensor, collections.OrderedDict[str, tf.Tensor]]:
  """(whether the teacher labels next, the last divergences): step 5."""
  num = aggregated.signals['is_measured']
  counts = (num, num * model.control['teacher_sent'])
  last = collections.OrderedDict(model.sets['divergences'])
  for name, count in zip(_DIVERGENCES, counts, strict=True):
    mean = aggregated.signals[name] / count
    last[name] = tf.where(count > 0.0, mean, last[name])
  of_student, of_teacher = (
    tf.abs(last[n] - hparams.prior_divergence) for n in _DIVERGENCES
  )
  by_teacher = of_teacher < of_student
  if hparams.labeler == fedswitch_hparams.FARTHEST:
    by_teacher = tf.logical_not(by_teacher)
  # Without a report, the round is of the same kind.
  as_before = model.control['by_teacher'] > 0.5
  return tf.where(num > 0.0, by_teacher, as_before), last


def build_server(
  hparams: FedSwitchHparams, round_hparams: round_hparams_lib.RoundHparams
) -> server_algorithm.ServerAlgorithm:
  """The server's part: steps 4 and 5."""
  del round_hparams
  averaging = server_algorithm.with_moving_average(
    server_algorithm.FEDAVG, teaching.TEACHER, hparams.ema_decay
  )
  first = hparams.labeler != fedswitch_hparams.STUDENT

  def start(weights: Weights) -> ServerModel:
    nothing = dict.fromkeys(_DIVERGENCES, tf.constant(float('nan')))
    model = averaging.start(weights)
    model = model.with_sets(divergences=collections.OrderedDict(nothing))
    return model._replace(control=_control(hparams, tf.constant(first), 1))

  def update(
    model: ServerModel,
    aggregated: server_algorithm.Aggregated,
    tools: server_algorithm.ServerTools,
  ) -> ServerModel:
    model = averaging.update(model, aggregated, tools)
    by_teacher = tf.constant(first)
    if hparams.switches:
      by_teacher, last = _switch(hparams, model, aggregated)
      model = model.with_sets(divergences=last)
    next_round = tools.round_num + 1
    return model._replace(control=_control(hparams, by_teacher, next_round))

  sends = lambda model: {teaching.TEACHER: model.control['teacher_sent'] > 0.5}
  return server_algorithm.ServerAlgorithm(
    start, update, sends, statistics_if_sent=(teaching.TEACHER,)
  )
