import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl.data import clients
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.data import sources
from tff_fssl.hparams import UsageError


@pytest.fixture(scope='module')
def partition(digits):
  return partition_draw.build_partition(
    digits.train.y,
    partition_settings.PartitionSettings(
      num_classes=10,
      num_clients=5,
      num_labels=10,
      scenario='labels_at_clients',
    ),
  )


def _element(digits, partition, client_id):
  labeled, unlabeled = clients.client_examples(digits, partition, client_id)
  return clients.make_example(
    seed=clients.client_seed(0, 1, client_id),
    labeled=labeled,
    unlabeled=unlabeled,
  )


def test_element_of_a_partition_fits_the_spec(digits, partition):
  element = _element(digits, partition, 2)
  for kind in ('labeled', 'unlabeled'):
    indices = getattr(partition, f'client_{kind}')[2]
    np.testing.assert_array_equal(element[kind]['x'], digits.train.x[indices])
    np.testing.assert_array_equal(element[kind]['y'], digits.train.y[indices])
  spec = clients.element_spec(digits.example_shape)
  tf.nest.map_structure(
    lambda s, v: s.shape.assert_is_compatible_with(v.shape) or None,
    spec,
    element,
  )
  assert tf.nest.map_structure(lambda s: s.dtype, spec) == (
    tf.nest.map_structure(lambda v: tf.as_dtype(v.dtype), element)
  )
  assert list(spec) == list(element) == ['seed', 'labeled', 'unlabeled']


def test_type_is_one_for_all_clients(digits, partition):
  spec = clients.element_spec(digits.example_shape)
  wanted = tff.SequenceType(tff.types.tensorflow_to_type(spec))
  dataset = tf.data.Dataset.from_tensors(_element(digits, partition, 0))
  given = tff.SequenceType(tff.types.tensorflow_to_type(dataset.element_spec))
  wanted.check_assignable_from(given)


def test_unknown_client_is_refused(digits, partition):
  for client_id in (-1, 5):
    with pytest.raises(UsageError, match='clients are 0 to 4'):
      clients.client_examples(digits, partition, client_id)


def test_client_seed():
  seed = clients.client_seed(7, -3, 10**12)
  assert seed.dtype == np.int32 and seed.shape == (2,)
  np.testing.assert_array_equal(seed, clients.client_seed(7, -3, 10**12))
  seen = {
    tuple(clients.client_seed(s, r, c))
    for s in (-1, 0, 1)
    for r in range(-20, 20)
    for c in range(20)
  }
  assert len(seen) == 3 * 40 * 20


def test_example_from_plain_arrays():
  x = np.zeros((3, 4, 4, 1), np.uint8)
  seed = clients.client_seed(0, 0, 0)
  example = clients.make_example(seed=seed, labeled=None, unlabeled=(x, None))
  assert example['unlabeled']['y'].tolist() == [-1, -1, -1]
  assert example['labeled']['x'].shape == (0, 4, 4, 1)
  example = clients.make_example(
    seed=seed, labeled=(x, [1, 2, 3]), unlabeled=None
  )
  assert example['labeled']['y'].dtype == np.int32
  assert example['unlabeled']['x'].shape == (0, 4, 4, 1)


def test_plain_arrays_that_do_not_fit_are_refused():
  x = np.zeros((3, 4, 4, 1), np.uint8)
  seed = clients.client_seed(0, 0, 0)
  with pytest.raises(UsageError, match='neither'):
    clients.make_example(seed=seed, labeled=None, unlabeled=None)
  with pytest.raises(UsageError, match='must have one shape'):
    clients.make_example(
      seed=seed, labeled=(x, [0, 0, 0]), unlabeled=(x[:, 1:], None)
    )
  with pytest.raises(UsageError, match=r'images \(uint8'):
    clients.make_example(
      seed=seed, labeled=None, unlabeled=(x.astype(np.float32), None)
    )
  with pytest.raises(UsageError, match='seed must be int32'):
    clients.make_example(seed=[1, 2], labeled=None, unlabeled=(x, None))


def _server_examples(count):
  rng = np.random.default_rng(0)
  x = rng.integers(0, 256, (count, 4, 4, 1), np.uint8)
  return x, rng.integers(0, 10, count).astype(np.int32)


@pytest.mark.parametrize('from_file', [False, True])
def test_server_data(monkeypatch, tmp_path, from_file):
  x, y = _server_examples(20)
  if from_file:
    monkeypatch.setattr(clients, 'MAX_CONSTANT_BYTES', 100)
  data_fn = clients.build_server_data_fn(x, y, tmp_path)
  assert len(list(tmp_path.iterdir())) == int(from_file)

  (eager,) = data_fn().as_numpy_iterator()
  assert isinstance(eager, collections.OrderedDict)
  np.testing.assert_array_equal(eager['x'], x)
  np.testing.assert_array_equal(eager['y'], y)

  with tf.Graph().as_default() as graph:
    element = data_fn().reduce(
      collections.OrderedDict(
        x=tf.zeros([20, 4, 4, 1], tf.uint8), y=tf.zeros([20], tf.int32)
      ),
      lambda _, e: e,
    )
    assert element['x'].shape == (20, 4, 4, 1)
    with tf.compat.v1.Session(graph=graph) as session:
      np.testing.assert_array_equal(session.run(element['x']), x)

  @tff.tensorflow.computation
  def in_tff():
    return data_fn().reduce(
      tf.constant(0), lambda _, e: tf.reduce_sum(tf.cast(e['x'], tf.int32))
    )

  # It can be built there; contexts that run it have tests of their own.
  assert str(in_tff.type_signature) == '( -> int32)'


def test_server_file_is_written_once_and_mended(monkeypatch, tmp_path):
  monkeypatch.setattr(clients, 'MAX_CONSTANT_BYTES', 100)
  x, y = _server_examples(20)
  clients.build_server_data_fn(x, y, tmp_path)
  (path,) = tmp_path.iterdir()
  before = path.stat().st_mtime_ns
  clients.build_server_data_fn(x, y, tmp_path)
  assert path.stat().st_mtime_ns == before
  path.write_bytes(path.read_bytes()[:10])
  clients.build_server_data_fn(x, y, tmp_path)
  assert path.read_bytes() == x.tobytes()
  clients.build_server_data_fn(255 - x, y, tmp_path)
  assert len(list(tmp_path.iterdir())) == 2


def test_large_server_data_need_a_folder(monkeypatch):
  monkeypatch.setattr(clients, 'MAX_CONSTANT_BYTES', 100)
  with pytest.raises(UsageError, match='give the folder'):
    clients.build_server_data_fn(*_server_examples(20))


def test_labels_are_taken_in_every_width_and_never_wrap():
  x = np.zeros((3, 4, 4, 1), np.uint8)
  seed = clients.client_seed(0, 0, 0)

  def make(labels, num_classes=None):
    example = clients.make_example(
      seed=seed, labeled=(x, labels), unlabeled=None, num_classes=num_classes
    )
    return example['labeled']['y']

  for dtype in (np.int8, np.uint8, np.int32, np.int64, np.uint64):
    labels = make(np.array([0, 1, 2], dtype), 3)
    assert labels.dtype == np.int32 and labels.tolist() == [0, 1, 2]
  (element,) = clients.build_server_data_fn(x, np.arange(3))()
  assert element['y'].dtype == tf.int32
  for wrong in ([2**32] * 3, [-(2**31) - 1] * 3, [2**63] * 3):
    with pytest.raises(UsageError, match='range of int32'):
      make(wrong)
  for wrong in ([0.0, 1.0, 2.0], [True, False, True], ['a', 'b', 'c']):
    with pytest.raises(UsageError, match='must be integers'):
      make(wrong)
  with pytest.raises(UsageError, match='from 0 to 3; allowed are 0 to 2'):
    make([0, 1, 3], 3)


def test_unusable_example_fits_the_spec():
  spec = clients.element_spec((4, 4, 1))
  example = clients.unusable_example(spec)
  tf.nest.map_structure(
    lambda s, v: s.shape.assert_is_compatible_with(v.shape), spec, example
  )
  assert example['unlabeled']['y'].tolist() == [-2]


def test_a_file_of_other_content_is_not_believed(monkeypatch, tmp_path):
  monkeypatch.setattr(clients, 'MAX_CONSTANT_BYTES', 100)
  x, y = _server_examples(20)
  clients.build_server_data_fn(x, y, tmp_path)
  (path,) = tmp_path.iterdir()
  path.write_bytes(bytes(path.stat().st_size))
  data_fn = clients.build_server_data_fn(x, y, tmp_path)
  np.testing.assert_array_equal(next(iter(data_fn()))['x'], x)


def test_labelled_examples_that_are_also_unlabelled():
  data = sources.load('digits')
  settings = partition_settings.PartitionSettings(
    10,
    20,
    20,
    scenario='labels_at_clients',
    labeled_also_unlabeled=True,
    label_noise=0.5,
  )
  partition = partition_draw.build_partition(data.train.y, settings)
  (x, y), (also, hidden) = clients.client_examples(data, partition, 3)
  np.testing.assert_array_equal(also[-20:], x)
  # Their hidden labels are the true ones, for metrics.
  assert (hidden[-20:] != y).any()
  assert len(also) == len(partition.client_unlabeled[3]) + 20
