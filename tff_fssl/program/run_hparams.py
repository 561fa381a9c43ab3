"""What a run is, apart from its algorithm. TensorFlow-free."""

import dataclasses

from tff_fssl import hparams
from tff_fssl.algorithms import registry
from tff_fssl.data import names as data_names
from tff_fssl.hparams import hparam
from tff_fssl.models import names as model_names

NORMS = ('sbn', 'bn', 'gn', 'none')


@dataclasses.dataclass(frozen=True)
class RunHparams:
  """Flags of `programs/train.py`, without a prefix."""

  algorithm: str = hparam(
    'fl2', 'The training algorithm.', choices=registry.REGISTRY
  )
  model: str = hparam(
    'wrn28_2',
    f'The network. {model_names.summaries()}.',
    choices=model_names.MODELS,
  )
  norm: str = hparam(
    'sbn',
    'Its normalization. sbn: static batch norm, whose statistics are gathered'
    ' after each round (see --batch_norm_statistics); bn: batch norm with'
    ' moving averages, aggregated with the weights; gn: group norm; none.',
    choices=NORMS,
  )
  init_from: str = hparam(
    '',
    "Start from these weights: a run's folder (its last checkpoint), or a Keras"
    " file (.keras, .h5, an exported model's folder), of which only numbers are"
    ' read; batch norm statistics included. Rounds and optimizers start anew.'
    ' Server pre-training is done all the same: --num_pretraining_rounds=0'
    ' leaves it out. Needed at the start only: they are saved as the first'
    ' checkpoint.',
  )
  seed: int = hparam(
    0,
    'Of everything random: runs of one command and one seed are equal.',
    minimum=0,
    maximum=2**31 - 1,
  )
  cross_device: bool = hparam(
    False,
    'Refuse what clients without identity, in a single phase of communication,'
    ' cannot run.',
  )

  dataset: str = hparam(
    'cifar10', 'The data set.', choices=data_names.DATA_SETS
  )
  data_dir: str = hparam(
    '',
    'Folder with the TFDS data sets; empty: $TFDS_DATA_DIR, else'
    ' ~/tensorflow_datasets. `digits` needs none.',
  )
  augmentation: str = hparam(
    'fl2',
    "Weak and strong views: (FL)^2's RandAugment, or FixMatch's.",
    choices=('fl2', 'fixmatch'),
  )
  num_labels: int = hparam(
    40,
    'Labelled examples, equally many of each class: in all, with labels at the'
    ' server; of each client, with labels at the clients.',
    minimum=0,
  )
  full_labels: bool = hparam(
    False,
    'Clients have labels for all their data, the upper bound (with'
    ' --scenario=labels_at_clients; --num_labels is then not needed).',
  )
  num_clients: int = hparam(
    100,
    'Clients that the rest of the training data goes to.',
    minimum=1,
    maximum=10**6,
  )
  split: str = hparam(
    'iid',
    'How it is split: evenly at random, or by Dirichlet(alpha) over clients for'
    ' each class.',
    choices=('iid', 'dirichlet'),
  )
  alpha: float = hparam(
    0.1,
    'Of the Dirichlet split; the smaller, the more uneven.',
    minimum=0,
    exclusive_minimum=True,
  )
  min_client_examples: int = hparam(
    10,
    'The Dirichlet split is drawn anew until each client has this many.',
    minimum=0,
  )
  num_validation: int = hparam(
    0,
    'Training examples kept aside, with their hidden labels, to select a round'
    ' by; not available in deployment.',
    minimum=0,
  )

  total_rounds: int = hparam(
    800, 'Rounds, not counting server pre-training.', minimum=1, maximum=10**7
  )
  clients_per_round: int = hparam(
    10,
    'Clients drawn for each round, without replacement.',
    minimum=1,
    maximum=10**6,
  )
  rounds_per_evaluation: int = hparam(
    10, 'Rounds from one evaluation to the next; the last is always.', minimum=1
  )
  max_bad_rounds: int = hparam(
    3,
    'The program stops after this many rounds in a row without a finite update'
    ' (such rounds leave the model as it was).',
    minimum=1,
  )

  output_dir: str = hparam(
    '',
    "The run's folder; empty: runs/ALGORITHM_DATASET_SCENARIO_seedSEED."
    ' The same command continues a run that was stopped.',
  )
  rounds_per_checkpoint: int = hparam(
    10, 'Rounds from one checkpoint to the next; the last is always.', minimum=1
  )
  keep_checkpoints: int = hparam(
    3,
    'How many checkpoints are kept, the latest ones; besides, that of the round'
    ' which validation data select.',
    minimum=1,
  )
  tensorboard: bool = hparam(True, 'Whether metrics go to TensorBoard as well.')
  profile: str = hparam(
    '',
    'Rounds, as 3, 3-5 or 2,4, whose TensorBoard profile is put into'
    ' tensorboard/round_N (tensorboard-plugin-profile shows it). Changes no'
    ' result.',
  )

  runtime: str = hparam(
    'in_process',
    "What runs TFF's computations: this process's TensorFlow, or TFF's worker"
    ' process (CPU only).',
    choices=('in_process', 'tff_worker'),
  )
  call_timeout_secs: float = hparam(
    0.0,
    "How long TFF's worker may take for a call, of which a round has some quick"
    ' ones and one that computes it, in seconds (tff_worker). Then another'
    ' worker is started and repeats the round. 0: no limit.',
    minimum=0,
    maximum=10**7,
  )
  client_devices: str = hparam(
    'auto',
    'Where clients train (in_process): auto (all GPUs, else the CPU), cpu, gpu,'
    ' or devices joined by commas, as gpu:0,gpu:1.',
  )
  client_threads: int = hparam(
    0,
    'Clients that train at a time; 0 suits the devices. Results do not depend'
    ' on it.',
    minimum=0,
    maximum=1024,
  )
  simulate_secure_aggregation: bool = hparam(
    False,
    'Replace secure sums (--aggregator=secure) by plain ones, which protect'
    ' nothing: for simulation.',
  )
  strict_clients: bool = hparam(
    False,
    'Stop if the data of a client cannot be used (labels that are no class,'
    ' wrong images, a reader that fails). Otherwise the client is left out of'
    ' the round, named on the console, and counted in'
    ' client_work/train/num_rejected_clients.',
  )
  debug_non_finite: bool = hparam(
    False,
    'Repeat the clients of rounds in which updates were not finite, one by one,'
    ' and say which failed, at which local step, and what was not finite first;'
    ' also in metrics/non_finite.txt.',
  )
  progress: str = hparam(
    'auto',
    'A bar, a line each round, or neither; auto: a bar on a terminal.',
    choices=('auto', 'bar', 'lines', 'none'),
  )
  verbose: bool = hparam(
    False, "Whether TensorFlow's own messages and tracebacks are shown."
  )

  def __post_init__(self):
    hparams.validate(self)


# For `--help`: every field, in groups.
GROUPS = {
  'What is trained': (
    'algorithm',
    'model',
    'norm',
    'init_from',
    'seed',
    'cross_device',
  ),
  'Data': (
    'dataset',
    'data_dir',
    'augmentation',
    'num_labels',
    'full_labels',
    'num_clients',
    'split',
    'alpha',
    'min_client_examples',
    'num_validation',
  ),
  'Rounds': (
    'total_rounds',
    'clients_per_round',
    'rounds_per_evaluation',
    'max_bad_rounds',
  ),
  'Output': (
    'output_dir',
    'rounds_per_checkpoint',
    'keep_checkpoints',
    'tensorboard',
    'profile',
  ),
  'Execution': (
    'runtime',
    'call_timeout_secs',
    'client_devices',
    'client_threads',
    'simulate_secure_aggregation',
    'strict_clients',
    'debug_non_finite',
    'progress',
    'verbose',
  ),
}

# Flags that may differ when a run is continued; `total_rounds` upwards only.
MAY_DIFFER = frozenset(
  {
    'call_timeout_secs',
    'client_devices',
    'client_threads',
    'cross_device',
    'data_dir',
    'debug_non_finite',
    'keep_checkpoints',
    'max_bad_rounds',
    'output_dir',
    'profile',
    'progress',
    'rounds_per_checkpoint',
    'runtime',
    'strict_clients',
    'tensorboard',
    'total_rounds',
    'verbose',
  }
)


def may_differ() -> str:
  """The names of `MAY_DIFFER`, for people."""
  names = (n + ' (upwards)' * (n == 'total_rounds') for n in sorted(MAY_DIFFER))
  return ', '.join(names)
