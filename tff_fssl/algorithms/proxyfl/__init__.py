"""ProxyFL: the classifier's rows as proxies of classes.

Chen and Wang, "ProxyFL: A Proxy-Guided Framework for Federated Semi-Supervised
Learning", CVPR 2026 (arXiv 2602.21078). The authors' code:
github.com/DuowenC/FSSLlib.

In a round:
1.  The server broadcasts the model, the frequencies pi of classes, and two
    linear projections: A of features, B of proxies. A client trains copies of
    model and projections, and keeps another copy of the model, G, unchanged.
2.  For each batch, the client's model predicts labelled, weak and strong views
    in one forward pass. G predicts the weak views as in evaluation. The
    pseudo-label is G's class. An example is kept if one of the two networks
    reaches the threshold. The loss on pseudo-labels is FixMatch's.
3.  An example that is kept may have G's class alone. Any other may have each
    class to which G gives more than pi: the candidates. A labelled example has
    its label.
4.  A feature is drawn to the proxy of its class, or to the candidates' proxies,
    weighted by G's probabilities. It is pushed away from the features of
    examples that share no possible class (ICPL). The loss is contrastive.
5.  The client sends the changes of model and projections, and how often it
    counted each class: labels, and pseudo-labels that it keeps.
6.  The server averages. pi follows the sum of the counts.
7.  With `tuning`, the averaged proxies are trained to classify the clients' own
    (GPT). This needs each client's classifier. With `one_step`, clients send a
    gradient instead, in the sum of updates.

docs/algorithms/proxyfl.md lists the differences of paper and authors' code, and
the choices made here.

Files: `proxies` (steps 3, 4 and 7), `memory` (steps 1 and 6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from tff_fssl import metrics as metrics_lib
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms.proxyfl import memory as memory_lib
from tff_fssl.algorithms.proxyfl import proxies as proxies_lib
from tff_fssl.client import joint_pass
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models import adapter
from tff_fssl.models import inference
from tff_fssl.models.weights import Weights, all_finite
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import thresholds

# Values of --proxyfl.tuning, --proxyfl.candidate_weights and
# --proxyfl.labeled_sets.
NONE, GPT, ONE_STEP = 'none', 'gpt', 'one_step'
GLOBAL, LOCAL = 'global', 'local'
TRUTH, RELEASED = 'truth', 'released'
_RECEIVED = 'received'
# Rounding may take the sum of a client's counts this far above 1.
_TOLERANCE = 1.001


@dataclasses.dataclass(frozen=True)
class ProxyFl(base.Algorithm):
  """ProxyFL: unsure examples learn from the proxies of several classes."""

  name = 'proxyfl'
  paper = 'Chen and Wang, CVPR 2026'
  scenarios = (base.LABELS_AT_CLIENTS,)
  unlabeled_views = base.WEAK_AND_STRONG
  norm = 'bn'
  capabilities = base.Capabilities(
    extra_uploads=('class counts', 'changes of two projections'),
    signals='sends_rows',
    without_signals='tuning=none',
  )
  round_defaults = {
    'client_epochs': 10,
    'client_batch_size': 256,
    'client_labeled_batch_size': 128,
    'client_learning_rate': 0.1,
    'nesterov': False,
    'weight_decay': 0.0001,
    'max_gradient_norm': 0.0,
    'server_optimizer_momentum': 0.0,
  }
  tiny = {'confidence_threshold': 0.35}
  metrics = (
    metrics_lib.client_metric(
      'loss_proxy',
      'Contrastive loss of features with proxies and with features of other'
      ' classes, mean over weak and strong views.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(
        metrics_lib.LOSS_AT_CLIENTS, 'proxies', metrics_lib.DOTTED
      ),
    ),
    metrics_lib.client_metric(
      'candidate_classes',
      'Classes above their frequency, mean over the examples that are not'
      ' kept.',
      'count',
      curve=metrics_lib.Curve('Candidate classes'),
      figure='candidates',
    ),
  )

  confidence_threshold: float = hparam(
    0.95,
    "The least probability of a pseudo-label, by the client's model or by the"
    ' received one.',
    minimum=0,
    maximum=1,
  )
  unlabeled_loss_weight: float = hparam(
    1.0,
    'The weight of the loss on pseudo-labels relative to the loss on labels'
    " (value: the authors' code).",
    minimum=0,
  )
  proxy_loss_weight: float = hparam(
    1.0,
    "The weight of the contrastive loss (value: the authors' code).",
    minimum=0,
  )
  candidate_weights: str = hparam(
    GLOBAL,
    "Whose probabilities weigh the candidates' proxies. global: the received"
    " model's (the authors' code); local: those of the model that is trained,"
    ' for weak views (eq. 6).',
    choices=(GLOBAL, LOCAL),
    when=lambda proxyfl: proxyfl.proxy_loss_weight,
  )
  labeled_sets: str = hparam(
    TRUTH,
    'The classes that a labelled example may have. truth: its label (paper);'
    " released: what the received model says, as of unlabelled ones (authors'"
    ' code), which costs a forward pass.',
    choices=(TRUTH, RELEASED),
    when=lambda proxyfl: proxyfl.proxy_loss_weight,
  )
  prior_decay: float = hparam(
    0.99,
    "The share of the old frequencies of classes in the new ones (authors'"
    ' code).',
    minimum=0,
    maximum=1,
    when=lambda proxyfl: proxyfl.proxy_loss_weight,
  )
  tuning: str = hparam(
    NONE,
    'What becomes of the averaged classifier. none: nothing; gpt: the server'
    " trains it to classify the rows of all clients' classifiers (paper), which"
    ' it must see one by one; one_step: each client adds its gradient of that'
    ' loss to its update, at the classifier that it received (ours), so that'
    ' sums suffice.',
    choices=(NONE, GPT, ONE_STEP),
  )
  tuning_learning_rate: float = hparam(
    0.005,
    'The learning rate of the tuning.',
    minimum=0,
    when=lambda proxyfl: proxyfl.tuning != NONE,
  )
  tuning_margin: bool = hparam(
    True,
    'Whether the distance from the own proxy counts with a margin: the largest'
    " distance of a proxy from its nearest other one (authors' code).",
    when=lambda proxyfl: proxyfl.tuning != NONE,
  )
  tuning_epochs: int = hparam(
    100,
    "Passes of the tuning over the clients' proxies in a round: 100 for"
    ' CIFAR-10, 10 for CIFAR-100.',
    minimum=1,
    maximum=10**6,
    when=lambda proxyfl: proxyfl.tuning == GPT,
  )
  tuning_batch_size: int = hparam(
    10,
    "Clients' proxies in a batch of the tuning.",
    minimum=1,
    maximum=10**6,
    when=lambda proxyfl: proxyfl.tuning == GPT,
  )

  @property
  def sends_rows(self) -> bool:
    """Tells whether the server sees single clients' classifiers."""
    return self.tuning == GPT

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts frequencies of classes, and the projections (step 1)."""
    return base.ServerState(weights, memory_lib.initial(setup))

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts frequencies and projections (step 1)."""
    return {name: base.Broadcast() for name in state.memory._fields}

  def uploads(self, setup: base.Setup) -> Mapping[str, base.Upload]:
    """Declares counts of classes, and changes of projections (step 5)."""
    if self.sends_rows and setup.robust:
      raise UsageError(
        f'--proxyfl.tuning=gpt: --aggregator={aggregator_hparams.ROBUST} does'
        " not bound what a lying client's classifier does to the tuned one; set"
        ' --proxyfl.tuning=none'
      )
    how = base.ROWS if self.sends_rows else base.SUM
    counts = tf.TensorSpec([setup.num_classes])
    uploads = {
      name: base.Upload(how=how, spec=spec)
      for name, spec in memory_lib.specs(setup).items()
    }
    uploads[memory_lib.COUNTS] = base.Upload(0.0, _TOLERANCE, how, counts)
    if self.sends_rows:
      kernel = tf.TensorSpec([setup.feature_size(), setup.num_classes])
      # The server knows it from the update.
      uploads[memory_lib.CLASSIFIER] = base.Upload(
        how=how, spec=kernel, is_known=True
      )
    return uploads

  def is_possible(self, uploads: base.Tensors) -> tf.Tensor:
    """Tells whether these may be a client's counts of classes."""
    return tf.reduce_sum(uploads[memory_lib.COUNTS]) <= _TOLERANCE

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Declares the received model, and the two projections."""
    return {
      _RECEIVED: base.AuxiliaryNetwork(),
      memory_lib.FEATURES: _projection(memory_lib.FEATURES, use_bias=True),
      memory_lib.PROXIES: _projection(memory_lib.PROXIES, use_bias=False),
    }

  def start(
    self, name: str, weights: Weights, received: Mapping[str, Any]
  ) -> Weights:
    """Starts the projections as they were received."""
    if name not in memory_lib.WEIGHTS:
      return super().start(name, weights, received)
    own = tuple(received[weight] for weight in memory_lib.WEIGHTS[name])
    return weights._replace(trainable=own)

  def prepare(self, client: base.Client) -> base.Prepared:
    """Keeps the frequencies of classes."""
    return base.Prepared(
      values={memory_lib.PRIOR: client.received[memory_lib.PRIOR]}
    )

  def step(self, networks: base.Networks, batch: base.Batch) -> base.StepResult:
    """Moves the projections, and differentiates the loss for the model."""
    names = tuple(memory_lib.WEIGHTS)
    trained = (networks.model, *(networks[name] for name in names))
    with tf.GradientTape() as tape:
      loss, metrics = self._loss(networks, batch)
    gradients = adapter.gradients(tape, loss, *trained)
    for name, of_projection in zip(names, gradients[1:], strict=True):
      networks.descend(name, of_projection)
    return base.StepResult(gradients[0], metrics)

  def _loss(self, networks: base.Networks, batch: base.Batch) -> base.Loss:
    """Computes the loss of a batch (steps 2 to 4)."""
    model, examples = networks.model, batch.unlabeled
    kernel, *biases = (model.trainable_variables[i] for i in model.head)
    features = joint_pass.outputs(
      lambda images: model.features(images, training=True), batch
    )
    weak, strong, of_labeled = (
      sum(biases, start=tf.matmul(f, kernel)) for f in features
    )
    probs = self._predict(networks, examples, batch)
    local = tf.stop_gradient(tf.nn.softmax(weak))
    is_kept = self._is_kept(local, probs)
    loss, metrics = self._pseudo_label_loss(probs, is_kept, strong, examples)
    entropy, more = base.cross_entropy_loss(of_labeled, batch.labeled)
    choice = proxies_lib.choose(
      probs,
      is_kept,
      batch.values[memory_lib.PRIOR],
      probs if self.candidate_weights == GLOBAL else local,
    )
    contrasted = self._proxy_loss(networks, batch, features, kernel, choice)
    total = entropy + self.unlabeled_loss_weight * loss
    total += self.proxy_loss_weight * contrasted
    unsure = examples.weights * tf.cast(~is_kept, tf.float32)
    sizes = tf.reduce_sum(tf.cast(choice.sets, tf.float32), axis=-1)
    metrics['loss_proxy'] = base.Mean.weighted(contrasted, examples.size)
    metrics['candidate_classes'] = base.Mean(
      tf.reduce_sum(unsure * sizes), tf.reduce_sum(unsure)
    )
    return total, {**metrics, **more}

  def _predict(
    self,
    networks: base.Networks,
    examples: base.BatchExamples,
    batch: base.Batch,
  ) -> tf.Tensor:
    """Predicts weak views by G, as in evaluation: float32 [B, C]."""
    return tf.nn.softmax(
      networks[_RECEIVED].inference_logits(examples.views['weak'])
    )

  def _is_kept(self, local: tf.Tensor, received: tf.Tensor) -> tf.Tensor:
    """Tells where one of two predictions reaches the threshold: bool [B]."""
    return thresholds.fixed_mask(
      local, self.confidence_threshold
    ) | thresholds.fixed_mask(received, self.confidence_threshold)

  def _pseudo_label_loss(
    self,
    probs: tf.Tensor,
    is_kept: tf.Tensor,
    logits: tf.Tensor,
    examples: base.BatchExamples,
  ) -> base.Loss:
    """Computes cross-entropy with G's classes, mean over the whole batch."""
    labels = thresholds.pseudo_labels(probs)
    kept = tf.cast(is_kept, tf.float32) * examples.weights
    entropies = losses.cross_entropy(labels, logits)
    metrics = diagnostics.pseudo_label_metrics(
      labels, examples.labels, kept, weights=examples.weights
    )
    metrics['loss_pseudo_label'] = base.Mean(
      tf.reduce_sum(kept * entropies), tf.reduce_sum(kept)
    )
    return losses.masked_mean(kept * entropies, examples.weights), metrics

  def _proxy_loss(
    self,
    networks: base.Networks,
    batch: base.Batch,
    features: list[tf.Tensor],
    kernel: tf.Tensor,
    choice: proxies_lib.Choice,
  ) -> tf.Tensor:
    """Computes the mean contrastive loss of weak and strong views (step 4)."""
    labeled, unlabeled = batch.labeled, batch.unlabeled
    weak, strong, of_labeled = features
    project = networks[memory_lib.FEATURES]
    own = tf.one_hot(labeled.labels, kernel.shape[-1]) > 0.0
    if self.labeled_sets == RELEASED:
      probs = self._predict(networks, labeled, batch)
      sure = thresholds.fixed_mask(probs, self.confidence_threshold)
      prior = batch.values[memory_lib.PRIOR]
      own = proxies_lib.choose(probs, sure, prior, probs).sets
    contrasted = proxies_lib.contrast(
      project.logits(tf.concat([of_labeled, weak, strong], 0), training=True),
      networks[memory_lib.PROXIES].logits(tf.transpose(kernel), training=True),
      tf.concat([own, choice.sets, choice.sets], 0),
      tf.concat([choice.shares, choice.shares], 0),
      tf.concat([labeled.weights, *[unlabeled.weights] * 2], 0),
    )
    return losses.masked_mean(contrasted, tf.concat([unlabeled.weights] * 2, 0))

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Counts classes, and sends the changes of the projections (step 5)."""
    del metrics
    uploads = {
      name: client.received[name] - variable
      for network, names in memory_lib.WEIGHTS.items()
      for name, variable in zip(
        names, client.networks[network].trainable_variables, strict=True
      )
    }
    uploads[memory_lib.COUNTS] = self._count(client)
    model = client.networks.model
    kernel = model.trainable_variables[model.head[0]]
    if self.tuning == GPT:
      uploads[memory_lib.CLASSIFIER] = kernel.read_value()
    if self.tuning == ONE_STEP:
      received = tf.transpose(client.weights.trainable[model.head[0]])
      change = self._one_step(received, tf.transpose(kernel))
      # As part of the model's change, it is averaged over clients.
      kernel.assign_sub(tf.transpose(change))
    return base.ClientOutput(uploads)

  def _one_step(self, received: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    """Computes the tuning's step on a client's own proxies, float32 [C, D]."""
    margin = tf.constant(0.0)
    if self.tuning_margin:
      margin = proxies_lib.margin(received)
    _, gradient = proxies_lib.tuning_gradient(
      received, own, tf.range(own.shape[0]), margin
    )
    return self.tuning_learning_rate * gradient

  def _count(self, client: base.Client) -> tf.Tensor:
    """Counts labels and kept pseudo-labels, float32 [C], of a sum <= 1.

    Labelled examples count as often as they are drawn while each unlabelled one
    is drawn once.
    """
    model = client.networks.model
    received, local = (
      tf.nn.softmax(
        inference.weak_logits(
          network,
          client.unlabeled.x,
          client.views,
          client.seed,
          self.round.statistics_batch_size,
          own_moments=own_moments,
        )
      )
      for network, own_moments in (
        (client.networks[_RECEIVED], False),
        # Static batch norm takes the examples' own moments: the statistics that
        # the client received are those of the network before training.
        (model, model.is_static),
      )
    )
    num_classes = received.shape[-1]
    kept = tf.cast(self._is_kept(local, received), tf.float32)[:, None]
    labels = tf.one_hot(thresholds.pseudo_labels(received), num_classes)
    of_unlabeled = tf.reduce_sum(kept * labels, axis=0)
    of_labeled = tf.reduce_sum(tf.one_hot(client.labeled.y, num_classes), 0)
    ratio = self.round.client_labeled_batch_size / self.round.client_batch_size
    num_unlabeled, num_labeled = (
      tf.cast(tf.size(examples.y), tf.float32)
      for examples in (client.unlabeled, client.labeled)
    )
    draws = tf.math.divide_no_nan(ratio * num_unlabeled, num_labeled)
    counts = of_unlabeled + tf.maximum(draws, 1.0) * of_labeled
    return counts / ((1.0 + ratio) * self.round.most_client_examples)

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Averages, then tunes the classifier by those of clients (step 7)."""
    state = super().update(state, aggregate, server)
    means = aggregate.values
    if self.sends_rows:
      means = {n: _mean(rows) for n, rows in aggregate.values.items()}
    memory = memory_lib.follow(state.memory, means, self.prior_decay)
    state = state._replace(memory=memory)
    if self.tuning != GPT:
      return state
    of_clients = aggregate[memory_lib.CLASSIFIER]
    trainable = list(state.weights.trainable)
    # The classifier is the network's last layer.
    index = max(
      i for i, w in enumerate(trainable) if w.shape == of_clients.shape[1:]
    )
    tuned = proxies_lib.tune(
      tf.transpose(trainable[index]),
      tf.transpose(of_clients, [0, 2, 1]),
      num_epochs=self.tuning_epochs,
      batch_size=self.tuning_batch_size,
      learning_rate=self.tuning_learning_rate,
      has_margin=self.tuning_margin,
      seed=server.seed,
    )
    trainable[index] = tf.where(
      all_finite([tuned]), tf.transpose(tuned), trainable[index]
    )
    return state._replace(
      weights=state.weights._replace(trainable=tuple(trainable))
    )


def _mean(rows: tf.Tensor) -> tf.Tensor:
  """Averages rows of clients, [n, ...], to 0 if there are none."""
  num_rows = tf.cast(tf.shape(rows)[0], tf.float32)
  return tf.math.divide_no_nan(tf.reduce_sum(rows, axis=0), num_rows)


def _projection(name: str, *, use_bias: bool) -> base.AuxiliaryNetwork:
  """Declares a linear map of features."""
  return base.AuxiliaryNetwork(trained=True, build=_build_dense(name, use_bias))


def _build_dense(
  name: str, use_bias: bool
) -> Callable[[adapter.Network], tf.keras.Model]:
  """Builds the function that makes a projection for a client's network."""

  def model_fn(network: adapter.Network) -> tf.keras.Model:
    size = network.feature_size
    return tf.keras.Sequential(
      [
        tf.keras.Input([size]),
        tf.keras.layers.Dense(size, use_bias=use_bias, name=name),
      ],
      name=name,
    )

  return model_fn
