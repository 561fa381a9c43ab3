"""The flags of a run, without those of its algorithm."""

import dataclasses
import re

from tff_fssl import hparams
from tff_fssl import metrics as metrics_lib
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import hparam
from tff_fssl.models import names as model_names

# A profile takes megabytes and seconds.
_MAX_PROFILED_ROUNDS = 1_000
# Where `--track` sends runs: the name of the package -> that of the product.
TRACKERS = {'mlflow': 'MLflow', 'wandb': 'Weights & Biases'}
_PROJECT = re.compile(r'([\w.-]+/)?[\w.-]+', re.ASCII)
# A URI's user and password, and its query.
_SECRETS = re.compile(r'(?<=//).*(?=@)|\?.*')
_ROUNDS = re.compile(r'(\d{1,9})(?:-(\d{1,9}))?')


@dataclasses.dataclass(frozen=True)
class RunHparams:
  """Flags of `programs/train.py`, without a prefix."""

  algorithm: str = hparam(
    registry.DEFAULT,
    'The training algorithm.',
    choices=registry.REGISTRY,
    group='Algorithm and model',
  )
  model: str = hparam(
    'wrn28_2',
    'The network: a name; keras:NAME, of keras.applications; or'
    f' FILE.py:function (docs/models.md). {model_names.summaries()}. Names:',
    choices=model_names.MODELS,
    other_choices=True,
  )
  norm: str = hparam(
    model_names.STATIC_BATCH_NORM,
    'Normalization of the network. sbn: static batch norm, whose statistics are'
    ' gathered after each round (see --batch_norm_statistics); bn: batch norm'
    ' with moving averages, aggregated with the weights; gn: group norm; none.',
    choices=model_names.NORMS,
  )
  init_from: str = hparam(
    '',
    "Initial weights: a run's folder (its last checkpoint is used), an exported"
    " model's folder, or a Keras file (.keras, .h5). Only numbers are read,"
    ' including batch norm statistics. The last layer of a Keras file may be'
    ' another one, for other classes; it then starts anew. Rounds and'
    ' optimizers start from the beginning. The server still pre-trains, unless'
    ' --num_pretraining_rounds=0. The source is needed only at the start: its'
    ' weights are saved as the first checkpoint.',
  )
  train_layers: str = hparam(
    '',
    'A regular expression: only layers whose whole names match train, such as'
    " 'predictions|block_16_.*'. The others stay as --init_from has them; their"
    ' weights are neither sent nor in checkpoints. If empty, all layers train.',
  )
  seed: int = hparam(
    0,
    'Seed of everything random. The same command with the same seed gives the'
    ' same results.',
    minimum=0,
    maximum=2**31 - 1,
  )
  cross_device: bool = hparam(
    False,
    'Refuse configurations that cross-device clients cannot run: such clients'
    ' have no identity, and communicate once per round.',
    may_change=True,
  )

  dataset: str = hparam(
    'cifar10',
    'folder:PATH | features:PATH | text:PATH | clientdata:PATH |'
    ' huggingface:OWNER/NAME | a name. Your own data (docs/own_data.md) are a'
    ' folder of images, a table or file of vectors, a CSV file of texts, files'
    " of TFF's ClientData, or a download of the hub's client in --data_dir. A"
    ' name is also ag_news, or any image classification set of TFDS, in'
    ' --data_dir. Names:',
    choices=data_names.DATA_SETS,
    other_choices=True,
    group='Data',
  )
  data_dir: str = hparam(
    '',
    'Folder with the TFDS data sets; if empty, $TFDS_DATA_DIR or else'
    ' ~/tensorflow_datasets. `digits` needs no folder. For folder:PATH and the'
    ' like, where a relative PATH starts; if empty, the current folder. For'
    ' huggingface:OWNER/NAME, the folder of OWNER/NAME, or the'
    " hub's cache; if empty, this cache.",
    may_change=True,
  )
  augmentation: str = hparam(
    data_names.FL2,
    'RandAugment of weak and strong views of images: that of (FL)^2, of'
    ' FixMatch, of SAGE, of SemiFL and FedDB, or of FedMatch. weak: none, so'
    ' that a strong view is a second weak one.',
    choices=data_names.AUGMENTATION_POLICIES,
    when=lambda run: run.info.kind == data_names.IMAGES,
  )
  crop_and_flip: bool = hparam(
    True,
    'Crop and flip weak views of images at random. If false, a weak view is the'
    ' image as it is, and a strong view has RandAugment alone.',
    when=lambda run: run.info.kind == data_names.IMAGES,
  )
  num_labels: int = hparam(
    40,
    'Number of labelled examples, equally many of each class: the total if the'
    ' server holds the labels; the number per client if clients hold them. With'
    ' --client_labels=own, of any classes. If a folder has server/, the server'
    ' has these images alone, all of them unless this is given (0).',
    minimum=0,
  )
  full_labels: bool = hparam(
    False,
    'Give clients labels for all their data, to measure the upper bound. With'
    ' --scenario=labels_at_clients, --num_labels is then not needed; with'
    ' labels_at_server, the server has --num_labels in addition'
    ' (--algorithm=supervised).',
  )
  labeled_clients: str = hparam(
    data_names.ALL_CLIENTS,
    'The clients that hold labels: all; a number of clients, such as 3; or a'
    ' share of all, such as 0.1 (at least one). They are drawn by --seed, with'
    ' --client_labels=own from those with enough examples; a larger number'
    ' includes them.',
    when=lambda run: (
      run.scenario == data_names.LABELS_AT_CLIENTS
      and run.client_labels != data_names.SPLIT
    ),
  )
  client_labels: str = hparam(
    data_names.BALANCED,
    'The labelled examples of a client. balanced: equally many of each class,'
    ' in addition to its share of the data; own (always with'
    ' --partition=natural): --num_labels of its share, drawn at random; split:'
    ' those of all clients, equally many of each class, are split by'
    ' --partition, in a draw of their own.',
    choices=data_names.CLIENT_LABELS,
    when=lambda run: (
      run.scenario == data_names.LABELS_AT_CLIENTS and not run.full_labels
    ),
  )
  labeled_also_unlabeled: bool = hparam(
    False,
    'Clients also train on their labelled examples as if these had no labels'
    ' (SAGE).',
    when=lambda run: (
      run.scenario == data_names.LABELS_AT_CLIENTS and not run.full_labels
    ),
  )
  client_label_classes: int = hparam(
    0,
    'Number of classes among the labels of each client, drawn by --seed so that'
    ' all classes are labelled at about equally many clients; --num_labels is'
    ' divided evenly among them. The rest of its data is unchanged. 0: all'
    ' classes.',
    minimum=0,
    when=lambda run: (
      run.scenario == data_names.LABELS_AT_CLIENTS
      and not run.full_labels
      and run.client_labels == data_names.BALANCED
    ),
  )
  label_noise: float = hparam(
    0.0,
    'Share of the labelled training examples, at the server and at clients,'
    ' with a wrong label: a class drawn uniformly from the others. Validation,'
    ' test and metrics of unlabelled examples keep the truth.',
    minimum=0,
    maximum=1,
  )
  client_test_fraction: float = hparam(
    0.0,
    "Share of each client's examples of known class that is held out for"
    ' evaluation at the client (evaluate --federated), and never trained on: at'
    ' least one, if the client has two. Labels are given to the others.',
    minimum=0,
    maximum=partition_settings.MAX_TEST_FRACTION,
  )
  num_clients: int = hparam(
    100,
    'Number of clients, among which the rest of the training data is split.'
    ' --partition=natural takes all clients of the data set (0) unless a'
    ' smaller number is given, which is drawn by --seed.',
    minimum=0,
    maximum=10**6,
  )
  partition: str = hparam(
    data_names.IID,
    'The split of training data among clients. iid: evenly, at random;'
    ' dirichlet: by shares of classes drawn from Dirichlet(alpha); fedmatch: by'
    ' the ten rows of shares of FedMatch (Batch-NonIID); extreme: by those of'
    ' ProtoFSSL, where a client lacks two classes; shards: sorted by class and'
    ' cut (McMahan et al., 2017); pairs: equal IID parts, each divided between'
    ' two clients by Dirichlet(alpha) (SAGE); natural (unless given, for'
    ' clientdata:PATH and folders of clients): as the data set says; grouped:'
    ' groups of whole owners; continuous: by owners that are numbers; given:'
    ' by --class_shares. docs/partitions.md shows them.',
    choices=data_names.PARTITIONS,
  )
  partition_file: str = hparam(
    '',
    'Take the partition from this file, which the program `partition` or a run'
    ' (partition.json) has written, instead of drawing it. It also sets the'
    ' flags of the partition. Flags on the command line must agree with it. A'
    ' resumed run needs the file; its own partition.json is a copy.',
    may_change=True,
  )
  alpha: float = hparam(
    0.1,
    'Concentration of the Dirichlet partition, or of each pair: smaller values'
    ' make it more uneven.',
    minimum=0,
    exclusive_minimum=True,
    when=lambda run: run.partition in data_names.WITH_ALPHA,
  )
  alpha_meaning: str = hparam(
    data_names.EACH,
    'The meaning of --alpha. each: the concentration of each class; total: the'
    ' sum over classes, so that each has alpha / classes (Hsu et al., 2019).',
    choices=data_names.ALPHA_MEANINGS,
    when=lambda run: run.partition in data_names.WITH_ALPHA,
  )
  equal_sizes: bool = hparam(
    False,
    'Give each client of the Dirichlet partition equally many examples, with'
    ' class shares of its own (Hsu et al., 2019), instead of dividing each'
    ' class among clients.',
    when=lambda run: run.partition == data_names.DIRICHLET,
  )
  min_client_examples: int = hparam(
    10,
    'Redraw the Dirichlet partition until each client has at least this many'
    ' examples.',
    minimum=0,
    when=lambda run: (
      run.partition == data_names.DIRICHLET and not run.equal_sizes
    ),
  )
  class_draws: str = hparam(
    data_names.EXACT,
    'Class counts of clients with --partition=fedmatch or extreme. exact: the'
    " row's shares, as in ProtoFSSL's code, at the largest client size for"
    " which no class runs out; multinomial: drawn, as in FedMatch's code. The"
    ' last clients get fewer if a class runs out.',
    choices=data_names.CLASS_DRAWS,
    when=lambda run: run.partition in (data_names.FEDMATCH, data_names.EXTREME),
  )
  shards_per_client: int = hparam(
    2,
    'Number of shards of each client (--partition=shards).',
    minimum=1,
    maximum=10**6,
    when=lambda run: run.partition == data_names.SHARDS,
  )
  classes_per_client: int = hparam(
    2,
    'Number of classes of each client (--partition=classes).',
    minimum=1,
    maximum=10**6,
    when=lambda run: run.partition == data_names.CLASSES,
  )
  size_skew: str = hparam(
    data_names.LINEAR,
    'Sizes of clients (--partition=sizes): the k-th of them has k parts of the'
    ' examples (linear), k^2 (square) or e^k (exponential).',
    choices=data_names.SIZE_SKEWS,
    when=lambda run: run.partition == data_names.SIZES,
  )
  class_shares: str = hparam(
    '',
    "The clients' shares of each class with --partition=given: a row of whole"
    " numbers for each client, '9,1; 1,9'. Each class is cut in proportion to"
    ' its column.',
    when=lambda run: run.partition == data_names.GIVEN,
  )
  strictness: float = hparam(
    1.0,
    "How far --partition=continuous follows the owners' numbers: 1: the first"
    ' client has the least; 0: IID; between, normal noise is mixed in.',
    minimum=0,
    maximum=1,
    when=lambda run: run.partition == data_names.CONTINUOUS,
  )
  streaming_steps: int = hparam(
    1,
    "Number of parts into which each client's unlabelled examples are cut, at"
    ' random (with --full_labels, all of its examples). A round uses one part.'
    ' FedMatch (Streaming-NonIID): 10. 1: always all.',
    minimum=1,
    maximum=10**6,
    when=lambda run: run.streams,
  )
  streaming_rounds: int = hparam(
    10,
    'Number of rounds for each part of --streaming_steps.',
    minimum=1,
    maximum=10**7,
    when=lambda run: run.streams and run.streaming_steps > 1,
  )
  streaming_cycles: bool = hparam(
    False,
    'Begin again with the first part after the last one (FedSwitch), instead of'
    ' staying at the last one.',
    when=lambda run: run.streams and run.streaming_steps > 1,
  )
  num_validation: int = hparam(
    0,
    'Number of training examples that are set aside, with their hidden labels,'
    ' to select the best round. A deployment would not have these labels.',
    minimum=0,
  )
  num_unlabeled: int = hparam(
    0,
    'Number of unlabelled examples of all clients together, drawn by --seed'
    ' from what labels and validation leave; a larger number includes those of'
    ' a smaller one. It includes the examples of --client_test_fraction, and'
    ' --full_labels labels it. A partition may skip a remainder. 0: all.',
    minimum=0,
  )

  total_rounds: int = hparam(
    800,
    'Number of rounds, not counting server pre-training.',
    minimum=1,
    maximum=10**7,
    group='Rounds',
    may_change=hparams.INCREASE_ONLY,
  )
  clients_per_round: int = hparam(
    10,
    'Number of clients drawn for each round, without replacement.',
    minimum=1,
    maximum=10**6,
  )
  rounds_per_evaluation: int = hparam(
    10,
    'Number of rounds between evaluations. The last round is always evaluated.',
    minimum=1,
  )
  metrics: str = hparam(
    '',
    'Further figures of each evaluation, with commas between them:'
    " balanced_accuracy, macro_f1, auroc (scikit-learn's; of more than two"
    ' classes, each against the others). If empty: balanced_accuracy, if the'
    ' largest class of the test examples has more than three times as many as'
    ' the smallest.',
    when=lambda run: not run.trains_alone,
  )
  best_by: str = hparam(
    'accuracy',
    'The figure on validation examples that selects the best round, which is'
    ' then also one of --metrics.',
    choices=('accuracy', *metrics_lib.FIGURES),
    when=lambda run: run.num_validation and not run.trains_alone,
  )
  max_bad_rounds: int = hparam(
    3,
    'Stop after this many consecutive rounds without a finite update. Such'
    ' rounds leave the model unchanged.',
    minimum=1,
    may_change=True,
  )

  output_dir: str = hparam(
    '',
    "The run's folder; if empty, runs/ALGORITHM_DATASET_SCENARIO_seedSEED."
    ' The same command continues a run that was stopped.',
    group='Output',
    may_change=True,
  )
  rounds_per_checkpoint: int = hparam(
    10,
    'Number of rounds between checkpoints. The last round is always saved.',
    minimum=1,
    may_change=True,
  )
  keep_checkpoints: int = hparam(
    3,
    'Number of latest checkpoints to keep. The checkpoint of the round that is'
    ' best on validation examples is kept as well.',
    minimum=1,
    may_change=True,
  )
  tensorboard: bool = hparam(
    True,
    'Also write metrics, pictures of views and of the partition, confidences'
    ' and flags for TensorBoard.',
    may_change=True,
  )
  track: str = hparam(
    '',
    'Also send metrics, flags, pictures and the models to a tracker:'
    " mlflow:URI, MLflow's server, database or folder; wandb:PROJECT or"
    ' wandb:ENTITY/PROJECT, Weights & Biases; or both, separated by a comma. No'
    ' tracker can stop training (docs/tracking.md).',
    may_change=True,
  )
  export_tflite: bool = hparam(
    False,
    'Also export the models as model.tflite, for LiteRT (TensorFlow Lite) on'
    ' phones and the like, and compare it with the model on test examples.',
    may_change=True,
  )
  profile: str = hparam(
    '',
    'Rounds to profile, such as 3, 3-5 or 2,4. Profiles are written to'
    ' tensorboard/round_N, for tensorboard-plugin-profile. Results do not'
    ' change.',
    may_change=True,
  )

  runtime: str = hparam(
    'in_process',
    "The runtime of TFF's computations. in_process: TensorFlow in this process;"
    " tff_worker: TFF's worker process (CPU only); ray: clients on the machines"
    ' of a Ray cluster, the rest in this process (docs/scaling.md).',
    choices=('in_process', 'tff_worker', 'ray'),
    group='Execution',
    may_change=True,
  )
  call_timeout_secs: float = hparam(
    0.0,
    'Time limit in seconds for a call to a worker. With tff_worker, a round has'
    ' a few quick calls, and one that computes the whole round; with ray, a'
    ' call is for --clients_per_group clients (the first ones also load the'
    ' data and compile). If a call takes longer, another worker repeats it. 0:'
    ' no limit.',
    minimum=0,
    maximum=10**7,
    may_change=True,
  )
  client_devices: str = hparam(
    'auto',
    'Devices of clients: auto (all GPUs, or the CPU if there are none), cpu,'
    ' gpu, or, with in_process, a list of devices such as gpu:0,gpu:1.',
    may_change=True,
  )
  client_threads: int = hparam(
    0,
    'Number of clients that train at the same time; 0 chooses a number that'
    ' suits the devices. Results do not depend on it.',
    minimum=0,
    maximum=1024,
    may_change=True,
  )
  clients_per_group: int = hparam(
    0,
    'Number of clients that are accumulated one after another, before their'
    ' sums are merged with those of earlier clients. With ray, the clients of'
    ' one call to a worker. Results depend on it within rounding. 0: all of a'
    ' cohort, or, with ray, 1.',
    minimum=0,
    maximum=10**6,
    when=lambda run: run.runtime in ('in_process', 'ray'),
    may_change=True,
  )
  intra_op_threads: int = hparam(
    0,
    'Number of cores of a TensorFlow operation, on each machine. 0: as many as'
    ' this machine has. Results depend on it within rounding.',
    minimum=0,
    maximum=1024,
    when=lambda run: run.runtime in ('in_process', 'ray'),
    may_change=True,
  )
  ray_address: str = hparam(
    '',
    'The Ray cluster: an address, auto (the one that runs on this machine), or'
    ' empty for a cluster of this machine alone, for this run.',
    when=lambda run: run.runtime == 'ray',
    may_change=True,
  )
  ray_workers: int = hparam(
    0,
    'Number of worker processes that train clients. 0: one for each core of the'
    ' cluster or, on GPUs, --clients_per_gpu for each GPU. Results do not'
    ' depend on it.',
    minimum=0,
    maximum=10**5,
    when=lambda run: run.runtime == 'ray',
    may_change=True,
  )
  clients_per_gpu: int = hparam(
    1,
    'Number of workers that share a GPU. Results do not depend on it.',
    minimum=1,
    maximum=64,
    when=lambda run: run.runtime == 'ray',
    may_change=True,
  )
  ray_trusted_network: bool = hparam(
    False,
    'Allow a Ray cluster without token authentication. Anybody who reaches its'
    ' ports can run programs on its machines.',
    when=lambda run: run.runtime == 'ray',
    may_change=True,
  )
  simulate_secure_aggregation: bool = hparam(
    False,
    'Replace secure sums (--aggregator=secure) by plain sums, which protect'
    ' nothing. For simulation only.',
    when=lambda run: run.aggregator.aggregator == aggregator_hparams.SECURE,
  )
  strict_clients: bool = hparam(
    False,
    "Stop if a client's data cannot be used (a label that is not a class, wrong"
    ' images, or a reader that fails). Otherwise the client is rejected, named'
    ' on the console, and counted in client_work/train/num_rejected_clients.',
    may_change=True,
  )
  debug_non_finite: bool = hparam(
    False,
    'When updates in a round are not finite, repeat its clients one by one, and'
    ' report the clients that failed, the local step, and the first value that'
    ' was not finite. The report is also written to metrics/non_finite.txt.',
    may_change=True,
    when=lambda run: run.trains_clients,
  )
  progress: str = hparam(
    'auto',
    'Display of progress: a bar, a line for each round, or nothing. auto: a bar'
    ' on a terminal, otherwise lines.',
    choices=('auto', 'bar', 'lines', 'none'),
    may_change=True,
  )
  verbose: bool = hparam(
    False,
    "Show TensorFlow's own messages and tracebacks.",
    may_change=True,
  )

  def __post_init__(self):
    hparams.validate(self)
    parse_figures(self.metrics)


def parse_figures(text: str) -> tuple[str, ...]:
  """Parses `--metrics`.

  Args:
    text: Names of `metrics.FIGURES`, with commas between them, or ''.

  Returns:
    The names, each once.

  Raises:
    UsageError: If there is no such figure.
  """
  names = tuple(dict.fromkeys(text.split(','))) if text else ()
  for name in names:
    if name not in metrics_lib.FIGURES:
      raise UsageError(
        f'--metrics={text}: {name!r} is none; allowed are'
        f' {", ".join(metrics_lib.FIGURES)}, with commas between them'
        f'{hparams.closest(name, metrics_lib.FIGURES)}'
      )
  return names


def parse_trackers(text: str) -> dict[str, str]:
  """Parses the trackers that `--track` names.

  Args:
    text: 'mlflow:URI', 'wandb:PROJECT', both with a comma between them, or ''
      for none.

  Returns:
    The kind of each ('mlflow' or 'wandb') -> the rest.

  Raises:
    UsageError: If the text has another form, or holds a password, which a run's
      flags would store.
  """
  result: dict[str, str] = {}
  for part in text.split(',') if text else ():
    kind, _, where = part.partition(':')
    if kind not in TRACKERS or not where:
      raise UsageError(
        f'--track: {_shown(part)!r} is not a tracker; trackers are written'
        ' mlflow:URI or wandb:PROJECT, with a comma between two'
      )
    if kind in result:
      raise UsageError(f'--track: {kind} is given twice')
    if kind == 'wandb' and not _PROJECT.fullmatch(where):
      raise UsageError(
        f'--track=wandb:{_shown(where)}: projects are written PROJECT or'
        ' ENTITY/PROJECT, of letters, digits, -, _ and .'
      )
    # flags.txt would hold it in plain text, and may be published.
    if kind == 'mlflow' and _SECRETS.search(where):
      raise UsageError(
        f"--track=mlflow:{_shown(where)}: the run's flags would store the user"
        ' or the password in it; omit these, and give'
        ' MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or'
        ' MLFLOW_TRACKING_TOKEN) in the environment'
      )
    result[kind] = where
  return result


def _shown(text: str) -> str:
  """Hides parts of a text that may be a password."""
  return _SECRETS.sub('...', text)


def parse_rounds(text: str, total_rounds: int) -> frozenset[int]:
  """Parses the rounds that `--profile` names.

  Args:
    text: '3', '3-5', '2,4', '2,4-6', or '' for none.
    total_rounds: The number of the last round.

  Returns:
    Their numbers, each in [1, total_rounds].

  Raises:
    UsageError: If the text has another form, or there are no such rounds.
  """
  rounds: set[int] = set()
  for part in text.split(',') if text else ():
    match = _ROUNDS.fullmatch(part)
    if match is None:
      raise UsageError(
        f'--profile={text}: {part!r} is not a round; rounds are written 3, 3-5'
        ' or 2,4'
      )
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= total_rounds:
      raise UsageError(
        f'--profile={text}: {part} is not within rounds 1 to'
        f' --total_rounds={total_rounds}, in ascending order'
      )
    if last - first + len(rounds) >= _MAX_PROFILED_ROUNDS:
      raise UsageError(
        f'--profile={text}: profiles of more than {_MAX_PROFILED_ROUNDS:,}'
        ' rounds would fill the disk; give fewer'
      )
    rounds.update(range(first, last + 1))
  return frozenset(rounds)
