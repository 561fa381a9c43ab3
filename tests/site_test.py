"""The documentation's site: every page is in it."""

import re

import site_reference

import tff_fssl
from tff_fssl.program import config


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
