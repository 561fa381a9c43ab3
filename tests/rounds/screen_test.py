import dataclasses

import handmade
import numpy as np
import pytest
import tensorflow_federated as tff
import tiny_task

from tff_fssl import lazy
from tff_fssl.aggregators import guarded
from tff_fssl.algorithms import fl2
from tff_fssl.algorithms import protofssl
from tff_fssl.interface import base
from tff_fssl.interface import round_hparams
from tff_fssl.rounds import screen

_UNLABELED = {base.UNLABELED: handmade.stream()}
_LABELED = {base.LABELED: handmade.stream(labeled=True)}


# Two epochs over at most 20 examples, in batches of 8 (unlabelled) and 5
# (labelled); the client that has no unlabelled stream takes 8 labelled ones.
@pytest.mark.parametrize(
  'streams, most',
  [
    (_UNLABELED, 2 * 3 * 8),
    (_LABELED, 2 * 3 * 8),
    ({**_UNLABELED, **_LABELED}, 2 * 4 * (8 + 5)),
  ],
  ids=['unlabeled', 'labeled', 'both'],
)
def test_most_examples_are_those_of_the_longest_stream(streams, most):
  hparams = round_hparams.RoundHparams(
    scenario=round_hparams.LABELS_AT_CLIENTS,
    client_epochs=2,
    client_batch_size=8,
    client_labeled_batch_size=5,
    max_client_examples=20,
    client_weighting='examples',
  )
  algorithm = dataclasses.replace(
    handmade.algorithm(streams=lambda: streams), round=hparams
  )
  bounds = screen.build_bounds(algorithm)
  assert bounds.num_examples == most
  assert bounds.weights == guarded.AllowedWeights(most)
  # 3 steps, whatever the examples are.
  algorithm = dataclasses.replace(
    algorithm, round=dataclasses.replace(hparams, client_steps=3)
  )
  steps = screen.build_bounds(algorithm)
  assert steps.num_examples == 3 * most / (2 * (4 if len(streams) > 1 else 3))
  # A metric may count all of the client's examples, before the steps.
  assert bounds.num_counted == most
  algorithm = dataclasses.replace(
    algorithm, round=dataclasses.replace(hparams, client_steps=1)
  )
  one_step = screen.build_bounds(algorithm)
  assert one_step.num_counted >= 20 > one_step.num_examples


@pytest.mark.parametrize('steps', [0, 1, 2])
def test_an_episode_may_have_all_labelled_examples(steps):
  algorithm = protofssl.ProtoFssl(
    round=round_hparams.RoundHparams(
      scenario='labels_at_clients',
      client_steps=steps,
      client_batch_size=30,
      client_labeled_batch_size=1,
      max_client_examples=500,
    )
  )
  bounds = screen.build_bounds(algorithm)
  assert bounds.num_examples >= max(steps, 1) * (30 + 500)
  assert bounds.num_counted >= bounds.num_examples


@pytest.mark.parametrize('weighs', [False, True])
def test_uniform_weights_are_0_or_1_unless_the_algorithm_sets_them(weighs):
  algorithm = fl2.Fl2(
    learning_status_aggregation=weighs,
    round=round_hparams.RoundHparams(client_weighting='uniform'),
  )
  weights = screen.build_bounds(algorithm).weights
  assert weights == guarded.AllowedWeights(1.0, all_or_nothing=not weighs)


# Each is 0 or 1 for a client.
_COUNTS = {
  '',  # Rejected sums of batch norm statistics.
  'num_clients',
  'num_clipped',
  'num_left_out',
  'num_non_finite_clients',
  'num_rejected_clients',
  'num_weighted_clients',
}


def _leaves(type_spec, name=''):
  if isinstance(type_spec, tff.StructType):
    for key, element in tff.structure.iter_elements(type_spec):
      yield from _leaves(element, key or name)
  else:
    yield name, type_spec


@pytest.mark.parametrize(
  'algorithm, scenario',
  [('fedmatch', 'labels_at_server'), ('protofssl', 'labels_at_clients')],
)
def test_no_sum_of_clients_integers_can_wrap_around(
  algorithm, scenario, monkeypatch
):
  summed = {}
  federated_sum = tff.federated_sum

  def record(value):
    summed.update(_leaves(value.type_signature.member))
    return federated_sum(value)

  monkeypatch.setattr(lazy.tff, 'federated_sum', record)
  # Not one that was built before.
  tiny_task.build.__wrapped__(algorithm, scenario)
  integers = {
    name
    for name, of in summed.items()
    if np.issubdtype(of.dtype, np.integer) and of.dtype != np.int64
  }
  assert 'num_clients' in integers and integers <= _COUNTS
