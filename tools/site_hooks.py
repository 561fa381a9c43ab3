"""Hooks of mkdocs.yml: pages that are generated, or stand outside of docs/."""

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure import files as mkdocs_files
import site_reference

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
# Page of the site -> its file in the repository.
_ELSEWHERE = {
  'changelog.md': 'CHANGELOG.md',
  'contributing.md': 'CONTRIBUTING.md',
}
# Page of the site -> what makes it.
_GENERATED = {
  'reference/api.md': site_reference.api_page,
  'reference/flags.md': site_reference.flags_page,
  'reference/index.md': site_reference.index_page,
}
# Folders whose files readers can download from the site.
_COPIED = ('examples',)
# Files of the repository that the site does not have: links become texts.
_LEFT_OUT = ('README.md', 'LICENSE')
# What each page loads.
_ASSETS = ('site.css', 'site.js')
# Beginning of a page's name -> how much it counts in a search: guides first.
_BOOSTS = {
  'changelog': 0.2,
  'contributing': 0.2,
  'reference/api': 0.2,
  'results/': 0.5,
  'decisions/': 0.5,
  'reference/': 0.7,
}
# Code blocks, code in a line, or a link (whose text may be code).
_CODE_OR_LINK = re.compile(
  r'(?ms)^```.*?^```|\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)|`[^`\n]*`'
)


def on_files(files: Any, config: Any) -> Any:
  """Adds the pages that are not in docs/, and what they need."""

  def add(name: str, **content: Any) -> None:
    files.append(mkdocs_files.File.generated(config, name, **content))

  for name, path in _ELSEWHERE.items():
    add(name, content=(_REPOSITORY / path).read_text(encoding='utf-8'))
  for name, make in _GENERATED.items():
    add(name, content=make())
  for folder in _COPIED:
    for file in sorted((_REPOSITORY / folder).iterdir()):
      if file.is_file():
        add(f'{folder}/{file.name}', abs_src_path=str(file))
  for name in _ASSETS:
    add(f'assets/{name}', abs_src_path=str(_REPOSITORY / 'tools' / name))
  return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Makes links within the repository those within the site."""
  name = page.file.src_uri
  for beginning, boost in _BOOSTS.items():
    if name.startswith(beginning):
      page.meta.setdefault('search', {'boost': boost})
  if name in _GENERATED:
    return markdown
  source = _ELSEWHERE.get(name, f'docs/{name}')

  def replace(match: re.Match[str]) -> str:
    target = match['target']
    # In a table, GitHub needs `\\|` in code, which Python-Markdown shows so.
    if target is None and match[0][0] == '`' and '\n' not in match[0]:
      return match[0].replace('\\|', '|')
    if target is None or '://' in target or target.startswith('#'):
      return match[0]
    path, hash_sign, anchor = target.partition('#')
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if path in _LEFT_OUT:
      return match['text']
    link = posixpath.relpath(_in_site(path), posixpath.dirname(name) or '.')
    text = match['text']
    if text.endswith('.md') and path.endswith(text) and not anchor:
      text = _title(path)
    return f'[{text}]({link}{hash_sign}{anchor})'

  return _CODE_OR_LINK.sub(replace, markdown)


def _title(path: str) -> str:
  """Reads a page's title: its file's name means nothing on the site."""
  file = _REPOSITORY / path
  first = file.read_text(encoding='utf-8').partition('\n')[0]
  return first.removeprefix('# ')


def _in_site(path: str) -> str:
  """Returns the file of the site for one of the repository.

  Args:
    path: Its path in the repository. If the site does not have it, the link is
      a broken one, with which `mkdocs build --strict` fails.

  Returns:
    Its path in the site's sources.
  """
  for name, source in _ELSEWHERE.items():
    if source == path:
      return name
  return path.removeprefix('docs/')
