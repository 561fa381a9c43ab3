import dataclasses

import pytest

from tff_fssl import hparams
from tff_fssl.algorithms import registry
from tff_fssl.hparams import hparam
from tff_fssl.interface import round_hparams
from tff_fssl.program import config
from tff_fssl.program import flags
from tff_fssl.program import main
from tff_fssl.program import train_main
from tff_fssl.program import usage


def test_groups_stand_in_the_order_of_their_fields():
  @dataclasses.dataclass(frozen=True)
  class Grouped:
    a: int = hparam(1, 'About a.')
    b: int = hparam(2, 'About b.', group='Second')
    c: int = hparam(3, 'About c.')
    d: int = hparam(4, 'About d.', group='Third')

  text = usage.help_text('usage', 'about', [flags.Group(Grouped, 'First')])
  shown = [
    line.strip()
    for line in text.splitlines()
    if line.startswith(('  --', 'Se')) or line in ('First:', 'Third:')
  ]
  assert shown[:7] == [
    'First:', '--a=1', 'Second:', '--b=2', '--c=3', 'Third:', '--d=4'
  ]  # fmt: skip


def _shown(*argv, common=('algorithm', 'alpha', 'momentum'), capsys=None):
  groups = config.groups()
  parsed = usage.parse(argv, 'usage', 'about\nmore', groups, common=common)
  assert parsed is None
  return capsys.readouterr().out


def test_help_has_the_common_flags_alone(capsys):
  text = _shown('--help', capsys=capsys)
  assert max(map(len, text.splitlines())) <= 80
  flag_lines = [line for line in text.splitlines() if line.startswith('  --')]
  assert [line.split('=')[0] for line in flag_lines[:3]] == [
    '  --algorithm',
    '  --alpha',
    '  --momentum',
  ]
  assert 'about' in text and 'more\n' not in text
  num = sum(len(group.named_fields()) for group in config.groups())
  assert f'Shows all flags: {num - 3} more.' in text
  # A program with few flags shows all of them.
  assert '--fl2.rho=' in _shown('--help', common=(), capsys=capsys)
  assert '--fl2.rho=' in _shown('--helpfull', capsys=capsys)


@pytest.mark.parametrize(
  'word, shown, hidden',
  [
    ('momentum', 'nesterov', 'alpha'),  # In the text.
    ('FL2.', 'fl2.rho', 'uda.tsa'),  # In the name.
    ('participation of clients', 'overselect', 'seed'),  # The topic.
  ],
)
def test_help_with_a_word(word, shown, hidden, capsys):
  text = _shown(f'--help={word}', capsys=capsys)
  assert f'  --{shown}=' in text
  assert f'  --{hidden}=' not in text


@pytest.mark.parametrize('word', ['', 'zzz', 'clients_per_rund'])
def test_a_word_that_no_flag_has(word, capsys):
  with pytest.raises(hparams.UsageError) as error:
    _shown(f'--help={word}', capsys=capsys)
  hint = "did you mean 'clients_per_round'?" if 'rund' in word else ''
  assert hint in str(error.value)


def test_every_common_flag_of_training_exists(capsys):
  assert main.run(train_main.train_main, ['--help']) == 0
  text = capsys.readouterr().out
  for name in train_main._COMMON:
    assert f'  --{name}=' in text
  # Two screens.
  assert len(text.splitlines()) <= 80


def test_every_flag_stands_under_a_heading():
  for group in config.groups():
    for _, field in group.named_fields()[:1]:
      assert group.title or field.metadata['group']


def test_help_is_complete_and_80_columns_wide():
  text = usage.help_text('usage', 'about', config.groups())
  assert max(map(len, text.splitlines())) <= 80
  for group in config.groups():
    for name, _ in group.named_fields():
      assert f'  --{name}=' in text
  fields = dataclasses.fields(round_hparams.RoundHparams)
  assert f'--{fields[0].name}={fields[0].default}' in text
  for entry in registry.REGISTRY.values():
    if not entry.flags_of and hparams.documented_fields(entry.hparams):
      assert f'--algorithm={entry.name} (' in text


@dataclasses.dataclass(frozen=True)
class _Hparams:
  kind: str = hparam('a', 'Which.', choices=('a', 'b'))
  rate: float = hparam(0.5, 'How fast.', when=lambda own: own.is_b)
  depth: int = hparam(3, 'How deep.', when=lambda own: own.is_b and own.rate)
  width: int = hparam(3, 'How wide.', when=lambda own: own.is_over(0.7))

  @property
  def is_b(self):
    return self.kind == 'b'

  def is_over(self, least):
    return self.rate > least


@pytest.mark.parametrize(
  'given, expected',
  [
    ({'kind': 'b', 'rate': 0.8}, {}),
    ({'rate': 0.8}, {'x.rate': '--x.kind=a', 'x.depth': '--x.kind=a'}),
    (
      {'kind': 'b', 'rate': 0.0},
      {'x.depth': '--x.rate=0.0', 'x.width': '--x.rate=0.0'},
    ),
  ],
)
def test_the_flag_that_is_read_last_is_the_reason(given, expected):
  assert usage.find_idle(_Hparams(**given), 'x.') == expected


def test_predicates_read_the_whole_configuration():
  given = ['--algorithm=supervised', '--num_labels=40', '--dataset=digits']
  built = config.parse_config(given)
  found = built.idle()
  assert found['overselect'] == found['aggregator'] == '--algorithm=supervised'
  assert found['image_size'] == '--dataset=digits'
  own = config.parse_config([*given[1:], '--algorithm=fl2']).idle()
  flag = '--fl2.learning_status_aggregation=true'
  assert own['client_weighting'] == flag
  assert own['overselect'] == '--straggler_probability=0.0'
  assert 'image_size' in own and 'aggregator' not in own


@pytest.mark.parametrize('algorithm', registry.REGISTRY)
def test_predicates_of_all_flags_can_be_evaluated(algorithm):
  entry = registry.REGISTRY[algorithm]
  scenario = entry.scenarios[-1]
  built = config.parse_config(
    [
      f'--algorithm={algorithm}',
      f'--scenario={scenario}',
      '--num_labels=50',
      '--num_clients=10',
    ]
  )
  idle_flags = built.idle()
  assert not idle_flags.keys() & built.flags().keys()
  assert all(why.startswith('--') for why in idle_flags.values())


@dataclasses.dataclass(frozen=True)
class _Wrong:
  depth: int = hparam(3, 'How deep.', when=lambda own: own.general)


def test_reading_what_is_no_flag_is_an_error_of_the_author():
  with pytest.raises(AttributeError, match="_Wrong: .* 'general', which is no"):
    usage.find_idle(_Wrong())
