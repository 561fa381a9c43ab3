"""Tiny algorithms with all that the skeleton carries; not the papers'."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tiny_task

from tff_fssl.data import clients
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.interface import round_hparams
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import process as process_lib
from tff_fssl.semisup import losses
from tff_fssl.semisup import moving_average
from tff_fssl.semisup import thresholds

NUM_CLASSES = 3


def _divergence(probs):
  """KL(mean prediction || uniform)."""
  mean = tf.reduce_mean(probs, axis=0)
  return tf.math.log(3.0) + tf.reduce_sum(tf.math.xlogy(mean, mean))


class _Teacher(NamedTuple):
  teacher: Weights
  mode: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Switching(base.Algorithm):
  """FedSwitch's shape: a teacher that is sent by mode, and two reports."""

  name = 'switching'
  unlabeled_views = base.WEAK_AND_STRONG

  mode: str = hparam(
    'switch', 'The mode.', choices=('switch', 'student', 'teacher')
  )
  decay: float = hparam(0.9, 'Decay of the teacher, a round.')
  local_decay: float = hparam(0.9, 'Decay of the teacher, a step.')

  def initial_state(self, weights, setup):
    first = 0.0 if self.mode == 'student' else 1.0
    return base.ServerState(weights, _Teacher(weights, tf.constant(first)))

  def broadcasts(self, state):
    when = state.memory.mode > 0.5
    return {'teacher': base.Broadcast(when=when), 'mode': base.Broadcast()}

  def networks(self):
    return {'teacher': base.AuxiliaryNetwork()}

  def uploads(self, setup):
    high = float(np.log(3)) + 1e-6
    return dict.fromkeys(('student', 'teacher'), base.Upload(-1e-6, high))

  def streams(self):
    return {base.UNLABELED: self.unlabeled_stream()}

  def prepare(self, client):
    return base.Prepared(values={'mode': client.received['mode']})

  def step(self, networks, batch):
    network, teacher = networks.model, networks['teacher']
    part = batch.unlabeled
    by_teacher = batch.values['mode'] > 0.5
    student_probs = tf.nn.softmax(
      network.logits(part.views['weak'], training=True)
    )
    probs = tf.cond(
      by_teacher,
      lambda: tf.nn.softmax(teacher.logits(part.views['weak'], training=True)),
      lambda: student_probs,
    )
    labels = thresholds.pseudo_labels(probs)
    kept = tf.cast(thresholds.fixed_mask(probs, 0.35), tf.float32)
    kept *= part.weights
    with tf.GradientTape() as tape:
      logits = network.logits(part.views['strong'], training=True)
      entropies = losses.cross_entropy(labels, logits)
      loss = 1.0 * tf.reduce_mean(kept * entropies)
    of_student = _divergence(tf.nn.softmax(logits))
    of_teacher = tf.where(by_teacher, _divergence(probs), 0.0)
    return base.StepResult(
      network.gradients(tape, loss),
      {
        'student_divergence': base.Mean.ratio(of_student, 1.0),
        'teacher_divergence': base.Mean.ratio(
          of_teacher, tf.where(by_teacher, 1.0, 0.0)
        ),
      },
    )

  def after_step(self, networks, batch):
    del batch
    teacher = networks['teacher'].trainable_variables
    new = moving_average.moving_average(
      teacher, networks.model.trainable_variables, self.local_decay
    )
    for variable, value in zip(teacher, new, strict=True):
      variable.assign(value)

  def finish(self, client, metrics):
    del client
    mean = lambda name: tf.math.divide_no_nan(*metrics[name])
    return base.ClientOutput(
      {
        'student': mean('student_divergence'),
        'teacher': mean('teacher_divergence'),
      }
    )

  def update(self, state, aggregate, server):
    teacher, mode = state.memory
    state = super().update(state, aggregate, server)
    weights = state.weights
    average = moving_average.moving_average(
      teacher.trainable, weights.trainable, self.decay
    )
    state = state.remember(teacher=weights._replace(trainable=tuple(average)))
    if self.mode != 'switch':
      return state
    # Every other round, as long as clients report.
    switched = tf.where(aggregate.num_reports > 0.0, 1.0 - mode, mode)
    return state.remember(mode=switched)

  def other_predictions(self):
    return {'teacher': lambda state: state.memory.teacher}


class _Psi(NamedTuple):
  psi: Weights


@dataclasses.dataclass(frozen=True)
class Helping(base.Algorithm):
  """FedMatch's shape: W = sigma + psi, a table of psi's, two steps a batch."""

  name = 'helping'
  scenarios = (base.LABELS_AT_CLIENTS,)
  unlabeled_views = base.WEAK_AND_STRONG

  def initial_state(self, weights, setup):
    psi = tf.nest.map_structure(lambda t: 0.2 * t, tuple(weights.trainable))
    return base.ServerState(weights, _Psi(weights._replace(trainable=psi)))

  def broadcasts(self, state):
    return {'psi': base.Broadcast()}

  def networks(self):
    return {'psi': base.AuxiliaryNetwork(trained=True, uploaded=True)}

  def prepare(self, client):
    return base.Prepared(values={'helper': client.received['helper']})

  def labeled_step(self, networks, batch):
    psi = networks['psi'].trainable_variables
    part = batch.labeled
    with networks.model.perturbed(psi), tf.GradientTape() as tape:
      logits = networks.model.logits(part.views['weak'], training=True)
      loss, metrics = base.cross_entropy_loss(logits, part)
    return base.StepResult(networks.model.gradients(tape, loss), metrics)

  def unlabeled_step(self, networks, batch):
    psi = networks['psi'].trainable_variables
    part, helper = batch.unlabeled, batch.values['helper']
    with networks.model.perturbed(psi), tf.GradientTape() as tape:
      logits = networks.model.logits(part.views['strong'], training=True)
      probs = tf.nn.softmax(logits)
      loss = tf.reduce_sum(tf.square(probs - helper)) * part.weights[0]
    networks.descend('psi', networks.model.gradients(tape, loss))
    return base.StepResult(None, {'loss_helper': base.Mean.weighted(loss, 1.0)})

  def step(self, networks, batch):
    labeled = self.labeled_step(networks, batch)
    networks.descend(base.MODEL, labeled.gradients)
    unlabeled = self.unlabeled_step(networks, batch)
    metrics = {**labeled.metrics, **unlabeled.metrics}
    return unlabeled._replace(metrics=metrics)

  def finish(self, client, metrics):
    del metrics
    images = client.views.plain(client.unlabeled.x[:1])
    logits = client.networks.model.logits(images, training=False)
    mean = tf.math.divide_no_nan(tf.reduce_sum(tf.nn.softmax(logits), 0), 1.0)
    return base.ClientOutput({'embedding': mean})

  def update(self, state, aggregate, server):
    psi = aggregate.move('psi', state.memory.psi)
    weights = server.apply(state.weights, aggregate.update)
    return state._replace(weights=weights).remember(psi=psi)

  def exchange(self) -> Any:
    return self.build_exchange

  def build_exchange(self, population):
    num = population.known_clients()
    return exchange_lib.Exchange(
      initialize=lambda: tf.fill([num, NUM_CLASSES], 1.0 / NUM_CLASSES),
      message=lambda table, model, round_num: table,
      # The next client's row.
      receive=lambda table, client_id: {'helper': table[(client_id + 1) % num]},
      row_specs={'embedding': tf.TensorSpec([NUM_CLASSES], tf.float32)},
      accept=lambda table, rows, model, round_num: tf.tensor_scatter_nd_update(
        table, rows.client_id[:, None], rows.values['embedding']
      ),
      num_clients=num,
    )

  def predicting_weights(self, state):
    psi = state.memory.psi
    summed = tuple(
      a + b for a, b in zip(state.weights.trainable, psi.trainable)
    )
    return state.weights._replace(trainable=summed)


def build(algorithm, norm='none', aggregator=None, **kwargs):
  """The process of an algorithm on the tiny task."""
  x, y = tiny_task.examples(9, 7)
  scenario = algorithm.scenarios[0]
  at_server = scenario == 'labels_at_server'
  rounds = round_hparams.RoundHparams(
    scenario=scenario,
    client_epochs=1,
    client_batch_size=5,
    server_epochs=1,
    num_pretraining_rounds=0,
    **kwargs,
  )
  return process_lib.build_process(
    lambda: tiny_task.model_fn(norm),
    dataclasses.replace(algorithm, round=rounds),
    process_lib.DataSpec(
      clients.element_spec(tiny_task.IMAGE_SHAPE),
      tiny_task.VIEWS,
      clients.build_server_data_fn(x, y) if at_server else None,
      num_clients=8,
    ),
    seed=5,
    aggregator=aggregator,
  )


def run(process, num_rounds=3, ids=(1, 4, 6), labeled=0, change=None):
  """The outputs of rounds with the clients of these ids."""
  outputs, state = [], process.initialize()
  for round_num in range(1, num_rounds + 1):
    cohort = []
    for index, client_id in enumerate(ids):
      element = tiny_task.client(index, round_num, labeled=labeled)
      if process.num_clients:
        element['client_id'] = np.int32(client_id)
      if change is not None:
        element = change(index, element)
      cohort.append(tiny_task.dataset(element))
    output = process.next(state, cohort)
    state = output.state
    outputs.append(output)
  return outputs
