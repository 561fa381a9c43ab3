import contextlib
import signal

import pytest

from tff_fssl.program import training_types


def test_hooks_do_nothing_by_default():
  hooks = training_types.Hooks()
  hooks.begin(0, training_types.Settings())
  with hooks.round_context(1) as nothing:
    assert nothing is None
  assert hooks.left_out_clients(1) == hooks.explain_non_finite(None, 1, 2) == ()
  assert hooks.seconds() == {}
  hooks.round_done(None, training_types.RoundReport(1, {}, {}, {}, False))
  hooks.end()


def test_a_hook_can_be_overridden_alone():
  entered = []

  class Hooks(training_types.Hooks):
    """Watches rounds."""

    def round_context(self, round_num):
      entered.append(round_num)
      return contextlib.nullcontext(round_num)

  hooks = Hooks()
  with hooks.round_context(3) as value:
    assert value == 3 and entered == [3]
  assert hooks.seconds() == {}


def test_a_stop_request_keeps_its_signal():
  stop = training_types.StopRequest()
  assert stop.signal is None
  stop.set(signal.SIGTERM)
  assert stop.signal == signal.SIGTERM


_TRAIN = 'client_work/train'
_SKIPPED = {f'{_TRAIN}/num_clients': 2, 'finalizer/update_skipped': 1}


@pytest.mark.parametrize(
  'metrics, bad',
  [
    ({}, False),
    ({f'{_TRAIN}/num_clients': 2, f'{_TRAIN}/num_non_finite_clients': 2}, True),
    (
      {f'{_TRAIN}/num_clients': 3, f'{_TRAIN}/num_non_finite_clients': 2},
      False,
    ),
    (
      {
        f'{_TRAIN}/num_clients': 2,
        f'{_TRAIN}/num_non_finite_clients': 1,
        f'{_TRAIN}/num_rejected_clients': 1,
      },
      True,
    ),
    ({f'{_TRAIN}/num_clients': 0, 'finalizer/server_non_finite': 1}, True),
    # An aggregate that is not finite though clients weighed something.
    ({**_SKIPPED, 'aggregator/num_weighted_clients': 2}, True),
    (_SKIPPED, True),  # A private aggregator.
    # All are empty, or sure of every pseudo-label.
    ({**_SKIPPED, 'aggregator/num_weighted_clients': 0}, False),
    # A robust aggregator, of whose clients too few weigh anything.
    (
      {
        **_SKIPPED,
        'aggregator/num_weighted_clients': 1,
        'aggregator/inner/too_few_clients': 1,
      },
      False,
    ),
    # Secure sums: only the aggregator's counts are known.
    (
      {
        **_SKIPPED,
        'aggregator/num_weighted_clients': 0,
        'aggregator/num_rejected_clients': 2,
      },
      True,
    ),
  ],
)
def test_what_a_bad_round_is(metrics, bad):
  assert training_types.is_bad_round(metrics) == bad


def _warnings(norms, weights_norm=100.0):
  watch = training_types.UpdateWatch()
  return [
    watch.warning(
      {
        'finalizer/update_norm': norm,
        'finalizer/weights_norm': weights_norm,
      }
    )
    for norm in norms
  ]


def test_updates_far_beyond_the_rounds_before_warn():
  assert not any(_warnings([1.0, 2.0, 1.5, 9.0, 0.0, 30.0]))
  *before, last = _warnings([1.0, 2.0, 1.5, 21.0])
  assert not any(before)
  assert "the update's norm is 21, 10.5 times the largest" in last
  # After a round without an update, too.
  assert _warnings([1.0, 2.0, 0.0, 1.5, 21.0])[-1]


def test_updates_far_beyond_the_model_warn_from_the_first_round_on():
  assert "1e+03 times that of the model's weights" in _warnings([1e5])[0]
  assert _warnings([1e5, 1e5])[1]
  assert not _warnings([900.0])[0]
