"""FedMatch: labels move sigma, unlabelled examples psi, other clients help.

Jeong, Yoon, Yang and Hwang, "Federated Semi-Supervised Learning with
Inter-Client Consistency & Disjoint Learning", ICLR 2021 (2006.12097). Code of
the authors: wyjeong/FedMatch at 4947aa2.

Every trainable weight is theta = sigma + psi. In a round:
1.  The server sends sigma and psi. Clients that took part before only get the
    elements that differ from the client's copy by more than delta. In every
    tenth round the server also sends the psi's of the H = 2 clients with the
    most similar predictions for an image of noise. With sigma, these psi's make
    H helpers.
2.  For each batch, a client makes up to two steps of SGD:
    a.  With labels at the clients, sigma moves on lambda_s CE of labels.
    b.  psi moves on the mean, over the local network's confident examples u, of
        lambda_i mean_j KL(helper_j(u) || local(u)) + lambda_a CE(y,
        local(strong view)), plus lambda_L1 |psi|_1 + lambda_L2 |sigma -
        psi|_2^2. The pseudo-label y is the class with the most votes of local
        network and helpers.
3.  It uploads psi, and sigma if it has moved. It sends the elements that differ
    from the received ones by more than delta. Its learning rate falls by the
    factor 3 after five of its rounds without a lower loss.
4.  The server keeps the upload, with the prediction for the image of noise. Its
    sigma and psi change by the mean of the clients' changes. With labels at the
    server, sigma moves on lambda_s CE of labels.
The server predicts with psi only where |psi| > psi_threshold. With
`helpers=past` (ours) the global models of earlier rounds help.

docs/algorithms/fedmatch.md lists the differences of paper, authors' code and
this code. Decided here:
*   The server's model changes by the elements that are sent. An element that
    the server has not sent to a client (S2C, server to client) is not averaged
    in. The authors' code sends whole models, and only counts such elements.
*   The loss that drives a client's rate is the loss of its batches before it
    learns from them, since the authors' validation data would not exist.
*   With labels at the server, the model is evaluated after the server's
    training. The authors evaluate it before.
*   Clients that come first get whole models (2 sets).
*   Ties of votes go to the local network.
*   The server's rate follows `--learning_rate_schedule`.

Files: `sparse_updates` (steps 1 and 3), `helper_predictions` (step 2b),
`helper_selection` and `upload_cache` (steps 1 and 4), `patience` (step 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

from tff_fssl import metrics as metrics_lib
from tff_fssl.algorithms.fedmatch import helper_predictions
from tff_fssl.algorithms.fedmatch import helper_selection
from tff_fssl.algorithms.fedmatch import sparse_updates
from tff_fssl.algorithms.fedmatch import upload_cache
from tff_fssl.hparams import hparam
from tff_fssl.interface import base
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import tf
from tff_fssl.models import weights as weights_lib
from tff_fssl.models.weights import Weights
from tff_fssl.semisup import patience as patience_lib

SIGMA, PSI = 'sigma', 'psi'
# Values of --fedmatch.helpers and --fedmatch.variant.
CLIENTS, PAST = 'clients', 'past'
OURS, PAPER, CODE = 'ours', 'paper', 'code'
# psi at the start is this multiple of sigma, as in the authors' code. The paper
# does not say.
_PSI_FACTOR = 0.2
# The divisor of a client's learning rate when its patience is over.
_RATE_DIVISOR = 3.0

_TRAVELS = 'What travels (% of one dense model)'
_METRICS = (
  metrics_lib.client_metric(
    'loss_helpers',
    'Kullback-Leibler divergence of predictions from those of helpers, mean'
    ' over confident examples and helpers; `nan` without helpers.',
    metrics_lib.NATS,
    metrics_lib.LOWER,
    curve=metrics_lib.Curve(
      metrics_lib.LOSS_AT_CLIENTS, 'consistency', metrics_lib.DOTTED
    ),
  ),
  metrics_lib.client_metric(
    'unmasked_cross_entropy',
    'Cross-entropy of strong views with the most probable classes of the'
    ' examples as they are, confident or not, mean over examples. With labels'
    " at the server, it drives the clients' learning rates.",
    metrics_lib.NATS,
    metrics_lib.LOWER,
  ),
  metrics_lib.client_metric(
    'helped_clients',
    'Clients that had helpers, among all.',
    metrics_lib.SHARE,
    curve=metrics_lib.Curve('Clients with helpers'),
  ),
  metrics_lib.client_metric(
    'percent_down',
    'Elements that a client is sent as differences from what it has, helpers'
    ' included, in % of the elements of one dense model (sigma or psi); mean'
    ' over clients. As in the paper, indices do not count.',
    metrics_lib.PERCENT,
    metrics_lib.LOWER,
    curve=metrics_lib.Curve(_TRAVELS, 'to clients'),
    compared='down (% of model)',
  ),
  metrics_lib.client_metric(
    'percent_up',
    'The same of what a client sends.',
    metrics_lib.PERCENT,
    metrics_lib.LOWER,
    curve=metrics_lib.Curve(_TRAVELS, 'from clients', metrics_lib.DASHED),
    compared='up (% of model)',
  ),
  metrics_lib.client_metric(
    'psi_distance',
    "L2 norm of sigma - psi over that of sigma, of clients' uploads; mean over"
    ' clients. 0.8 at the start; 0 where psi is a copy of sigma.',
    'ratio',
    curve=metrics_lib.Curve('Distance of psi from sigma'),
  ),
  metrics_lib.client_metric(
    'learning_rate_factor',
    "Factor of the clients' learning rates; mean over clients.",
    'ratio',
  ),
)


class FedMatchMemory(NamedTuple):
  """The server's memory besides sigma, which is the model.

  Attributes:
    psi: The other summand, `Weights`, or () without decomposition.
    past_models: float32 [H, weights], models of earlier rounds, latest first.
      H is 0 unless they help.
    num_past_models: float32 scalar, the number of past models that clients get
      in the next round.
  """

  psi: Any
  past_models: tf.Tensor
  num_past_models: tf.Tensor


@dataclasses.dataclass(frozen=True)
class FedMatch(base.Algorithm):
  """FedMatch: labels move sigma, unlabelled examples psi; clients help."""

  name = 'fedmatch'
  paper = 'Jeong et al., ICLR 2021'
  labeled_views = {'plain': 'plain'}
  unlabeled_views = {'plain': 'plain', 'strong': 'strong'}
  # Steps 2a and 2b are separate updates.
  normalization = 'scale'
  capabilities = base.Capabilities(
    extra_uploads=(
      'its upload apart from those of others',
      'predictions for an image of noise',
      'its learning rate',
    ),
    without_signals='remembered_clients=0',
    without_quota='its clients receive a model in two parts, and helpers',
  )
  round_defaults = {
    'client_epochs': 1,
    'client_batch_size': 100,
    'client_learning_rate': 1e-3,
    'max_gradient_norm': 0.0,
    'momentum': 0.0,
    'num_pretraining_rounds': 1,
    'server_batch_size': 100,
    'server_epochs': 1,
    'server_learning_rate': 1e-3,
    'server_optimizer_momentum': 0.0,
    'weight_decay': 0.0,
  }
  tiny = {'confidence_threshold': 0.3, 'helper_interval': 1}
  metrics = _METRICS

  variant: str = hparam(
    OURS,
    'Where paper and code differ. ours: differences are applied, helpers are'
    " used in the round in which they are chosen, and the local model's class"
    ' has a tied vote; paper: the same, but helpers are used until others are'
    ' chosen, at the cost of H more sets in each round; code: differences are'
    ' only counted, and the lowest class has a tied vote'
    ' (docs/algorithms/fedmatch.md).',
    choices=(OURS, PAPER, CODE),
    when=lambda own: own.remembered_clients or own.uses_helpers,
  )
  # Losses (step 2).
  confidence_threshold: float = hparam(
    0.85,
    'tau: an unlabelled example is learnt from if the local model gives some'
    ' class at least this probability (paper; code: 0.75).',
    minimum=0,
    maximum=1,
  )
  labeled_loss_weight: float = hparam(
    10.0, 'lambda_s, the weight of the loss on labels.', minimum=0
  )
  pseudo_label_weight: float = hparam(
    0.01,
    'lambda_a, the weight of the loss on pseudo-labels (lambda_ICCS).',
    minimum=0,
  )
  consistency_weight: float = hparam(
    0.01,
    'lambda_i, the weight of the divergence from helpers (lambda_ICCS); 0: no'
    ' inter-client consistency.',
    minimum=0,
    when=lambda own: own.num_helpers and own.finds_helpers,
  )
  l1_weight: float = hparam(
    1e-5,
    'lambda_L1, of the sum of |psi|: 1e-5 with labels at the server, 1e-4 with'
    ' labels at the clients.',
    minimum=0,
    when=lambda fedmatch: fedmatch.decomposition,
  )
  l2_weight: float = hparam(
    10.0,
    'lambda_L2, of the sum of (sigma - psi)^2, for psi alone. A step of rate r'
    ' takes psi the share 2 r lambda_L2 of the way to sigma: with the default'
    ' rate psi becomes a copy of sigma. Above r lambda_L2 = 1 it diverges.',
    minimum=0,
    when=lambda fedmatch: fedmatch.decomposition,
  )
  # The decomposition into sigma and psi.
  psi_threshold: float = hparam(
    1e-5,
    'Elements of psi of at most this size count as 0 in evaluation, at the'
    ' server, and where psi is sent (code: 1e-5 with labels at the server, 5e-6'
    ' with labels at the clients).',
    minimum=0,
    when=lambda fedmatch: fedmatch.decomposition,
  )
  decomposition: bool = hparam(
    True,
    'Whether weights are sigma + psi, sigma learns from labels and psi from'
    ' unlabelled examples. If false, one set learns from both (table 5).',
  )
  evaluate_sets: bool = hparam(
    False,
    'Whether evaluation also measures the network with sigma alone and with psi'
    ' alone (figure 6b): sigma/accuracy, psi/accuracy. Statistics of batch norm'
    ' are those of the sum, and wrong for each alone: take --norm=none or gn.',
    when=lambda fedmatch: fedmatch.decomposition,
  )
  # Helpers (steps 1 and 2b).
  agreement: bool = hparam(
    True,
    'Whether helpers vote on pseudo-labels; if false, the local model decides.',
    when=lambda own: own.num_helpers and own.finds_helpers,
  )
  num_helpers: int = hparam(
    2,
    'H, the other clients whose models help; 0: none, so that neither'
    ' consistency nor agreement has an effect.',
    minimum=0,
    maximum=100,
    when=lambda own: (
      not own.num_helpers or (own.wants_help and own.finds_helpers)
    ),
  )
  helpers: str = hparam(
    CLIENTS,
    'Who helps. clients: other clients, by what they last uploaded; past: the'
    ' global models before the last H rounds in which helpers were due, which'
    ' all clients get (ours). With --fedmatch.remembered_clients=0 the server'
    ' then needs to know no client.',
    choices=(CLIENTS, PAST),
    when=lambda fedmatch: fedmatch.num_helpers and fedmatch.wants_help,
  )
  helper_interval: int = hparam(
    10,
    'R_H: helpers are chosen in rounds whose number is a multiple of this.',
    minimum=1,
    maximum=10**6,
    when=lambda fedmatch: fedmatch.uses_helpers,
  )
  # Sparse updates (steps 1 and 3).
  delta_threshold: float = hparam(
    1e-5,
    'Differences of at most this size from what the receiver has are not sent'
    ' (paper: 1e-5 to 5e-5; code: 1e-5 with labels at the server, 5e-5 with'
    ' labels at the clients). -1: whole models are sent.',
    minimum=-1,
    when=lambda fedmatch: fedmatch.remembered_clients,
  )
  # Learning rates of single clients (step 3).
  patience: int = hparam(
    5,
    'After so many rounds of a client, without a lower loss on its batches as'
    ' they come, its learning rate falls by the factor 3; 0: it never does'
    ' (paper: 5; code: 20 with labels at the server).',
    minimum=0,
    maximum=10**6,
    when=lambda fedmatch: fedmatch.remembered_clients,
  )
  # The server's table of last uploads (step 4).
  remembered_clients: int = hparam(
    10**6,
    'The most clients whose last upload the server keeps; who has not taken'
    ' part for longest is forgotten. 0: no state of clients, hence no helpers,'
    ' no deltas and no patience.',
    minimum=0,
    maximum=10**6,
  )
  uploads_in: str = hparam(
    upload_cache.AUTO,
    'Where the server keeps the sets that clients last sent. state: in its'
    ' state, of at most 1.5 GB, and so in each checkpoint; files: beside the'
    " checkpoints, a file for each client's last round, of which a round reads"
    " only its cohort's and their helpers'; auto: files above 200 MB. Results"
    ' are the same. A program of your own must bring what is in files.',
    choices=(upload_cache.AUTO, upload_cache.STATE, upload_cache.FILES),
    when=lambda fedmatch: fedmatch.uses_clients or fedmatch.sends_deltas,
  )

  @property
  def remembers(self) -> bool:
    """Tells whether the server keeps state for each client."""
    return bool(self.remembered_clients) and bool(
      self.uses_clients or self.sends_deltas or self.patience
    )

  @property
  def uses_helpers(self) -> bool:
    """Tells whether clients get helpers."""
    return self._asks_for_helpers and self.finds_helpers

  @property
  def wants_help(self) -> bool:
    """Tells whether helpers have an effect, through votes or the loss."""
    return bool(self.agreement or self.consistency_weight)

  @property
  def finds_helpers(self) -> bool:
    """Tells whether the server has models that can help."""
    return self.helpers == PAST or bool(self.remembered_clients)

  @property
  def uses_clients(self) -> bool:
    """Tells whether helpers are other clients."""
    return (
      self._asks_for_helpers
      and self.helpers == CLIENTS
      and bool(self.remembered_clients)
    )

  @property
  def uses_past(self) -> bool:
    """Tells whether helpers are global models of earlier rounds."""
    return self._asks_for_helpers and self.helpers == PAST

  @property
  def _asks_for_helpers(self) -> bool:
    return bool(self.num_helpers) and self.wants_help

  @property
  def sends_deltas(self) -> bool:
    """Tells whether differences up to `delta_threshold` are not sent."""
    return bool(self.remembered_clients) and self.delta_threshold >= 0

  @property
  def adapts_rates(self) -> bool:
    """Tells whether clients have learning rates of their own."""
    return bool(self.remembered_clients and self.patience)

  @property
  def set_names(self) -> tuple[str, ...]:
    """Returns the names of the sets of weights: sigma, and psi if it exists."""
    return (SIGMA, PSI) if self.decomposition else (SIGMA,)

  @property
  def sparse(self) -> sparse_updates.SparseUpdates:
    """Returns the rule by which sets are sent as sparse differences."""
    return sparse_updates.SparseUpdates(
      self.delta_threshold if self.sends_deltas else None,
      {PSI: self.psi_threshold},
      applied=self.variant != CODE,
    )

  @property
  def rates(self) -> patience_lib.Rule | None:
    """Returns the rule for a client's learning rate, if rates adapt."""
    if not self.adapts_rates:
      return None
    return patience_lib.Rule(self.patience, _RATE_DIVISOR)

  @property
  def selection(self) -> helper_selection.Settings:
    """Returns the settings of the server's table and of the helpers' choice."""
    # With decomposition, only psi is sent: the receiver adds its own sigma.
    helper = self.set_names[-1:] if self.uses_clients else ()
    return helper_selection.Settings(
      self.set_names if self.sends_deltas else helper,
      self.rates.ranges() if self.rates else {},
      helper[0] if helper else '',
      self.num_helpers,
      self.helper_interval,
      self.variant == PAPER,
      self.remembered_clients,
      self.uploads_in,
      ('--fedmatch.remembered_clients', '--fedmatch.uploads_in'),
    )

  def initial_state(
    self, weights: Weights, setup: base.Setup
  ) -> base.ServerState:
    """Splits the weights into sigma and psi."""
    del setup
    psi: Any = ()
    if self.decomposition:
      weights, psi = sparse_updates.split(weights, _PSI_FACTOR)
    # Without past models, a tensor without rows.
    num = self.num_helpers if self.uses_past else 0
    size = sum(w.shape.num_elements() for w in weights.trainable)
    memory = FedMatchMemory(psi, tf.zeros([num, size]), tf.constant(0.0))
    return base.ServerState(weights, memory)

  def broadcasts(self, state: base.ServerState) -> Mapping[str, base.Broadcast]:
    """Broadcasts psi, and past models in rounds in which they help (step 1).

    A client's own last upload and its helpers come from the server's table.
    """
    sent = {}
    if self.decomposition:
      sent[PSI] = base.Broadcast()
    if self.uses_past:
      when = state.memory.num_past_models > 0.0
      sent['past_models'] = base.Broadcast(when=when)
      sent['num_past_models'] = base.Broadcast()
    return sent

  def exchange(self) -> exchange_lib.BuildExchange | None:
    """Keeps the last uploads, and chooses helpers among them (steps 1, 4)."""
    if not self.remembers:
      return None
    return functools.partial(helper_selection.build_exchange, self.selection)

  def networks(self) -> Mapping[str, base.AuxiliaryNetwork]:
    """Holds psi in a second network, which is trained and uploaded."""
    if not self.decomposition:
      return {}
    return {PSI: base.AuxiliaryNetwork(trained=True, uploaded=True)}

  def start(
    self, name: str, weights: Weights, received: Mapping[str, Any]
  ) -> Weights:
    """Starts a set from the client's last upload where nothing was sent."""
    sent = super().start(name, weights, received)
    merge = self.sparse.start(SIGMA if name == base.MODEL else name)
    return sent if merge is None else merge(sent, received)

  def prepare(self, client: base.Client) -> base.Prepared:
    """Asks the helpers once, since they do not change during the round."""
    sets = self._sets(client.networks)
    share = tf.add_n(
      [self.sparse.share_down(n, v, client.received) for n, v in sets.items()]
    )
    helpers, weights, helper_share = self._helpers(client)
    share += helper_share
    probs, weights = helper_predictions.predict(
      client, helpers, weights, self.round.statistics_batch_size
    )
    # The field `Patience.rate` of the client's row at the server.
    rate = client.received['rate'] if self.rates else tf.constant(1.0)
    return base.Prepared(
      per_example={helper_predictions.PROBS: probs},
      values={helper_predictions.WEIGHTS: weights},
      metrics={
        'percent_down': base.Mean.ratio(100.0 * share, 1.0),
        'helped_clients': base.Mean.ratio(tf.reduce_max(weights), 1.0),
        'learning_rate_factor': base.Mean.ratio(rate, 1.0),
      },
      learning_rate_factor=rate,
    )

  def _sets(self, networks: base.Networks) -> dict[str, Sequence[tf.Variable]]:
    """Returns the variables of each set."""
    sets: dict[str, Sequence[tf.Variable]] = {
      SIGMA: networks.model.trainable_variables
    }
    if self.decomposition:
      sets[PSI] = networks[PSI].trainable_variables
    return sets

  def _helpers(
    self, client: base.Client
  ) -> tuple[list[Sequence[tf.Tensor]], tf.Tensor, tf.Tensor]:
    """Expresses helpers as tensors that are added to sigma.

    Args:
      client: The client.

    Returns:
      (for each helper, tensors like sigma, weights float32 [H] that are 0 for
      helpers that do not count, the size of the transfer in multiples of one
      set).
    """
    sigma = client.networks.model.trainable_variables
    if self.uses_clients:
      sent, share = self.sparse.helpers(
        self.set_names[-1], sigma, client.received
      )
      helpers: list[Sequence[tf.Tensor]] = list(sent)
      if not self.decomposition:  # They are whole networks.
        helpers = [_subtract(helper, sigma) for helper in helpers]
      weights = client.received[helper_selection.HELPER_WEIGHTS]
      return helpers, weights, share
    if not self.uses_past:
      # Not empty, since the largest weight is taken.
      return [], tf.zeros([1]), tf.constant(0.0)
    models = client.received['past_models']
    # A discarded round stored no model, though `num_past_models` counts it.
    exists = tf.reduce_any(tf.not_equal(models, 0.0), axis=1)
    num_sent = client.received['num_past_models']
    is_sent = tf.range(models.shape[0], dtype=tf.float32) < num_sent
    # After a discarded round, `num_past_models` is that of the round before.
    is_due = self._is_past_due(client.round_num)
    weights = tf.cast(exists & is_sent & is_due, tf.float32)
    helpers = [
      _subtract(weights_lib.unflatten(models[i], sigma), sigma)
      for i in range(models.shape[0])
    ]
    return helpers, weights, tf.reduce_sum(weights)

  def step(self, networks: base.Networks, batch: base.Batch) -> base.StepResult:
    """Moves sigma on labels, if clients have some, and then psi (step 2)."""
    metrics: base.Metrics = {}
    if base.LABELED in batch.streams:
      labeled = self.labeled_step(networks, batch)
      assert labeled.gradients is not None
      networks.descend(base.MODEL, labeled.gradients)
      metrics = labeled.metrics
    unlabeled = self.unlabeled_step(networks, batch)
    return unlabeled._replace(metrics={**metrics, **unlabeled.metrics})

  def labeled_step(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.StepResult:
    """Differentiates by sigma on labels (step 2a), also at the server."""
    model, examples = networks.model, batch.labeled
    # The server trains the sum itself, without a second network.
    psi = self._sets(networks)[PSI] if networks.auxiliary else ()
    # The gradients at sigma + psi move sigma alone.
    with model.perturbed(psi), tf.GradientTape() as tape:
      loss, metrics = base.cross_entropy_loss(
        examples.logits(model, 'plain'), examples
      )
      loss *= self.labeled_loss_weight
    return base.StepResult(model.gradients(tape, loss), metrics)

  def unlabeled_step(
    self, networks: base.Networks, batch: base.Batch
  ) -> base.StepResult:
    """Moves psi on unlabelled examples (step 2b)."""
    gradients, metrics = self._differentiate(networks, batch)
    if not self.decomposition:
      return base.StepResult(gradients, metrics)
    sets = self._sets(networks)
    gradients = [
      # The gradients of lambda_L1 |psi|_1 and of lambda_L2 |sigma - psi|_2^2.
      g + self.l1_weight * tf.sign(p) + 2.0 * self.l2_weight * (p - s)
      for g, p, s in zip(gradients, sets[PSI], sets[SIGMA], strict=True)
    ]
    networks.descend(PSI, gradients)
    # Sigma is constant in step 2b.
    return base.StepResult(None, metrics)

  def _differentiate(
    self, networks: base.Networks, batch: base.Batch
  ) -> tuple[list[tf.Tensor], base.Metrics]:
    """Differentiates the losses of inter-client consistency (eq. 2 and 3)."""
    model, examples = networks.model, batch.unlabeled
    psi = self._sets(networks).get(PSI, ())

    def learn(*, with_helpers: bool) -> tuple[list[tf.Tensor], base.Metrics]:
      with model.perturbed(psi), tf.GradientTape() as tape:
        # Without helpers, no gradient flows through this pass.
        recording = contextlib.nullcontext
        if not with_helpers:
          recording = tape.stop_recording
        with recording():
          plain = examples.logits(model, 'plain')
        loss, metrics = helper_predictions.loss(
          examples,
          plain,
          examples.logits(model, 'strong'),
          batch.values[helper_predictions.WEIGHTS],
          threshold=self.confidence_threshold,
          label_weight=self.pseudo_label_weight,
          consistency_weight=self.consistency_weight,
          agree=self.agreement,
          local_breaks_ties=self.variant != CODE,
        )
      return model.gradients(tape, loss), metrics

    if not (self.uses_helpers and self.consistency_weight):
      return learn(with_helpers=False)
    result: tuple[list[tf.Tensor], base.Metrics] = tf.cond(
      tf.reduce_any(batch.values[helper_predictions.WEIGHTS] > 0.0),
      lambda: learn(with_helpers=True),
      lambda: learn(with_helpers=False),
    )
    return result

  def finish(
    self, client: base.Client, metrics: Mapping[str, base.Mean]
  ) -> base.ClientOutput:
    """Drops small changes, and makes the row that the server keeps (step 3)."""
    share = tf.constant(0.0)
    sets = self._sets(client.networks)
    for name, variables in sets.items():
      # An unchanged sigma is not sent, and costs nothing.
      if name == SIGMA and not self._moves_sigma:
        continue
      before = self._received_set(name, client).trainable
      sent, set_share = self.sparse.cut(name, before, variables)
      share += set_share
      # The upload is the difference of these variables and the received ones.
      for variable, value in zip(variables, sent, strict=True):
        variable.assign(value)
    flat = {name: weights_lib.flatten(v) for name, v in sets.items()}
    more = {'percent_up': base.Mean.ratio(100.0 * share, 1.0)}
    if self.decomposition:
      distance = tf.math.divide_no_nan(
        tf.norm(flat[SIGMA] - flat[PSI]), tf.norm(flat[SIGMA])
      )
      more['psi_distance'] = base.Mean.ratio(distance, 1.0)
    # The server's table stores flat rows.
    row = {name: flat[name] for name in self.selection.sets}
    if self.uses_clients:
      with client.networks.model.perturbed(sets.get(PSI, ())):
        row[helper_selection.EMBEDDING] = helper_predictions.embedding(client)
    if self.rates is not None:
      # One loss a round: the mean over the client's batches.
      received = (client.received[n] for n in patience_lib.Patience._fields)
      total, count = metrics[self._rate_loss]
      patience = self.rates.update(
        patience_lib.Patience(*received), total / count
      )
      row |= patience._asdict()
    return base.ClientOutput(row, more)

  def _received_set(self, name: str, client: base.Client) -> Weights:
    """Returns the set from which the client started."""
    if name == SIGMA:
      return client.weights
    start = self.sparse.start(name)
    received: Weights = client.received[name]
    return received if start is None else start(received, client.received)

  @property
  def _moves_sigma(self) -> bool:
    """Tells whether clients train sigma: on labels, or without psi."""
    return self.round.labels_at_clients or not self.decomposition

  @property
  def _rate_loss(self) -> str:
    """Returns the metric that decides when a client's learning rate falls."""
    if self.round.labels_at_clients:
      return 'loss_labeled'
    return helper_predictions.LOSS_OF_ALL

  def update(
    self,
    state: base.ServerState,
    aggregate: base.Aggregate,
    server: base.Server,
  ) -> base.ServerState:
    """Applies both changes, then trains sigma on labels (step 4)."""
    before = state
    if not self.decomposition:
      state = super().update(state, aggregate, server)
      return self._remember_model(before, state, server.round_num)
    state = state.remember(psi=aggregate.move(PSI, state.memory.psi))
    sigma = server.apply(state.weights, aggregate.update)
    state = state._replace(weights=sigma)
    if self.round.labels_at_clients:
      return self._remember_model(before, state, server.round_num)
    # The server trains the sum that predicts. Its change becomes sigma's.
    summed = self.predicting_weights(state)
    trained = server.train(summed)
    moved = tuple(
      s + (after - total)
      for s, after, total in zip(
        sigma.trainable, trained.trainable, summed.trainable, strict=True
      )
    )
    state = state._replace(weights=trained._replace(trainable=moved))
    return self._remember_model(before, state, server.round_num)

  def _remember_model(
    self,
    before: base.ServerState,
    state: base.ServerState,
    round_num: tf.Tensor,
  ) -> base.ServerState:
    """Keeps the model before a round in which helpers were due."""
    if not self.uses_past:
      return state
    past = state.memory.past_models
    model = weights_lib.flatten(self.predicting_weights(before).trainable)
    # Latest first: the oldest one drops out.
    later = tf.concat([model[tf.newaxis], past[:-1]], axis=0)
    was_due = tf.logical_and(round_num >= 1, self._is_multiple(round_num))
    is_due = self._is_past_due(round_num + 1)
    # The rounds so far in which helpers were due, discarded ones included.
    num_kept = tf.clip_by_value(
      round_num // self.helper_interval, 0, self.num_helpers
    )
    return state.remember(
      past_models=tf.where(was_due, later, past),
      num_past_models=tf.cast(tf.where(is_due, num_kept, 0), tf.float32),
    )

  def _is_past_due(self, round_num: tf.Tensor) -> tf.Tensor:
    """Tells whether past models help in a round."""
    return tf.logical_or(self._is_multiple(round_num), self.variant == PAPER)

  def _is_multiple(self, round_num: tf.Tensor) -> tf.Tensor:
    # `==` would compare identities in TFF's graphs.
    return tf.equal(round_num % self.helper_interval, 0)

  def predicting_weights(self, state: base.ServerState) -> Weights:
    """Adds sigma and psi, where |psi| > psi_threshold."""
    if not self.decomposition:
      return state.weights
    psi = self.sparse.zero_small(PSI, state.memory.psi.trainable)
    pairs = zip(state.weights.trainable, psi, strict=True)
    sigma: Weights = state.weights
    return sigma._replace(trainable=tuple(s + p for s, p in pairs))

  def other_predictions(
    self,
  ) -> Mapping[str, Callable[[base.ServerState], Weights]]:
    """Evaluates each set alone, with the statistics of the sum (figure 6b)."""
    if not (self.decomposition and self.evaluate_sets):
      return {}
    return {
      SIGMA: lambda state: state.weights,
      PSI: lambda state: state.weights._replace(
        trainable=self.sparse.zero_small(PSI, state.memory.psi.trainable)
      ),
    }


def _subtract(
  first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Subtracts two sets of weights, tensor by tensor."""
  return [a - b for a, b in zip(first, second, strict=True)]
