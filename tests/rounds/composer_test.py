"""Which rounds count."""

import collections
import dataclasses

import contexts
import numpy as np
import pytest
import tensorflow_federated as tff
import tiny_plan

from tff_fssl.algorithms import supervised
from tff_fssl.interface import round_hparams
from tff_fssl.rounds import composer

_context = contexts.of_each_module()
_MEASURED = tff.to_type(
  collections.OrderedDict(
    train=collections.OrderedDict(num_clients=np.int32), num_reports=np.float32
  )
)


@pytest.mark.parametrize(
  'min_clients, round_num, num_clients, num_reports, counts',
  [
    (0, 1, 3, 1.0, True),
    (0, 1, 3, 0.0, False),
    (0, 1, 0, 0.0, True),
    (2, 1, 3, 1.0, False),
    (2, 1, 0, 0.0, False),
    (2, 0, 0, 0.0, True),
  ],
)
def test_rounds_with_too_few_clients_do_not_count(
  min_clients, round_num, num_clients, num_reports, counts
):
  hparams = round_hparams.RoundHparams(min_clients=min_clients)
  plan = tiny_plan.bare(supervised.Supervised(round=hparams))
  measured = collections.OrderedDict(
    train=collections.OrderedDict(num_clients=num_clients),
    num_reports=num_reports,
  )
  computed = composer.build_counts(plan, _MEASURED)(round_num, measured)
  assert bool(computed) == counts


def test_a_confidential_round_fails_by_its_number_of_clients_alone():
  plan = dataclasses.replace(tiny_plan.bare(), is_confidential=True)
  assert not plan.can_discard
