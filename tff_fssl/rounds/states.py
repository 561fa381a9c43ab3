"""The conversion of an algorithm's server state for a process."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from tff_fssl.interface import base
from tff_fssl.interface import names
from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import optimizers
from tff_fssl.semisup import moving_average

ServerModel = server_model.ServerModel
# The moving average of the weights that predict (`--average_decay`).
_AVERAGE = 'average'


class States:
  """The conversion between an algorithm's `ServerState` and a `ServerModel`.

  A field of the memory becomes a control value if it is a tensor that every
  round broadcasts. Any other field becomes a set. With `average_decay`, the
  exponential moving average of the weights that predict is a further set.

  Attributes:
    setup: What the algorithm knows of its process.
    statistics_of: Names of sets, `Weights`, whose static batch norm statistics
      are gathered with those of the model.
    statistics_if_sent: Names of further such sets. Their statistics are
      gathered only at the end of rounds after which clients get the set.
    prediction: The rule by which the model predicts.
    plateau: The schedule that follows a loss, if learning rates have that.
  """

  def __init__(
    self, algorithm: base.Algorithm, setup: base.Setup = base.Setup()
  ):
    """Finds the names of the memory's fields.

    Args:
      algorithm: The algorithm.
      setup: What it knows of its process. `prediction` does without.
    """
    self._algorithm, self.setup = algorithm, setup
    self.plateau = (
      optimizers.Plateau(algorithm.round)
      if algorithm.round.follows_loss
      else None
    )
    # The names of fields and broadcasts do not depend on the weights.
    with tf.Graph().as_default():
      weights = Weights((tf.zeros([1]),), (), tf.constant(0.0))
      state = algorithm.initial_state(weights, setup)
      broadcasts = dict(algorithm.broadcasts(state))
    self._memory_type = type(state.memory) if state.memory else None
    fields = getattr(state.memory, '_fields', ())
    self._control = tuple(
      name
      for name, b in broadcasts.items()
      if b.when is None
      and isinstance(getattr(state.memory, name, None), tf.Tensor)
    )
    self._sets = tuple(f for f in fields if f not in self._control)
    self._averages = bool(algorithm.round.average_decay)
    if self._averages:
      names.join('sets', {_AVERAGE: None}, dict.fromkeys(fields))
    own = {n: b for n, b in broadcasts.items() if b.own_statistics}
    self.statistics_of = tuple(n for n, b in own.items() if b.when is None)
    if self._averages:
      self.statistics_of += (_AVERAGE,)
    self.statistics_if_sent = tuple(
      n for n, b in own.items() if b.when is not None
    )
    self.prediction = self._build_prediction()

  def state(self, model: ServerModel) -> base.ServerState:
    """Converts a `ServerModel` to the algorithm's state."""
    if self._memory_type is None:
      return base.ServerState(model.weights)
    values = {**model.sets, **model.control}
    fields = getattr(self._memory_type, '_fields', ())
    # Clients and older files have only some of the fields.
    memory = self._memory_type(**{f: values.get(f) for f in fields})
    return base.ServerState(model.weights, memory)

  def model(self, state: base.ServerState) -> ServerModel:
    """Converts a `ServerState` to the process's model."""
    model = ServerModel(*state.weights)
    if self._memory_type is None:
      return model
    memory = state.memory._asdict()
    model = model.replace_sets(**{n: memory[n] for n in self._sets})
    return model._replace(
      control=collections.OrderedDict((n, memory[n]) for n in self._control)
    )

  def start(self, weights: Weights) -> ServerModel:
    """Makes the model before the first round, or from a user's weights."""
    model = self.model(self._algorithm.initial_state(weights, self.setup))
    if self._averages:
      model = model.replace_sets(**{_AVERAGE: self._predicting_weights(model)})
    return model if self.plateau is None else self.plateau.start(model)

  def update(
    self, model: ServerModel, aggregate: base.Aggregate, server: base.Server
  ) -> ServerModel:
    """Makes the model after a round."""
    state = self._algorithm.update(self.state(model), aggregate, server)
    new = self.model(self._after_round(state, server.round_num))
    new = _keep_control(model, new)
    if self._averages:
      average = moving_average.follow(
        model.sets[_AVERAGE],
        self._predicting_weights(new),
        self._algorithm.round.average_decay,
        started=server.round_num >= 1,
      )
      new = new.replace_sets(**{_AVERAGE: average})
    return new

  def discard(self, model: ServerModel, round_num: tf.Tensor) -> ServerModel:
    """Makes the model after a discarded round, from that before it."""
    state = self.state(model)
    new = self.model(self._after_round(state, round_num))
    sets = collections.OrderedDict(model.sets, **new.sets)
    control = _keep_control(model, new).control
    return model._replace(sets=sets, control=control)

  def _after_round(
    self, state: base.ServerState, round_num: tf.Tensor
  ) -> base.ServerState:
    memory = self._algorithm.after_round(state.memory, round_num)
    return state._replace(memory=memory)

  def sent(self, model: ServerModel) -> dict[str, tf.Tensor]:
    """Tells for each set, by name, whether clients get it now: bool scalars."""
    sent = {
      name: tf.constant(True) if b.when is None else b.when
      for name, b in self._algorithm.broadcasts(self.state(model)).items()
      if name not in self._control
    }
    known = [field for field in model.sets if field != _AVERAGE]
    for name in sent:
      names.check(name, known, 'broadcasts', "fields of the server's memory")
    return sent

  def is_sent(self, name: str, model: ServerModel) -> tf.Tensor:
    """Tells whether clients get a set in the next round: bool scalar."""
    return self.sent(model)[name]

  def _predicting_weights(self, model: ServerModel) -> Weights:
    return self.prediction.weights(model)

  def _build_prediction(self) -> server_model.Prediction:
    """Builds the rule by which the model predicts."""
    algorithm = self._algorithm
    prediction = algorithm.prediction() or server_model.Prediction(
      weights=lambda model: algorithm.predicting_weights(self.state(model)),
      also={
        name: self._predict_by(weights_of)
        for name, weights_of in algorithm.other_predictions().items()
      },
    )
    if not self._averages:
      return prediction
    average = server_model.set_prediction(_AVERAGE, prediction)
    also = names.join('predictions', prediction.also, {_AVERAGE: average})
    return prediction._replace(also=also)

  def _predict_by(
    self, weights_of: Callable[[base.ServerState], Weights]
  ) -> server_model.Prediction:
    """Builds the rule that predicts by other weights of the state."""

    def logits(
      network: Any, model: ServerModel, images: tf.Tensor
    ) -> tf.Tensor:
      weights = weights_of(self.state(model))
      return server_model.Prediction().logits(
        network, model.replace_weights(weights), images
      )

    return server_model.Prediction(
      lambda model: weights_of(self.state(model)), logits
    )


def _keep_control(old: ServerModel, new: ServerModel) -> ServerModel:
  """Adds the old model's control values that are not the algorithm's."""
  return new._replace(
    control=collections.OrderedDict(old.control, **new.control)
  )
