"""Writes a process as a Flower app, and the folder of its server.

app/        the Flower app: fssl_app/packed.py has the clients' graphs
clients/    the clients' graphs, if they are too large for the app
server/     the server's graphs and data, which never reach a client
README.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import io
import json
import os
import shutil
from typing import Any, NamedTuple

import jinja2
import numpy as np

import tff_fssl
from tff_fssl import durable
from tff_fssl import files
from tff_fssl import hparams
from tff_fssl import runtime
from tff_fssl.data import augment
from tff_fssl.data import names as data_names
from tff_fssl.data import sources
from tff_fssl.data.sources import columns as columns_lib
from tff_fssl.hparams import UsageError
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.models import evaluate as evaluate_lib
from tff_fssl.models import server_model
from tff_fssl.program import checkpoint
from tff_fssl.program import config as config_lib
from tff_fssl.program import experiment as experiment_lib
from tff_fssl.program import export as export_lib
from tff_fssl.program import exported
from tff_fssl.program import output_tree
from tff_fssl.program import run_hparams
from tff_fssl.program import train_main
from tff_fssl.program import training
from tff_fssl.program import warm_start
from tff_fssl.program.deploy import deployment as deployment_lib
from tff_fssl.runtime import artefact
from tff_fssl.runtime import export

_PACKAGE = 'fssl_app'
_CODE = (
  '__init__.py',
  'client_app.py',
  'load_client.py',
  'readers.py',
  'server_app.py',
  'wire.py',
  'work.py',
)
# Flower takes apps of up to 10 MB.
_MOST_PACKED_BYTES = 9 * 10**6
_TEMPORARY = '.writing_'
_BATCH_SIZE = 256
_WHAT_DATA = {
  data_names.IMAGES: 'a folder of images (`CLASS/*.jpg` with labels,'
  ' `unlabeled/*.jpg` without)',
  data_names.TEXTS: 'a file `.csv` with the columns `text` and `label`, which'
  ' may be empty',
  data_names.VECTORS: 'a file `.npz`',
}


class Written(NamedTuple):
  """What was written.

  Attributes:
    num_phases: The messages that a client gets in a round.
    sent_bytes: The size of these messages.
    app_bytes: The size of the packed graphs.
    max_examples: The most examples that a client may have.
    has_clients: Whether the graphs are too large for the app.
  """

  num_phases: int
  sent_bytes: int
  app_bytes: int
  max_examples: int
  has_clients: bool


def write_app(
  config: config_lib.Config,
  folder: str,
  *,
  run: output_tree.OutputTree | None = None,
) -> Written:
  """Writes an app, completely or not at all.

  Args:
    config: The configuration.
    folder: The folder to write, new or empty.
    run: The run whose latest checkpoint is the first state. None: the first
      state is that of a new run.

  Returns:
    What was written.

  Raises:
    UsageError: If the configuration cannot run in a federation, the run has no
      checkpoint, or the folder cannot be written.
  """
  check(config)
  folder = os.path.abspath(folder)
  _check_folder(folder)
  experiment_lib.configure_devices(config)
  context = runtime.build_context(
    runtime.Settings(
      simulate_secure_aggregation=config.run.simulate_secure_aggregation
    )
  )
  parent, name = os.path.split(folder)
  temporary = os.path.join(parent, f'{_TEMPORARY}{name}')
  try:
    with runtime.installed(context), durable.storage_errors():
      start = _start(config, run)
      durable.make_folder(parent)
      # A killed process may have left it.
      shutil.rmtree(temporary, ignore_errors=True)
      os.mkdir(temporary)
      written = _Writer(config, start, temporary).write(run)
      # The last step, so that a folder of this name is a whole app.
      os.replace(temporary, folder)
  except NotImplementedError as error:
    raise UsageError(
      f'--algorithm={config.run.algorithm}: cannot be deployed: {error}'
    ) from error
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
  return written


def check(config: config_lib.Config) -> None:
  """Refuses configurations without a federation (`UsageError`)."""
  algorithm = f'--algorithm={config.run.algorithm}'
  if config.trains_alone:
    raise UsageError(
      f'{algorithm}: its clients train alone, so there is nothing to deploy;'
      ' choose another algorithm'
    )
  if not config.trains_clients:
    raise UsageError(
      f'{algorithm}: with --scenario={config.round.scenario}, its rounds have'
      ' no clients, so there is nothing to deploy; choose another one'
    )
  if not (config.info.has_clients or config.round.max_client_examples):
    raise UsageError(
      f'--dataset={config.run.dataset}: has no examples for clients, which tell'
      ' how many one has; give the most, --max_client_examples=1000'
    )
  _check_evaluation(config)


def _check_evaluation(config: config_lib.Config) -> None:
  """Refuses figures that the server does not measure (`UsageError`)."""
  run, usual = config.run, run_hparams.RunHparams()
  for name in ('metrics', 'best_by'):
    if (given := getattr(run, name)) != getattr(usual, name):
      raise UsageError(
        f'--{name}={given}: the server of a federation measures accuracy and'
        ' loss alone; omit it, and give --metrics to programs/evaluate.py'
      )


def _check_folder(folder: str) -> None:
  """Refuses a folder that is in use (`UsageError`)."""
  if not os.path.lexists(folder):
    return
  if not os.path.isdir(folder):
    raise UsageError(f'--output_dir={folder}: is not a folder; choose another')
  # `list_folder` says why a folder cannot be read, but hides some names.
  if files.list_folder(folder) or os.listdir(folder):
    raise UsageError(f'--output_dir={folder}: is not empty; choose another')


class _Start(NamedTuple):
  """The process and the state that a federation starts from.

  Attributes:
    experiment: Data, model and process.
    state: The state.
    done: Its round.
    paths: The paths of a checkpoint of it.
  """

  experiment: experiment_lib.Experiment
  state: Any
  done: int
  paths: list[str]


def _start(
  config: config_lib.Config, run: output_tree.OutputTree | None
) -> _Start:
  """Builds the process, and reads or makes its first state."""
  loaded = None
  if run is None and config.run.init_from:
    source = warm_start.find(config.run.init_from)
    loaded = experiment_lib.load_weights(config, source)
  frozen = train_main.read_frozen(config, run, loaded)
  task = experiment_lib.build_task(config, frozen, elsewhere=True)
  held = task.partition.server_labeled
  if config.round.scenario == data_names.LABELS_AT_SERVER:
    _check_size(task.data.train.x[held].nbytes)
  experiment = experiment_lib.build_experiment(task, '')
  process = experiment.process
  if process.outside is not None:
    raise UsageError(
      f'--algorithm={config.run.algorithm}: keeps rows of clients in files,'
      ' which a federation does not; give --fedmatch.uploads_in=state'
    )
  structure = training.state_structure(process, experiment.data_source)
  paths = training.leaf_paths(structure)
  if run is not None:
    try:
      done, leaves = checkpoint.read_latest(run.checkpoints, task.owner)
      state = training.fill_structure(leaves, structure).process
    except checkpoint.CheckpointError as error:
      raise UsageError(
        f'{run.checkpoints}: no checkpoint can be used: {error}'
      ) from error
    if done >= config.run.total_rounds:
      raise UsageError(
        f'{run.path}: has finished its {done} rounds; give a larger'
        ' --total_rounds'
      )
    return _Start(experiment, state, done, paths)
  state = process.initialize()
  if loaded:
    model = experiment.start(loaded.weights)
    state = state._replace(global_model_weights=model)
  return _Start(experiment, state, config.first_round - 1, paths)


def _check_size(num_bytes: int) -> None:
  """Refuses labelled examples that no graph can hold (`UsageError`)."""
  from tff_fssl.data import clients  # pylint: disable=import-outside-toplevel

  if num_bytes > clients.MAX_CONSTANT_BYTES:
    raise UsageError(
      f'--num_labels: {num_bytes / 2**20:.0f} MB of labelled examples at the'
      f' server; a deployment takes {clients.MAX_CONSTANT_BYTES // 2**20} MB;'
      ' give fewer'
    )


@dataclasses.dataclass
class _Writer:
  """Writes an app.

  Attributes:
    config: The configuration.
    start: The process, and the state to start from.
    folder: The folder to write.
  """

  config: config_lib.Config
  start: _Start
  folder: str

  def write(self, run: output_tree.OutputTree | None) -> Written:
    """Writes everything."""
    process = self.start.experiment.process
    server, clients = self._path('server'), self._path('clients')
    program = export.export(
      process.next,
      server,
      initial=self.start.state,
      simulate_secure_aggregation=self.config.run.simulate_secure_aggregation,
    )
    names = set(map(deployment_lib.checkpoint_path, program.parameter))
    assert names == {
      path for path in self.start.paths if path.startswith('process/')
    }, 'the state of the program is not that of a checkpoint'
    # Clients get what is in this folder, and nothing else.
    durable.make_folder(clients)
    shutil.move(os.path.join(server, 'client'), clients)
    shutil.copy(os.path.join(server, artefact.PROGRAM), clients)
    self._text('clients', 'client.json', json.dumps(self._about(), indent=1))
    # The server runs the copy in the app, so that both agree.
    os.unlink(os.path.join(server, 'artefact.py'))
    size, has_clients = self._write_code(clients)
    self._write_evaluation()
    self._write_deployment()
    self._copy(run)
    self._render('README.md.j2', 'README.md', has_clients=has_clients)
    self._render('pyproject.toml.j2', 'app', 'pyproject.toml')
    return Written(
      program.num_phases,
      _sent_bytes(program),
      size,
      self._max_examples(),
      has_clients,
    )

  def _path(self, *names: str) -> str:
    return os.path.join(self.folder, *names)

  def _text(self, *names_and_text: str) -> None:
    *names, text = names_and_text
    durable.write_file(self._path(*names), [text.encode()])

  def _write_code(self, clients: str) -> tuple[int, bool]:
    """Writes the app's code and the clients' graphs."""
    package = self._path('app', _PACKAGE)
    durable.make_folder(package)
    for name in _CODE:
      durable.write_file(os.path.join(package, name), [_own(name)])
    with open(artefact.__file__, 'rb') as file:
      durable.write_file(os.path.join(package, 'artefact.py'), [file.read()])
    graphs = sorted(
      f'client/{name}' for name in os.listdir(os.path.join(clients, 'client'))
    )
    packed = artefact.pack(clients, [artefact.PROGRAM, 'client.json', *graphs])
    has_clients = len(packed) > _MOST_PACKED_BYTES
    if not has_clients:
      self._text('app', _PACKAGE, artefact.PACKED, packed)
      shutil.rmtree(clients)
    return len(packed), has_clients

  def _max_examples(self) -> int:
    """Returns the number of examples with which a client is not rejected."""
    bounded = experiment_lib.bound_clients(
      self.config, self.start.experiment.task.partition
    )
    return bounded.max_client_examples

  def _about(self) -> dict[str, Any]:
    """Returns what clients need to read their data."""
    data, settings = self.start.experiment.task.data, self.config.data
    return {
      'example_shape': list(data.example_shape),
      'class_names': list(data.class_names),
      'unknown_words': sorted(
        word for word in data_names.UNKNOWN_WORDS if settings.is_unknown(word)
      ),
      'resize': settings.resize,
      'bit_depth': data.bit_depth,
      'vocabulary_size': settings.vocabulary_size,
      'max_words': settings.max_words,
      'text_unit': settings.text_unit,
      'columns': getattr(self.config.info, 'columns', ()),
      'label_field': settings.label_field,
      'max_examples': self._max_examples(),
      'labeled_also_unlabeled': self.config.run.labeled_also_unlabeled,
      'labels_at_server': self.config.round.scenario
      == data_names.LABELS_AT_SERVER,
    }

  def _splits(self) -> list[str]:
    task = self.start.experiment.task
    splits = {'test': task.data.test.y, 'validation': task.partition.validation}
    return [split for split, examples in splits.items() if len(examples)]

  def _write_evaluation(self) -> None:
    """Writes the graph and the data of evaluations."""
    experiment, place = self.start.experiment, deployment_lib.EVALUATION
    folder = self._path('server', place)
    export.export(_build_evaluation(experiment), folder)
    os.unlink(os.path.join(folder, 'artefact.py'))
    for split in self._splits():
      examples, content = experiment.task.examples(split), io.BytesIO()
      np.savez(content, x=examples.x, y=examples.y)
      durable.write_file(
        os.path.join(folder, f'{split}.npz'), [content.getbuffer()]
      )

  def _write_deployment(self) -> None:
    """Writes the description for the server."""
    config, experiment = self.config, self.start.experiment
    run, task = config.run, experiment.task
    values = {n: hparams.format_value(v) for n, v in config.flags().items()}
    values.pop('output_dir', None)
    deployed = deployment_lib.Deployment(
      values=values,
      owner=task.owner,
      is_private=config.is_private,
      seed=run.seed,
      num_clients=task.partition.num_clients,
      clients_per_round=min(run.clients_per_round, task.partition.num_clients),
      first_round=config.first_round,
      done=self.start.done,
      total_rounds=run.total_rounds,
      rounds_per_evaluation=run.rounds_per_evaluation,
      max_bad_rounds=run.max_bad_rounds,
      keep_checkpoints=run.keep_checkpoints,
      min_clients=experiment.process.min_clients,
      # Real clients drop out, and are late, by themselves.
      participation=deployment_lib.ParticipationHparams(
        availability_file=config.participation.availability_file,
        availability_period=config.participation.availability_period,
      ),
      splits=tuple(self._splits()),
    )
    self._text('server', deployment_lib.NAME, deployed.encode())

  def _copy(self, run: output_tree.OutputTree | None) -> None:
    """Copies what a run's folder has besides, for those who read it."""
    task = self.start.experiment.task
    task.partition.save_json(self._path('server', 'partition.json'))
    about = json.dumps(export_lib.describe(task, self.start.done), indent=2)
    self._text('server', exported.ABOUT_FILE, about)
    path = self.config.participation.availability_file
    if path:
      self._text('server', deployment_lib.AVAILABILITY, files.read_text(path))
    if run is not None and os.path.lexists(run.frozen):
      shutil.copy(run.frozen, self._path('server'))

  def _render(self, template: str, *names: str, **values: Any) -> None:
    """Writes a file from its template."""
    data = self.start.experiment.task.data
    at_server = self.config.round.scenario == data_names.LABELS_AT_SERVER
    text = jinja2.Template(
      _own(template).decode(),
      undefined=jinja2.StrictUndefined,
      keep_trailing_newline=True,
    ).render(
      name=f'tff-fssl-{self.config.run.algorithm}'.replace('_', '-'),
      description=f'{self.config.entry.name}, federated semi-supervised',
      version=tff_fssl.__version__,
      tensorflow=tf.version.VERSION,
      secret=', its labelled examples' * at_server,
      labels_text='The server has the labels; those that clients give'
      ' serve metrics alone.'
      if at_server
      else 'Clients have the labels.',
      data_text=_what_data(data, getattr(self.config.info, 'columns', ())),
      class_names=', '.join(data.class_names[:100]),
      num_clients=self.start.experiment.task.partition.num_clients,
      per_round=self.config.run.clients_per_round,
      max_examples=self._max_examples(),
      **values,
    )
    self._text(*names, text)


def _what_data(
  data: sources.DataSet, columns: Sequence[columns_lib.Column]
) -> str:
  """Says what data a client may have."""
  if not columns:
    return _WHAT_DATA[data.train.kind]
  listed = ', '.join(f'`{column.name}`' for column in columns)
  return (
    f'a table (`.csv`, `.tsv`, `.csv.gz`) with the columns {listed}, and for'
    ' labels `label`, `diagnosis` or the like, empty if not known'
  )


def _own(name: str) -> bytes:
  """Reads a file of the folder app/ beside this module."""
  folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'app')
  with open(os.path.join(folder, name), 'rb') as file:
    return file.read()


def _sent_bytes(program: artefact.Program) -> int:
  """Returns the size of a round's messages to a client, as far as known."""
  slots = program.description['slots']
  return sum(
    int(np.prod([n or 0 for n in slots[slot]['shape']]))
    * np.dtype(slots[slot]['dtype']).itemsize
    for phase in program.description['phases']
    for slot in phase['sent']
    if slots[slot]['dtype'] != 'string'
  )


def _build_evaluation(
  experiment: experiment_lib.Experiment,
) -> tff.Computation:
  """Builds `<state, x, y> -> figures`, as `Experiment.evaluate_fn` has them."""
  process, task = experiment.process, experiment.task
  prediction = process.prediction
  state_type = process.initialize.type_signature.result.member
  examples = task.data.test
  stored = [None, *examples.x.shape[1:]]
  views = task.views

  @tff.tensorflow.computation(
    state_type,
    tff.TensorType(examples.x.dtype, stored),
    tff.TensorType(np.int32, [None]),
  )
  def measure(state: Any, x: tf.Tensor, y: tf.Tensor) -> Mapping[str, Any]:
    spec = tf.TensorSpec(stored, examples.x.dtype)
    network = adapter.Network(
      task.model_fn, image_shape=augment.input_shape(views, spec)
    )
    passes = evaluate_lib.Passes(network, views, _BATCH_SIZE)

    # Within it, the weights are assigned before the passes.
    @tf.function(autograph=False)
    def run(state: Any, x: tf.Tensor, y: tf.Tensor) -> Mapping[str, Any]:
      table = state.distributor['table'] if prediction.member else ()
      model = server_model.ServerModel(*state.global_model_weights)
      return evaluate_lib.measure(passes, prediction, model, table, x, y)

    measured: Mapping[str, Any] = run(state, x, y)
    return measured

  return measure
