"""Builds a learning process from an algorithm's local work."""

import collections
from collections.abc import Callable
import math
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import hparams as hparams_lib
from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.aggregators import privacy
from tff_fssl.data import augment
from tff_fssl.finalizers import server_step
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import optimizer as optimizer_lib
from tff_fssl.local import training
from tff_fssl.models import adapter
from tff_fssl.models import statistics
from tff_fssl.rounds import client_work
from tff_fssl.rounds import composer
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.rounds import statistics_phase

RoundHparams = round_hparams_lib.RoundHparams
ServerDataFn = Callable[[], tf.data.Dataset]

# Keeps the server's seeds apart from the clients', which the data source makes.
_SERVER = 1


def build_process(
  model_fn: adapter.ModelFn,
  local_algorithm: algorithm_lib.LocalAlgorithm,
  *,
  server_training: algorithm_lib.LocalAlgorithm = objective.SUPERVISED,
  views: augment.Views,
  element_spec: Any,
  server_data_fn: ServerDataFn | None,
  hparams: RoundHparams,
  seed: int,
  model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
  num_classes: int | None = None,
) -> tff.learning.templates.LearningProcess:
  """Builds the process of an algorithm that averages one model.

  Its state is TFF's `LearningAlgorithmState`, whose `client_work` is the number
  of the next round; the first is `1 - num_pretraining_rounds`. In a round:

  1.  The server broadcasts weights and batch norm statistics.
  2.  Clients train (from round 1 on) and send updates and weights.
  3.  The aggregator combines them; the server optimizer applies the result.
  4.  With labels at the server, the server trains on them.
  5.  With static batch norm, a second client phase gathers statistics.

  If clients took part but none sent a usable update, only the round number in
  the state changes.

  Args:
    model_fn: Builds a Keras model, images -> logits.
    local_algorithm: What clients do in a round.
    server_training: What the server does with its labels, if it has any.
    views: How stored examples become the network's inputs.
    element_spec: The spec of the one element that a client's data set has.
    server_data_fn: Returns the server's labelled data, a data set of one
      element OrderedDict(x, y); called inside a TFF computation. Needed if and
      only if labels are at the server.
    hparams: The round's hyper-parameters.
    seed: Seed of the initial weights and of the server's training.
    model_aggregator: Combines updates; the weighted mean by default. With a
      `privacy.PrivateMeanFactory`, or an aggregator that sums securely, nothing
      else about a client is released: no statistics, and no metrics except the
      number of clients.
    num_classes: Width of the model's output; None to skip the check.

  Returns:
    The process.

  Raises:
    UsageError: If arguments do not fit together, or the model is unsuitable.
  """
  at_server = hparams.scenario == round_hparams_lib.LABELS_AT_SERVER
  if at_server != (server_data_fn is not None):
    raise hparams_lib.UsageError(
      f'scenario={hparams.scenario} and server_data_fn='
      f'{"None" if server_data_fn is None else "(given)"}: the server needs'
      ' labelled data if, and only if, labels are at the server'
    )
  if isinstance(model_aggregator, tff.aggregators.UnweightedAggregationFactory):
    raise hparams_lib.UsageError(
      f'model_aggregator={type(model_aggregator).__name__}: must be weighted;'
      ' for equal weights set client_weighting=uniform; for differential'
      ' privacy use aggregators.factory.build_aggregator, with which nothing is'
      ' released without noise'
    )
  tracked = hparams.batch_norm_statistics == 'moving_average'
  # Only `batch_mean` statistics depend on the batch size.
  server_statistics_batch = hparams.statistics_batch_size
  if hparams.batch_norm_statistics == statistics.BATCH_MEAN:
    server_statistics_batch = hparams.server_batch_size
  pretraining = hparams.num_pretraining_rounds if at_server else 0
  first_round = 1 - pretraining

  def read_server_data():
    assert server_data_fn is not None  # Checked above.
    return client_work.read_examples(client_work.read_one(server_data_fn()))

  stored = element_spec['unlabeled']['x']
  image_shape = augment.image_shape(views, stored)

  def make_network(network_seed=None):
    return adapter.Network(
      model_fn,
      seed=network_seed,
      num_classes=num_classes,
      image_shape=image_shape,
      track_moving_averages=tracked,
      compute_dtype=hparams.compute_dtype,
      trace=network_seed is not None,  # Initial weights come first.
    )

  sgd = optimizer_lib.Sgd(
    hparams.momentum,
    hparams.nesterov,
    hparams.weight_decay,
    hparams.max_gradient_norm,
  )

  def rate_fn(initial):
    return lambda round_num: optimizer_lib.learning_rate(
      initial,
      hparams.learning_rate_schedule,
      hparams.schedule_rounds,
      round_num,
    )

  built: dict[str, Any] = {}  # Properties of the network, once it is built.

  @tff.tensorflow.computation
  def initial_weights():
    network = make_network(seed)
    if network.num_outputs < 2:
      raise hparams_lib.UsageError(
        f'model {network.model.name!r} gives one logit; it must give one for'
        ' each class, two for two classes'
      )
    built['batch_norm'] = bool(network.batch_norm_layers)
    built['static'] = network.is_static
    built['variances'] = network.variances
    built['num_classes'] = network.num_outputs

    @tf.function
    def run():
      weights = network.initial_weights()
      if not (network.is_static and at_server):
        return weights
      images = read_server_data().x
      kind = hparams.batch_norm_statistics
      sums = statistics.gather(
        network,
        weights,
        images,
        views,
        kind=kind,
        batch_size=server_statistics_batch,
      )
      return statistics.put(network, weights, sums, kind=kind)

    return run()

  weights_type = initial_weights.type_signature.result
  specs = tff.types.type_to_tf_tensor_specs(weights_type)
  update_specs = tuple(specs.trainable)
  if tracked:
    update_specs += tuple(s for s in specs.non_trainable if s.dtype.is_floating)
  bounds = _bounds(hparams, local_algorithm)
  factory = model_aggregator or tff.aggregators.MeanFactory()
  private = isinstance(factory, privacy.PrivateMeanFactory)
  if not private:
    factory = guarded.GuardedFactory(factory, bounds.weights)
  aggregator = factory.create(
    tff.types.tensorflow_to_type(update_specs), tff.TensorType(np.float32)
  )
  secure = guarded.sums_securely(aggregator)
  if private or secure:
    aggregator_hparams.check_confidential(
      aggregator_hparams.DP if private else aggregator_hparams.SECURE,
      own_weights=local_algorithm.weighs,
      client_weighting=hparams.client_weighting,
      batch_norm=built['batch_norm'],
      static=built['static'],
    )

  def make_client_training():
    config = training.LoopConfig(
      hparams.client_epochs,
      hparams.client_batch_size,
      hparams.client_labeled_batch_size
      if local_algorithm.trains_on_unlabeled
      else hparams.client_batch_size,
      sgd,
      hparams.proximal_strength,
      hparams.jit_compile,
    )
    return training.LocalTraining(
      make_network(), local_algorithm, views, config
    )

  keeps_momentum = (
    at_server and hparams.server_keeps_momentum and bool(hparams.momentum)
  )

  def make_server_training():
    config = training.LoopConfig(
      hparams.server_epochs,
      hparams.server_batch_size,
      hparams.server_batch_size,
      sgd,
      jit_compile=hparams.jit_compile,
      keeps_momentum=keeps_momentum,
    )
    local = training.LocalTraining(
      make_network(), server_training, views, config
    )

    def train(weights, round_num, momentum):
      labeled = read_server_data()
      result = local.run(
        weights,
        labeled,
        algorithm_lib.Examples(labeled.x[:0], labeled.y[:0]),
        learning_rate=rate_fn(hparams.server_learning_rate)(round_num),
        seed=training.fold_in(tf.stack([seed, round_num]), _SERVER),
        round_num=round_num,
        momentum=momentum,
      )
      metrics = collections.OrderedDict(
        (f'server_{name}', total / count)
        for name, (total, count) in sorted(result.ratios.items())
      )
      metrics['server_num_examples'] = result.num_examples
      metrics['server_non_finite'] = tf.cast(
        tf.logical_not(result.is_finite), tf.int32
      )
      trained = tuple(w - u for w, u in zip(weights.trainable, result.update))
      weights = weights._replace(
        trainable=trained, non_trainable=result.non_trainable
      )
      return weights, metrics, result.momentum

    return train

  client_rate_fn = rate_fn(hparams.client_learning_rate)
  work, bytes_up = client_work.build_client_work(
    weights_type,
    element_spec,
    make_client_training,
    learning_rate_fn=client_rate_fn,
    weigh_by_examples=hparams.client_weighting == 'examples',
    track_non_trainable=tracked,
    first_round=first_round,
    bounds=bounds,
    num_classes=built['num_classes'],
    release_metrics=not (private or secure),
  )
  finalizer = server_step.build_server_step(
    weights_type,
    aggregator.next.type_signature.result.result.member,
    _server_optimizer(hparams),
    first_round=first_round,
    make_training=make_server_training if at_server else None,
    keeps_momentum=keeps_momentum,
    non_negative=built['variances'],
  )
  # Each phase broadcasts the weights; the first also sends the round number.
  weight_bytes = client_work.num_bytes(weights_type)
  bytes_down = weight_bytes + tf.int32.size
  last_phase = None
  if built['static']:
    last_phase, phase_bytes_up = statistics_phase.build_statistics_phase(
      weights_type,
      element_spec,
      make_network,
      views,
      kind=hparams.batch_norm_statistics,
      batch_size=hparams.statistics_batch_size,
      max_client_examples=_max_client_examples(hparams),
      num_classes=built['num_classes'],
      server_data_fn=server_data_fn,
      server_batch_size=server_statistics_batch,
    )
    bytes_down += weight_bytes
    bytes_up += phase_bytes_up

  state_type = tff.to_type(
    composer.LearningAlgorithmState(
      weights_type,
      (),
      tff.TensorType(np.int32),
      aggregator.initialize.type_signature.result.member,
      finalizer.initialize.type_signature.result.member,
    )
  )
  revise_state = None
  if not (private or secure):  # Otherwise the server must not learn who failed.
    revise_state = _keep_if_all_failed(
      state_type, work.next.type_signature.result.measurements.member
    )

  return composer.compose_fssl_process(
    initial_weights,
    tff.learning.templates.build_broadcast_process(weights_type),
    work,
    aggregator,
    finalizer,
    last_phase=last_phase,
    revise_state=revise_state,
    communication={
      'bytes_down_per_client': bytes_down,
      'bytes_up_per_client': bytes_up,
    },
    find_non_finite=client_work.build_find_non_finite(
      make_client_training, client_rate_fn, built['num_classes']
    ),
    num_classes=built['num_classes'],
  )


def _keep_if_all_failed(
  state_type: tff.Type, metrics_type: tff.Type
) -> tff.Computation:
  """Restores the old state, but its counters, if no update was usable."""

  @tff.tensorflow.computation(state_type, state_type, metrics_type)
  def keep_if_all_failed(old, new, metrics):
    train = metrics['train']
    num_failed = train['num_non_finite_clients'] + train['num_rejected_clients']
    failed = tf.logical_and(
      train['num_clients'] > 0, num_failed >= train['num_clients']
    )
    kept = tf.nest.map_structure(lambda n, o: tf.where(failed, o, n), new, old)
    finalizer_state = kept.finalizer
    finalizer_state['round_num'] = new.finalizer['round_num']
    return kept._replace(client_work=new.client_work, finalizer=finalizer_state)

  return keep_if_all_failed


def _max_client_examples(hparams: RoundHparams) -> int:
  return hparams.max_client_examples or round_hparams_lib.MAX_CLIENT_EXAMPLES


def _bounds(
  hparams: RoundHparams, local_algorithm: algorithm_lib.LocalAlgorithm
) -> client_work.Bounds:
  """Bounds on what an honest client with `max_client_examples` can send."""
  batch_sizes = []
  if local_algorithm.trains_on_unlabeled:
    batch_sizes.append(hparams.client_batch_size)
  if local_algorithm.trains_on_labels:
    batch_sizes.append(
      hparams.client_labeled_batch_size
      if local_algorithm.trains_on_unlabeled
      else hparams.client_batch_size
    )
  # The other streams repeat until the longest stream of batches ends.
  most_examples = _max_client_examples(hparams)
  steps = max(math.ceil(most_examples / b) for b in batch_sizes)
  most = float(hparams.client_epochs * steps * sum(batch_sizes))
  if not local_algorithm.weighs and hparams.client_weighting == 'examples':
    return client_work.Bounds(guarded.AllowedWeights(most), most)
  return client_work.Bounds(
    guarded.AllowedWeights(1.0, all_or_nothing=not local_algorithm.weighs), most
  )


def _server_optimizer(
  hparams: RoundHparams,
) -> tff.learning.optimizers.Optimizer:
  rate = hparams.server_optimizer_learning_rate
  if hparams.server_optimizer == 'adam':
    return tff.learning.optimizers.build_adam(rate)
  if hparams.server_optimizer == 'yogi':
    return tff.learning.optimizers.build_yogi(rate)
  # TFF does not accept a momentum of 0.
  return tff.learning.optimizers.build_sgdm(
    rate, momentum=hparams.server_optimizer_momentum or None
  )
