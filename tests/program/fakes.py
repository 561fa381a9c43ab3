"""A learning process without TensorFlow's runtime."""

import asyncio
import collections
import functools
import os
import types

import numpy as np
import tensorflow_federated as tff

from tff_fssl.models import adapter
from tff_fssl.program import training_types
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.loop import training
from tff_fssl.program.reporting import managers
from tff_fssl.program.storage import checkpoint
from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import ownership
from tff_fssl.program.storage import summary
from tff_fssl.rounds import sampling

State = tff.learning.templates.LearningAlgorithmState
_DATA_TYPE = tff.FederatedType(
  tff.SequenceType(tff.TensorType(np.float32, [3])), tff.CLIENTS
)


class FakeProcess:
  """Adds up what clients hand over, and counts its rounds."""

  def __init__(self, bad_rounds=()):
    self.rounds = []
    self._bad_rounds = bad_rounds
    state_type = tff.to_type(
      State(
        adapter.Weights(
          (tff.TensorType(np.float32, [3]), tff.TensorType(np.float32)),
          (),
          tff.TensorType(np.float32),
        ),
        (),
        tff.TensorType(np.int32),
        (),
        collections.OrderedDict(momentum=tff.TensorType(np.float32, [3])),
      )
    )
    self.initialize = _Computation(
      lambda: State(
        adapter.Weights(
          (np.zeros([3], np.float32), np.float32(0.1)), (), np.float32(1)
        ),
        (),
        np.int32(-1),
        (),
        collections.OrderedDict(momentum=np.zeros([3], np.float32)),
      ),
      None,
      tff.FederatedType(state_type, tff.SERVER),
    )
    self.next = _Computation(self._next, (state_type, _DATA_TYPE), None)

  def _next(self, state, cohort):
    values = list(cohort)
    round_num = int(state.client_work) + 1
    self.rounds.append(round_num)
    total = np.sum(values, axis=0, dtype=np.float32) * np.float32(1 / 3)
    momentum = np.float32(0.9) * state.finalizer['momentum'] + total
    if round_num in self._bad_rounds:
      momentum = state.finalizer['momentum']
    (vector, scalar), _, count = state.global_model_weights
    state = State(
      adapter.Weights((vector + momentum, np.float32(scalar * 1.1)), (), count),
      (),
      np.int32(round_num),
      (),
      collections.OrderedDict(momentum=momentum),
    )
    bad = len(values) if round_num in self._bad_rounds else 0
    train = collections.OrderedDict(
      num_clients=np.int32(len(values)),
      num_non_finite_clients=np.int32(bad),
      loss_pseudo_label=np.float32(vector.sum()),
      pseudo_label_accuracy=np.float32('nan'),
    )
    metrics = collections.OrderedDict(
      distributor=(),
      client_work=collections.OrderedDict(train=train),
      finalizer=collections.OrderedDict(server_loss_labeled=scalar),
    )
    return tff.learning.templates.LearningProcessOutput(state, metrics)


class _Computation:
  def __init__(self, fn, parameter, result):
    self._fn = fn
    self.type_signature = types.SimpleNamespace(
      parameter=parameter, result=result
    )

  def __call__(self, *args):
    return self._fn(*args)


def evaluate(state):
  """A test accuracy and a validation accuracy of a fake state."""
  scalar = float(state.global_model_weights.trainable[1])
  return {
    'test/accuracy': scalar / (1 + scalar),
    'validation/accuracy': scalar / (2 + scalar),
  }


def data_source(num_clients=5, clients_per_round=2, first_round=0):
  def make_client(round_num, client_id, slot):
    del slot
    rng = np.random.default_rng([round_num, client_id])
    return rng.normal(size=3).astype(np.float32)

  return sampling.CohortDataSource(
    _DATA_TYPE,
    make_client,
    seed=3,
    num_clients=num_clients,
    clients_per_round=clients_per_round,
    first_round=first_round,
  )


class Reporter:
  """Remembers what it is told."""

  def __init__(self, on_round=lambda report: None):
    self.reports, self.messages = [], []
    self._on_round = on_round

  def begin(self, done, settings):
    self.done = done

  def round_done(self, report):
    self.reports.append(report)
    self._on_round(report)

  def say(self, message):
    self.messages.append(message)

  def end(self):
    pass


def settings(**kwargs):
  return training_types.Settings(
    **{
      'first_round': 0,
      'total_rounds': 4,
      'rounds_per_evaluation': 2,
      'rounds_per_checkpoint': 1,
      **kwargs,
    }
  )


def outputs(tree, warn=lambda message: None, keep=2):
  return training.Outputs(
    managers.DurableProgramStateManager(
      tree.checkpoints,
      keep_total=keep,
      warn=warn,
      owner=ownership.of_config(config(tree.path)),
      keep_also_fn=lambda: summary.best_round_num(tree.eval_csv),
    ),
    managers.CsvReleaseManager(tree.train_csv),
    managers.CsvReleaseManager(tree.eval_csv),
    managers.CsvReleaseManager(tree.timing_csv),
    non_finite=managers.LinesReleaseManager(tree.non_finite_txt),
  )


@functools.cache
def config(folder):
  return config_lib.from_command_line([f'--output_dir={folder}'])


def run(
  folder,
  process=None,
  reporter=None,
  stop=None,
  keep=2,
  options=None,
  **changed,
):
  """Runs a training program on the fakes; returns its result.

  Args:
    folder: The run's.
    process: A fake one by default.
    reporter: Likewise.
    stop: `training.train`'s.
    keep: How many checkpoints.
    options: Further arguments of `training.train`.
    **changed: Settings.
  """
  folder = str(folder)
  reporter = reporter or Reporter()
  with output_tree.OutputTree(folder) as tree:
    tree.open(config(folder))
    tree.record(config(folder))
    logic = training.train(
      process or FakeProcess(),
      data_source(),
      settings(**changed),
      outputs(tree, reporter.say, keep),
      evaluate_fn=lambda state: evaluate(state),
      reporter=reporter,
      stop=stop or training_types.StopRequest(),
      **(options or {}),
    )
    return asyncio.run(logic)


def results(folder):
  """What must be equal: the tables and the last checkpoint, as bytes."""
  tree = output_tree.OutputTree(str(folder))
  content = {}
  paths = [tree.train_csv, tree.eval_csv]
  last = checkpoint.versions(tree.checkpoints)[-1]
  paths.append(checkpoint.path_of(tree.checkpoints, last))
  for path in paths:
    with open(path, 'rb') as file:
      content[os.path.basename(path)] = file.read()
  return content
