"""`programs/algorithms.py`: lists the algorithms, or explains one."""

import ast
from collections.abc import Sequence
import importlib.util
import os
import sys

from tff_fssl import files
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.hparams import closest
from tff_fssl.interface import base
from tff_fssl.program import config as config_lib
from tff_fssl.program import console
from tff_fssl.program import flags
from tff_fssl.program import main as main_lib
from tff_fssl.program import papers_main
from tff_fssl.program import run_hparams
from tff_fssl.program import usage

_USAGE = 'programs/algorithms.py [NAME]'
_ABOUT = (
  'Without a name, lists all algorithms, with their needs of a deployment and'
  ' the options that they support. With a name, explains that algorithm: its'
  ' source, its rounds, its flags, its configurations.'
)
# What the programs accept or refuse is asked of them, with these flags. Group
# norm, since static batch norm rules out all three.
_COMMON = ('--norm=gn', '--num_labels=50', '--max_client_examples=1000')
_ASKED = {
  'secure': ('--aggregator=secure', '--simulate_secure_aggregation'),
  'dp': ('--aggregator=dp',),
  'cross-device': ('--cross_device',),
}
_YES = 'yes'
# Two lines of headings, the algorithm's name apart.
_HEADS = (
  ('labels', 'client', 'weight', 'secure', 'dp', 'cross-'),
  ('at', 'state', 'sets', '', '', 'device'),
)
_LEGEND = """\
labels at      Where the labels can be; both: at the server or at the clients.
client state   Whether the server keeps one for each client, by its identity.
               Each client then receives a message of its own.
weight sets    That a client sends in a round.
secure         --aggregator=secure: only sums of updates leave the clients.
dp             --aggregator=dp: only a sum with noise leaves the clients.
cross-device   --cross_device: no identities, one phase a round; TFF's
               MapReduceForm holds such a process. These three need --norm=gn
               or --norm=none; all but dp can have --norm=bn. With a name,
               `algorithms` says what refuses them.\
"""


@main_lib.command(_USAGE, _ABOUT, main_lib.NoHparams, most=1)
def algorithms_main(_: main_lib.NoHparams, parsed: flags.ParsedFlags) -> None:
  """Lists the algorithms, or explains the one that is named."""
  names = parsed.positional
  if not names:
    console.show(_overview())
    return
  if names[0] not in registry.REGISTRY:
    raise UsageError(
      f'{names[0]!r} is not an algorithm; there are'
      f' {", ".join(registry.REGISTRY)}{closest(names[0], registry.REGISTRY)}'
    )
  console.show(_page(registry.REGISTRY[names[0]]))


def _refusal(entry: registry.Entry, asked: str) -> str:
  """Finds why `asked` is refused for an algorithm, or '' if it is not."""
  scenarios = entry.trains_clients or entry.scenarios
  try:
    config_lib.parse_config(
      [
        f'--algorithm={entry.name}',
        f'--scenario={scenarios[0]}',
        *_COMMON,
        *_ASKED[asked],
      ]
    )
  except UsageError as error:
    return str(error)
  return ''


def _overview() -> str:
  """Shows the table of all algorithms, with their papers."""
  rows = [['', *_HEADS[0]], ['', *_HEADS[1]]]
  for name, entry in registry.REGISTRY.items():
    places = [s.removeprefix('labels_at_') for s in entry.scenarios]
    row = [
      name,
      places[0] if len(places) == 1 else 'both',
      _YES if entry.keeps_client_state() else 'no',
      str(entry.weight_sets_up),
    ]
    row += ['no' if _refusal(entry, asked) else _YES for asked in _ASKED]
    rows.append(row)
  papers_main = {e.name: e.paper for e in registry.REGISTRY.values() if e.paper}
  more = f'{console.command("algorithms")} NAME explains one.'
  return '\n'.join(
    [
      *_columns(rows),
      '',
      console.table(papers_main, indent=0),
      '',
      _LEGEND,
      '',
      more,
    ]
  )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
  """Aligns cells. A first cell that is too long gets a line of its own."""
  widths = [max(map(len, cells)) for cells in zip(*rows)]
  room = console.WIDTH - sum(widths[1:]) - 2 * len(widths[1:])
  widths[0] = min(widths[0], room)
  lines = []
  for first, *others in rows:
    if len(first) > room:
      lines.append(first)
      first = ''
    padded = (cell.ljust(w) for cell, w in zip((first, *others), widths))
    lines.append('  '.join(padded).rstrip())
  return lines


def _page(entry: registry.Entry) -> str:
  """Explains an algorithm: source, flags, files and deployment."""
  group = config_lib.own_group(entry)
  lines = [_docstring(entry.hparams.__module__)]
  lines += usage.group_lines(group)
  names = _configs(entry.name)
  if names:
    lines += ['', 'Configurations, for --flagfile:', *(f'  {n}' for n in names)]
  tables = dict.fromkeys(
    row.table
    for row in papers_main.rows().values()
    if row.flags.get('algorithm') == entry.name
  )
  if tables:
    program = console.command('papers')
    lines += ['', f'Tables with rows of it, for {program} list:']
    lines += [f'  {table}' for table in tables]
  lines += ['', 'A deployment:', console.table(_deployment(entry))]
  return '\n'.join(lines)


def _docstring(module: str) -> str:
  """Reads a module's docstring without importing the module."""
  loaded = sys.modules.get(module)
  path = getattr(loaded, '__file__', None)
  if path is None:
    spec = importlib.util.find_spec(module)
    path = spec.origin if spec else None
  if path is None or not os.path.isfile(path):
    return f'{module}: its source is not there.'
  # An import would also run the module.
  tree = ast.parse(files.read_text(path))
  return ast.get_docstring(tree) or f'{module}: it has no docstring.'


def _configs(name: str) -> list[str]:
  """Lists the package's flagfiles for an algorithm."""
  default = run_hparams.RunHparams.algorithm
  return [
    path
    for path in flags.list_configs()
    if flags.read_flagfile(path).get('algorithm', default) == name
  ]


def _client_state(entry: registry.Entry) -> str:
  """Says whether the server keeps something of each client."""
  can = entry.capabilities
  if not entry.keeps_client_state():
    return 'none is kept from round to round'
  kept = 'the server keeps one for each client, by its identity'
  if can.without_signals:
    kept += f'; none with --{entry.prefix}{can.without_signals}'
  return kept


def _undescribed(entry: registry.Entry) -> str:
  """Says what clients send by a class without `extra_uploads`."""
  if entry.hparams.uploads is not base.Algorithm.uploads:
    return 'the values of `uploads`, which `capabilities` do not describe'
  return 'nothing beside the update, its weight and sums for metrics'


def _deployment(entry: registry.Entry) -> dict[str, str]:
  """Lists the needs of a deployment and its options."""
  can = entry.capabilities
  rows = {
    'labels': ' or '.join(entry.scenarios).replace('_', ' '),
    'clients train': ', '.join(entry.trains_clients).replace('_', ' ')
    or 'never',
    'client state': _client_state(entry),
    'messages': 'each client receives one of its own'
    if entry.keeps_client_state()
    else 'all clients receive the same one',
    'weight sets': f'{entry.weight_sets_up} from a client in a round'
    + (', without the last layer' if entry.hparams.head_stays else ''),
    'also sent': ', '.join(can.extra_uploads) or _undescribed(entry),
  }
  if entry.is_alone:
    rows['client state'] = (
      'each client keeps its own model; in a simulation, the server keeps all'
    )
    rows['messages'] = 'none: each client trains alone'
    for name in ('weight sets', 'also sent'):
      del rows[name]
  if can.without_own_weights:
    rows['weights'] = (
      'of updates are set by the algorithm, unless'
      f' --{entry.prefix}{can.without_own_weights}'
    )
  for asked, arguments in _ASKED.items():
    reason = _refusal(entry, asked).removeprefix(f'{arguments[0]}: ')
    rows[arguments[0]] = f'no: {reason}' if reason else 'with --norm=gn'
  return rows
