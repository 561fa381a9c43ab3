"""FedMatch: labels move sigma, unlabelled examples psi, other clients help.

Jeong, Yoon, Yang and Hwang, "Federated Semi-Supervised Learning with
Inter-Client Consistency & Disjoint Learning", ICLR 2021 (2006.12097). Code of
the authors: wyjeong/FedMatch at 4947aa2.

Every trainable weight is theta = sigma + psi. In a round:
1.  The server sends sigma and psi; to clients that took part before, only where
    they differ from what the client has by more than delta. In every tenth
    round it also sends the psi's of the H = 2 clients whose networks predict
    most similarly for an image of noise; with sigma they make H helpers.
2.  For each batch, a client makes up to two steps of SGD:
    a.  with labels at the clients, sigma moves on lambda_s CE of labels;
    b.  psi moves on the mean, over examples u of which the local network is
        confident, of lambda_i mean_j KL(helper_j(u) || local(u)) + lambda_a
        CE(y, local(strong view)), where y is the class with the most votes of
        local network and helpers, plus lambda_L1 |psi|_1 + lambda_L2 |sigma -
        psi|_2^2.
3.  It sends psi, and sigma if it has moved, where they differ from what it
    received by more than delta. Its learning rate falls by the factor 3 after
    five of its rounds without a lower loss.
4.  The server keeps the upload, with the prediction for the image of noise. Its
    sigma and psi change by the mean of the clients' changes. With labels at the
    server, sigma moves on lambda_s CE of labels.
Where it predicts, psi counts only where |psi| > psi_threshold. With
`helpers=past` (ours) the global models of earlier rounds help.

docs/algorithms/fedmatch.md lists where paper, code and we differ; decided here:
the server's model changes by what travels, so that what S2C leaves out is not
averaged in (the authors' code sends whole models, and only counts); the loss
that drives a client's rate is that of its batches before it learns from them,
since the authors' validation data would not exist; with labels at the server,
the model is evaluated after the server's training, theirs before it; clients
that come first get whole models (2 sets); ties of votes go to the local
network; the server's rate follows `--learning_rate_schedule`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from tff_fssl.algorithms import fedmatch_hparams
from tff_fssl.finalizers import disjoint as disjoint_server
from tff_fssl.finalizers import past_models
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import disjoint
from tff_fssl.local import helping
from tff_fssl.local import objective
from tff_fssl.models import server_model
from tff_fssl.rounds import deltas as deltas_lib
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import helpers as helpers_lib
from tff_fssl.rounds import remembered
from tff_fssl.rounds import round_hparams as round_hparams_lib
from tff_fssl.semisup import patience as patience_lib

Hparams = fedmatch_hparams.FedMatchHparams
RoundHparams = round_hparams_lib.RoundHparams
SIGMA, PSI = disjoint.SIGMA, disjoint.PSI
_VIEWS = {'plain': 'plain', 'strong': 'strong'}


def unsupervised_step(hparams: Hparams) -> algorithm_lib.Step:
  """Step 2b: psi learns from unlabelled examples."""
  by_helpers = hparams.uses_helpers and hparams.consistency_weight

  def step(
    networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
  ) -> algorithm_lib.StepResult:
    local, psi = networks.local, disjoint.psi_of(networks)
    part = batch.parts[objective.UNLABELED]

    def learn(has_helpers: bool) -> Any:
      with local.perturbed(psi), tf.GradientTape() as tape:
        # Without helpers, no gradient flows through this pass.
        none = contextlib.nullcontext if has_helpers else tape.stop_recording
        with none():
          plain = objective.training_logits(local, part, 'plain')
        strong = objective.training_logits(local, part, 'strong')
        loss, ratios = helping.loss(
          batch,
          plain,
          strong,
          confidence_threshold=hparams.confidence_threshold,
          label_weight=hparams.pseudo_label_weight,
          consistency_weight=hparams.consistency_weight,
          agree=hparams.agreement,
          tie=hparams.tie,
        )
      return local.gradients(tape, loss), ratios

    some = tf.reduce_any(batch.constants[helping.WEIGHTS] > 0.0)
    alone, helped = (functools.partial(learn, has) for has in (False, True))
    gradients, ratios = tf.cond(some, helped, alone) if by_helpers else alone()
    if not hparams.decomposition:
      return algorithm_lib.StepResult(gradients, ratios)
    penalties = disjoint.penalty_gradients(
      psi, local.trainable_variables, hparams.l1_weight, hparams.l2_weight
    )
    of_psi = [g + p for g, p in zip(gradients, penalties, strict=True)]
    return algorithm_lib.StepResult(None, ratios, {PSI: of_psi})

  return step


def build_local_algorithm(
  hparams: Hparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients' part: steps 1 to 3."""
  streams = {objective.UNLABELED: algorithm_lib.Stream(_VIEWS)}
  local = algorithm_lib.LocalAlgorithm(
    (unsupervised_step(hparams),), helping.RATIOS, streams
  )
  moves: tuple[str, ...] = (SIGMA,)
  if hparams.decomposition:
    peer = algorithm_lib.Peer(PSI, trained=True, uploaded=True)
    moves, local = (PSI,), local._replace(peers={PSI: peer})
  if round_hparams.labels_at_clients:
    moves = tuple(dict.fromkeys((SIGMA, *moves)))
    labeled = disjoint.supervised(hparams.labeled_loss_weight)
    local = objective.in_turn(labeled, local)
  return remembered.ClientRound(
    _settings(hparams),
    deltas_lib.Deltas(
      hparams.sent_above, {PSI: hparams.psi_threshold}, hparams.keeps_own
    ),
    _rates(hparams),
    'loss_labeled' if round_hparams.labels_at_clients else helping.LOSS_OF_ALL,
    moves,
    hparams.uses_past,
    round_hparams.statistics_batch_size,
  ).around(local)


def _rates(hparams: Hparams) -> patience_lib.Rule | None:
  """When a client's learning rate falls."""
  rule = patience_lib.Rule(hparams.patience, hparams.patience_factor)
  return rule if hparams.adapts_rates else None


def _settings(hparams: Hparams) -> helpers_lib.Settings:
  """What the server keeps of clients."""
  names = (SIGMA, PSI) if hparams.decomposition else (SIGMA,)
  helper, rates = names[-1:] if hparams.uses_clients else (), _rates(hparams)
  return helpers_lib.Settings(
    names if hparams.sends_deltas else helper,
    rates.ranges() if rates else {},
    helper[0] if helper else '',
    hparams.num_helpers,
    hparams.helper_interval,
    hparams.helper_cache == fedmatch_hparams.INTERVAL,
    hparams.remembered_clients,
    hparams.uploads,
    ('--fedmatch.remembered_clients', '--fedmatch.uploads'),
  )


def build_exchange(
  hparams: Hparams, round_hparams: RoundHparams
) -> exchange_lib.BuildExchange | None:
  """What the server keeps of clients, and whose uploads they get."""
  del round_hparams
  if not hparams.remembers:
    return None
  return functools.partial(helpers_lib.build_exchange, _settings(hparams))


def build_server_training(
  hparams: Hparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """What the server does with its labels."""
  del round_hparams
  return disjoint.supervised(hparams.labeled_loss_weight)


def build_server(
  hparams: Hparams, round_hparams: RoundHparams
) -> server_algorithm.ServerAlgorithm:
  """The server's part: step 4."""
  server = server_algorithm.FEDAVG
  if hparams.decomposition:
    server = disjoint_server.build_server(
      hparams.psi_factor,
      hparams.psi_threshold,
      trains=not round_hparams.labels_at_clients,
    )
  return past_models.with_past_models(
    server,
    hparams.num_helpers if hparams.uses_past else 0,
    hparams.helper_interval,
    in_every_round=hparams.helper_cache == fedmatch_hparams.INTERVAL,
    weights_of=build_prediction(hparams, round_hparams).weights,
  )


def build_prediction(
  hparams: Hparams, round_hparams: RoundHparams
) -> server_model.Prediction:
  """Sigma and psi together predict; each alone for the figure 6 (b)."""
  del round_hparams
  if not hparams.decomposition:
    return server_model.Prediction()
  return disjoint_server.build_prediction(
    hparams.psi_threshold, with_each=hparams.evaluate_sets
  )
