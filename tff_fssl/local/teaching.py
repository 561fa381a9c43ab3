"""Clients whose pseudo-labels are by a teacher, FixMatch's loss otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tff_fssl.data import augment
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import terms
from tff_fssl.models import server_model
from tff_fssl.semisup import moving_average

# The name of the peer, and of the server's weight set that it starts from.
TEACHER = 'teacher'
_STATISTICS = 'teacher_statistics'


def teacher_probs(
  networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
) -> tf.Tensor:
  """The teacher's predictions for weak views: float32 [B, C].

  It predicts as in evaluation: with its own batch norm statistics, if it has
  some, and without dropout.
  """
  logits = networks.peers[TEACHER].inference_logits(
    batch.parts[objective.UNLABELED].views['weak'], batch.constants[_STATISTICS]
  )
  return tf.nn.softmax(logits)


class Hparams(Protocol):
  """What `learn` reads of an algorithm's hyper-parameters; see `fixmatch`."""

  @property
  def confidence_threshold(self) -> float:
    """The least probability of a pseudo-label that is used."""

  @property
  def unlabeled_loss_weight(self) -> float:
    """The weight of the loss on pseudo-labels."""


def learn(
  hparams: Hparams,
  networks: algorithm_lib.Networks,
  batch: algorithm_lib.Batch,
  probs: tf.Tensor,
) -> tuple[algorithm_lib.StepResult, tf.Tensor]:
  """A step of the local network on pseudo-labels that others may have made.

  Args:
    hparams: Threshold and weight of the loss.
    networks: The networks.
    batch: The batch.
    probs: float32 [B, C], predictions for the weak views.

  Returns:
    The step's result; the network's predictions for strong views, float32
    [B, C].
  """
  network, part = networks.local, batch.parts[objective.UNLABELED]
  with tf.GradientTape() as tape:
    logits = objective.training_logits(network, part, 'strong')
    loss, ratios = terms.pseudo_label_loss(
      probs,
      logits,
      part,
      confidence_threshold=hparams.confidence_threshold,
      loss_weight=hparams.unlabeled_loss_weight,
    )
  result = algorithm_lib.StepResult(network.gradients(tape, loss), ratios)
  return result, tf.nn.softmax(logits)


def follow(
  decay: float, name: str = TEACHER
) -> Callable[[algorithm_lib.Networks, algorithm_lib.Batch], None] | None:
  """Builds `after_step`: teacher <- decay teacher + (1 - decay) student.

  Args:
    decay: In [0, 1]; at 1 the teacher stays as it is.
    name: The peer that is the teacher.

  Returns:
    The function; None if nothing is to be done.
  """
  if decay == 1.0:
    return None

  def after_step(
    networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
  ) -> None:
    del batch
    teacher, student = networks.peers[name], networks.local
    old, new = teacher.trainable_variables, student.trainable_variables
    # Static batch norm statistics are gathered: each network has its own.
    if not student.is_static:
      old += teacher.non_trainable_variables
      new += student.non_trainable_variables
    averages = moving_average.moving_average(old, new, decay)
    for variable, average in zip(old, averages, strict=True):
      variable.assign(average)

  return after_step


def clients(
  step: algorithm_lib.Step,
  *,
  labels_at_clients: bool,
  local_decay: float = 1.0,
  uploads: bool = False,
  ratios: tuple[str, ...] = (),
) -> algorithm_lib.LocalAlgorithm:
  """The local algorithm of clients that start with the server's teacher.

  Args:
    step: The step on unlabelled examples, `learn`'s with metrics `ratios`
      beside. `batch.constants` has what the server sent.
    labels_at_clients: Whether the loss of a labelled batch is added.
    local_decay: Of the teacher's moving average, after each batch.
    uploads: Whether the teacher is sent back.
    ratios: Names of further metrics.

  Returns:
    The local algorithm.
  """

  def prepare(
    networks: algorithm_lib.Networks,
    data: algorithm_lib.ClientData,
    views: augment.Views,
  ) -> algorithm_lib.Prepared:
    del networks, views
    # Where the teacher was not sent, nobody asks it.
    teacher = data.sets.get(TEACHER, data.weights)
    return algorithm_lib.Prepared(
      tf.range(tf.shape(data.unlabeled.x)[0]),
      constants={**data.received, _STATISTICS: teacher.statistics_count},
    )

  local = algorithm_lib.LocalAlgorithm(
    steps=(step,),
    step_ratios=(*terms.PSEUDO_LABEL_RATIOS, *ratios),
    streams=terms.WEAK_AND_STRONG,
    prepare=prepare,
    after_step=follow(local_decay),
    peers={TEACHER: algorithm_lib.Peer(TEACHER, uploaded=uploads)},
  )
  if not labels_at_clients:
    return local
  return objective.plus(local, objective.supervised())


def build_prediction(
  hparams: Any, round_hparams: Any
) -> server_model.Prediction:
  """The student predicts, and the teacher is evaluated as well."""
  del hparams, round_hparams
  return server_model.Prediction(also={TEACHER: server_model.of_set(TEACHER)})
