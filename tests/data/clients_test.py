import collections

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.datasets import emnist
from tensorflow_federated.python.simulation.datasets import (
  from_tensor_slices_client_data as slices_client_data,
)

from tff_fssl.data import clients
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.data import sources
from tff_fssl.data.clients import ClientDataClients
from tff_fssl.data.clients import NaturalClients
from tff_fssl.data.data_hparams import DataHparams
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


def test_full_labels_come_in_parts(digits):
  settings = partition_settings.PartitionSettings(
    num_classes=10,
    num_clients=20,
    num_labels=0,
    scenario='labels_at_clients',
    full_labels=True,
  )
  parted = partition_draw.build_partition(digits.train.y, settings)
  held = parted.client_labeled[3]
  seen = []
  for round_num in (1, 2, 3):
    streaming = clients.Streaming(steps=3, rounds=1)
    (x, y), (rest, _) = clients.client_examples(
      digits, parted, 3, round_num, streaming
    )
    part = streaming.part(held, 3, round_num)
    np.testing.assert_array_equal(x, digits.train.x[part])
    np.testing.assert_array_equal(y, digits.train.y[part])
    assert not len(rest)
    seen.extend(part)
  assert sorted(seen) == held.tolist()


def test_steps_of_the_paper():
  # FedMatch: 10 steps of 10 rounds.
  parts = clients.Streaming(steps=10, rounds=10)
  assert [parts.step(r) for r in range(1, 101)] == [
    step for step in range(10) for _ in range(10)
  ]
  assert parts.step(101) == 9
  assert parts.last_begins == 91 and parts.step(91) == 9 > parts.step(90)
  assert clients.Streaming().last_begins == 1
  # FedSwitch: one round each, and again.
  again = clients.Streaming(steps=10, rounds=1, cycles=True)
  assert [again.step(r) for r in range(1, 24)] == [
    *range(10),
    *range(10),
    *range(3),
  ]


@given(
  size=st.integers(0, 40),
  steps=st.integers(1, 12),
  rounds=st.integers(1, 3),
  cycles=st.booleans(),
  seed=st.integers(-5, 5),
)
def test_parts_are_all_examples_once(size, steps, rounds, cycles, seed):
  parts = clients.Streaming(steps, rounds, cycles, seed)
  examples = np.arange(7, 7 + 3 * size, 3)
  taken = [parts.part(examples, 4, 1 + rounds * s) for s in range(steps)]
  np.testing.assert_array_equal(np.sort(np.concatenate(taken)), examples)
  sizes = [len(a) for a in taken]
  assert max(sizes) - min(sizes) <= 1
  for step, part in enumerate(taken):
    assert np.all(np.diff(part) > 0)
    # All rounds of a step have the same, whenever they are asked for.
    last = parts.part(examples, 4, rounds * (step + 1))
    np.testing.assert_array_equal(last, part)
  after = parts.part(examples, 4, rounds * steps + 1)
  np.testing.assert_array_equal(after, taken[0 if cycles else -1])


def test_parts_are_random():
  examples = np.arange(100)
  parts = clients.Streaming(steps=2, rounds=1)
  first = parts.part(examples, 0, 1)
  assert first.tolist() != list(range(50))
  assert first.tolist() != parts.part(examples, 1, 1).tolist()
  other = clients.Streaming(steps=2, rounds=1, seed=1)
  assert first.tolist() != other.part(examples, 0, 1).tolist()


def _data(owners, client_names=('ann', 'bob', 'cyd')):
  x = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1)
  train = sources.Examples(x, np.array([0, 1, -1, 1, 0, -1], np.int32))
  test = sources.Examples(x[:2], np.array([0, 1], np.int32))
  return sources.DataSet(
    'mine',
    train,
    test,
    2,
    ('a', 'b'),
    (1, 1, 1),
    owners=None if owners is None else np.array(owners, np.int32),
    client_names=client_names,
  )


def test_each_client_has_its_examples():
  people = NaturalClients(_data([1, 0, 1, -1, 1, 0]))
  assert list(people) == ['ann', 'bob', 'cyd'] and len(people) == 3
  (x, y), (hidden, unknown) = people['bob']
  assert (x.ravel().tolist(), y.tolist()) == ([0, 4], [0, 0])
  assert (hidden.ravel().tolist(), unknown.tolist()) == ([2], [-1])
  assert [len(part[0]) for part in people['cyd']] == [0, 0]
  assert 'dan' not in people and people.get('dan') is None
  element = clients.make_example(
    seed=np.zeros(2, np.int32), labeled=(x, y), unlabeled=(hidden, unknown)
  )
  assert element['unlabeled']['y'].tolist() == [-1]


def test_a_set_without_clients_is_refused():
  with pytest.raises(UsageError, match='does not record the clients'):
    NaturalClients(_data(None, ()))


@pytest.mark.parametrize('owners', [[0] * 5, [0, 0, 0, 0, 0, 3], [-2] * 6])
def test_owners_that_are_no_clients_are_refused(owners):
  with pytest.raises(UsageError, match='owners must be integers'):
    _data(owners)


def test_labels_may_be_unknown_for_training_only():
  data = _data(None, ())
  with pytest.raises(UsageError, match='test labels go from -1'):
    sources.DataSet('m', data.test, data.train, 2, ('a', 'b'), (1, 1, 1))


def test_client_data_of_tff():
  theirs = emnist.get_synthetic()
  people = ClientDataClients(theirs)
  assert list(people) == theirs.client_ids == ['synthetic1', 'synthetic2']
  assert people.image_shape == (28, 28, 1) and len(people) == 2
  (x, y), (hidden, unknown) = people['synthetic2']
  rows = list(theirs.create_tf_dataset_for_client('synthetic2'))
  pixels = np.stack([row['pixels'] for row in rows])
  np.testing.assert_array_equal(x[..., 0], np.rint(255 * pixels))
  assert (x.dtype, y.dtype) == (np.uint8, np.int32)
  # White is 255, as it is 1 there.
  assert y.tolist() == list(range(10)) and x[0, 0, 0, 0] == 255
  assert hidden.shape == (0, 28, 28, 1) and not len(unknown)
  with pytest.raises(KeyError):
    people['synthetic3']


def _client_data(**fields):
  return slices_client_data.TestClientData(
    {'ann': collections.OrderedDict(fields)}
  )


def test_client_data_with_settings():
  pixels = np.arange(64, dtype=np.int64).reshape(2, 4, 8, 1) * 3
  people = ClientDataClients(
    _client_data(picture=pixels, kind=[[1], [-1]]),
    DataHparams(
      image_field='picture', label_field='kind', image_size='4', color='rgb'
    ),
  )
  (x, y), (hidden, unknown) = people['ann']
  assert x.shape == hidden.shape == (1, 4, 4, 3)
  assert (y.tolist(), unknown.tolist()) == ([1], [-1])


@pytest.mark.parametrize(
  'data,words',
  [
    (_client_data(pixels=[[0.5], [np.nan]], label=[1, 1]), 'example 1: it is'),
    (_client_data(pixels=[[0.5]], label=[0.5]), 'neither a whole number'),
    (_client_data(pixels=[[0.5]], label=['cat']), "label is 'cat', not an"),
    (_client_data(pixels=[[0.5]]), 'name the right one by --label_field'),
    (slices_client_data.TestClientData({'ann': [1, 2]}), 'not mappings'),
    (
      _client_data(pixels=np.zeros([0, 2, 2]), label=np.zeros(0)),
      'has no examples',
    ),
  ],
)
def test_client_data_that_cannot_be_used(data, words):
  with pytest.raises(UsageError) as error:
    ClientDataClients(data)['ann']
  assert words in str(error.value) and len(str(error.value).splitlines()) == 1
