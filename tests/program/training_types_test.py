import contextlib
import signal

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
