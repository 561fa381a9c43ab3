"""Tiny algorithms with all that the skeleton carries; not the papers'."""

import collections

import numpy as np
import tensorflow as tf

from tff_fssl.finalizers import server_algorithm
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights, all_finite
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import parts as parts_lib
from tff_fssl.semisup import losses
from tff_fssl.semisup import moving_average
from tff_fssl.semisup import thresholds

_UNLABELED = objective.UNLABELED
_STREAMS = {
  _UNLABELED: algorithm_lib.Stream({'weak': 'weak', 'strong': 'strong'})
}
NUM_CLASSES = 3


def _divergence(probs):
  """KL(mean prediction || uniform)."""
  mean = tf.reduce_mean(probs, axis=0)
  return tf.math.log(3.0) + tf.reduce_sum(tf.math.xlogy(mean, mean))


def switching(
  *, mode: str = 'switch', decay: float = 0.9, local_decay: float = 0.9
) -> parts_lib.Parts:
  """FedSwitch's shape: a teacher set, sent by mode, and two signals.

  `mode` is 'switch', or forces 'student' or 'teacher'.
  """

  def step(networks, batch):
    network, teacher = networks.local, networks.peers['teacher']
    part = batch.parts[_UNLABELED]
    by_teacher = batch.constants['mode'] > 0.5
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
    return algorithm_lib.StepResult(
      network.gradients(tape, loss),
      {
        'student_divergence': algorithm_lib.ratio(of_student, 1.0),
        'teacher_divergence': algorithm_lib.ratio(
          of_teacher, tf.where(by_teacher, 1.0, 0.0)
        ),
      },
    )

  def prepare(networks, data, views):
    del networks, views
    return algorithm_lib.Prepared(
      tf.range(tf.shape(data.unlabeled.x)[0]),
      constants={'mode': data.received['mode']},
    )

  def after_step(networks, batch):
    del batch
    teacher = networks.peers['teacher'].trainable_variables
    new = moving_average.moving_average(
      teacher, networks.local.trainable_variables, local_decay
    )
    for variable, value in zip(teacher, new, strict=True):
      variable.assign(value)

  def finish(networks, data, views, ratios):
    del networks, data, views
    mean = lambda name: tf.math.divide_no_nan(*ratios[name])
    return algorithm_lib.Finished(
      signals={
        'student': mean('student_divergence'),
        'teacher': mean('teacher_divergence'),
      }
    )

  signal = algorithm_lib.Signal(-1e-6, float(np.log(3)) + 1e-6)
  local = algorithm_lib.LocalAlgorithm(
    steps=(step,),
    streams=_STREAMS,
    prepare=prepare,
    after_step=after_step,
    finish=finish,
    peers={'teacher': algorithm_lib.Peer(starts_from='teacher')},
    signals={'student': signal, 'teacher': signal},
  )

  def start(weights):
    first = 0.0 if mode == 'student' else 1.0
    return server_model.ServerModel(
      *weights,
      collections.OrderedDict(teacher=weights),
      collections.OrderedDict(mode=tf.constant(first)),
    )

  def update(model, aggregated, tools):
    teacher = model.sets['teacher']
    model = model.replace_weights(
      tools.train(tools.apply(model.weights, aggregated.update))
    )
    average = moving_average.moving_average(
      teacher.trainable, model.trainable, decay
    )
    model = model.replace_sets(
      teacher=Weights(
        tuple(average), model.non_trainable, model.statistics_count
      )
    )
    if mode != 'switch':
      return model
    # Every other round, as long as clients report.
    switched = tf.where(
      aggregated.num_reports > 0.0,
      1.0 - model.control['mode'],
      model.control['mode'],
    )
    return model._replace(control=collections.OrderedDict(mode=switched))

  return parts_lib.Parts(
    local,
    server=server_algorithm.ServerAlgorithm(
      start,
      update,
      sends=lambda model: {'teacher': model.control['mode'] > 0.5},
    ),
    prediction=server_model.Prediction(
      also={'teacher': server_model.set_prediction('teacher')}
    ),
  )


def helping(num_clients: int = 8) -> parts_lib.Parts:
  """FedMatch's shape: W = sigma + psi, a table of psi's, two steps a batch."""

  def supervised_step(networks, batch):
    psi = networks.peers['psi'].trainable_variables
    part = batch.parts[objective.LABELED]
    with networks.local.perturbed(psi), tf.GradientTape() as tape:
      logits = networks.local.logits(part.views['weak'], training=True)
      loss, ratios = objective.labeled_loss(logits, part)
    return algorithm_lib.StepResult(
      networks.local.gradients(tape, loss), ratios
    )

  def unsupervised_step(networks, batch):
    psi = networks.peers['psi'].trainable_variables
    part = batch.parts[_UNLABELED]
    helper = batch.constants['helper']
    with networks.local.perturbed(psi), tf.GradientTape() as tape:
      logits = networks.local.logits(part.views['strong'], training=True)
      probs = tf.nn.softmax(logits)
      loss = tf.reduce_sum(tf.square(probs - helper)) * part.weights[0]
    return algorithm_lib.StepResult(
      None,
      {'loss_helper': algorithm_lib.mean_metric(loss, 1.0)},
      of_peers={'psi': networks.local.gradients(tape, loss)},
    )

  def prepare(networks, data, views):
    del networks, views
    return algorithm_lib.Prepared(
      tf.range(tf.shape(data.unlabeled.x)[0]),
      constants={'helper': data.received['helper']},
    )

  def finish(networks, data, views, ratios):
    del ratios
    images = views.plain(data.unlabeled.x[:1])
    logits = networks.local.logits(images, training=False)
    mean = tf.math.divide_no_nan(tf.reduce_sum(tf.nn.softmax(logits), 0), 1.0)
    return algorithm_lib.Finished(row={'embedding': mean})

  local = algorithm_lib.LocalAlgorithm(
    steps=(supervised_step, unsupervised_step),
    streams={**objective.supervised().streams, **_STREAMS},
    prepare=prepare,
    finish=finish,
    peers={'psi': algorithm_lib.Peer('psi', trained=True, uploaded=True)},
  )

  def start(weights):
    psi = tf.nest.map_structure(lambda t: 0.2 * t, tuple(weights.trainable))
    return server_model.ServerModel(
      *weights,
      collections.OrderedDict(
        psi=weights._replace(trainable=psi),
      ),
    )

  def update(model, aggregated, tools):
    psi = model.sets['psi']
    changed = tuple(
      p - u for p, u in zip(psi.trainable, aggregated.of_peers['psi'])
    )
    finite = all_finite(changed)
    changed = tf.nest.map_structure(
      lambda new, old: tf.where(finite, new, old), changed, psi.trainable
    )
    model = model.replace_weights(tools.apply(model.weights, aggregated.update))
    return model.replace_sets(psi=psi._replace(trainable=changed))

  exchange = exchange_lib.Exchange(
    initialize=lambda: tf.fill([num_clients, NUM_CLASSES], 1.0 / NUM_CLASSES),
    message=lambda table, model, round_num: table,
    # The next client's row.
    receive=lambda table, client_id: {
      'helper': table[(client_id + 1) % num_clients]
    },
    row_specs={'embedding': tf.TensorSpec([NUM_CLASSES], tf.float32)},
    accept=lambda table, rows, model, round_num: tf.tensor_scatter_nd_update(
      table, rows.client_id[:, None], rows.values['embedding']
    ),
    num_clients=num_clients,
  )

  def both(model):
    summed = tuple(
      a + b for a, b in zip(model.trainable, model.sets['psi'].trainable)
    )
    return model.weights._replace(trainable=summed)

  return parts_lib.Parts(
    local,
    server=server_algorithm.ServerAlgorithm(start, update),
    exchange=exchange,
    prediction=server_model.Prediction(weights=both),
  )
