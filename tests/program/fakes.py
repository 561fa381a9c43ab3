"""A learning process without TensorFlow's runtime."""

import asyncio
import collections
import contextlib
import functools
import os
import types

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tree as tree_lib

from tff_fssl.algorithms.fedmatch import upload_cache
from tff_fssl.interface import exchange
from tff_fssl.models.weights import Weights
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import csv_table
from tff_fssl.program import output_tree
from tff_fssl.program import summary
from tff_fssl.program import training
from tff_fssl.program import training_types
from tff_fssl.rounds import sampling

State = tff.learning.templates.LearningAlgorithmState
NUM_CLIENTS = 5
_DATA_TYPE = tff.FederatedType(
  tff.SequenceType(tff.TensorType(np.float32, [3])), tff.CLIENTS
)


class FakeProcess:
  """Adds up what clients hand over, and counts its rounds."""

  distributor, outside = (), None

  def __init__(self, bad_rounds=()):
    self.rounds = []
    self._bad_rounds = bad_rounds
    state_type = tff.to_type(
      State(
        Weights(
          (tff.TensorType(np.float32, [3]), tff.TensorType(np.float32)),
          (),
          tff.TensorType(np.float32),
        ),
        self.distributor_type(),
        tff.TensorType(np.int32),
        (),
        collections.OrderedDict(momentum=tff.TensorType(np.float32, [3])),
      )
    )
    self.initialize = _Computation(
      lambda: State(
        Weights(
          (np.zeros([3], np.float32), np.float32(0.1)), (), np.float32(1)
        ),
        self.distributor,
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
    held, values = self._remember(state.distributor, values)
    round_num = int(state.client_work) + 1
    self.rounds.append(round_num)
    total = np.sum(values, axis=0, dtype=np.float32) * np.float32(1 / 3)
    momentum = np.float32(0.9) * state.finalizer['momentum'] + total
    if round_num in self._bad_rounds:
      momentum = state.finalizer['momentum']
    (vector, scalar), _, count = state.global_model_weights
    state = State(
      Weights((vector + momentum, np.float32(scalar * 1.1)), (), count),
      held,
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

  def distributor_type(self):
    return ()

  def _remember(self, held, values):
    return held, values


class RememberingProcess(FakeProcess):
  """Also adds what clients handed over before, which is kept outside."""

  def __init__(self):
    table = collections.OrderedDict(
      owner=np.arange(NUM_CLIENTS, dtype=np.int32),
      last_round=np.zeros([NUM_CLIENTS], np.int32),
      window=collections.OrderedDict(
        sum=collections.OrderedDict(
          slot=np.zeros([0], np.int32), values=np.zeros([0, 3], np.float32)
        )
      ),
    )
    self.distributor = collections.OrderedDict(
      table=table, round_num=np.int32(0)
    )
    self.outside = exchange.Outside(self._bring, self._take)
    super().__init__()

  def distributor_type(self):
    held = tree_lib.map_structure(
      lambda a: tf.TensorSpec(a.shape, a.dtype), self.distributor
    )
    held['table']['window']['sum'] = collections.OrderedDict(
      slot=tf.TensorSpec([None], tf.int32), values=tf.TensorSpec([None, 3])
    )
    return tff.types.tensorflow_to_type(held)

  def _bring(self, table, client_ids, round_num, read):
    self._cohort = client_ids
    assert not table['window']['sum']['slot'].size
    known = [i for i in client_ids if table['last_round'][i]]
    entries = upload_cache.entries(table, known)
    assert all(entry.round_num < round_num for entry in entries)
    rows = [read(*entry) for entry in entries]
    return self._add_rows(table, known, rows)

  def _add_rows(self, table, slots, rows):
    table = upload_cache.add_rows(table, {'sum': slots}, zip(slots, rows))
    return tf.nest.map_structure(np.asarray, table)

  def _take(self, table, write):
    table, taken = upload_cache.drop_rows(table)
    for entry, row in taken:
      write(*entry, row)
    return table

  def _remember(self, held, values):
    table, round_num = held['table'], held['round_num']
    window = table['window']['sum']
    before = dict(zip(window['slot'], window['values'], strict=True))
    last_round, sums = table['last_round'].copy(), []
    for client_id, value in zip(self._cohort, values, strict=True):
      assert (client_id in before) == (last_round[client_id] > 0)
      sums.append(value + before.get(client_id, np.zeros_like(value)))
      last_round[client_id] = round_num
    table = collections.OrderedDict(table, last_round=last_round)
    table = self._add_rows(
      table, self._cohort, [{'sum': total} for total in sums]
    )
    held = collections.OrderedDict(
      table=table, round_num=np.int32(round_num + 1)
    )
    return held, sums


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


def data_source(
  num_clients=NUM_CLIENTS, clients_per_round=2, first_round=0, **options
):
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
    **options,
  )


class Reporter:
  """Remembers what it is told."""

  def __init__(self, on_round=lambda report: None):
    self.reports, self.messages, self.phases = [], [], []
    self._on_round = on_round

  def begin(self, done, settings):
    self.done = done

  @contextlib.contextmanager
  def phase(self, name, round_num):
    self.phases.append((name, round_num))
    yield

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


def outputs(tree, warn=lambda message: None, keep=2, best_by=summary.ACCURACY):
  return training.Outputs(
    training.DurableProgramStateManager(
      tree.checkpoints,
      keep_total=keep,
      warn=warn,
      owner=checkpoint.run_owner(config(tree.path)),
      keep_also_fn=lambda: summary.best_round_num(tree.eval_csv, best_by),
    ),
    csv_table.CsvTable(tree.train_csv),
    csv_table.CsvTable(tree.eval_csv),
    csv_table.CsvTable(tree.timing_csv),
    non_finite=csv_table.RoundLines(tree.non_finite_txt),
    rows=checkpoint.RowFiles(
      tree.client_rows, checkpoint.run_owner(config(tree.path))
    ),
    best_by=best_by,
  )


@functools.cache
def config(folder):
  return config_lib.parse_config([f'--output_dir={folder}'])


def run(
  folder,
  process=None,
  reporter=None,
  stop=None,
  keep=2,
  options=None,
  source=None,
  best_by=summary.ACCURACY,
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
    source: Of clients; one in which all take part by default.
    best_by: What selects the best round.
    **changed: Settings.
  """
  folder = str(folder)
  reporter = reporter or Reporter()
  with output_tree.OutputTree(folder) as tree:
    tree.open(config(folder))
    tree.record(config(folder))
    logic = training.train(
      process or FakeProcess(),
      source or data_source(),
      settings(**changed),
      outputs(tree, reporter.say, keep, best_by),
      evaluate_fn=lambda state: evaluate(state),
      reporter=reporter,
      stop=stop or training_types.StopRequest(),
      **(options or {}),
    )
    return asyncio.run(logic)


def results(folder):
  """What must be equal, as bytes: tables, last checkpoint, rows of clients."""
  tree = output_tree.OutputTree(str(folder))
  content = {}
  paths = [tree.train_csv, tree.eval_csv]
  last = checkpoint.versions(tree.checkpoints)[-1]
  paths.append(checkpoint.path_of(tree.checkpoints, last))
  if os.path.isdir(tree.client_rows):
    names = os.listdir(tree.client_rows)
    paths += [os.path.join(tree.client_rows, name) for name in names]
  for path in paths:
    with open(path, 'rb') as file:
      content[os.path.basename(path)] = file.read()
  return content
