"""The file of a partition, and its checks against data."""

import dataclasses
import json

import numpy as np
import pytest

from tff_fssl.data import names
from tff_fssl.data import partition as partition_lib
from tff_fssl.data import partition_draw
from tff_fssl.data import partition_settings
from tff_fssl.hparams import UsageError


def _labels(counts, seed=0):
  labels = np.repeat(np.arange(len(counts)), counts)
  return np.random.default_rng(seed).permutation(labels).astype(np.int32)


def _build(labels, **kwargs):
  defaults = {'num_clients': 10, 'num_labels': 10}
  return partition_draw.build_partition(
    labels, partition_settings.PartitionSettings(10, **(defaults | kwargs))
  )


def test_settings_of_newer_versions_are_in_files_that_need_them():
  labels = _labels([100] * 10)
  plain = json.loads(_build(labels).dump_json())['settings']
  assert not {'num_unlabeled', 'client_label_classes'} & plain.keys()
  p = _build(
    labels,
    scenario=names.LABELS_AT_CLIENTS,
    num_unlabeled=50,
    client_label_classes=2,
    num_labels=4,
  )
  fields = json.loads(p.dump_json())
  assert fields['settings']['num_unlabeled'] == 50
  assert fields['settings']['client_label_classes'] == 2
  back = partition_lib.Partition.parse_json(json.dumps(fields))
  assert back.settings == p.settings and back.has_same_examples(p)


def test_json_file_and_its_version(tmp_path):
  p = _build(_labels([50] * 10))
  p.save_json(tmp_path / 'deep' / 'partition.json')
  assert [f.name for f in (tmp_path / 'deep').iterdir()] == ['partition.json']
  text = (tmp_path / 'deep' / 'partition.json').read_text()
  assert text == p.dump_json()
  fields = json.loads(text)
  assert fields['settings']['seed'] == 0
  assert fields['settings']['num_examples'] == 500
  with pytest.raises(UsageError, match='version is 99'):
    partition_lib.Partition.parse_json(json.dumps(fields | {'version': 99}))
  # Settings that are newer than the file.
  del fields['wrong_examples'], fields['wrong_labels'], fields['client_names']
  del fields['settings']['shards_per_client']
  older = partition_lib.Partition.parse_json(json.dumps(fields))
  assert older.settings == p.settings and older.has_same_examples(p)
  assert not _build(_labels([50] * 10), seed=1).has_same_examples(p)
  noisy = _build(_labels([50] * 10), label_noise=0.2)
  assert not noisy.has_same_examples(p)
  other = dataclasses.replace(noisy, wrong_labels=(noisy.wrong_labels + 1) % 10)
  assert not noisy.has_same_examples(other)
  fields = json.loads(text)
  for bad in (
    *('{"a": 1}', text[:-9], '[]', '[' * 100_000, ''),
    *(
      json.dumps(fields | changed)
      for changed in (
        {'server_labeled': [0.5]},
        {'server_labeled': [[1, 2]]},
        {'server_labeled': 'x'},
        {'server_labeled': []},
        {'validation': [10**30]},
        {'validation': [1]},
        {'validation': [500, *fields['validation'][1:]]},
        {'server_labeled': [-1, *fields['server_labeled'][1:]]},
        {'client_labeled': [[10**7], *fields['client_labeled'][1:]]},
        {'client_unlabeled': [[-(10**7)], *fields['client_unlabeled'][1:]]},
        {'client_unlabeled': [[[]], *fields['client_unlabeled'][1:]]},
        {'class_counts': [[-1] * 10, *fields['class_counts'][1:]]},
        {'wrong_examples': [-1], 'wrong_labels': [0]},
        {'settings': fields['settings'] | {'num_examples': 499}},
        {'client_labeled': []},
        {'client_unlabeled': fields['client_unlabeled'][1:]},
        {'class_counts': [[1]]},
        {'class_counts': None},
        {'client_names': ['a']},
        {'wrong_examples': [3]},
        {'wrong_examples': [3], 'wrong_labels': [10]},
        {'settings': fields['settings'] | {'num_clients': 10.0}},
        {'settings': fields['settings'] | {'num_clients': True}},
        {'settings': fields['settings'] | {'partition': 'x'}},
        {'settings': {'num_examples': 500}},
        {'settings': None},
      )
    ),
  ):
    with pytest.raises(UsageError, match='not a partition'):
      partition_lib.Partition.parse_json(bad)


def test_partitions_of_other_data_are_refused():
  labels = _labels([50] * 10)
  p = _build(labels)
  p.check(labels)
  for other in (labels[:400], _labels([50] * 10, seed=1)):
    with pytest.raises(UsageError, match='made for other data'):
      p.check(other)
  unknown = labels.copy()
  unknown[p.server_labeled[0]] = -1
  with pytest.raises(UsageError, match='labels examples whose class is not'):
    p.check(unknown)


def test_files_have_held_out_examples_only_if_there_are_any():
  labels = _labels([50] * 10)
  plain = json.loads(_build(labels).dump_json())
  assert plain['version'] == 2
  assert 'client_test' not in plain
  assert 'client_test_fraction' not in plain['settings']
  p = _build(labels, client_test_fraction=0.2)
  fields = json.loads(p.dump_json())
  assert fields['version'] == 3
  assert partition_lib.Partition.parse_json(p.dump_json()).has_same_examples(p)
  del fields['client_test']
  with pytest.raises(UsageError, match='client_test does not fit'):
    partition_lib.Partition.parse_json(json.dumps(fields))
  double = dataclasses.replace(p, client_test=p.client_unlabeled)
  with pytest.raises(UsageError, match='more than once'):
    double.check(labels)
  y = labels.copy()
  y[p.client_test[0][0]] = -1
  with pytest.raises(UsageError, match='class is not known'):
    p.check(y)


def test_given_labels_are_true_but_for_the_wrong_ones():
  labels = _labels([50] * 10)
  p = _build(labels, num_labels=100, label_noise=0.3)
  given = p.given_labels(labels, p.labeled)
  is_wrong = np.isin(p.labeled, p.wrong_examples)
  assert is_wrong.sum() == 30
  np.testing.assert_array_equal(given != labels[p.labeled], is_wrong)
  np.testing.assert_array_equal(given[is_wrong], p.wrong_labels)
  plain = _build(labels)
  np.testing.assert_array_equal(
    plain.given_labels(labels, plain.labeled), labels[plain.labeled]
  )


def _iid(num_clients):
  return partition_draw.build_partition(
    np.repeat(np.arange(10, dtype=np.int32), 200),
    partition_settings.PartitionSettings(10, num_clients, num_labels=10),
  )


@pytest.mark.parametrize('num_clients', [3, 120, 1_500])
def test_figure(tmp_path, num_clients):
  figure = partition_lib.make_figure([_iid(num_clients)])
  figure.savefig(tmp_path / 'partition.png')
  assert (tmp_path / 'partition.png').read_bytes()[:4] == b'\x89PNG'


def test_many_clients_are_drawn_by_means():
  counts = np.array([[1, 0], [3, 2], [5, 4], [7, 6], [9, 8]])
  np.testing.assert_array_equal(
    partition_lib._means(counts, 2), [[2, 1], [6, 5], [9, 8]]
  )
  np.testing.assert_array_equal(partition_lib._means(counts[:, 0], 3), [3, 8])


def test_the_title_counts_all_examples():
  title = partition_lib.make_figure([_iid(3)]).subfigs[0].get_suptitle()
  assert title == (
    'IID, 3 clients, each with 0 labelled and 663 unlabelled examples\n'
    '10 labelled at the server, 0 for validation, seed 0'
  )


def test_the_picture_names_clients_and_what_is_unknown():
  labels = np.array([0, 1, 1, -1, -1, 0, 1, 0, 1, -1])
  p = partition_draw.build_partition(
    labels,
    partition_settings.PartitionSettings(2, 0, 2, partition='natural'),
    np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, -1]),
    ('north', '$outh'),
  )
  figure = partition_lib.make_figure([p], ('ill', 'well')).subfigs[0]
  heat = figure.axes[0]
  text_of = lambda labels: [label.get_text() for label in labels]
  assert text_of(heat.get_yticklabels()) == ['north', '$outh']
  assert text_of(heat.get_xticklabels()) == [
    'ill',
    'well',
    'not known\n(0 to 2)',
  ]
  known, unknown = heat.images
  assert known.get_array().shape == (2, 2)
  assert unknown.get_array().tolist() == [[2], [0]]
  # Gray: all channels are equal.
  red, green, blue, _ = unknown.to_rgba(unknown.get_array()).T
  assert np.array_equal(red, green) and np.array_equal(green, blue)
  assert p.client_name(1) == '1 ($outh)'
