import numpy as np
import pytest

from tff_fssl.data import clients
from tff_fssl.data import sources
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
  with pytest.raises(UsageError, match='does not say whose'):
    NaturalClients(_data(None, ()))


@pytest.mark.parametrize('owners', [[0] * 5, [0, 0, 0, 0, 0, 3], [-2] * 6])
def test_owners_that_are_no_clients_are_refused(owners):
  with pytest.raises(UsageError, match='owners must be integers'):
    _data(owners)


def test_labels_may_be_unknown_for_training_only():
  data = _data(None, ())
  with pytest.raises(UsageError, match='test labels go from -1'):
    sources.DataSet('m', data.test, data.train, 2, ('a', 'b'), (1, 1, 1))
