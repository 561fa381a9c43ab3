"""TS-Server EMA and TS-Client EMA: a teacher labels. FedSwitch's baselines.

Zhao, Ghosh, Bharadwaj and Ma, "When does the student surpass the teacher?
Federated Semi-supervised Learning with Teacher-Student EMA", arXiv 2023
(2301.10114), section 3. There is no code of the authors.

In a round:
1.  The server sends the student S and the teacher T.
2.  For each batch, a client makes pseudo-labels from weak views by T. It makes
    a step of SGD on FixMatch's loss for S (with labels at the clients, plus the
    loss of a labelled batch; with FedProx's term, by `--proximal_strength`).
    `ts_client_ema`: then T <- a' T + (1 - a') S.
3.  It sends the change of S; `ts_client_ema`: also that of T.
4.  The server averages the changes of S. With labels at the server, it trains S
    on them. `ts_server_ema`: T <- a T + (1 - a) S. `ts_client_ema`: T is the
    mean of the clients' teachers.

With labels at the server, `ts_client_ema` ends with T <- a T + (1 - a) S, too,
which is our choice: without it, labels would reach T only through clients.

The paper also calls the global teacher of TS-Client EMA an average of global
students (C13 in docs/algorithms/fedswitch.md). Then nothing would have to be
sent back: that is `--algorithm=fedswitch --fedswitch.labeler=teacher`.

T starts as S, and predicts with its own batch norm statistics.
"""

from tff_fssl.algorithms import fedswitch_hparams
from tff_fssl.finalizers import server_algorithm
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import teaching
from tff_fssl.models import server_model
from tff_fssl.rounds import round_hparams as round_hparams_lib

TsServerHparams = fedswitch_hparams.TsServerHparams
TsClientHparams = fedswitch_hparams.TsClientHparams
RoundHparams = round_hparams_lib.RoundHparams


def _build_clients(
  hparams: TsServerHparams,
  round_hparams: RoundHparams,
  *,
  local_decay: float,
  uploads: bool,
) -> algorithm_lib.LocalAlgorithm:
  """Steps 2 and 3."""

  def step(
    networks: algorithm_lib.Networks, batch: algorithm_lib.Batch
  ) -> algorithm_lib.StepResult:
    probs = teaching.teacher_probs(networks, batch)
    return teaching.learn(hparams, networks, batch, probs)[0]

  return teaching.clients(
    step,
    labels_at_clients=round_hparams.labels_at_clients,
    local_decay=local_decay,
    uploads=uploads,
  )


def build_ts_server_ema(
  hparams: TsServerHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients of TS-Server EMA."""
  return _build_clients(hparams, round_hparams, local_decay=1.0, uploads=False)


def build_ts_client_ema(
  hparams: TsClientHparams, round_hparams: RoundHparams
) -> algorithm_lib.LocalAlgorithm:
  """The clients of TS-Client EMA."""
  decay = hparams.local_ema_decay
  return _build_clients(hparams, round_hparams, local_decay=decay, uploads=True)


def build_ts_server_ema_server(
  hparams: TsServerHparams, round_hparams: RoundHparams
) -> server_algorithm.ServerAlgorithm:
  """The server of TS-Server EMA: step 4; T is always sent."""
  del round_hparams
  server = server_algorithm.with_moving_average(
    server_algorithm.FEDAVG, teaching.TEACHER, hparams.ema_decay
  )
  return server._replace(sends=None)


def build_ts_client_ema_server(
  hparams: TsClientHparams, round_hparams: RoundHparams
) -> server_algorithm.ServerAlgorithm:
  """The server of TS-Client EMA: step 4."""
  server = build_ts_server_ema_server(hparams, round_hparams)

  def update(
    model: server_model.ServerModel,
    aggregated: server_algorithm.Aggregated,
    tools: server_algorithm.ServerTools,
  ) -> server_model.ServerModel:
    taught = aggregated.moved(teaching.TEACHER, model.sets[teaching.TEACHER])
    model = server.update(model.with_sets(teacher=taught), aggregated, tools)
    if not round_hparams.labels_at_clients:
      return model
    # Of the moving average, only the batch norm statistics are of use.
    averaged = model.sets[teaching.TEACHER]
    return model.with_sets(
      teacher=averaged._replace(trainable=taught.trainable)
    )

  return server._replace(update=update)
