"""Makes matplotlib's figures, as PNG files and as parts of a page.

On a page, their text takes the page's colour and font.
"""

from collections.abc import Iterator
import contextlib
import io
from typing import Any
from xml.etree import ElementTree

from tff_fssl import durable
from tff_fssl import files

# What is drawn in these colours gets the colour of the page's text: the first
# is drawn by `style`, the second, '0.3', is that of legends of `plots`.
_TEXT = '#010203'
_CURRENT = (_TEXT, '#4c4c4c')


def new_figure(
  width: float, height: float, *grid: int, adapts: bool = True
) -> tuple[Any, Any]:
  """Makes a figure without pyplot, which would choose a window system.

  Args:
    width: Inches.
    height: Inches.
    *grid: Rows and columns of diagrams, by default one diagram.
    adapts: Whether the layout adapts to labels, the slowest part of drawing.

  Returns:
    (the figure, its axes).
  """
  from matplotlib import figure  # pylint: disable=import-outside-toplevel

  canvas = figure.Figure(
    figsize=(width, height), layout='constrained' if adapts else None
  )
  return canvas, canvas.subplots(*grid, squeeze=not grid)


def save_png(canvas: Any, path: str) -> None:
  """Writes a figure as a PNG file, or raises `UsageError`."""
  content = io.BytesIO()
  canvas.savefig(content, dpi=110, format='png')
  durable.write_file(path, [content.getvalue()])


@contextlib.contextmanager
def style() -> Iterator[None]:
  """Gives figures that are made within it a style that suits any page."""
  import matplotlib  # pylint: disable=import-outside-toplevel

  colored = ('axes.edgecolor', 'axes.labelcolor', 'text.color')
  ticks = ('xtick.color', 'ytick.color', 'grid.color')
  values: dict[Any, Any] = {
    **dict.fromkeys((*colored, *ticks), _TEXT),
    'figure.facecolor': 'none',
    'axes.facecolor': 'none',
    'savefig.facecolor': 'none',
    'legend.facecolor': 'none',
    # Text stays text: it takes the page's font, and can be searched.
    'svg.fonttype': 'none',
    # A class may be called '$x'.
    'text.parse_math': False,
  }
  with matplotlib.rc_context(values):
    yield


def render(figure: Any, name: str, label: str) -> str:
  """Renders a figure as the text of an SVG element, for HTML.

  Args:
    figure: A matplotlib figure, made within `style`.
    name: Distinguishes it from others of the page: letters, digits, '-'.
    label: A description, for those who do not see it.

  Returns:
    The element, without ids that another one of the page may have.
  """
  import matplotlib  # pylint: disable=import-outside-toplevel

  content = io.BytesIO()
  with style(), matplotlib.rc_context({'svg.hashsalt': name}):
    nothing = dict.fromkeys(('Creator', 'Date', 'Format', 'Type'))
    figure.savefig(content, format='svg', metadata=nothing)
  # XML has no control characters, but a class may be called so.
  root = ElementTree.fromstring(
    files.printable(content.getvalue().decode(), lines=True)
  )
  for element in root.iter():
    element.tag = element.tag.rpartition('}')[2]
    for key in list(element.attrib):
      value = element.attrib.pop(key)
      # HTML needs no name spaces. References keep what they refer to.
      key = key.rpartition('}')[2]
      if key == 'id':
        # Ids of two pictures of a page must differ.
        value = f'{name}-{value}'
      elif key == 'href':
        value = value.replace('#', f'#{name}-', 1)
      else:
        value = value.replace('url(#', f'url(#{name}-')
        for color in _CURRENT:
          value = value.replace(color, 'currentColor')
      element.set(key, value)
  for element in list(root):
    if element.tag == 'metadata':
      root.remove(element)
  # Screen readers read the label instead of the picture's parts.
  root.attrib.update({'role': 'img', 'aria-label': label})
  # The page's style sets the size.
  del root.attrib['width'], root.attrib['height']
  root.tail = None
  return ElementTree.tostring(root, encoding='unicode')
