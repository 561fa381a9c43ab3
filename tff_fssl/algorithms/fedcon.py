"""FedCon: consistency of two networks, at server and clients.

Long, Che, Wang, Ye, Luo, Wu, Xiao and Ma, "FedCon: A Contrastive Framework for
Federated Semi-Supervised Learning", arXiv 2021 (2109.04533). Details are from
the authors' code (github.com/zewei-long/fedcon-pytorch); of the paper, we had
the abstract. Labels at the server.

The network is a backbone f and a head, the last layer. In a round:
1.  The server sends f. The head never leaves it.
2.  A client has a target network f' and a projector h, an MLP with one hidden
    layer and batch norm. By default (`client_state=none`) f' starts as f, and h
    from initial weights that all share; with `table`, both are as the client
    left them, if it took part before.
3.  For each batch, with two weak views x1, x2 of each example, f and h make a
    step of SGD on D(h(f(x1)), f'(x2)) / 2 + D(h(f(x2)), f'(x1)) / 2, where D is
    minus the mean cosine. Then f' <- a f' + (1 - a) f. There are no negative
    examples: this is BYOL.
4.  The server averages the changes of f.
5.  It trains f and head, the online network, on its labels: the cross-entropy
    of both views, plus w(round) times the mean KL divergence from the target
    network's prediction for the other view. After each step, the target
    network, which it keeps, follows the online one.

The first round of pre-training is the authors' first training at the server.

Deviations from the authors' code: z' is of the target network, which their code
never uses (`server_target=online`). A client's state is its own; theirs is that
of the client which trained before it on a batch of that number. Clients train
with SGD; LARS with their schedule (its warm-up starts at 0 in each round) moves
weights by less than 2e-5 of their norm a round. The server's moving average
follows each step; theirs precedes it, and so lags by a step. Their head is an
MLP (for CIFAR-10 4,096 - 1,024 - 512 - 10, with dropout); ours is the network's
last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
import math
from typing import Any

from tff_fssl.algorithms import fedcon_hparams
from tff_fssl.data import augment
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.local import teaching
from tff_fssl.local import two_views
from tff_fssl.models import server_model
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import own_models
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.semisup import annealing

FedConHparams = fedcon_hparams.FedConHparams
RoundHparams = round_hparams_lib.RoundHparams
Networks = algorithm_lib.Networks
Batch = algorithm_lib.Batch
_TARGET, _PROJECTOR = two_views.TARGET, two_views.PROJECTOR
# The share of what is new in the server's moving average falls to 0 over 20,000
# steps, and rises again; rounds begin at multiples of 1,000 steps.
_PERIOD, _STEPS_PER_ROUND = 20_000.0, 1_000.0


def ramp(round_num: tf.Tensor, num_rounds: int) -> tf.Tensor:
  """w: exp(-5 (1 - t)^2), t = round / num_rounds in [0, 1]; from 0 if less."""
  if not num_rounds:
    return tf.constant(1.0)
  progress = tf.cast(tf.maximum(round_num, 0), tf.float32) / num_rounds
  return annealing.sigmoid_ramp(progress)


def server_share(clock: algorithm_lib.Clock, decay: float) -> tf.Tensor:
  """The share of the online network in the server's moving average.

  (1 - decay) (cos(pi k / 20,000) + 1) / 2, k = 1,000 round + step.

  Args:
    clock: The step.
    decay: The least share of the old average, in [0, 1].

  Returns:
    float32 scalar.
  """
  rounds = tf.cast(tf.maximum(clock.round_num, 0), tf.float32)
  step = _STEPS_PER_ROUND * rounds + tf.cast(clock.step, tf.float32)
  return (1.0 - decay) * (tf.cos(math.pi * step / _PERIOD) + 1.0) / 2.0


def build_local_algorithm(
  hparams: FedConHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: steps 2 and 3."""
  del round_hparams

  def finish(
    networks: Networks,
    data: algorithm_lib.ClientData,
    views: augment.Views,
    ratios: Mapping[str, algorithm_lib.Ratio],
  ) -> algorithm_lib.Finished:
    del views, ratios
    count = data.weights.statistics_count
    kept = (networks.peers[n].weights_now(count) for n in (_TARGET, _PROJECTOR))
    return algorithm_lib.Finished(row=own_models.to_row(tuple(kept)))

  starts: dict[str, Any] = {}
  if hparams.keeps_state:  # As the client left them.
    starts = {
      _TARGET: own_models.of_client,
      _PROJECTOR: functools.partial(own_models.of_client, is_last=True),
    }
  projector = algorithm_lib.Peer(
    trained=True,
    model_fn=two_views.build_projector(hparams.hidden_size),
    start=starts.get(_PROJECTOR),
  )
  return algorithm_lib.LocalAlgorithm(
    steps=(two_views.similarity_step,),
    step_ratios=two_views.SIMILARITY_RATIOS,
    streams={objective.UNLABELED: algorithm_lib.Stream(two_views.VIEWS)},
    after_step=teaching.follow(hparams.target_decay, _TARGET),
    finish=finish if hparams.keeps_state else None,
    peers={
      _TARGET: algorithm_lib.Peer(start=starts.get(_TARGET)),
      _PROJECTOR: projector,
    },
  )


def build_server_training(
  hparams: FedConHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The server's training: step 5."""
  del round_hparams

  def step(networks: Networks, batch: Batch) -> algorithm_lib.StepResult:
    rising = ramp(batch.clock.round_num, hparams.ramp_rounds)
    return two_views.consistency_step(
      networks,
      batch,
      weight=hparams.server_consistency_weight * rising,
      is_online=hparams.server_target == fedcon_hparams.ONLINE,
    )

  def after_step(networks: Networks, batch: Batch) -> None:
    share = server_share(batch.clock, hparams.server_target_decay)
    local, target = networks.local, networks.peers[_TARGET]
    for new, old in zip(
      local.trainable_variables, target.trainable_variables, strict=True
    ):
      old.assign_add(tf.cast(share, old.dtype) * (new - old))

  return algorithm_lib.LocalAlgorithm(
    steps=(step,),
    step_ratios=two_views.CONSISTENCY_RATIOS,
    streams={
      objective.LABELED: algorithm_lib.Stream(two_views.VIEWS, labeled=True)
    },
    after_step=after_step,
    peers={_TARGET: algorithm_lib.Peer(_TARGET)},
  )


def build_server(
  hparams: FedConHparams, round_hparams: RoundHparams
) -> server_algorithm.ServerAlgorithm:
  """The server's part: steps 4 and 5, and the target network that it keeps."""
  del hparams, round_hparams

  def update(
    model: server_model.ServerModel,
    aggregated: server_algorithm.Aggregated,
    tools: server_algorithm.ServerTools,
  ) -> server_model.ServerModel:
    weights = tools.apply(model.weights, aggregated.update)
    assert tools.train_with is not None
    weights, peers = tools.train_with(weights, model.sets)
    return model.with_weights(weights).with_sets(**peers)

  return server_algorithm.ServerAlgorithm(
    lambda weights: server_model.ServerModel(*weights).with_sets(
      **{_TARGET: weights}
    ),
    update,
    sends=lambda model: {},
  )


def build_exchange(
  hparams: FedConHparams, round_hparams: RoundHparams
) -> exchange_lib.BuildExchange | None:
  """What clients keep, which a simulation keeps at the server."""
  del round_hparams
  if not hparams.keeps_state:
    return None

  def build(population: exchange_lib.Population) -> exchange_lib.Exchange:
    kept = (population.weights, population.of_peers[_PROJECTOR])
    table = own_models.build_exchange(population, kept)
    return table._replace(is_clients_own=True)

  return build


def build_head_stays(
  hparams: FedConHparams, round_hparams: RoundHparams
) -> bool:
  """`parts.Parts.head_stays`."""
  del hparams, round_hparams
  return True
