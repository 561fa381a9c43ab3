import collections

import numpy as np
import pytest
from tensorflow_federated.python.simulation.datasets import emnist
from tensorflow_federated.python.simulation.datasets import (
  from_tensor_slices_client_data as slices_client_data,
)

from tff_fssl.data import clients
from tff_fssl.data import sources
from tff_fssl.data.data_hparams import DataHparams
from tff_fssl.data.natural_clients import ClientDataClients
from tff_fssl.data.natural_clients import NaturalClients
from tff_fssl.hparams import UsageError


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
