"""The pages: links resolve, the guide lists all, commands are accepted."""

import functools
import json
import pathlib
import re
import shlex

import page_code
import pytest
import site_reference

from tff_fssl import hparams
from tff_fssl.algorithms import registry
from tff_fssl.hparams import UsageError
from tff_fssl.program import config
from tff_fssl.program import output_tree

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_PAGES = sorted(
  path.relative_to(_REPOSITORY).as_posix()
  for pattern in ('*.md', 'docs/**/*.md', 'examples/*.ipynb')
  for path in _REPOSITORY.glob(pattern)
)
# Pages that begin with what a reader can do, and a command or code.
_GUIDES = [
  page
  for page in _PAGES
  if re.fullmatch(r'docs/\w+\.md', page) and page != 'docs/architecture.md'
] + ['docs/algorithms/index.md']
_MAX_WORDS, _MAX_WORDS_OF_AN_ALGORITHM = 1400, 1650


def _text(page):
  """A page without its code blocks."""
  path = _REPOSITORY / page
  text = path.read_text(encoding='utf-8')
  if path.suffix == '.ipynb':
    cells = json.loads(text)['cells']
    prose = [c['source'] for c in cells if c['cell_type'] == 'markdown']
    text = '\n'.join(''.join(source) for source in prose)
  return re.sub(r'(?ms)^```.*?^```', '', text)


def _anchor(heading):
  """The anchor of a heading that no heading before it has."""
  return re.sub(r'[^\w\- ]', '', heading.lower()).strip().replace(' ', '-')


def _anchors(page):
  """The anchors that GitHub gives to a page's headings."""
  anchors = set()
  for heading in re.findall(r'(?m)^#+ (.*)$', _text(page)):
    anchor = _anchor(re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', heading))
    number, unique = 0, anchor
    while unique in anchors:
      number += 1
      unique = f'{anchor}-{number}'
    anchors.add(unique)
  return anchors


def _links(page):
  return re.findall(r'\]\(([^)\s]+)\)', _text(page))


@pytest.mark.parametrize('page', _PAGES)
def test_links_resolve(page):
  for link in _links(page):
    # The badge of GitHub's own pages: see readme_test.
    if re.match(r'https?://|\.\./\.\./actions/', link):
      continue
    name, _, anchor = link.partition('#')
    target = (_REPOSITORY / page).parent / name if name else _REPOSITORY / page
    target = target.resolve()
    assert target.is_relative_to(_REPOSITORY) and target.exists(), link
    if anchor:
      assert anchor in _anchors(target.relative_to(_REPOSITORY)), link


def test_the_guide_lists_every_page_once():
  pages = [p for p in _PAGES if p.startswith('docs/') and p != 'docs/index.md']
  lines = [
    line for line in _text('docs/index.md').splitlines() if line[:2] == '- '
  ]
  linked = [re.findall(r'\]\(([^)]+)\)', line) for line in lines]
  assert all(len(links) == 1 for links in linked)
  linked = [f'docs/{link}' for (link,) in linked if not link.startswith('..')]
  assert sorted(linked) == pages


@pytest.mark.parametrize('page', _GUIDES)
def test_guides_begin_with_an_aim_and_a_command(page):
  text = (_REPOSITORY / page).read_text(encoding='utf-8')
  title, aim, *rest = text.split('\n\n')
  assert title.startswith('# ')
  assert re.match(r'With this (page|guide) you ', aim)
  assert re.search(r'(?m)^(    |```)', '\n\n'.join(rest[:3]))


@pytest.mark.parametrize('page', [p for p in _PAGES if p[:5] == 'docs/'])
def test_pages_are_short(page):
  most = _MAX_WORDS
  text = (_REPOSITORY / page).read_text(encoding='utf-8')
  if page.startswith('docs/algorithms/'):
    most = _MAX_WORDS_OF_AN_ALGORITHM
  if page == 'docs/metrics.md' or page.startswith('docs/results/'):
    # Their tables are made by programs.
    text = re.sub(r'(?m)^\|.*$', '', text)
  # Bars between cells are no words.
  assert len(re.findall(r'\S*\w\S*', text)) <= most


_ALGORITHMS = 'docs/algorithms/index.md'
# The headings of a page for an algorithm, in order.
_HEADINGS = (
  'Idea',
  'A round',
  'Flags',
  'Where paper and code disagree',
  'What a deployment needs',
  'Cost',
  'How it was checked',
  'Our results',
  'Known to be weak',
)
# Pages that have figures of their own.
_OWN_FIGURES = (
  'cbafed',
  'fedcon',
  'feddb',
  'feddure',
  'fedmatch',
  'fedrgd',
  'fedswitch',
  'freematch',
  'protofssl',
  'proxyfl',
  'sage',
)


def _pages_of_algorithms():
  """Page -> the algorithms that the table of all algorithms links to it."""
  pages = {}
  for cell in re.findall(r'(?m)^\| (\[?`\w+`.*?) \|', _text(_ALGORITHMS)):
    names, page = re.fullmatch(r'\[(.*)\]\((\w+)\.md\)', cell).groups()
    pages.setdefault(page, []).extend(re.findall(r'`(\w+)`', names))
  return pages


_OF_ALGORITHMS = sorted(_pages_of_algorithms())


def _commands(page):
  """The commands of a page: program, arguments."""
  text = (_REPOSITORY / page).read_text(encoding='utf-8').replace('\\\n', '')
  found = re.findall(
    r'(?m)^ +(?:\.venv/bin/)?python programs/(\w+)\.py *(.*)$', text
  )
  return [(name, shlex.split(rest, comments=True)) for name, rest in found]


@functools.cache
def _flags(program):
  """The names of a program's flags."""
  groups = site_reference._groups(program)
  names = {name for group in groups for name, _ in group.named_fields()}
  if program in ('deploy', 'partition', 'sweep'):
    names |= _flags('train')  # They take these, too.
  return names | {'flagfile', 'help', 'helpfull'}


# What stands for a reader's own flags.
_FURTHER = ('...', '--flagfile=...')
_VALUES = {'${a}': 'fl2', '$a': 'fl2', '$seed': '0'}
_USUAL = '--flagfile=configs/quickstart.flags'


@pytest.mark.parametrize('page', [p for p in _PAGES if p.endswith('.md')])
def test_commands_are_accepted(page):
  for program, argv in _commands(page):
    assert (_REPOSITORY / 'programs' / f'{program}.py').is_file()
    for name in re.findall(r'(?m)^\[?--([a-z][\w.]+)', '\n'.join(argv)):
      assert {name, name.removeprefix('no')} & _flags(program), (program, name)
    # Commands of results stand for several runs.
    if program == 'train' and not page.startswith('docs/results/'):
      argv = [_USUAL if a in _FURTHER else a for a in argv]
      for name, value in _VALUES.items():
        argv = [argument.replace(name, value) for argument in argv]
      try:
        config.parse_config(argv)
      except UsageError as error:
        # A reader's own file is not here, which is found out last.
        assert '--data_dir=DIR' in argv or 'does not exist' in str(error)
        assert 'configs' not in str(error)
    if program == 'algorithms':
      assert set(argv) <= set(registry.REGISTRY)


def test_the_page_of_runs_names_every_file_of_a_run():
  table = _text('docs/runs.md').partition('## The folder')[2]
  table = table.partition('\n## ')[0]
  paths = [
    value.names
    for value in vars(output_tree.OutputTree).values()
    if isinstance(value, output_tree.PathInside)
    and value.names != (output_tree.LOCK,)
  ]
  assert len(paths) > 20
  for names in paths:
    assert re.search(rf'[`/]{re.escape(names[-1])}[`/]', table), names


@pytest.mark.parametrize('page', [p for p in _PAGES if p.endswith('.md')])
def test_lists_begin_after_an_empty_line(page):
  """Without it, the site shows a paragraph, and GitHub a list."""
  lines = ['', *_text(page).splitlines()]
  for before, line in zip(lines, lines[1:], strict=False):
    if re.match(r'(-|\d+\.) ', line) and before.strip():
      assert re.match(r' |#|(-|\d+\.) ', before), line


def _sections(page):
  """Anchor -> the text of the section, without those below it."""
  text = (_REPOSITORY / page).read_text(encoding='utf-8')
  parts = re.split(r'(?m)^## (.*)$', text)[1:]
  return {
    _anchor(title): content
    for title, content in zip(parts[::2], parts[1::2], strict=True)
  }


def _results(text):
  """The sections of docs/results/ that a text links to."""
  found = []
  for name, anchor in re.findall(r'\(\S*?results/(\w+\.md)#?([^)]*)\)', text):
    page = f'docs/results/{name}'
    path = _REPOSITORY / page
    found.append(_sections(page)[anchor] if anchor else path.read_text())
  return ''.join(found)


def test_figures_for_choosing_are_in_the_results():
  figures = 0
  for line in _text('docs/choosing.md').splitlines():
    sections = _results(line)
    shown = re.sub(r'\]\([^)]*\)|Dirichlet[( ]0\.\d\)?', '', line)
    numbers = re.findall(r'(?<![\w.=])\d+\.\d+(?: ± \d+\.\d+)?', shown)
    for number in numbers:
      assert number in sections, (number, line)
    figures += len(numbers)
  assert figures > 50


# Tests that run the Python of a page, or compare it with a file that they run.
_RUN_BY = {
  'README.md': 'readme_test.py',
  'docs/coming_from.md': 'docs_test.py',
  'docs/deploying.md': 'docs_test.py',
  'docs/embedding.md': 'docs_test.py',
  'docs/evaluation.md': 'docs_test.py',
  'docs/extending.md': 'examples/extend_test.py',
  'docs/own_data.md': 'data/own_data_page_test.py',
  'docs/participation.md': 'docs_test.py',
  'docs/runtimes.md': 'docs_test.py',
  'docs/tracking.md': 'program/loggers_test.py',
}


def _python(page):
  """The Python of a page, without blocks marked `<!-- Not run: REASON. -->`."""
  text = (_REPOSITORY / page).read_text(encoding='utf-8')
  return re.findall(
    r'(?ms)(?<!\.-->\n)^```python\n(.*?)```', text.replace('. -->', '.-->')
  )


def test_the_python_of_every_page_is_run():
  pages = [p for p in _PAGES if p.endswith('.md') and _python(p)]
  assert pages == sorted(_RUN_BY)
  for page, file in _RUN_BY.items():
    test = (_REPOSITORY / 'tests' / file).read_text(encoding='utf-8')
    assert pathlib.PurePosixPath(page).name in test


@pytest.mark.slow
def test_the_program_for_those_who_come_runs(tmp_path):
  text = (_REPOSITORY / 'docs/coming_from.md').read_text(encoding='utf-8')
  code = ''.join(_python('docs/coming_from.md'))
  printed = page_code.run(code, _REPOSITORY, tmp_path)
  stated = re.search(r'prints about (0\.\d+)', text)[1]
  assert float(printed) == pytest.approx(float(stated), abs=0.1)


@pytest.mark.parametrize(
  'pages',
  [
    ('deploying',),
    # The later ones continue the first.
    pytest.param(
      ('embedding', 'evaluation', 'participation'), marks=pytest.mark.slow
    ),
    ('runtimes',),
  ],
)
def test_programs_of_pages_print_what_they_say(pages, tmp_path):
  pages = [f'docs/{page}.md' for page in pages]
  code = '\n'.join(block for page in pages for block in _python(page))
  printed = page_code.run(code, _REPOSITORY, tmp_path).splitlines()
  text = ''.join((_REPOSITORY / page).read_text() for page in pages)
  # A table of 100 clients is not shown.
  shown = [line for line in printed if not re.fullmatch(r'[\w,]+,\w+', line)]
  assert shown
  for line in shown:
    assert f'\n    {line}\n' in text or f'prints `{line}`' in text, line


def _parts(page):
  """Heading -> the text below it, code blocks included."""
  path = _REPOSITORY / 'docs' / 'algorithms' / f'{page}.md'
  parts = re.split(r'(?m)^## (.*)$', path.read_text(encoding='utf-8'))
  return {'': parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def _defaults(entry):
  """Flag -> its default with an algorithm, of all flags of a run."""
  groups = [*config.groups(), config.own_group(entry)]
  defaults = {
    name: field.default
    for group in groups
    for name, field in group.named_fields()
  }
  defaults |= entry.run_defaults
  return {n: hparams.format_value(v) for n, v in defaults.items()}


def test_every_algorithm_has_a_page():
  names = sorted(sum(_pages_of_algorithms().values(), []))
  assert names == sorted(registry.REGISTRY)


@pytest.mark.parametrize('page', _OF_ALGORITHMS)
def test_pages_of_algorithms_have_one_form(page):
  parts = _parts(page)
  assert tuple(parts) == ('', *_HEADINGS)
  title, paper, command = parts[''].split('\n\n')[:3]
  assert title.startswith('# ')
  for name in _pages_of_algorithms()[page]:
    assert f'`--algorithm={name}`' in paper or f'`{name}`' in paper
  assert command.startswith('    python programs/train.py --')
  assert parts['A round'].lstrip().startswith(('```', 'Labels at the '))


@pytest.mark.parametrize('page', _OF_ALGORITHMS)
def test_pages_of_algorithms_have_all_flags(page):
  header = "| flag | here | paper | authors' code | meaning |"
  # Tables of variants may follow.
  table = _parts(page)['Flags'].partition(header)[2].partition('\n\n')[0]
  rows = [
    [cell.strip() for cell in line.split('|')[1:-1]]
    for line in [header, *table.splitlines()[1:]]
  ]
  assert {len(row) for row in rows} == {5}
  stated = {re.fullmatch('`--(.*)`', row[0])[1]: row[1] for row in rows[2:]}
  assert len(stated) == len(rows) - 2
  assert all(cell for row in rows[2:] for cell in row)
  own = set()
  for name in _pages_of_algorithms()[page]:
    entry = registry.REGISTRY[name]
    own |= {flag for flag, _ in config.own_group(entry).named_fields()}
    defaults = _defaults(entry)
    for flag in stated.keys() & defaults.keys():
      assert stated[flag] == defaults[flag], flag
    assert all('.' in flag for flag in stated.keys() - defaults.keys())
  assert {flag for flag in stated if '.' in flag} == own


@pytest.mark.parametrize('page', _OF_ALGORITHMS)
def test_pages_of_algorithms_name_tests_that_exist(page):
  checked = _parts(page)['How it was checked']
  folder = None
  files = re.findall(r'`((?:tests/[\w/]+/)?\w+_test\.py)`', checked)
  assert files
  for file in files:
    path = pathlib.PurePosixPath(file)
    # A bare name stands in the folder of the one before.
    folder = folder if path.parent == pathlib.PurePosixPath() else path.parent
    assert (_REPOSITORY / folder / path.name).is_file(), file


@pytest.mark.parametrize(
  'page', sorted(set(_OF_ALGORITHMS) - set(_OWN_FIGURES))
)
def test_figures_of_algorithms_are_in_the_results(page):
  results = _parts(page)['Our results']
  sections = _results(results)
  shown = re.sub(r'\]\([^)]*\)|Dirichlet\(0\.\d\)|\(\d+\.\d+\)', '', results)
  numbers = re.findall(r'(?<![\w.=])\d+\.\d+(?: ± \d+\.\d+)?', shown)
  assert len(numbers) > 3
  for number in numbers:
    assert number in sections, number
