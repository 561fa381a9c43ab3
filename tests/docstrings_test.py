"""Docstrings' examples print what they say, and entry points have them."""

import ast
import doctest
import pathlib

import contexts
import pytest
import source_tree

import tff_fssl

_context = contexts.of_each_module(simulate_secure_aggregation=True)

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# The heading that the site shows as code.
_HEADING = 'Examples:'
# They take a process or what one has learned, which takes a dozen lines to
# make: `build_process` and docs/ have the examples.
_OF_A_PROCESS = {
  'build_data_source',
  'build_evaluation_process',
  'build_weights_evaluation',
  'get_map_reduce_form',
  'whole_model',
}


def _public(body, prefix):
  """Full names of public functions, classes and methods, with their nodes."""
  for node in body:
    if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and node.name[0] != '_':
      name = f'{prefix}.{node.name}'
      yield name, node
      if isinstance(node, ast.ClassDef):
        yield from _public(node.body, name)


_NODES = {
  name: node
  for source in source_tree.SourceTree(_REPOSITORY).sources.values()
  if source.path.startswith('tff_fssl/')
  for name, node in _public(source.tree.body, source.module)
}
_DOCSTRINGS = {
  name: ast.get_docstring(node) or '' for name, node in _NODES.items()
}
_WITH_EXAMPLES = [name for name, text in _DOCSTRINGS.items() if '>>>' in text]


def _run(text, name='x'):
  """How many examples there are, and what is wrong with them.

  Examples import all that they use.
  """
  test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
  wrong = []
  results = doctest.DocTestRunner().run(test, out=wrong.append)
  return results.attempted, ''.join(wrong)


def _assert_have_examples(names):
  functions = {n for n in names if isinstance(_NODES[n], _FUNCTIONS)}
  assert len(functions) > 8
  assert not sorted(functions - {*_WITH_EXAMPLES})


@pytest.mark.parametrize('name', _WITH_EXAMPLES)
def test_it_prints_what_it_says(name):
  attempted, wrong = _run(_DOCSTRINGS[name], name)
  assert attempted and not wrong, wrong


@pytest.mark.parametrize('name', _WITH_EXAMPLES)
def test_it_is_shown_as_code(name):
  before, _, examples = _DOCSTRINGS[name].partition(f'\n{_HEADING}\n')
  assert '>>>' in examples and '>>>' not in before


def test_functions_of_losses_have_an_example():
  _assert_have_examples(
    name
    for name in _NODES
    if name.startswith('tff_fssl.semisup.') and name.count('.') == 3
  )


def test_exported_functions_have_an_example():
  exported = tff_fssl._EXPORTED
  assert _OF_A_PROCESS <= exported.keys()
  names = {f'{exported[n]}.{n}' for n in exported.keys() - _OF_A_PROCESS}
  _assert_have_examples(names & _NODES.keys())


def test_wrong_examples_are_found():
  text = 'Adds.\n\nExamples:\n  >>> {}\n  2\n'
  assert _run(text.format('1 + 1')) == (1, '')
  assert 'Got:\n    3' in _run(text.format('1 + 2'))[1]
  assert "name 'tf' is not defined" in _run(text.format('tf'))[1]
