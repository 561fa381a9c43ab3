"""ProtoFSSL: pseudo-labels by other clients' prototypes. Labels at clients.

Kim, Park, Sohn, Shu and Kim, "Federated Semi-Supervised Learning with
Prototypical Networks", arXiv 2022 (2205.13921). The authors' code:
github.com/kimwj94/ProtoFSSL.

The network has no classifier. Its outputs are embeddings. A prototype is the
mean embedding of a class. The prediction is softmax(-distances from
prototypes).

In a round:
1.  The server broadcasts the network, and the prototypes of clients of the
    round before (helpers). With `--protofssl.helper_interval` R_H, it sends new
    prototypes in rounds 1, 1 + R_H, ... only, and the same again in the others.
2.  For each of E episodes (`--client_epochs`), a client draws n_S support and
    n_Q query examples of each of its classes and n_QU unlabelled ones
    (`--client_batch_size`). It embeds all of them, not augmented, in one pass.
    Its own prototypes are those of the support examples.
3.  It makes a step on L = CE(label, own prediction), mean over query examples,
    + lambda_U CE(p, own prediction), mean over unlabelled examples. The target
    p is the mean of the helpers' predictions, sharpened. Before there are
    prototypes, the client skips the second term and the unlabelled examples.
4.  It uploads the change of the network, and the prototypes of all its labelled
    examples by the network after training.
5.  The server averages the changes. It replaces the prototypes of the round
    before by the new ones. The model's prediction is the mean prediction by
    these sets.

Differences of paper (P) and code (C), with reasons in
docs/algorithms/protofssl.md:
*   The distance is Euclidean in P. In C it is squared, mean over dimensions,
    which is the default (`--protofssl.variant=paper`: Euclidean).
*   p is a label in P, which is the default. Gradients flow through it in C
    (`--protofssl.variant=code`).
*   FedProx and L2 have no gradient in C. Here they have one
    (`--proximal_strength`, `--weight_decay`).
*   Clients are weighed by examples in P (`--client_weighting=examples`). They
    are weighed equally in C, which is the default.
*   sBN is static batch norm in P and here. In C it is batch norm without
    memory.
*   Convolutions have no biases in P and here. They have biases in C.
*   RMSprop starts anew in each round. In C, all clients share its memory.
*   A class that a client lacks is excluded from the softmax. In C its distance
    is 1e18. A helper that lacks it takes the mean of the other helpers. The
    model predicts by helpers of the last cohort, in C of the last two.

`--protofssl.support=global` is the ablation of P's appendix B.1. The prototypes
of step 2 are then the means of the helpers' prototypes, and support examples
are queries, too.

`--protofssl.prototypes=global` is ours (section 8 of the FedSwitch spec). There
is one helper with the prototypes of all clients' labelled examples together.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from tff_fssl import metrics as metrics_lib
from tff_fssl import seeds
from tff_fssl.algorithms.protofssl import prototypes as prototypes_lib
from tff_fssl.algorithms.protofssl import sets
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import format_value
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.lazy import tf
from tff_fssl.models import inference
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import diagnostics
from tff_fssl.semisup import losses
from tff_fssl.semisup import sharpening
from tff_fssl.semisup import thresholds

# Values of --protofssl.prototypes, --protofssl.support and --protofssl.variant.
HELPERS, GLOBAL, OWN = 'helpers', 'global', 'own'
OURS, PAPER, CODE = 'ours', 'paper', 'code'
# The groups of an episode.
_SUPPORT, _QUERY = 0, 1


@dataclasses.dataclass(frozen=True)
class ProtoFssl(base.Algorithm):
  """ProtoFSSL: pseudo-labels by other clients' prototypes, in episodes.

  Episodes in a round are `--client_epochs`, unlabelled examples in an episode
  `--client_batch_size`.
  """

  name = 'protofssl'
  paper = 'Kim et al., arXiv 2022'
  scenarios = (base.LABELS_AT_CLIENTS,)
  embeds = True
  normalization = 'scale'
  capabilities = base.Capabilities(
    extra_uploads=('prototypes of the classes that a client has',),
    signals='sends_rows',
    without_signals='prototypes=global',
    labels_of_class='least_labels',
  )
  round_defaults = {
    'client_epochs': 10,
    'client_batch_size': 100,
    'client_optimizer': 'rmsprop',
    'client_learning_rate': 0.001,
    'weight_decay': 0.0001,
    'max_gradient_norm': 0.0,
    'server_optimizer_momentum': 0.0,
  }
  tiny = {'num_query': 1}
  metrics = (
    metrics_lib.client_metric(
      'loss_prototype_label',
      "Cross-entropy of predictions by a client's own prototypes with sharpened"
      " predictions by other clients' prototypes, mean over unlabelled"
      ' examples; `nan` in rounds before there are such prototypes.',
      metrics_lib.NATS,
      metrics_lib.LOWER,
      curve=metrics_lib.Curve(metrics_lib.LOSS_AT_CLIENTS, 'by prototypes'),
      figure='loss',
    ),
  )

  # Episodes (step 2).
  num_support: int = hparam(
    1,
    'n_S, the labelled examples of each class of whose embeddings an episode'
    ' makes its prototypes (table 5).',
    minimum=1,
    maximum=10**6,
  )
  num_query: int = hparam(
    2,
    'n_Q, the other labelled examples of each class that an episode classifies'
    ' by them (table 5). A class with fewer examples has fewer of them.',
    minimum=1,
    maximum=10**6,
  )
  # The prototypes that clients receive (step 1).
  prototypes: str = hparam(
    HELPERS,
    'What clients are sent. helpers: prototypes of single clients of the round'
    ' before, which the server keeps; global: the mean of all of them, class by'
    ' class, of sums and numbers of examples that are part of the same sum as'
    ' the update, so that secure sums and differential privacy are possible.',
    choices=(HELPERS, GLOBAL),
  )
  num_helpers: int = hparam(
    5,
    '|H|, the most clients whose prototypes are sent and used, and by which the'
    ' global model predicts (section 5). Of a larger cohort, some are drawn.',
    minimum=1,
    maximum=1000,
    when=lambda proto: proto.prototypes == HELPERS,
  )
  helper_interval: int = hparam(
    1,
    'R_H, the rounds after which clients are sent other prototypes: in rounds'
    ' 1, 1 + R_H, 1 + 2 R_H and so on those of the round before, in the others'
    ' the same again; so there are none in the first R_H rounds. The global'
    ' model predicts by the last ones in any case (figures 4b and 5b).',
    minimum=1,
    maximum=10**7,
    when=lambda proto: proto.prototypes == HELPERS,
  )
  sum_norm: float = hparam(
    1.0,
    "The norm that a client's sums and numbers of examples, taken together, are"
    ' scaled down to, so that aggregators that clip them together with the'
    " update clip the update little; clients' shares in the mean are then no"
    ' longer proportional to their examples. 0: they are not scaled.',
    minimum=0,
    when=lambda proto: proto.prototypes == GLOBAL,
  )
  # Predictions and losses (step 3).
  support: str = hparam(
    OWN,
    'By whose prototypes a client predicts in training. own: its own, of n_S'
    ' support examples of each class; global: the mean of those that it was'
    ' sent, which are constants, so that all n_S + n_Q examples of a class are'
    ' classified (section B.1, an ablation). Of classes that nobody sent, and'
    ' in rounds without helpers, its own.',
    choices=(OWN, GLOBAL),
  )
  unlabeled_loss_weight: float = hparam(
    0.3,
    'lambda_U, the weight of the loss on unlabelled examples (table 5).',
    minimum=0,
  )
  temperature: float = hparam(
    0.5,
    'T, by which the mean prediction of helpers is sharpened; 1: it is not'
    ' (table 5).',
    minimum=1e-3,
    maximum=1e3,
  )
  variant: str = hparam(
    OURS,
    'Where paper and code differ. ours: the distance of an embedding from a'
    ' prototype is the mean over dimensions of squared differences, as in the'
    " authors' code, and helpers' predictions are labels, as in the paper;"
    ' paper: the distance is Euclidean; code: gradients flow through these'
    ' labels, too, which also rewards embeddings for which they are easy to'
    ' predict (docs/algorithms/protofssl.md).',
    choices=(OURS, PAPER, CODE),
  )
  # Uploaded prototypes (step 4).
  prototype_noise: float = hparam(
    0.0,
    'Standard deviation of Gaussian noise that a client adds to each entry of'
    ' the prototypes that it sends (table 9).',
    minimum=0,
    maximum=1e6,
    when=lambda proto: proto.prototypes == HELPERS,
  )

  def check(self) -> None:
    """Refuses settings in which unlabelled examples have no gradient."""
    # Cross-entropy with a prediction itself as a constant target is at its
    # minimum.
    labels_are_predictions = (
      self.support == GLOBAL
      and self.num_sets == 1
      and self.temperature == 1
      and self.variant != CODE
    )
    if labels_are_predictions and self.unlabeled_loss_weight:
      raise UsageError(
        f'--protofssl.temperature={format_value(self.temperature)}: with'
        ' --protofssl.support=global and one set of prototypes, the labels of'
        " unlabelled examples are then the client's own predictions, from which"
        ' nothing is learnt; give another temperature or more'
        ' --protofssl.num_helpers, or set --protofssl.unlabeled_loss_weight=0'
      )

  @property
  def distance(self) -> str:
    """Returns the distance of embeddings from prototypes."""
    if self.variant == PAPER:
      return prototypes_lib.EUCLIDEAN
    return prototypes_lib.MEAN_SQUARED

  @property
  def sends_rows(self) -> bool:
    """Tells whether prototypes leave clients outside of the sum of updates."""
    return self.prototypes == HELPERS

  @property
  def least_labels(self) -> int:
    """Returns the fewest labels from which a client can learn a class."""
    # An episode needs a query besides the support examples.
    return self.num_support + 1

  @property
  def num_sets(self) -> int:
    """Returns the most sets of prototypes that the server keeps."""
    return self.num_helpers if self.sends_rows else 1

  @property
  def _holds(self) -> bool:
    """Tells whether the sets that are sent are not those that predict."""
    return self.sends_rows and self.helper_interval > 1

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Starts without prototypes."""
    none = sets.empty(self.num_sets, setup)
    memory = sets.HeldSets(*none, *none) if self._holds else none
    return base.ServerState(weights, memory)

  @property
  def _sent(self) -> dict[str, str]:
    """Returns the names of the fields of `Sets` in what is sent."""
    prefix = 'sent_' if self._holds else ''
    return {name: f'{prefix}{name}' for name in sets.Sets._fields}

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts sets of prototypes (step 1)."""
    del state
    return {name: base.Broadcast() for name in self._sent.values()}

  def uploads(self, setup: base.Setup) -> Mapping[str, base.Upload]:
    """Declares prototypes, or sums and numbers of examples (step 4)."""
    of_class = [setup.num_classes]
    wide = tf.TensorSpec([*of_class, setup.num_outputs])
    if self.sends_rows:
      exists = tf.TensorSpec(of_class, tf.bool)
      return {
        'exists': base.Upload(how=base.ROWS, spec=exists),
        'prototypes': base.Upload(how=base.ROWS, spec=wide),
      }
    counts = tf.TensorSpec(of_class)
    return {
      'counts': base.Upload(0.0, math.inf, base.SUM, counts),
      'sums': base.Upload(how=base.SUM, spec=wide),
    }

  def is_possible(self, uploads: base.Tensors) -> tf.Tensor:
    """Tells whether a client can have these prototypes, or sums."""
    if self.sends_rows:
      return sets.are_possible_rows(**uploads)
    return sets.are_possible_sums(
      **uploads,
      norm=self.sum_norm,
      max_examples=self.round.most_client_examples,
    )

  def streams(self) -> dict[str, base.Stream]:
    """Draws episodes (step 2)."""
    plain, groups = {'plain': 'plain'}, (self.num_support, self.num_query)
    return {
      base.LABELED: base.Stream(plain, labeled=True, episode=groups),
      base.UNLABELED: base.Stream(plain, episode=()),
    }

  def prepare(self, client: base.Client) -> base.Prepared:
    """Completes the sets: a missing prototype is the other helpers' mean."""
    received = {n: client.received[sent] for n, sent in self._sent.items()}
    return base.Prepared(values=sets.complete(received))

  def step(self, networks: base.Networks, batch: base.Batch) -> base.StepResult:
    """Differentiates L, without helpers until there are prototypes (step 3)."""
    with_helpers = tf.logical_and(
      tf.reduce_any(batch.values['used'] > 0.0),
      tf.reduce_any(batch.unlabeled.weights > 0.0),
    )
    gradients, metrics = tf.cond(
      with_helpers,
      lambda: self._differentiate(networks, batch, with_helpers=True),
      lambda: self._differentiate(networks, batch, with_helpers=False),
    )
    return base.StepResult(gradients, metrics)

  def _differentiate(
    self, networks: base.Networks, batch: base.Batch, *, with_helpers: bool
  ) -> tuple[list[tf.Tensor], base.Metrics]:
    labeled, unlabeled = batch.labeled, batch.unlabeled
    images, num_labeled = labeled.views['plain'], tf.size(labeled.labels)
    if with_helpers:
      # One pass, so that batch norm sees all examples together.
      images = tf.concat([images, unlabeled.views['plain']], axis=0)
    with tf.GradientTape() as tape:
      embeddings = networks.model.logits(images, training=True)
      own, exists, in_query = self._own_prototypes(
        embeddings[:num_labeled], batch
      )
      log_probs = prototypes_lib.log_probs(
        embeddings, own, exists, self.distance
      )
      loss, metrics = base.cross_entropy_loss(
        log_probs[:num_labeled], labeled._replace(weights=in_query)
      )
      helped, more = self._helper_loss(
        embeddings[num_labeled:],
        log_probs[num_labeled:],
        batch,
        with_helpers=with_helpers,
      )
      if with_helpers:
        loss += self.unlabeled_loss_weight * helped
    return networks.model.gradients(tape, loss), {**metrics, **more}

  def _own_prototypes(
    self, embeddings: tf.Tensor, batch: base.Batch
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes the prototypes by which the client itself predicts.

    Args:
      embeddings: float32 [B, D], of the labelled examples.
      batch: The batch.

    Returns:
      (prototypes float32 [K, D], which exist bool [K], weights of the examples
      to classify float32 [B]).
    """
    labeled = batch.labeled
    in_support, in_query = (
      tf.cast(tf.equal(labeled.group, group), tf.float32) * labeled.weights
      for group in (_SUPPORT, _QUERY)
    )
    own, exists = prototypes_lib.class_means(
      embeddings,
      labeled.labels,
      in_support,
      batch.values['prototypes'].shape[1],
    )
    if self.support == GLOBAL:
      # Support examples are queries unless they make the prototype.
      is_helped = tf.gather(batch.values['exists'], labeled.labels)
      in_query += in_support * tf.cast(is_helped, tf.float32)
      own, exists = prototypes_lib.replace(own, exists, **batch.values)
    return own, exists, in_query

  def _helper_loss(
    self,
    embeddings: tf.Tensor,
    log_probs: tf.Tensor,
    batch: base.Batch,
    *,
    with_helpers: bool,
  ) -> base.Loss:
    """Computes mean_b CE(p_b, own prediction) with the helpers' targets p."""
    examples = batch.unlabeled
    if not with_helpers:
      # Both branches of `tf.cond` must report the same metrics.
      names = diagnostics.names(diagnostics.PSEUDO_LABEL)
      return tf.constant(0.0), {
        name: base.Mean.ratio(0.0, 0.0)
        for name in ('loss_prototype_label', *names)
      }
    probs = prototypes_lib.mean_probs(
      embeddings, **batch.values, distance=self.distance
    )
    targets = sharpening.sharpen_with_gradient(probs, self.temperature)
    if self.variant != CODE:
      targets = tf.stop_gradient(targets)
    entropies = prototypes_lib.cross_entropy(targets, log_probs)
    loss = losses.masked_mean(entropies, examples.weights)
    # There is no threshold: every example counts as kept.
    metrics = diagnostics.pseudo_label_metrics(
      thresholds.pseudo_labels(probs),
      examples.labels,
      examples.weights,
      weights=examples.weights,
    )
    metrics['loss_prototype_label'] = base.Mean.weighted(loss, examples.size)
    return loss, metrics

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Uploads prototypes of all labelled examples (step 4)."""
    del metrics
    sums, counts = self._class_sums(client)
    if not self.sends_rows:
      return base.ClientOutput(sets.make_sum_row(sums, counts, self.sum_norm))
    own, exists = prototypes_lib.means(sums, counts)
    own = prototypes_lib.add_noise(
      own, exists, self.prototype_noise, client.seed
    )
    return base.ClientOutput({'exists': exists, 'prototypes': own})

  def _class_sums(self, client: base.Client) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the embeddings of the labelled examples, class by class."""
    model = client.networks.model
    embeddings = inference.outputs(
      model,
      client.labeled.x,
      lambda images, i: client.views.plain(images),
      self.round.statistics_batch_size,
      # The received statistics are those of the network before training.
      own_moments=model.is_static,
    )
    return prototypes_lib.class_sums(
      embeddings,
      client.labeled.y,
      tf.ones_like(client.labeled.y, tf.float32),
      client.received[self._sent['prototypes']].shape[1],
    )

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Averages, and replaces the prototypes of the round before (step 5)."""
    state = super().update(state, aggregate, server)
    latest = sets.Sets(state.memory.exists, state.memory.prototypes)
    if not self.sends_rows:
      latest = sets.take_means(latest, aggregate['sums'], aggregate['counts'])
      return state.remember(**latest._asdict())
    rows = sets.Sets(aggregate['exists'], aggregate['prototypes'])
    if server.setup.robust:
      latest = sets.take_medians(latest, *rows)
    else:
      seed = seeds.server_seed(server.setup.seed, server.round_num)
      latest = sets.draw(latest, *rows, seeds.fold_in(seed, seeds.MEMORY))
    return state.remember(**latest._asdict())

  def after_round(self, memory: Any, round_num: tf.Tensor) -> Any:
    """Sends other prototypes from the next round on, if that is due (R_H)."""
    if not self._holds:
      return memory
    is_due = tf.equal(round_num % self.helper_interval, 0)
    return memory._replace(
      sent_exists=tf.where(is_due, memory.exists, memory.sent_exists),
      sent_prototypes=tf.where(
        is_due, memory.prototypes, memory.sent_prototypes
      ),
    )

  def prediction(self) -> server_model.Prediction:
    """Averages the predictions by all sets of prototypes (step 5)."""
    return sets.build_prediction(self.num_sets, self.distance)
