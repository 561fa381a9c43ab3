import dataclasses

from tff_fssl import hparams
from tff_fssl.algorithms import registry
from tff_fssl.hparams import hparam
from tff_fssl.program.configuration import config
from tff_fssl.program.configuration import flags
from tff_fssl.program.configuration import usage
from tff_fssl.rounds import round_hparams


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
