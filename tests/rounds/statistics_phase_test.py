"""Statistics that are gathered while clients train."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tiny_plan
import tiny_rounds
import tiny_task

from tff_fssl import hparams
from tff_fssl.algorithms import supervised
from tff_fssl.interface import round_hparams
from tff_fssl.program import config
from tff_fssl.rounds import process as process_lib
from tff_fssl.rounds import statistics_phase

_SERVER, _CLIENTS = tiny_rounds.SERVER, tiny_rounds.CLIENTS


def _moments(kernel, cohort, scenario):
  """Mean and variance of the first layer, over all images of a round."""
  images = [e[k]['x'] for e in cohort for k in ('labeled', 'unlabeled')]
  if scenario == _SERVER:
    images.append(tiny_task.examples(9, 7)[0])
  x = tiny_task.VIEWS.plain(np.concatenate(images))
  outputs = tf.nn.conv2d(x, kernel, 1, 'VALID')
  return tf.nn.moments(outputs, [0, 1, 2])


# One set; a set that is always sent; one that is sent now and then; two whose
# sum predicts.
@pytest.mark.parametrize(
  'name, scenario, sets',
  [
    pytest.param('fixmatch', _CLIENTS, (), marks=pytest.mark.slow),
    pytest.param(
      'ts_server_ema', _SERVER, ('teacher',), marks=pytest.mark.slow
    ),
    ('fedswitch', _SERVER, ('teacher',)),
    pytest.param('fedmatch', _CLIENTS, (), marks=pytest.mark.slow),
  ],
)
def test_they_are_those_of_the_weights_that_were_sent(name, scenario, sets):
  process = tiny_task.build(name, scenario, statistics_phase='training')
  assert process.num_phases == 1
  state = process.initialize()
  if int(state.client_work) < 1:
    state = process.next(state, []).state
  for round_num in (1, 2):
    cohort = tiny_task.cohort(scenario, round_num=round_num)
    clients = [tiny_task.dataset(e, process) for e in cohort]
    before, output = state, process.next(state, clients)
    state = output.state
    old, new = before.global_model_weights, state.global_model_weights
    weights = process.get_model_weights(before)
    mean, variance = _moments(weights.trainable[0], cohort, scenario)
    np.testing.assert_allclose(new.non_trainable[0], mean, atol=1e-5)
    np.testing.assert_allclose(new.non_trainable[1], variance, rtol=1e-4)
    assert new.statistics_count > 3
    for set_name in sets:
      was, now = (model.sets[set_name] for model in (old, new))
      mean, _ = _moments(was.trainable[0], cohort, scenario)
      sent = output.metrics['communication'][f'bytes_down_{set_name}'] > 0
      if sent:
        np.testing.assert_allclose(now.non_trainable[0], mean, atol=1e-5)
      assert np.any(now.trainable[0] != was.trainable[0])
    communication = output.metrics['communication']
    assert communication['bytes_down_statistics'] == 0
    assert communication['bytes_up_statistics'] > 0
    assert output.metrics['last_phase']['num_rejected_clients'] == 0


def test_clients_learn_the_same_of_the_same_message():
  process = tiny_task.build('fixmatch', _CLIENTS, statistics_phase='training')
  usual = tiny_task.build('fixmatch', _CLIENTS)
  assert usual.num_phases == 2
  first, second = tiny_rounds.run(process, _CLIENTS)
  clients = [
    tiny_task.dataset(e, usual) for e in tiny_task.cohort(_CLIENTS, round_num=2)
  ]
  expected = usual.next(first.state, clients)
  tiny_rounds.assert_same(
    tiny_rounds.model(second).trainable, tiny_rounds.model(expected).trainable
  )
  assert expected.metrics['communication']['bytes_down_statistics'] > 0


def test_a_lie_is_rejected():
  process = tiny_task.build(
    'fixmatch', _CLIENTS, statistics_phase='training', max_client_examples=17
  )
  cohort = tiny_task.cohort(_CLIENTS, 2)
  liar = tiny_task.client(2, unlabeled=40, labeled=4)
  honest, both = (
    process.next(
      process.initialize(), [tiny_task.dataset(e, process) for e in elements]
    )
    for elements in (cohort, [*cohort, liar])
  )
  assert both.metrics['last_phase']['num_rejected_clients'] == 1
  tiny_rounds.assert_same(
    tiny_rounds.model(honest).non_trainable,
    tiny_rounds.model(both).non_trainable,
  )


def test_one_phase_can_be_deployed():
  process = tiny_task.build('fixmatch', _CLIENTS, statistics_phase='training')
  assert process_lib.get_map_reduce_form(process) is not None
  with pytest.raises(hparams.UsageError, match='one client phase') as error:
    process_lib.get_map_reduce_form(tiny_task.build('fixmatch', _CLIENTS))
  for remedy in ('--statistics_phase=training', '--norm=sbn', '--norm=gn'):
    assert remedy in str(error.value)
  flags = ['--algorithm=fixmatch', '--cross_device', '--norm=sbn']
  with pytest.raises(hparams.UsageError, match='--statistics_phase=training'):
    config.parse_config(flags)
  config.parse_config([*flags, '--statistics_phase=training'])


def test_groups_have_no_common_model_to_measure():
  with pytest.raises(hparams.UsageError, match='models of their groups'):
    tiny_task.build('fedrgd', _SERVER, statistics_phase='training')


def test_it_has_no_effect_without_static_batch_norm():
  flags = ['--algorithm=fixmatch', '--norm=gn', '--statistics_phase=training']
  with pytest.raises(hparams.UsageError, match='has no effect'):
    config.parse_config(flags)


def test_a_client_that_lies_in_a_later_phase_only_is_counted():
  phases = [collections.OrderedDict(num_rejected_clients=n) for n in (0, 2, 1)]
  assert statistics_phase._largest(phases) == {'num_rejected_clients': 2}


def test_a_model_without_batch_norm_keeps_its_own_statistics():
  algorithm = supervised.Supervised(round=round_hparams.RoundHparams())
  plan, model = tiny_plan.build(algorithm, 'none'), object()
  assert statistics_phase.make_own(plan)(model, None) is model
  assert not statistics_phase.when_gathered(plan)
