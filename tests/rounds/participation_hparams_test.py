"""The sizes of cohorts, and the clients that may be missing from them."""

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.rounds import participation_hparams

Hparams = participation_hparams.ParticipationHparams


def test_over_selection_counts_in_decimals():
  late = {'dropout_probability': 0.1}
  numbers = [(0.1, 10, 11), (0.07, 100, 107), (0.3, 5, 7), (1e-9, 10, 11)]
  for overselect, k, num in numbers:
    assert Hparams(overselect=overselect, **late).num_drawn(k) == num
  assert Hparams(overselect=0.5).num_drawn(10) == 10
  settings = Hparams(overselect=0.5, **late)
  settings.check_cohort(10, 15)
  with pytest.raises(UsageError, match='15 clients would be drawn.*are 14;'):
    settings.check_cohort(10, 14)


@pytest.mark.parametrize(
  'settings, is_on, may_be_empty',
  [
    ({}, False, False),
    ({'overselect': 0.5}, False, False),
    ({'straggler_probability': 1.0}, True, False),
    ({'dropout_probability': 0.1}, True, True),
    ({'availability_file': 'a.csv'}, True, True),
  ],
)
def test_what_can_be_missing(settings, is_on, may_be_empty):
  hparams = Hparams(**settings)
  assert (hparams.is_on, hparams.may_be_empty) == (is_on, may_be_empty)


@pytest.mark.parametrize(
  'settings',
  [
    # Rounds without any client would follow one another for ever.
    {'dropout_probability': 1.0},
    {'straggler_probability': 1.5},
    {'straggler_least_share': -0.1},
    {'overselect': float('nan')},
    {'availability_period': -1},
  ],
)
def test_numbers_out_of_range_are_refused(settings):
  (name,) = settings
  with pytest.raises(UsageError, match=name):
    Hparams(**settings)
