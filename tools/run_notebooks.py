"""Runs the notebooks of examples/ and writes their outputs into them.

Runs what Jupyter would run, as far as the notebooks use it: Python, lines that
begin with `!`, `%%writefile`, and the last expression, a picture or text. It
needs no kernel. Each notebook is run in an empty folder.

  python tools/run_notebooks.py [NOTEBOOK ...]
"""

import ast
import base64
from collections.abc import Sequence
import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / 'examples'
_WRITEFILE = re.compile(r'%%writefile (-a )?(\S+)\n')
_COMMAND = re.compile(r'(?m)^([ \t]*)!((?:.*\\\n)*.*)$')
# Where a notebook says which sources its outputs are of.
_SOURCES = 'sources_sha256'

Notebook = dict[str, Any]


def read(path: pathlib.Path) -> Notebook:
  """The notebook in a file."""
  return json.loads(path.read_text())


def digest(notebook: Notebook) -> str:
  """A digest of all that is not output."""
  cells = [(c['cell_type'], ''.join(c['source'])) for c in notebook['cells']]
  return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def is_in_step(notebook: Notebook) -> bool:
  """Whether the outputs are those of the sources that are there now."""
  return notebook['metadata'].get(_SOURCES) == digest(notebook)


def run(notebook: Notebook) -> None:
  """Runs all cells in the current folder, and puts their outputs in.

  Args:
    notebook: Changed in place.

  Raises:
    Exception: Whatever a cell raises; also if a command fails.
  """
  import matplotlib  # pylint: disable=import-outside-toplevel

  matplotlib.use('agg')
  namespace: dict[str, Any] = {'__name__': '__main__'}
  count = 0
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      count += 1
      cell['execution_count'] = count
      cell['outputs'] = _run_cell(''.join(cell['source']), namespace, count)
  notebook['metadata'][_SOURCES] = digest(notebook)


def _run_cell(
  source: str, namespace: dict[str, Any], count: int
) -> list[dict[str, Any]]:
  """The outputs of a cell."""
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    value = _execute(source, namespace)
  outputs: list[dict[str, Any]] = []
  if text := printed.getvalue():
    outputs.append(
      {'name': 'stdout', 'output_type': 'stream', 'text': _lines(text)}
    )
  outputs += [
    {'data': data, 'metadata': {}, 'output_type': 'display_data'}
    for data in _figures()
  ]
  if value is not None:
    outputs.append(
      {
        'data': _shown(value),
        'execution_count': count,
        'metadata': {},
        'output_type': 'execute_result',
      }
    )
  return outputs


def _execute(source: str, namespace: dict[str, Any]) -> Any:
  """Runs a cell; the value of its last expression, if it ends in one."""
  if match := _WRITEFILE.match(source):
    with open(match[2], 'a' if match[1] else 'w') as file:
      file.write(source[match.end() :].rstrip('\n') + '\n')
    print(f'{"Appending to" if match[1] else "Writing"} {match[2]}')
    return None
  source = _COMMAND.sub(
    lambda match: f'{match[1]}_shell({match[2]!r}, globals())', source
  )
  namespace['_shell'] = _shell
  body = ast.parse(source).body
  last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
  exec(compile(ast.Module(body, []), '<cell>', 'exec'), namespace)
  if not isinstance(last, ast.Expr):
    return None
  return eval(compile(ast.Expression(last.value), '<cell>', 'eval'), namespace)


def _shell(command: str, namespace: dict[str, Any]) -> None:
  """Runs a command, in which {NAME} is a variable, and prints its output."""
  known = {k: v for k, v in namespace.items() if not k.startswith('_')}
  done = subprocess.run(
    ['bash', '-o', 'pipefail', '-c', command.format(**known)],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  print(done.stdout, end='')
  if done.returncode:
    raise RuntimeError(f'{command}: exit code {done.returncode}\n{done.stdout}')


def _figures() -> list[dict[str, Any]]:
  """The open figures, which are closed."""
  from matplotlib import pyplot as plt  # pylint: disable=C0415

  shown = []
  for number in plt.get_fignums():
    content = io.BytesIO()
    plt.figure(number).savefig(content, format='png', bbox_inches='tight')
    shown.append(_png(content.getvalue()))
  plt.close('all')
  return shown


def _shown(value: Any) -> dict[str, Any]:
  """A value as a picture, if it can be one, else as text."""
  picture = getattr(value, '_repr_png_', None)
  if picture is not None:
    return _png(picture())
  return {'text/plain': _lines(repr(value))}


def _png(content: bytes) -> dict[str, Any]:
  return {'image/png': base64.b64encode(content).decode()}


def _lines(text: str) -> list[str]:
  return text.splitlines(keepends=True)


def environment() -> dict[str, str]:
  """Variables by which commands find this Python's programs and this tree."""
  folders = [os.path.dirname(sys.executable), os.environ.get('PATH', '')]
  return {
    'PATH': os.pathsep.join(folders),
    'PYTHONPATH': str(EXAMPLES.parent),
  }


def main(arguments: Sequence[str]) -> int:
  """Runs notebooks, each in a process of its own; the exit code."""
  paths = [pathlib.Path(a).resolve() for a in arguments]
  paths = paths or sorted(EXAMPLES.glob('*.ipynb'))
  if len(paths) > 1:
    codes = [
      subprocess.run([sys.executable, __file__, str(path)], check=False)
      for path in paths
    ]
    return max(code.returncode for code in codes)
  notebook = read(paths[0])
  os.environ.update(environment())
  with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    run(notebook)
    os.chdir(EXAMPLES)
  text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
  paths[0].write_text(text + '\n')
  print(f'{paths[0]}: {len(text):,} characters')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
