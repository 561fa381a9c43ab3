"""The calls that a tracker gets, without a tracker."""

from tff_fssl.program import trackers


class _Fake:
  """A tracker that remembers."""

  def __init__(self, target, folder, run_id, name, params, algorithm):
    self.calls = [(target.partition(':')[0], params, run_id)]
    self.id = run_id or 'new'

  def __getattr__(self, name):
    return lambda *args: self.calls.append((name, *args))


_START = ['start', 'run', {}, 'fl2']


def test_calls_are_passed_on(tmp_path, monkeypatch):
  made = []

  def make(*args):
    made.append(_Fake(*args))
    return made[-1]

  monkeypatch.setattr(trackers, '_open', make)
  calls = [
    _START,
    ['log', 1, {'a': 1}],
    ['log_picture', 'p', '/p.png'],
    ['log', 2, {'a': 2}],
    ['log_summary', 2, {'b': 3}],
    ['log_file', 'm', '/m'],
    ['finish', 'FINISHED'],
  ]
  trackers.track('fake:x', str(tmp_path), iter(calls))
  assert made[0].calls == [
    ('fake', {}, None),
    ('log', 1, {'a': 1}),
    ('log_picture', 'p', '/p.png'),
    ('log', 2, {'a': 2}),
    ('log_summary', 2, {'b': 3}),
    ('log_file', 'm', '/m'),
    ('finish', 'FINISHED'),
  ]
  # The same run goes on after its last round; that of another target does not.
  calls = [*calls[:2], ['log', 3, {}], ['finish', 'FINISHED']]
  trackers.track('fake:x', str(tmp_path), iter(calls))
  assert made[1].calls == [
    ('fake', {}, 'new'),
    ('log', 3, {}),
    ('finish', 'FINISHED'),
  ]
  trackers.track('fake:y', str(tmp_path), iter(calls))
  assert made[2].calls[:2] == [('fake', {}, None), ('log', 1, {'a': 1})]
