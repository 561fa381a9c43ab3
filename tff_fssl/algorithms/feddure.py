"""FedDure: a teacher that learns from what its pseudo-labels do to a student.

Bai et al., "Combating Data Imbalances in Federated Semi-Supervised Learning
with Dual Regulators", AAAI 2024, 38(10) 10989-10997 (arXiv 2307.05358). Of the
paper, only the abstract was available. Details are from the authors' code:
github.com/White1973/FedDure.

In a round:
1.  The server broadcasts the model. A client trains two copies of it: the
    teacher, which it sends back, and the student, which it throws away.
2.  In the first `finetuning_steps`, the teacher learns from labels only.
3.  In each further step, the teacher predicts labelled, weak and strong views
    in one forward pass. The student makes a step on the classes that the
    teacher predicts for weak views, all of them. The gain is by how much its
    cross-entropy on the labelled batch falls in this step.
4.  The teacher then makes a step on the sum of three losses: the cross-entropy
    of the labels, that of strong views with its own predictions for weak views
    (where these reach the threshold), and the gain times that of strong views
    with the classes that it predicts for them. So it becomes surer of what
    helped the student, and less sure of what did not.
5.  The server averages. Only the teacher is sent.

The paper has two regulators. In the authors' code, one of them learns nothing,
and is left out here. docs/algorithms/feddure.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

from tff_fssl import metrics as metrics_lib
from tff_fssl.client import joint_pass
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

_STUDENT = 'student'
_THEORY, _RELEASED = 'theory', 'released'
_CONSTANT, _COSINE = 'constant', 'cosine'


@dataclasses.dataclass(frozen=True)
class FedDure(base.Algorithm):
  """FedDure: a teacher learns from what its pseudo-labels do to a student."""

  name = 'feddure'
  paper = 'Bai et al., AAAI 2024'
  scenarios = (base.LABELS_AT_CLIENTS,)
  unlabeled_views = base.WEAK_AND_STRONG
  norm = 'bn'
  round_defaults = {
    'client_steps': 10,
    'client_batch_size': 90,
    'client_labeled_batch_size': 10,
    'client_optimizer': 'adam',
    'client_learning_rate': 0.0006,
    'weight_decay': 0.0,
    'max_gradient_norm': 0.0,
    'server_optimizer_momentum': 0.0,
  }
  tiny = {'confidence_threshold': 0.35, 'finetuning_steps': 1}
  metrics = (
    metrics_lib.client_metric(
      'loss_own_prediction',
      "Cross-entropy of the teacher's predictions for strong views with those"
      ' for weak views, mean over the kept examples.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(metrics_lib.LOSS_AT_CLIENTS, 'own predictions'),
      figure='loss',
    ),
    metrics_lib.client_metric(
      'loss_student',
      "Cross-entropy of the student with the teacher's classes, before each of"
      ' its steps, mean over unlabelled examples.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(
        metrics_lib.LOSS_AT_CLIENTS, 'student', metrics_lib.DOTTED
      ),
    ),
    metrics_lib.client_metric(
      'student_gain',
      "By how much the student's loss on labels falls in a step, mean over the"
      ' labelled examples of joint steps.',
      metrics_lib.NATS,
      metrics_lib.HIGHER,
      curve=metrics_lib.Curve("The student's gain"),
    ),
  )

  confidence_threshold: float = hparam(
    0.6,
    "The least probability of the teacher's own predictions that it learns from"
    " (value: the authors' code).",
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    8.0,
    'The weight of the loss on own predictions relative to the loss on labels,'
    " after --feddure.rampup_steps (value: the authors' code).",
    minimum=0,
  )
  rampup_steps: int = hparam(
    20,
    'The joint steps of a round over which that weight rises, in proportion'
    " (value: the authors' code, where a round has 5 or 10 of them).",
    minimum=1,
    maximum=10**6,
  )
  finetuning_steps: int = hparam(
    5,
    'The steps at the start of a round in which the teacher learns from labels'
    " only (authors' code: 5; for CINIC-10 100).",
    minimum=0,
    maximum=10**6,
  )
  signal: str = hparam(
    _THEORY,
    "The factor of the teacher's loss on its classes of strong views. theory:"
    " the student's loss on labels before its step minus that after it;"
    " released: after minus before, as in the authors' code.",
    choices=(_THEORY, _RELEASED),
    when=lambda feddure: feddure.signal_weight,
  )
  signal_weight: float = hparam(
    1.0,
    "The weight of that loss (value: the authors' code). 0: an ablation,"
    ' without a student.',
    minimum=0,
  )
  student_view: str = hparam(
    'weak',
    "The views that the student learns from (authors' code: weak).",
    choices=('weak', 'strong'),
    when=lambda feddure: feddure.signal_weight,
  )
  warmup_steps: int = hparam(
    0,
    'The steps of a round over which the learning rates rise from 0, of the'
    ' teacher from its first step on, of the student from the first joint one'
    " (authors' code: 10; for CINIC-10 100).",
    minimum=0,
    maximum=10**6,
  )
  student_wait_steps: int = hparam(
    0,
    "The first joint steps, in which the student's learning rate is 0 (authors'"
    ' code: 2; for CINIC-10 0).',
    minimum=0,
    maximum=10**6,
    when=lambda feddure: feddure.signal_weight,
  )
  after_warmup: str = hparam(
    _CONSTANT,
    'The learning rates after the warm-up. constant: the whole rate; cosine:'
    ' rate * (1 + cos(pi k / n)) / 2 after k steps, where n is the number of'
    " joint steps without the warm-up's, at least 1 (authors' code).",
    choices=(_CONSTANT, _COSINE),
  )

  def streams(self) -> dict[str, base.Stream]:
    """Declares the examples of a batch, and refuses rounds without a joint one.

    `check` cannot refuse them, since the round may be given later.

    Returns:
      Name -> stream.

    Raises:
      UsageError: If fine-tuning leaves no joint step.
    """
    steps = self.round.client_steps
    if steps and self.finetuning_steps >= steps:
      raise UsageError(
        f'--feddure.finetuning_steps={self.finetuning_steps}: must be below'
        f' --client_steps={steps}, which also counts the joint steps'
      )
    return super().streams()

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Declares the student, which starts as the received model (step 1)."""
    if not self.signal_weight:
      return {}
    return {_STUDENT: base.AuxiliaryNetwork(trained=True)}

  def step(self, networks: base.Networks, batch: base.Batch) -> base.StepResult:
    """Makes a step of the student, then one of the teacher."""
    # The number of the joint step, below 0 in the fine-tuning.
    number = batch.time.step - self.finetuning_steps
    with tf.GradientTape() as tape:
      weak, strong, of_labels = joint_pass.logits(networks.model, batch)
      probs = tf.stop_gradient(tf.nn.softmax(weak))
      loss, metrics = self._loss(probs, strong, of_labels, batch, number)
      if self.signal_weight:
        with tape.stop_recording():
          gain, more = self._train_student(
            networks, batch, thresholds.pseudo_labels(probs), number
          )
        metrics |= more
        loss += self._signal(gain) * _own_class_loss(strong, batch.unlabeled)
    networks.descend(
      base.MODEL,
      networks.model.gradients(tape, loss),
      self._rate_factor(batch.time.step, batch.time),
    )
    return base.StepResult(None, metrics)

  def _train_student(
    self,
    networks: base.Networks,
    batch: base.Batch,
    labels: tf.Tensor,
    number: tf.Tensor,
  ) -> tuple[tf.Tensor, base.Metrics]:
    """Makes a step of the student, unless the teacher is fine-tuned (step 3).

    Args:
      networks: The client's networks.
      batch: The batch.
      labels: int32 [B], the teacher's classes of weak views.
      number: int32 scalar, the number of the joint step.

    Returns:
      The student's gain, float32 scalar, and metrics.
    """
    student, examples = networks[_STUDENT], batch.unlabeled
    # Fillers of a client without labelled, or unlabelled, examples have no
    # weight.
    sizes = [batch.labeled.size, examples.size]

    def train() -> list[tf.Tensor]:
      before = _loss_on_labels(student, batch)
      with tf.GradientTape() as tape:
        logits = examples.logits(student, self.student_view)
        entropies = losses.cross_entropy(labels, logits)
        loss = losses.masked_mean(entropies, examples.weights)
      factor = self._rate_factor(number, batch.time, self.student_wait_steps)
      networks.descend(_STUDENT, student.gradients(tape, loss), factor)
      return [before - _loss_on_labels(student, batch), loss, *sizes]

    gain, loss, num_labeled, num_unlabeled = tf.cond(
      number >= 0, train, lambda: [tf.constant(0.0)] * 4
    )
    return gain, {
      'student_gain': base.Mean.weighted(gain, num_labeled),
      'loss_student': base.Mean.weighted(loss, num_unlabeled),
    }

  def _loss(
    self,
    probs: tf.Tensor,
    strong: tf.Tensor,
    of_labels: tf.Tensor,
    batch: base.Batch,
    number: tf.Tensor,
  ) -> base.Loss:
    """Computes the teacher's loss without that by the gain (steps 2 and 4).

    Args:
      probs: float32 [B, C], its predictions for weak views, without gradient.
      strong: float32 [B, C], its logits of strong views.
      of_labels: float32 [., C], its logits of labelled examples.
      batch: The batch.
      number: int32 scalar, the number of the joint step.

    Returns:
      The loss and its metrics.
    """
    examples = batch.unlabeled
    loss, metrics = base.cross_entropy_loss(of_labels, batch.labeled)
    # In the fine-tuning, no unlabelled example counts.
    weights = examples.weights * tf.cast(number >= 0, tf.float32)
    mask = thresholds.fixed_mask(probs, self.confidence_threshold)
    kept = tf.cast(mask, tf.float32) * weights
    entropies = losses.soft_cross_entropy(probs, strong)
    metrics |= diagnostics.pseudo_label_metrics(
      thresholds.pseudo_labels(probs), examples.labels, kept, weights=weights
    )
    # The metric is a mean over kept examples, the loss over the whole batch.
    metrics['loss_own_prediction'] = base.Mean(
      tf.reduce_sum(kept * entropies), tf.reduce_sum(kept)
    )
    done = tf.cast(number + 1, tf.float32) / self.rampup_steps
    loss += (
      self.unlabeled_loss_weight
      * tf.minimum(done, 1.0)
      * losses.masked_mean(kept * entropies, weights)
    )
    return loss, metrics

  def _signal(self, gain: tf.Tensor) -> tf.Tensor:
    """Computes the weight of the teacher's loss on its own classes."""
    sign = 1.0 if self.signal == _THEORY else -1.0
    return sign * self.signal_weight * gain

  def _rate_factor(
    self, number: tf.Tensor, time: base.StepTime, wait: int = 0
  ) -> tf.Tensor:
    """Computes the factor of a network's learning rate.

    Args:
      number: int32 scalar, the network's step, from 0.
      time: The time of the step.
      wait: The first steps, in which the rate is 0.

    Returns:
      float32 scalar, in [0, 1].
    """
    warm = self.warmup_steps + wait
    factor = tf.constant(1.0)
    if self.after_warmup == _COSINE:
      num_steps = tf.maximum(time.num_steps - self.finetuning_steps - warm, 1)
      done = tf.cast(number - warm, tf.float32) / tf.cast(num_steps, tf.float32)
      factor = (1.0 + tf.cos(math.pi * done)) / 2.0
    if warm:
      rising = tf.cast(number, tf.float32) / warm
      factor = tf.where(number < warm, rising, factor)
    return tf.where(number < wait, 0.0, factor) if wait else factor


def _own_class_loss(
  logits: tf.Tensor, examples: base.BatchExamples
) -> tf.Tensor:
  """Computes the mean cross-entropy of predictions with their own classes."""
  entropies = losses.cross_entropy(thresholds.pseudo_labels(logits), logits)
  return losses.masked_mean(entropies, examples.weights)


def _loss_on_labels(student: adapter.Network, batch: base.Batch) -> tf.Tensor:
  """Computes the student's cross-entropy on the labelled batch."""
  examples = batch.labeled
  entropies = losses.cross_entropy(
    examples.labels, examples.logits(student, 'weak')
  )
  return losses.masked_mean(entropies, examples.weights)
