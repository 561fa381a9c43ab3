"""Who takes part is a function of (seed, round, client)."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.rounds import participation
from tff_fssl.rounds import sampling

Hparams = participation.ParticipationHparams
# Half of 10 clients in the first 2 of 4 rounds, two others in the last 2.
_ROWS = tuple((i, 1, 3) for i in range(5)) + ((5, 3, 5), (6, 3, 5))
_DAY = participation.Availability(_ROWS, 4)


def _draw(settings, availability=None, seed=3, round_num=1, num=50, k=10):
  return participation.draw(
    settings,
    availability,
    seed=seed,
    round_num=round_num,
    num_clients=num,
    clients_per_round=k,
  )


_ANY = st.builds(
  Hparams,
  dropout_probability=st.sampled_from([0.0, 0.2, 0.9]),
  straggler_probability=st.sampled_from([0.0, 0.5, 1.0]),
  straggler_least_share=st.sampled_from([0.0, 0.4, 1.0]),
  overselect=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
)


@hypothesis.given(
  _ANY, st.booleans(), st.integers(0, 99), st.integers(1, 99), st.integers(1, 9)
)
def test_a_round(settings, by_day, seed, round_num, k):
  availability = _DAY if by_day else None
  draw = lambda: _draw(settings, availability, seed, round_num, 10, k)
  first = draw()
  assert first == draw()
  available = range(10)
  if by_day:
    available = [*(range(5) if (round_num - 1) % 4 < 2 else (5, 6)), 7, 8, 9]
  assert set(first.slots) <= set(available)
  assert first.num_drawn == min(settings.num_drawn(k), len(available))
  num_reported = first.num_drawn - first.num_dropped_out
  assert len(first.slots) == min(num_reported, k)
  assert first.num_discarded == num_reported - len(first.slots)
  slots = list(first.slots.values())
  assert slots == sorted(set(slots)) and set(slots) <= set(
    range(first.num_drawn)
  )
  shares = [
    participation.share_of_steps(settings, seed, round_num, i)
    for i in first.slots
  ]
  assert first.shares == {
    i: s
    for i, s in sorted(zip(first.slots, shares))
    if i in first.shares or s < 1.0
  }
  least = settings.straggler_least_share
  assert all(least <= share <= 1.0 for share in shares)


def test_without_settings_it_is_the_cohort_of_old_runs():
  for round_num in range(1, 20):
    drawn = _draw(Hparams(), round_num=round_num)
    slots = sampling.draw_slots(3, round_num, 50, 10)
    assert list(drawn.slots.items()) == list(slots.items())
    assert drawn[1:] == ({}, 10, 0, 0)
  # All available is the same as no file.
  everybody = participation.Availability(((0, 1, 9),))
  assert _draw(Hparams(), everybody) == _draw(Hparams())


def test_a_flag_does_not_change_what_another_draws():
  dropout, late = {'dropout_probability': 0.4}, {'straggler_probability': 0.4}
  for round_num in range(1, 20):
    one = _draw(Hparams(**dropout), round_num=round_num)
    both = _draw(Hparams(**dropout, **late), round_num=round_num)
    assert one.slots == both.slots
    only_late = _draw(Hparams(**late), round_num=round_num)
    assert both.shares == {
      i: share for i, share in only_late.shares.items() if i in one.slots
    }


def test_rates_and_shares():
  settings = Hparams(
    dropout_probability=0.3,
    straggler_probability=0.5,
    straggler_least_share=0.2,
  )
  rounds = [_draw(settings, round_num=r, k=20) for r in range(1, 201)]
  # 4,000 clients: standard deviations 29 and, of 2,800, 26.
  assert abs(sum(r.num_dropped_out for r in rounds) - 1200) < 120
  shares = [share for r in rounds for share in r.shares.values()]
  assert abs(len(shares) - 1400) < 120
  # Evenly in [0.2, 1): mean 0.6, standard error 0.006.
  assert abs(np.mean(shares) - 0.6) < 0.03
  assert 0.2 <= min(shares) < 0.21 and 0.99 < max(shares) < 1.0


def test_over_selection_takes_the_first_that_report():
  settings = Hparams(straggler_probability=0.5, overselect=1.0)
  used = np.zeros(50)
  for round_num in range(1, 201):
    drawn = _draw(settings, round_num=round_num)
    assert len(drawn.slots) == drawn.num_discarded == 10
    in_time = [
      i
      for i in participation.draw_order(3, round_num, 50, 20)
      if participation.share_of_steps(settings, 3, round_num, i) == 1.0
    ]
    # Stragglers only where others were too few.
    assert len(drawn.shares) == max(0, 10 - len(in_time))
    used[list(drawn.slots)] += 1
  # 40 expected each, standard deviation 5.7: nobody is preferred.
  assert used.min() > 15 and used.max() < 65


def test_availability():
  once = participation.Availability(((0, 2, 4), (0, 6, 7), (2, 1, 3)))
  ids = [once.ids(r, 4).tolist() for r in range(1, 8)]
  both, one, rest = [0, 1, 2, 3], [0, 1, 3], [1, 3]
  assert ids == [[1, 2, 3], both, one, rest, rest, one, rest]
  nobody = participation.Availability(((0, 2, 3),))
  assert _draw(Hparams(), nobody, num=1, k=1) is participation.NOBODY


def _read(tmp_path, text, num_clients=10, **settings):
  path = tmp_path / 'availability.csv'
  path.write_bytes(text.encode())
  settings = Hparams(availability_file=str(path), **settings)
  return participation.read_availability(settings, num_clients)


def test_the_file(tmp_path):
  text = 'client, from, to\r\n3,5,9\r\n\r\n 1 , 2 , 4\r\n3,1,5\r\n'
  read = _read(tmp_path, text, availability_period=8)
  assert read.rows == ((1, 2, 4), (3, 1, 5), (3, 5, 9)) and read.period == 8
  copy = _read(tmp_path, read.format_csv(), availability_period=8)
  assert copy == read
  assert _read(tmp_path, 'client,from,to\n').ids(1, 3).tolist() == [0, 1, 2]
  assert participation.read_availability(Hparams()) is None


@pytest.mark.parametrize(
  'text, words',
  [
    ('', 'line 1: nothing; the first line must be client,from,to'),
    ('a,b,c\n', "line 1: 'a,b,c'; the first line must be"),
    ('client,from,to\n1,2,3', 'line 2: has no line end'),
    ('client,from,to\n1,2\n', "line 2: '1,2'; a line is three whole"),
    ('client,from,to\n1,2,3,4\n', "line 2: '1,2,3,4'; a line is three"),
    ('client,from,to\n\n1,2,3.5\n', "line 3: '1,2,3.5'; a line is three"),
    ('client,from,to\n"1",2,3\n', 'a line is three whole'),
    ('client,from,to\nana,2,3\n', "line 2: 'ana,2,3'; a line is three"),
    ('client,from,to\n10,2,3\n', 'line 2: client 10: clients are 0 to 9'),
    ('client,from,to\n-1,2,3\n', 'line 2: client -1: clients are 0 to 9'),
    ('client,from,to\n1,3,3\n', 'line 2: from 3 to 3: rounds are'),
    ('client,from,to\n1,0,3\n', 'line 2: from 0 to 3: rounds are'),
    ('client,from,to\n1,2,10\n', 'line 2: to 10: must be at most 9'),
    (
      'client,from,to\n1,4,6\n2,1,9\n1,1,5\n',
      'line 2: client 1 is available in round 4 by another line',
    ),
    ('\x00\xff', 'line 1'),
  ],
)
def test_mistakes_in_the_file(text, words, tmp_path):
  with pytest.raises(UsageError) as error:
    _read(tmp_path, text, availability_period=8)
  message = str(error.value)
  assert words in message and '\n' not in message
  assert message.startswith('--availability_file=')


def test_clients_whose_number_is_not_known_yet(tmp_path):
  text = 'client,from,to\n12345,1,2\n'
  assert _read(tmp_path, text, num_clients=0).rows == ((12345, 1, 2),)
  with pytest.raises(UsageError, match='clients are 0 to 2147483646'):
    _read(tmp_path, text.replace('5,', '5' * 30 + ','), num_clients=0)


def test_no_file(tmp_path):
  settings = Hparams(availability_file=str(tmp_path / 'none.csv'))
  with pytest.raises(UsageError, match='none.csv: cannot be read: it does not'):
    participation.read_availability(settings)
