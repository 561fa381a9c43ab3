from tff_fssl.program import progress as progress_lib
from tff_fssl.program import training_types


class _Run:
  """A run on a clock that only it moves."""

  def __init__(self, **settings):
    self.now = 100.0
    self.progress = progress_lib.Progress(lambda: self.now)
    self.settings = training_types.Settings(**settings)
    self.progress.begin(self.settings.first_round - 1, self.settings)

  def round(self, round_num, seconds, evaluation=None):
    self.now += seconds
    evaluated = {} if evaluation is None else {'test/accuracy': 0.5}
    timing = {'seconds/evaluation': evaluation or 0.0}
    self.now += evaluation or 0
    report = training_types.RoundReport(
      round_num, {}, timing, evaluated, is_bad=False
    )
    self.progress.round_done(report)
    return self.progress.seconds_left()


def test_the_first_round_does_not_count():
  run = _Run(total_rounds=11, rounds_per_evaluation=100)
  assert run.progress.seconds_left() is None
  assert run.round(1, 60) is None
  assert run.round(2, 2) == 9 * 2
  assert run.round(3, 4) == 8 * 3
  run.now += 5
  assert run.progress.seconds_left() == 8 * 3 - 5
  run.now += 500
  assert run.progress.seconds_left() == 0


def test_evaluations_that_are_left_count():
  run = _Run(total_rounds=10, rounds_per_evaluation=4)
  for r in (1, 2, 3):
    run.round(r, 1)
  # Of round 8, and of 10, the last one; the first one also compiles.
  assert run.round(4, 1, evaluation=30) == 6 * 1 + 2 * 30
  for r in (5, 6, 7):
    run.round(r, 1)
  assert run.round(8, 1, evaluation=3) == 2 * 1 + 3
  assert run.progress.accuracy == 0.5
  assert run.round(9, 1) == 1 + 3
  assert run.round(10, 1, evaluation=3) == 0


def test_only_the_last_rounds_count():
  run = _Run(total_rounds=1000, rounds_per_evaluation=1000)
  for r in range(1, 30):
    run.round(r, 50)
  for r in range(30, 50):
    left = run.round(r, 1)
  assert left == 951


def test_pretraining_has_an_end_of_its_own():
  run = _Run(first_round=-3, total_rounds=100, rounds_per_evaluation=50)
  run.progress.enter(training_types.ROUND, -3)
  assert run.progress.phase == training_types.PRETRAINING
  assert run.round(-3, 20) is None
  assert run.round(-2, 2) == 2 * 2
  run.round(-1, 2)
  # Rounds with clients have not been seen yet, and the first one compiles.
  assert run.round(0, 2) is None
  run.progress.enter(training_types.ROUND, 1)
  assert run.progress.phase == training_types.ROUND
  assert run.round(1, 30) is None
  assert run.round(2, 7) == 98 * 7


def test_a_phase_takes_as_long_as_the_last_of_its_kind():
  run = _Run(total_rounds=3)
  for phase in (training_types.EVALUATING, training_types.EXPORTING):
    for took in (8, 5):
      run.progress.enter(phase, 2)
      before = None if took == 8 else 8 - 5
      run.now += 5
      assert run.progress.phase_left() == before
      run.now += took - 5
      run.progress.leave()
    run.progress.enter(phase, 3)
    assert run.progress.phase_left() == 5
    run.now += 50
    assert run.progress.phase_left() == 0
  # The rounds are over then.
  assert run.progress.json_values()['seconds_left'] == 0


def test_what_is_told_to_others():
  run = _Run(total_rounds=3)
  assert run.progress.json_values() == {
    'phase': 'starting',
    'round': 0,
    'total_rounds': 3,
    'accuracy': None,
    'seconds_left': None,
  }
  run.round(1, 9, evaluation=1)
  run.round(2, 2, evaluation=1)
  run.progress.enter(training_types.SAVING, 2)
  assert run.progress.json_values() == {
    'phase': 'saving',
    'round': 2,
    'total_rounds': 3,
    'accuracy': 0.5,
    'seconds_left': 3.0,
  }
