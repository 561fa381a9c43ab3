"""The documentation's site: every page is in it, and nothing is loaded."""

import json
import re

import check_site
import pytest
import site_reference

import tff_fssl
from tff_fssl.program.configuration import config

_CLEAN = '<html><link rel="icon" href="x.png"><a href="https://x.org">x</a>'


def test_the_navigation_has_every_page_once(repository):
  text = (repository / 'mkdocs.yml').read_text()
  navigation = text.partition('\nnav:\n')[2].partition('\n\n')[0]
  listed = re.findall(r'(?m): (\S+\.md)$', navigation)
  folder = repository / 'docs'
  pages = [p.relative_to(folder).as_posix() for p in folder.rglob('*.md')]
  others = [page for page in listed if page not in pages]
  assert sorted(listed) == sorted({*pages, *others})
  assert sorted(others) == [
    'changelog.md',
    'contributing.md',
    'reference/api.md',
    'reference/flags.md',
    'reference/index.md',
  ]


def test_flags_have_a_heading_each():
  page = site_reference.flags_page()
  for group in config.groups():
    for name, _ in group.named_fields():
      assert len(re.findall(rf'(?m)^#### `--{re.escape(name)}=', page)) >= 1
      assert page.count(f'{{: #{name} }}') == 1, name
  anchors = re.findall(r'\{: #(\S+) \}', page)
  assert len(anchors) == len(set(anchors))


def test_exported_names_have_a_heading_each():
  page = site_reference.api_page()
  headings = re.findall(r'(?m)^      heading: fssl\.(\w+)$', page)
  assert sorted(headings) == sorted(tff_fssl._EXPORTED)


def _site(folder, page, styles=''):
  (folder / 'search').mkdir(parents=True)
  (folder / 'index.html').write_text(page)
  (folder / 'site.css').write_text(styles)
  index = {'docs': [{'location': ''}]}
  (folder / 'search' / 'search_index.json').write_text(json.dumps(index))
  return folder


def test_links_to_elsewhere_are_no_problem(tmp_path):
  site = _site(tmp_path / 'site', _CLEAN, 'a { background: url(data:x) }')
  assert not list(check_site.problems(site))


@pytest.mark.parametrize(
  'page',
  [
    '<script src="https://x.org/x.js"></script>',
    '<link rel="stylesheet" href="//x.org/x.css">',
    '<link rel="preconnect" href="https://x.org">',
    '<img src="http://x.org/x.png">',
    '<img srcset="a.png 1x, https://x.org/x.png 2x">',
    '<style>@import "https://x.org/x.css";</style>',
    '<p style="background: url(https://x.org/x.png)">',
    '<pre class="mermaid">',
  ],
)
def test_what_is_loaded_from_elsewhere_is_found(page, tmp_path):
  (problem,) = check_site.problems(_site(tmp_path / 'site', _CLEAN + page))
  assert problem.startswith('index.html: ')


def test_fonts_from_elsewhere_are_found(tmp_path):
  styles = '@font-face { src: url("https://x.org/x.woff2") }'
  (problem,) = check_site.problems(_site(tmp_path / 'site', _CLEAN, styles))
  assert 'site.css' in problem


def test_pages_that_search_does_not_find_are_found(tmp_path):
  site = _site(tmp_path / 'site', _CLEAN)
  (site / 'other').mkdir()
  (site / 'other' / 'index.html').write_text(_CLEAN)
  (problem,) = check_site.problems(site)
  assert problem.startswith('other/: ')
