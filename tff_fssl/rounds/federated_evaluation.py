"""Federated evaluation: the accuracy of a model on its clients' own examples.

Clients' reports are checked, and consist of whole numbers. Only their sums over
clients are used, so that secure sums are possible, and results depend neither
on the order of clients nor on the number that runs at once.

In TFF's type notation, `T@SERVER` is one value of type T at the server, and
`D*@CLIENTS` is a data set of elements of type D at each client.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np

from tff_fssl import hparams
from tff_fssl.data import augment
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import evaluate
from tff_fssl.models import server_model
from tff_fssl.models.weights import Weights
from tff_fssl.rounds import client_accuracy
from tff_fssl.rounds import client_data
from tff_fssl.rounds import composer

_ByName = collections.OrderedDict[str, Any]
# The broadcast value -> the model, and the exchange's table.
_ReadModel = Callable[[Any], tuple[server_model.ServerModel, Any]]


class EvaluationProcess(tff.learning.templates.LearningProcess):
  """The process of a federated evaluation.

  Attributes:
    num_classes: The number of classes. Labels must be less.
  """

  num_classes: int


def whole_model(
  prediction: server_model.Prediction,
  model: server_model.ServerModel,
  table: Any = (),
) -> _ByName:
  """Makes the value that a process of `build_evaluation_process` evaluates.

  Args:
    prediction: The rule by which the model predicts.
    model: The model, of tensors or arrays.
    table: The exchange's table, `state.distributor['table']`, if each client
      has a model of its own (`prediction.member`).

  Returns:
    OrderedDict(model, table) for `set_model_weights`, of NumPy arrays.
  """
  model = server_model.ServerModel(*model)
  # Only `member` reads the table in an evaluation. It may be large.
  if prediction.member is None:
    table = ()
  model, table = tf.nest.map_structure(np.asarray, (model, table))
  return collections.OrderedDict(
    model=server_model.ServerModel(*map(_sort_names, model)),
    table=_sort_names(table),
  )


def build_evaluation_process(
  model_fn: adapter.ModelFn,
  model: Mapping[str, Any],
  *,
  views: augment.Views,
  element_spec: Any,
  num_classes: int,
  prediction: server_model.Prediction = server_model.Prediction(),
  num_clients: int = 0,
  **settings: Any,
) -> EvaluationProcess:
  """Builds the evaluation of models as they are in states of our processes.

  Clients' data have the form of training. Evaluation uses their labelled
  examples, on which no client should have trained. `next` returns metrics as
  `tff.learning.algorithms.build_fed_eval` does, those of the round and those of
  all rounds so far:

      client_work/eval/current_round_metrics/accuracy
      client_work/eval/total_rounds_metrics/accuracy

  `client_accuracy.finalize` lists them. In all rounds together, a client that
  was drawn twice counts twice. The model of `initialize` is zeros: set another
  one by `set_model_weights`.

  Args:
    model_fn: Builds the network (`network_factory.network_fn`).
    model: A result of `whole_model`, or the same of `tf.TensorSpec`s. It gives
      the type.
    views: The preprocessing. `plain` is used.
    element_spec: The spec of the one element of a client's data set.
    num_classes: The number of classes.
    prediction: The rule by which the model predicts. The rules in
      `prediction.also` are evaluated, too.
    num_clients: The number of clients whose own models the table has
      (`prediction.member`).
    **settings: `batch_size`, the examples in a batch (256).
      `max_client_examples`, the most examples of an honest client (a million).
      `secure_sum`, whether sums are secure (False), which the runtime must
      support.

  Returns:
    The process. `get_model_weights` and `set_model_weights` use `model`s.
  """
  if prediction.member is not None:
    element_spec = client_data.add_ids(element_spec, num_clients)
  return _Evaluation(
    model_fn,
    views,
    element_spec,
    num_classes,
    prediction,
    _type_of(model),
    lambda whole: (server_model.ServerModel(*whole['model']), whole['table']),
    **settings,
  ).build()


def build_weights_evaluation(
  process: composer.FsslProcess,
  model_fn: adapter.ModelFn,
  *,
  views: augment.Views,
  element_spec: Any,
  **settings: Any,
) -> EvaluationProcess:
  """Builds the same for `tff.learning.programs`, which pass on weights alone.

  `set_model_weights` takes the result of `process.get_model_weights`, as
  `EvaluationManager` needs it. The rules in `prediction.also` are not
  evaluated, since the weights do not contain theirs.

  Args:
    process: The process of training.
    model_fn: See `build_evaluation_process`.
    views: See `build_evaluation_process`.
    element_spec: See `build_evaluation_process`.
    **settings: See `build_evaluation_process`.

  Returns:
    The process.

  Raises:
    UsageError: If the process predicts by more than its weights.
  """
  if process.prediction.member or process.prediction.head:
    raise hparams.UsageError(
      'prediction: this process predicts by what its server keeps, not by its'
      ' weights alone; use build_evaluation_process, and set_model_weights with'
      ' whole_model(process.prediction, model, table)'
    )
  assert process.num_classes is not None

  def read(weights: Any) -> tuple[server_model.ServerModel, Any]:
    # As `FsslProcess.set_model_weights` does.
    return process.start(
      Weights(
        tuple(weights.trainable), tuple(weights.non_trainable), tf.constant(1.0)
      )
    ), ()

  return _Evaluation(
    model_fn,
    views,
    element_spec,
    process.num_classes,
    process.prediction._replace(also={}),
    process.get_model_weights.type_signature.result,
    read,
    **settings,
  ).build()


@dataclasses.dataclass(frozen=True)
class _Evaluation:
  """The parts of an evaluation. See `build_evaluation_process`."""

  model_fn: adapter.ModelFn
  views: augment.Views
  element_spec: Any
  num_classes: int
  prediction: server_model.Prediction
  model_type: tff.Type
  read: _ReadModel
  batch_size: int = 256
  max_client_examples: int = 10**6
  secure_sum: bool = False

  def build(self) -> EvaluationProcess:
    """Builds the process."""
    work = self._build_work()
    screen = client_accuracy.build_screen(
      work.type_signature.result, self.max_client_examples
    )
    sums_type = screen.type_signature.result
    state_type = tff.to_type(
      # The state has TFF's form. Its `client_work` holds the sums of all
      # rounds.
      composer.LearningAlgorithmState(self.model_type, (), sums_type, (), ())
    )
    limits = client_accuracy.limits(sums_type, self.max_client_examples)

    @tff.tensorflow.computation
    def zeros() -> Any:
      specs = tff.types.type_to_tf_tensor_specs(state_type)
      return tf.nest.map_structure(
        lambda s: tf.zeros([d or 0 for d in s.shape], s.dtype), specs
      )

    @tff.federated_computation
    def init_fn() -> tff.Value:
      return tff.federated_eval(zeros, tff.SERVER)

    @tff.tensorflow.computation(state_type, sums_type)
    def add(state: Any, sums: Any) -> Any:
      totals = tf.nest.map_structure(tf.add, state.client_work, sums)
      return state._replace(client_work=totals)

    finalize = tff.tensorflow.computation(client_accuracy.finalize, sums_type)

    @tff.federated_computation(
      tff.FederatedType(state_type, tff.SERVER),
      tff.FederatedType(work.type_signature.parameter[1], tff.CLIENTS),
    )
    def next_fn(
      state: tff.Value, client_data: tff.Value
    ) -> tff.learning.templates.LearningProcessOutput:
      model = tff.federated_broadcast(state.global_model_weights)
      reports = tff.federated_map(work, (model, client_data))
      screened = tff.federated_map(screen, reports)
      # Secure sums need bounds on each client's values.
      if self.secure_sum:
        sums = tff.federated_secure_sum(screened, limits)
      else:
        sums = tff.federated_sum(screened)
      state = tff.federated_map(add, (state, sums))
      of_eval = collections.OrderedDict(
        current_round_metrics=tff.federated_map(finalize, sums),
        total_rounds_metrics=tff.federated_map(finalize, state.client_work),
      )
      nothing = tff.federated_value((), tff.SERVER)
      metrics = collections.OrderedDict(
        distributor=nothing,
        client_work=collections.OrderedDict(eval=of_eval),
        aggregator=nothing,
        finalizer=nothing,
      )
      return tff.learning.templates.LearningProcessOutput(
        state, tff.federated_zip(metrics)
      )

    @tff.tensorflow.computation(state_type)
    def get_model_weights(state: Any) -> Any:
      return state.global_model_weights

    @tff.tensorflow.computation(state_type, self.model_type)
    def set_model_weights(state: Any, model: Any) -> Any:
      return state._replace(global_model_weights=model)

    process = EvaluationProcess(
      init_fn, next_fn, get_model_weights, set_model_weights
    )
    process.num_classes = self.num_classes
    return process

  def _build_work(self) -> tff.Computation:
    """Builds `<M, D*> -> report` of one client."""
    stored = self.element_spec['labeled']['x']
    image_shape = augment.input_shape(self.views, stored)

    @tff.tensorflow.computation(
      self.model_type,
      client_data.data_type(self.element_spec),
    )
    def work(model: Any, dataset: tf.data.Dataset) -> _ByName:
      network = adapter.Network(self.model_fn, image_shape=image_shape)

      @tf.function(autograph=False)
      def run(model: Any, dataset: tf.data.Dataset) -> _ByName:
        data, usable = client_data.read_client(
          dataset, self.num_classes, self.views.accepts
        )
        return self._report(network, *self.read(model), data, usable)

      report: _ByName = run(model, dataset)
      return report

    return work

  def _report(
    self,
    network: adapter.Network,
    model: server_model.ServerModel,
    table: Any,
    data: Mapping[str, Any],
    usable: tf.Tensor,
  ) -> _ByName:
    """Builds a client's report: numbers of examples by class, and sums."""
    passes = evaluate.Passes(network, self.views, self.batch_size)
    x, y = data['labeled']['x'], data['labeled']['y']
    ways = collections.OrderedDict()
    for name, way in _ways(self.prediction).items():
      weights = way.weights(model)
      logits_fn: Callable[[tf.Tensor], tf.Tensor] = functools.partial(
        way.logits, network, model
      )
      if way.member is not None:
        weights = way.member(model, table, data['client_id'])
        logits_fn = network.inference_logits
      correct, loss = passes.count_correct(
        weights, logits_fn, x, y, self.num_classes, client_accuracy.MAX_LOSS
      )
      ways[name] = collections.OrderedDict(correct=correct, loss=loss)
    one_hot = tf.one_hot(y, self.num_classes, dtype=tf.int64)
    return collections.OrderedDict(
      usable=usable, num_examples=tf.reduce_sum(one_hot, 0), ways=ways
    )


def _ways(
  prediction: server_model.Prediction,
) -> Mapping[str, server_model.Prediction]:
  return {client_accuracy.MAIN: prediction, **prediction.also}


def _sort_names(value: Any) -> Any:
  """Replaces all mappings by ordered dictionaries, sorted by name."""
  # TFF's types depend on the order of fields.
  if isinstance(value, Mapping):
    return collections.OrderedDict(
      (name, _sort_names(value[name])) for name in sorted(value)
    )
  return value


def _type_of(model: Any) -> tff.Type:
  """Returns the TFF type of a structure of arrays or specs."""
  specs = tf.nest.map_structure(
    lambda v: tf.TensorSpec(v.shape, v.dtype), model
  )
  return tff.types.tensorflow_to_type(specs)
