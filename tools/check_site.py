"""Checks a built site: it loads nothing from elsewhere, and search has pages.

Usage: check_site.py FOLDER
"""

from collections.abc import Iterator
import html.parser
import json
import pathlib
import re
import sys

# Elements that load what an attribute names. Of links, `rel` decides.
_LOADING = {
  'audio': ('src',),
  'embed': ('src',),
  'iframe': ('src',),
  'img': ('src', 'srcset'),
  'input': ('src',),
  'object': ('data',),
  'script': ('src',),
  'source': ('src', 'srcset'),
  'track': ('src',),
  'video': ('src', 'poster'),
}
# Links that only name another page.
_NAMES = {'alternate', 'canonical', 'next', 'prev'}
_OUTSIDE = re.compile(r'(?i)(^|[\s,])(https?:)?//')
_IN_STYLES = re.compile(
  r'(?i)(?:url\(\s*[\'"]?|@import\s+[\'"])((?:https?:)?//[^\'")\s]+)'
)
# Material's script loads more for these.
_LOADED_FOR = {
  'class="mermaid"': 'a diagram, for which a script is loaded',
  'data-md-component="source"': 'a repository, whose facts are loaded',
}


class _Page(html.parser.HTMLParser):
  """Collects what a page loads from elsewhere."""

  def __init__(self) -> None:
    super().__init__()
    self.found: list[str] = []
    self._is_style = False

  def handle_starttag(
    self, tag: str, attrs: list[tuple[str, str | None]]
  ) -> None:
    given = {name: value or '' for name, value in attrs}
    names = _LOADING.get(tag, ())
    if tag == 'link' and not _NAMES & set(given.get('rel', '').split()):
      names = ('href',)
    for name in names:
      if _OUTSIDE.search(given.get(name, '')):
        self.found.append(f'<{tag} {name}={given[name]}>')
    self.found += _IN_STYLES.findall(given.get('style', ''))
    self._is_style = tag == 'style'

  def handle_endtag(self, tag: str) -> None:
    self._is_style = False

  def handle_data(self, data: str) -> None:
    if self._is_style:
      self.found += _IN_STYLES.findall(data)


def problems(folder: pathlib.Path) -> Iterator[str]:
  """Finds what is wrong with a built site.

  Args:
    folder: The site.

  Yields:
    One line for each problem.
  """
  pages = sorted(folder.rglob('*.html'))
  if not (folder / 'index.html').is_file():
    yield f'{folder}: there is no index.html'
  for path in pages:
    text = path.read_text(encoding='utf-8')
    page = _Page()
    page.feed(text)
    name = path.relative_to(folder)
    for found in page.found:
      yield f'{name}: is loaded from elsewhere: {found}'
    for sign, what in _LOADED_FOR.items():
      if sign in text:
        yield f'{name}: has {what}'
  for path in sorted(folder.rglob('*.css')):
    for found in _IN_STYLES.findall(path.read_text(encoding='utf-8')):
      yield f'{path.relative_to(folder)}: is loaded from elsewhere: {found}'
  yield from _search_problems(folder, pages)


def _search_problems(
  folder: pathlib.Path, pages: list[pathlib.Path]
) -> Iterator[str]:
  index = folder / 'search' / 'search_index.json'
  if not index.is_file():
    yield f'{index.relative_to(folder)}: is missing'
    return
  entries = json.loads(index.read_text(encoding='utf-8'))['docs']
  found = {entry['location'].partition('#')[0] for entry in entries}
  for path in pages:
    name = path.relative_to(folder).as_posix().removesuffix('index.html')
    if name not in found and name != '404.html':
      yield f'{name}: search does not find it'


def main(folder: str) -> int:
  """Prints the problems of a site.

  Args:
    folder: The site.

  Returns:
    The exit code: 1 if there is a problem.
  """
  path = pathlib.Path(folder)
  found = list(problems(path))
  for problem in found:
    print(f'error: {problem}', file=sys.stderr)
  if not found:
    size = sum(f.stat().st_size for f in path.rglob('*') if f.is_file())
    print(
      f'{folder}: {len(list(path.rglob("*.html")))} pages,'
      f' {size / 1e6:.1f} MB, nothing loaded from elsewhere'
    )
  return bool(found)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1]))
