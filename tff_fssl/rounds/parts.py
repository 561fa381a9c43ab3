"""The parts of an algorithm, from which a learning process is assembled."""

from __future__ import annotations

from collections.abc import Collection
import dataclasses

from tff_fssl import hparams as hparams_lib
from tff_fssl.finalizers import server_algorithm
from tff_fssl.lazy import tf, tff
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.models import adapter
from tff_fssl.models import embedding
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import exchange as exchange_lib
from tff_fssl.rounds import groups as groups_lib
from tff_fssl.rounds import round_hparams as round_hparams_lib

RoundHparams = round_hparams_lib.RoundHparams
# The set that holds the moving average of the model's weights.
_AVERAGE = 'average'


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of an algorithm; with the defaults, a round is FedAvg's.

  Attributes:
    local: What clients do in a round.
    server_training: What the server does with its labels, if it has any.
    server: What the server does with what came from the clients.
    exchange: What else travels between server and clients; or a function of
      the population that makes it.
    prediction: How the model predicts.
    groups: The groups of a round's clients, if they are combined apart. With
      one group, an aggregator may be given, which then combines the updates.
    head_stays: Whether the model's last layer stays at the server: clients get
      zeros for it, and send no update of it.
    embeds: Whether networks are used without their classifier: a Dense layer,
      their last one. Their outputs, where others' are logits, are embeddings.
    alone: Whether each client trains alone. The exchange's table then stands
      for the clients' own disks: in reality nothing travels, so that no bytes
      are counted, and no statistics are gathered over clients.
  """

  local: algorithm_lib.LocalAlgorithm
  server_training: algorithm_lib.LocalAlgorithm = objective.SUPERVISED
  server: server_algorithm.ServerAlgorithm = server_algorithm.FEDAVG
  exchange: exchange_lib.Exchange | exchange_lib.BuildExchange | None = None
  prediction: server_model.Prediction = server_model.Prediction()
  groups: groups_lib.Groups | None = None
  head_stays: bool = False
  embeds: bool = False
  alone: bool = False

  def network_fn(self, model_fn: adapter.ModelFn) -> adapter.ModelFn:
    """The function that builds the network, from one that builds it whole."""
    if not self.embeds:
      return model_fn
    return embedding.remove_classifier(model_fn)


def completed(parts: Parts, hparams: RoundHparams) -> Parts:
  """An algorithm's parts with those that any algorithm can be given."""
  if not hparams.average_decay or _AVERAGE in parts.prediction.also:
    return parts
  server = server_algorithm.with_moving_average(
    parts.server, _AVERAGE, hparams.average_decay, parts.prediction.weights
  )
  average = server_model.set_prediction(_AVERAGE, parts.prediction)
  also = {**parts.prediction.also, _AVERAGE: average}
  return dataclasses.replace(
    parts, server=server, prediction=parts.prediction._replace(also=also)
  )


def check_names(
  parts: Parts, model: server_model.ServerModel, sent: Collection[str]
) -> None:
  """Checks that the parts refer to sets, streams and views that exist.

  Args:
    parts: The algorithm.
    model: The model, of `tf.TensorSpec`s.
    sent: The names of the sets that the server may send to clients.

  Raises:
    UsageError: If one of them names what does not exist.
  """
  # Only networks' weights are sets that another network can start from.
  kept = [n for n, v in model.sets.items() if isinstance(v, Weights)]
  of_clients = [name for name in sent if name in kept]
  parts.local.check_names(of_clients, 'the server sends')
  parts.server_training.check_names(kept, 'the server keeps')
  server = parts.server
  for names, known, field in (
    (server.statistics_of, kept, 'statistics_of'),
    (server.statistics_if_sent, of_clients, 'statistics_if_sent'),
  ):
    for name in names:
      algorithm_lib.check_name(
        name, known, f'server: {field}', 'sets with statistics'
      )
  if parts.prediction.with_table is None:
    for prediction in (parts.prediction, *parts.prediction.also.values()):
      # Without AutoGraph, which would replace the class of errors.
      predicting = tf.function(prediction.weights, autograph=False)
      predicting.get_concrete_function(model)


def with_aggregator(
  parts: Parts,
  model_aggregator: tff.aggregators.WeightedAggregationFactory | None,
) -> Parts:
  """The parts; without groups, if an aggregator combines their only one."""
  if parts.groups is None or model_aggregator is None:
    return parts
  if parts.groups.num_groups > 1:
    raise hparams_lib.UsageError(
      f'model_aggregator={type(model_aggregator).__name__}: this algorithm'
      f' forms {parts.groups.num_groups} groups of clients, and the plain mean'
      ' of each; leave model_aggregator out, or take one group'
    )
  return dataclasses.replace(parts, groups=None)
