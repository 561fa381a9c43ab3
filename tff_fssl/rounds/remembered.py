"""Clients that the server remembers: their round with deltas and helpers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from tff_fssl.data import augment
from tff_fssl.finalizers import past_models
from tff_fssl.lazy import tf
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import disjoint
from tff_fssl.local import helping
from tff_fssl.models.weights import Weights, flatten, unflatten
from tff_fssl.rounds import deltas as deltas_lib
from tff_fssl.rounds import helpers as helpers_lib
from tff_fssl.semisup import patience as patience_lib

Networks = algorithm_lib.Networks
ClientData = algorithm_lib.ClientData
Patience = patience_lib.Patience


@dataclasses.dataclass(frozen=True)
class ClientRound:
  """What surrounds a client's steps.

  Attributes:
    settings: What the server keeps; `settings.sets` are among sigma and psi.
    deltas: How sets travel.
    rates: When the learning rate falls; None: never.
    loss: The metric of the steps that decides it: a mean over batches, each of
      which is measured before the client learns from it.
    moves: The names of the sets that steps move.
    past: Whether models of earlier rounds help, instead of other clients.
    batch_size: Examples in a batch of passes that do not train.
  """

  settings: helpers_lib.Settings
  deltas: deltas_lib.Deltas
  rates: patience_lib.Rule | None
  loss: str
  moves: tuple[str, ...]
  past: bool
  batch_size: int

  def around(
    self, local: algorithm_lib.LocalAlgorithm
  ) -> algorithm_lib.LocalAlgorithm:
    """The algorithm with `start`, `prepare` and `finish`."""
    peers = {
      name: peer._replace(start=self.deltas.start(name))
      for name, peer in local.peers.items()
    }
    return local._replace(
      start=self.deltas.start(disjoint.SIGMA),
      peers=peers,
      prepare=self.prepare,
      finish=self.finish,
    )

  def prepare(
    self, networks: Networks, data: ClientData, views: augment.Views
  ) -> algorithm_lib.Prepared:
    """What was sent, what helpers predict, the learning rate."""
    local, received = networks.local, data.received
    sets = disjoint.sets_of(networks)
    share = tf.add_n(
      [self.deltas.share_down(name, v, received) for name, v in sets.items()]
    )
    helpers: list[Any] = []
    weights = tf.zeros([1])
    if self.past:
      helpers, weights = _past_helpers(sets[disjoint.SIGMA], received)
      share += tf.reduce_sum(weights)
    elif self.settings.helper_set:
      weights = received[helpers_lib.HELPER_WEIGHTS]
      helpers, of_helpers = self.deltas.of_helpers(
        self.settings.helper_set, local.trainable_variables, received
      )
      share += of_helpers
    if self.past or self.settings.helper_set == disjoint.SIGMA:
      # They are whole networks.
      helpers = [
        [h - s for h, s in zip(helper, sets[disjoint.SIGMA], strict=True)]
        for helper in helpers
      ]
    probs, weights = helping.predict(
      local, helpers, weights, data, views, self.batch_size
    )
    rate = received['rate'] if self.rates else tf.constant(1.0)
    return algorithm_lib.Prepared(
      tf.range(tf.shape(data.unlabeled.x)[0]),
      of_example={helping.PROBS: probs},
      constants={helping.WEIGHTS: weights},
      ratios={
        'percent_down': algorithm_lib.ratio(100.0 * share, 1.0),
        'helped_clients': algorithm_lib.ratio(tf.reduce_max(weights), 1.0),
        'learning_rate_factor': algorithm_lib.ratio(rate, 1.0),
      },
      rate=rate,
    )

  def finish(
    self,
    networks: Networks,
    data: ClientData,
    views: augment.Views,
    ratios: Mapping[str, algorithm_lib.Ratio],
  ) -> algorithm_lib.Finished:
    """Takes back small changes; what the server keeps of the client."""
    sets, share = disjoint.sets_of(networks), tf.constant(0.0)
    for name in self.moves:
      before = self._before(name, data)
      cut, sent = self.deltas.cut(name, before.trainable, sets[name])
      share += sent
      for variable, value in zip(sets[name], cut, strict=True):
        variable.assign(value)
    flat = {name: flatten(v) for name, v in sets.items()}
    further = {'percent_up': algorithm_lib.ratio(100.0 * share, 1.0)}
    if disjoint.PSI in flat:
      sigma, psi = flat[disjoint.SIGMA], flat[disjoint.PSI]
      distance = tf.math.divide_no_nan(tf.norm(sigma - psi), tf.norm(sigma))
      further['psi_distance'] = algorithm_lib.ratio(distance, 1.0)
    row = {name: flat[name] for name in self.settings.sets}
    if self.settings.helper_set:
      with networks.local.perturbed(disjoint.psi_of(networks)):
        row[helpers_lib.EMBEDDING] = helping.embedding(
          networks.local, data, views
        )
    if self.rates is not None:
      received = (data.received[name] for name in Patience._fields)
      total, count = ratios[self.loss]
      state = self.rates.after(Patience(*received), total / count)
      row |= state._asdict()
    return algorithm_lib.Finished(row=row, ratios=further)

  def _before(self, name: str, data: ClientData) -> Weights:
    """The set that the client had received."""
    if name == disjoint.SIGMA:
      return data.weights
    weights = data.sets.get(name, data.weights)
    start = self.deltas.start(name)
    return weights if start is None else start(weights, data.received)


def _past_helpers(
  like: Sequence[tf.Tensor], received: Mapping[str, tf.Tensor]
) -> tuple[list[tuple[tf.Tensor, ...]], tf.Tensor]:
  """The weights of models of earlier rounds; 1 for those that exist, else 0."""
  models = received[past_models.MODELS]
  num = models.shape[0]
  # A round that failed as a whole left no model.
  exists = tf.reduce_any(tf.not_equal(models, 0.0), axis=1)
  is_sent = tf.range(num, dtype=tf.float32) < received[past_models.NUM_SENT]
  helpers = [unflatten(models[i], like) for i in range(num)]
  return helpers, tf.cast(tf.logical_and(exists, is_sent), tf.float32)
