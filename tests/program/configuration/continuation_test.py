import re

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program.commands import main
from tff_fssl.program.commands import train_main
from tff_fssl.program.configuration import config
from tff_fssl.program.configuration import continuation
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import run_hparams


def test_differences():
  old = {'seed': '0', 'total_rounds': '5', 'client_threads': '1'}
  new = {'seed': '0', 'total_rounds': '9', 'client_threads': '2'}
  assert continuation.differences(old, new) == (
    [],
    ['client_threads', 'total_rounds'],
  )
  assert continuation.differences(new, old)[0] == ['total_rounds']
  assert continuation.differences(old, old | {'seed': '1'})[0] == ['seed']
  # A flag that older runs did not know has its default there.
  default = str(run_hparams.RunHparams().num_clients)
  assert continuation.differences(old, old | {'num_clients': default}) == (
    [],
    [],
  )
  assert continuation.differences(old, old | {'num_clients': '7'})[0] == [
    'num_clients'
  ]


def test_flags_without_effect_are_not_compared():
  # An older version wrote flags that this one knows to have no effect.
  old = {'fl2.consistency': 'none', 'fl2.rho': '0.5'}
  new = {'fl2.consistency': 'none'}
  assert continuation.differences(old, new) == ([], [])
  # The reason differs, and is named.
  new = {'fl2.consistency': 'sacr'}
  assert continuation.differences(new | {'fl2.rho': '0.5'}, old) == (
    ['fl2.consistency'],
    [],
  )
  iid = {'partition': 'iid'}
  dirichlet = {'partition': 'dirichlet', 'alpha': '0.3'}
  assert continuation.differences(dirichlet, iid)[0] == ['partition']
  assert continuation.differences(iid, dirichlet)[0] == ['alpha', 'partition']
  # Older versions called it --split.
  old = {'split': 'dirichlet', 'alpha': '0.3'}
  assert continuation.differences(old, dirichlet) == ([], [])
  assert continuation.differences(old, iid)[0] == ['partition']
  # Its baselines had flags of their own.
  old = {'algorithm': 'ts_server_ema', 'ts_server_ema.ema_decay': '0.5'}
  new = {'algorithm': 'ts_server_ema', 'fedswitch.ema_decay': '0.5'}
  assert continuation.differences(old, new) == ([], [])
  # What no version knows is compared.
  assert continuation.differences({'zzz': '1'}, {})[0] == ['zzz']


def test_help_and_page_name_the_flags_that_may_differ(repository, capsys):
  page = (repository / 'docs' / 'runs.md').read_text()
  assert main.run(train_main.train_main, ['--helpfull']) == 0
  shown = ' '.join(capsys.readouterr().out.split())
  for text in (page, shown):
    assert f'these may differ: {continuation.may_differ_text()}.' in text
  assert 'total_rounds (upwards)' in continuation.may_differ_text()
  assert 'seed' not in continuation.may_differ()


def test_flags_that_are_gone():
  known = {n for g in config.groups() for n, _ in g.named_fields()}
  assert not known & {*flags.RENAMED, *flags.REMOVED}
  assert known >= {*flags.RENAMED.values()}
  for name, (kept, instead) in flags.REMOVED.items():
    # A run in which it did what all runs do now goes on.
    assert continuation.differences({name: kept}, {}) == ([], [])
    assert continuation.differences({name: 'zzz'}, {}) == ([name], [])
    shown = continuation.describe([name], {name: 'zzz'}, {})
    assert shown == f'--{name}=zzz there; {instead}'
    # What to give instead exists.
    given = re.findall(r'--([\w.]+)', instead)
    assert known >= {*given}
    assert given or 'omit it' in instead


def test_flags_that_are_gone_are_refused_in_a_flagfile(tmp_path):
  path = tmp_path / 'a.flags'
  for name, (kept, instead) in flags.REMOVED.items():
    path.write_text(f'--{name}={kept}\n')
    with pytest.raises(UsageError) as error:
      config.parse_config([f'--flagfile={path}'])
    assert str(error.value) == (
      f'unknown flag --{name} (in {path}); {instead} (--helpfull lists all'
      ' flags)'
    )


def test_what_an_older_run_recorded_is_read(tmp_path):
  path = tmp_path / 'flags.txt'
  recorded = {name: kept for name, (kept, _) in flags.REMOVED.items()}
  recorded |= {'algorithm': 'local_uda', 'local_uda.tsa': 'none'}
  path.write_text(flags.flagfile_text(recorded))
  new = {'algorithm': 'local_uda', 'uda.tsa': 'none'}
  assert flags.read_flagfile(str(path)) == new
  given = [f'--flagfile={path}']
  parsed = flags.parse(given, config.groups(), recorded=True)
  assert parsed.files == dict.fromkeys(new, str(path))
  path.write_text('--fl2.temperature=2\n')
  with pytest.raises(UsageError, match='it is always 1 now; omit it'):
    flags.parse(given, config.groups(), recorded=True)
