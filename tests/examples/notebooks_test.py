"""The notebooks run, and the outputs in them are those of their sources."""

import base64
import json

import pytest
import run_notebooks

_PATHS = sorted(run_notebooks.EXAMPLES.glob('*.ipynb'))
_MAX_PICTURE_BYTES = 200_000
# What tests run less of.
_SHORTER = {
  'ROUNDS = 20': 'ROUNDS = 2',
  'for seed in (0, 1)': 'for seed in (0,)',
}


@pytest.fixture(name='path', params=_PATHS, ids=lambda path: path.stem)
def _path(request):
  return request.param


def _outputs(notebook):
  return [o for cell in notebook['cells'] for o in cell.get('outputs', ())]


def _code(*cells):
  return {
    'metadata': {},
    'cells': [
      {'cell_type': 'code', 'source': cell.splitlines(keepends=True)}
      for cell in cells
    ],
  }


def test_there_are_notebooks():
  names = [path.stem for path in _PATHS]
  assert names == ['adding_an_algorithm', 'quick_start_and_results']


def test_outputs_are_in_step_with_the_sources(path):
  notebook = run_notebooks.read(path)
  assert run_notebooks.is_in_step(notebook), 'run tools/run_notebooks.py'
  notebook['cells'][1]['source'][0] += ' '
  assert not run_notebooks.is_in_step(notebook)


def test_outputs_are_small_and_of_no_particular_machine(path):
  notebook = run_notebooks.read(path)
  outputs = _outputs(notebook)
  pictures = [
    base64.b64decode(output['data']['image/png'])
    for output in outputs
    if 'image/png' in output.get('data', ())
  ]
  assert pictures
  assert sum(map(len, pictures)) < _MAX_PICTURE_BYTES
  text = json.dumps([output.get('text', '') for output in outputs])
  for folder in ('/tmp/', '/home/', '/root/', str(run_notebooks.EXAMPLES)):
    assert folder not in text
  assert 'Traceback' not in text
  for cell in notebook['cells']:
    assert max(map(len, cell['source'])) <= 81 or (
      cell['cell_type'] == 'markdown'
    )


@pytest.mark.slow
def test_it_runs(path, tmp_path, monkeypatch):
  notebook = run_notebooks.read(path)
  for name, value in run_notebooks.environment().items():
    monkeypatch.setenv(name, value)
  monkeypatch.chdir(tmp_path)
  expected = len(_outputs(notebook))
  source = json.dumps(notebook)
  for long, short in _SHORTER.items():
    source = source.replace(long, short)
  notebook = json.loads(source)
  run_notebooks.run(notebook)
  assert len(_outputs(notebook)) >= expected


def test_what_cells_put_out(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  notebook = _code(
    '%%writefile a.txt\nfirst',
    '%%writefile -a a.txt\n\nsecond {x}',
    'x = 3\nfor y in (1, 2):\n  !echo {x} \\\n    {y}\nprint("z")',
    '!cat a.txt',
    'x * 2',
    'import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\nNone',
    'import PIL.Image\nPIL.Image.new("L", (2, 2))',
  )
  run_notebooks.run(notebook)
  texts = [
    ''.join(o['text']) if o['output_type'] == 'stream' else o['data']
    for o in _outputs(notebook)
  ]
  assert texts[:5] == [
    'Writing a.txt\n',
    'Appending to a.txt\n',
    '3 1\n3 2\nz\n',
    'first\n\nsecond {x}\n',
    {'text/plain': ['6']},
  ]
  for data in texts[5:]:
    content = base64.b64decode(data['image/png'])
    assert content.startswith(b'\x89PNG')
  assert [c['execution_count'] for c in notebook['cells']] == [*range(1, 8)]
  assert run_notebooks.is_in_step(notebook)


def test_a_command_that_fails_is_an_error(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(RuntimeError, match='exit code 1'):
    run_notebooks.run(_code('!false | cat'))
