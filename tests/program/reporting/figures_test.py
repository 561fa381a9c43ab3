"""Diagrams of a page."""

from xml.etree import ElementTree

from matplotlib import figure

from tff_fssl.program.reporting import figures


def _draw(name, label='what', title='x'):
  with figures.style():
    canvas = figure.Figure(figsize=(3, 2))
    axes = canvas.subplots()
    axes.plot([1, 2, 3], marker='o')
    axes.plot([3, 2, 1], color='0.3')  # As in legends of `plots`.
    axes.fill_between([0, 1, 2], [1, 2, 3])
    axes.set_title(title)
  return figures.render(canvas, name, label)


def test_text_has_the_color_of_the_page():
  text = _draw('a')
  assert 'currentColor' in text and '#010203' not in text
  assert '#4c4c4c' not in text
  assert '<text' in text and 'metadata' not in text


def test_a_diagram_is_the_same_every_time_and_shares_no_id():
  first, second = _draw('a'), _draw('b')
  assert first == _draw('a')

  def ids(text):
    root = ElementTree.fromstring(text)
    return [e.get('id') for e in root.iter() if e.get('id')]

  assert len(ids(first)) == len(set(ids(first)))
  assert not set(ids(first)) & set(ids(second))


def test_control_characters_are_escaped():
  text = _draw('a', title='a\x1b[31m\x01\u202eb\nc')
  root = ElementTree.fromstring(text)
  shown = {e.text for e in root.iter() if e.text}
  assert {'a\\x1b[31m\\x01\\u202eb', 'c'} <= shown


def test_references_lead_to_what_is_there():
  root = ElementTree.fromstring(_draw('a'))
  ids = {e.get('id') for e in root.iter()}
  used = [e.get('href') for e in root.iter() if e.tag == 'use']
  clips = [e.get('clip-path') for e in root.iter() if e.get('clip-path')]
  assert used and clips
  assert {href[1:] for href in used} <= ids
  assert {clip[len('url(#') : -1] for clip in clips} <= ids


def test_texts_are_texts():
  text = _draw('a', label='a "<b>', title='$x <script>')
  root = ElementTree.fromstring(text)
  assert root.get('aria-label') == 'a "<b>' and root.get('role') == 'img'
  assert '<script>' not in text
  assert '$x <script>' in {e.text for e in root.iter() if e.text}
