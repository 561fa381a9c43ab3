"""Arguments of `build_process` that do not fit together."""

import functools
import warnings

import pytest
import tensorflow_federated as tff
import tiny_task

from tff_fssl.algorithms import fedrgd
from tff_fssl.algorithms import fixmatch
from tff_fssl.algorithms import protofssl
from tff_fssl.data import clients
from tff_fssl.hparams import UsageError
from tff_fssl.interface.round_hparams import RoundHparams
from tff_fssl.rounds import process as process_lib

_AT_SERVER = RoundHparams().scenario
_AT_CLIENTS = RoundHparams(scenario='labels_at_clients')
_SPEC = clients.element_spec(tiny_task.IMAGE_SHAPE)
_MEAN = tff.aggregators.MeanFactory()


def _refused(algorithm, words, server_data_fn=None, aggregator=None):
  data = process_lib.DataSpec(_SPEC, tiny_task.VIEWS, server_data_fn)
  with pytest.raises(UsageError, match=words):
    process_lib.build_process(
      functools.partial(tiny_task.model_fn, 'none'),
      algorithm,
      data,
      seed=0,
      aggregator=aggregator,
    )


def test_labels_are_where_the_algorithm_says():
  labels = clients.build_server_data_fn(*tiny_task.examples(9, 7))
  _refused(fixmatch.FixMatch(), r'server_data_fn=None: the server needs')
  _refused(
    fixmatch.FixMatch(round=_AT_CLIENTS),
    r'server_data_fn=\(given\): the server needs',
    labels,
  )
  algorithm = protofssl.ProtoFssl(round=RoundHparams())
  _refused(algorithm, 'protofssl is not defined for it', labels)


def test_aggregators_that_do_not_fit():
  algorithm = fixmatch.FixMatch(round=_AT_CLIENTS)
  unweighted = tff.aggregators.SumFactory()
  _refused(algorithm, 'SumFactory: must be weighted', aggregator=unweighted)
  groups = fedrgd.FedRgd(num_groups=2, round=_AT_CLIENTS)
  _refused(groups, 'forms 2 groups of clients', aggregator=_MEAN)


def test_clients_given_while_the_server_trains_alone_are_told_of():
  process = tiny_task.build('supervised', norm='none')
  assert list(process.rounds(2)) == [0, 1, 2]
  cohort = [[element] for element in tiny_task.cohort(_AT_SERVER)]
  with pytest.warns(UserWarning, match='round 0: .* ignores 3 clients'):
    state, _ = process.next(process.initialize(), cohort)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    process.next(process.initialize(), [])
    process.next(state, cohort)


def test_a_class_is_no_algorithm():
  data = process_lib.DataSpec(clients.element_spec((4, 4, 1)), tiny_task.VIEWS)
  with pytest.raises(UsageError, match=r'algorithm=FixMatch: .* FixMatch\(\)'):
    process_lib.build_process(
      tiny_task.model_fn, fixmatch.FixMatch, data, seed=0
    )
