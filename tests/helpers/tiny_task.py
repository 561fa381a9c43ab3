"""A tiny federated task, and processes compiled once a session."""

import collections
import functools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.aggregators import factory
from tff_fssl.algorithms import registry
from tff_fssl.data import augment
from tff_fssl.data import clients
from tff_fssl.interface import round_hparams
from tff_fssl.models import networks
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import process as process_lib
from tff_fssl.rounds import sampling

IMAGE_SHAPE = (6, 6, 1)
NUM_CLASSES = 3
NUM_CLIENTS = 10
_LAYERS = tf.keras.layers


def model_fn(norm: str = 'bn') -> tf.keras.Model:
  """Convolution, norm, ReLU, pooling, logits."""
  middle = [_LAYERS.BatchNormalization(momentum=0.9)] if norm == 'bn' else []
  return tf.keras.Sequential(
    [
      tf.keras.Input(IMAGE_SHAPE),
      _LAYERS.Conv2D(4, 3, use_bias=False),
      *middle,
      _LAYERS.ReLU(),
      _LAYERS.GlobalAveragePooling2D(),
      _LAYERS.Dense(NUM_CLASSES),
    ]
  )


def big_model_fn() -> tf.keras.Model:
  """A network so large that TensorFlow would use temporary variables."""
  image = tf.keras.Input(IMAGE_SHAPE)
  x = _LAYERS.Resizing(8, 8)(image)
  logits = networks.build_resnet9(x, NUM_CLASSES, norm='none')
  return tf.keras.Model(image, logits)


def network_fn(name: str, norm: str = 'bn'):
  """The function that builds the network of an algorithm."""
  entry = registry.REGISTRY[name]
  scenario = entry.scenarios[0]
  algorithm = entry.configure(
    None, round_hparams.RoundHparams(scenario=scenario)
  )
  return network_factory.network_fn(
    functools.partial(model_fn, norm), algorithm
  )


# An image of this level only stands for one that makes a client fail.
SPOILT = 254


def _plain(images):
  spoilt = tf.reduce_all(tf.equal(images, SPOILT), [1, 2, 3], keepdims=True)
  return tf.where(spoilt, np.nan, tf.cast(images, tf.float32) / 255.0)


def _noisy(scale):
  def view(images, seed):
    noise = scale * tf.random.stateless_normal(tf.shape(images), seed)
    return _plain(images) + noise

  return view


VIEWS = augment.Views(plain=_plain, weak=_noisy(0.01), strong=_noisy(0.1))
# Without randomness, for comparisons with others' FedAvg.
PLAIN_VIEWS = augment.Views(
  plain=VIEWS.plain,
  weak=lambda x, seed: VIEWS.plain(x),
  strong=lambda x, seed: VIEWS.plain(x),
)


def examples(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Images whose brightness is their class, roughly."""
  rng = np.random.default_rng(seed)
  y = rng.integers(0, NUM_CLASSES, num).astype(np.int32)
  x = rng.integers(0, 60, [num, *IMAGE_SHAPE]) + 80 * y[:, None, None, None]
  return x.astype(np.uint8), y


def client(
  index: int, round_num: int = 1, unlabeled: int = 12, labeled: int = 0
) -> collections.OrderedDict:
  """A client's one element, in NumPy."""
  x, y = examples(labeled + unlabeled, 100 + index)
  part = lambda s: collections.OrderedDict(x=x[s], y=y[s])
  return collections.OrderedDict(
    seed=np.array([index, round_num], np.int32),
    labeled=part(slice(0, labeled)),
    unlabeled=part(slice(labeled, None)),
  )


def dataset(element: collections.OrderedDict, process=None) -> tf.data.Dataset:
  """That element as the data set a client hands over to a process."""
  index, _ = element['seed']
  if getattr(process, 'num_clients', 0):
    element = collections.OrderedDict(element, client_id=np.int32(index))
  if getattr(process, 'needs_slots', False):
    element = collections.OrderedDict(element, slot=np.int32(index))
  return tf.data.Dataset.from_tensors(element)


@functools.cache
def _server_data_fn():
  x, y = examples(9, 7)
  return clients.build_server_data_fn(x, y)


# Each holds graphs of up to 100 MB.
@functools.lru_cache(maxsize=6)
def build(
  name: str,
  scenario: str = round_hparams.LABELS_AT_SERVER,
  *,
  norm: str = 'bn',
  plain: bool = False,
  model=None,
  hparams: tuple = (),
  aggregator=None,
  model_aggregator=None,
  stragglers: bool = False,
  **settings,
) -> tff.learning.templates.LearningProcess:
  """A process, built once for each set of arguments."""
  entry = registry.REGISTRY[name]
  settings = {
    'client_epochs': 1,
    'client_batch_size': 5,
    'server_epochs': 1,
    'num_pretraining_rounds': 1,
    **settings,
  }
  at_server = scenario == round_hparams.LABELS_AT_SERVER
  return process_lib.build_process(
    model or functools.partial(model_fn, norm),
    entry.configure(
      entry.hparams(**{**entry.tiny_hparams, **dict(hparams)}),
      round_hparams.RoundHparams(scenario=scenario, **settings),
    ),
    process_lib.DataSpec(
      clients.element_spec(IMAGE_SHAPE, stragglers=stragglers),
      PLAIN_VIEWS if plain else VIEWS,
      _server_data_fn() if at_server else None,
      NUM_CLASSES,
      NUM_CLIENTS,
    ),
    seed=5,
    aggregator=factory.build_aggregator(
      aggregator, clients_per_round=3, population=8
    )
    if aggregator
    else model_aggregator,
  )


def scenarios() -> list[tuple[str, str]]:
  """Every (algorithm, scenario) that the registry offers."""
  return [
    (name, scenario)
    for name, algorithm in registry.REGISTRY.items()
    for scenario in algorithm.scenarios
  ]


def cohort(scenario: str, size: int = 3, round_num: int = 1) -> list:
  """Elements of a cohort, with labels if clients have them."""
  labeled = 4 if scenario == round_hparams.LABELS_AT_CLIENTS else 0
  return [client(i, round_num, labeled=labeled) for i in range(size)]


def flat(state) -> list[np.ndarray]:
  """All weights of a state, and the table of an exchange if there is one."""
  table = state.distributor['table'] if len(state.distributor) else ()
  values = (state.global_model_weights, table)
  return [np.array(t) for t in tf.nest.flatten(values)]


def metric_columns(process) -> list[str]:
  """The columns of a process's metrics."""

  def walk(tff_type, path):
    if not isinstance(tff_type, tff.StructType):
      return ['/'.join(path)]
    return [
      column
      for name, inner in tff.structure.iter_elements(tff_type)
      for column in walk(inner, [*path, name])
    ]

  return walk(process.next.type_signature.result[1].member, [])


def data_source(process, scenario: str, **options) -> sampling.CohortDataSource:
  """8 clients of the tiny task, 2 a round, for a process that `build` built."""

  def load_client(_, client_id):
    element = cohort(scenario, 8)[client_id]
    return tuple(
      (element[kind]['x'], element[kind]['y'])
      for kind in ('labeled', 'unlabeled')
    )

  return sampling.build_data_source(
    process,
    load_client,
    **{
      'seed': 3,
      'num_clients': 8,
      'clients_per_round': 2,
      'first_round': int(scenario != round_hparams.LABELS_AT_SERVER),
      **options,
    },
  )
