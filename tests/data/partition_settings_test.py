"""Settings of partitions, without data; partition_draw_test.py has more."""

import dataclasses

import pytest

from tff_fssl.data import names
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError


def _settings(num_classes=10, num_clients=20, num_labels=10, **kwargs):
  return partition_settings.PartitionSettings(
    num_classes, num_clients, num_labels, **kwargs
  )


@pytest.mark.parametrize(
  'text, num', [('all', 20), ('3', 3), ('0.1', 2), ('.01', 1), ('20', 20)]
)
def test_clients_with_labels(text, num):
  settings = _settings(
    scenario=names.LABELS_AT_CLIENTS, labeled_clients=text, num_labels=10
  )
  assert settings.num_labeled_clients == num
  assert _settings(labeled_clients=text).num_labeled_clients == 0


def test_alpha_of_a_class_or_of_all():
  each = _settings(partition='dirichlet', alpha=0.5)
  total = _settings(partition='dirichlet', alpha=0.5, alpha_meaning='total')
  assert (each.concentration, total.concentration) == (0.5, 0.05)
  assert (each.title, total.title) == ('Dirichlet(0.5)', 'Dirichlet(0.5/10)')


@pytest.mark.parametrize('partition', names.PARTITIONS)
def test_records_give_back_the_settings(partition):
  shares = ';'.join(20 * ['1,' * 9 + '0'])
  settings = _settings(
    partition=partition, seed=7, label_noise=0.1, class_shares=shares
  )
  record = settings.recorded()
  parse = partition_settings.PartitionSettings.parse_record
  assert parse(record) == settings
  # Older versions had fewer settings.
  del record['num_unlabeled'], record['client_test_fraction']
  assert parse(record) == settings
  assert settings.title


@pytest.mark.parametrize(
  'changed, words',
  [
    ({'num_clients': 2.0}, 'its num_clients is 2.0'),
    ({'equal_sizes': 1}, 'its equal_sizes is 1'),
    ({'alpha': '0.1'}, "its alpha is '0.1'"),
    ({'partition': 'idd'}, "did you mean 'iid'"),
  ],
)
def test_records_of_other_types_are_rejected(changed, words):
  record = _settings().recorded() | changed
  with pytest.raises(UsageError, match=words):
    partition_settings.PartitionSettings.parse_record(record)
  del record['num_labels']
  with pytest.raises(UsageError, match='its num_labels is missing|is '):
    partition_settings.PartitionSettings.parse_record(record)


def test_settings_that_no_data_could_satisfy():
  with pytest.raises(UsageError, match='--label_noise=1.5: must be a share'):
    _settings(label_noise=1.5)


def test_settings_do_not_change():
  with pytest.raises(dataclasses.FrozenInstanceError):
    _settings().seed = 3
