"""The layers and the rules of code, held by the syntax trees of the sources."""

import ast
import graphlib
import io
import tokenize

import pytest
import source_tree

from tff_fssl.algorithms import registry

# A module imports from its own layer and from those before it.
_LAYERS = (
  ('tff_fssl',),
  ('data',),
  ('models',),
  ('semisup',),
  ('interface',),
  ('client',),
  ('aggregators',),
  ('rounds', 'algorithms'),
  ('program',),
  ('programs',),
)
_RANK = {name: rank for rank, names in enumerate(_LAYERS) for name in names}
_WITHOUT_FEDERATED = (
  'tff_fssl',
  'data',
  'models',
  'semisup',
  'interface',
  'client',
)
_TENSORFLOW = {
  'keras',
  'tensorflow',
  'tensorflow_datasets',
  'tensorflow_federated',
}
# Besides all that say so in their first lines, and all `*_hparams`.
_TENSORFLOW_FREE = (
  'tff_fssl.hparams',
  'tff_fssl.algorithms.registry',
  'tff_fssl.data.names',
  'tff_fssl.models.names',
)
_MAX_INTERFACE_LINES = 300
_MAX_PROGRAM_LINES = 9
_MAX_FUNCTION_LINES = 80


@pytest.fixture(scope='module')
def tree(repository):
  return source_tree.SourceTree(repository)


def _package_sources(tree):
  return [
    source
    for source in tree.sources.values()
    if source.path.startswith(('tff_fssl/', 'programs/'))
  ]


def _layer(module):
  """'data' of tff_fssl.data.x; 'tff_fssl' of tff_fssl.hparams."""
  parts = module.split('.')
  is_layer = len(parts) > 1 and (parts[1] in _RANK or parts[1] == 'runtime')
  return parts[1] if parts[0] == 'tff_fssl' and is_layer else parts[0]


def _top_level_names(modules):
  return {module.partition('.')[0] for module in modules}


def _code_lines(text):
  """Lines that hold code: not blank, comment, docstring or import."""
  ignored = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
  }
  lines = set()
  tokens = tokenize.generate_tokens(io.StringIO(text).readline)
  for token in tokens:
    if token.type not in ignored:
      lines.update(range(token.start[0], token.end[0] + 1))
  for node in ast.walk(ast.parse(text)):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, kinds) and ast.get_docstring(node, clean=False):
      docstring = node.body[0]
      lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
      lines -= set(range(node.lineno, node.end_lineno + 1))
  return len(lines)


def test_code_lines_count_code_only():
  text = (
    '"""Doc.\n\nMore."""\n\n# Why.\nx = """a\nb"""\n\ndef f():\n  """D."""\n'
  )
  assert _code_lines(text) == 3


def test_layers_import_from_the_left_only(tree):
  wrong = [
    f'{source.path} imports {module}'
    for source in _package_sources(tree)
    for module in tree.imports(source)
    if module in tree.sources
    and 'runtime' not in (_layer(module), _layer(source.module))
    and (
      _RANK[_layer(module)] > _RANK[_layer(source.module)]
      or (
        _RANK[_layer(module)] == _RANK[_layer(source.module)]
        and _layer(module) != _layer(source.module)
      )
    )
  ]
  assert not wrong


def test_no_modules_of_the_program_import_each_other(tree):
  """Counts imports within functions, too."""
  above = {
    source.module: {m for m in tree.imports(source) if m in tree.sources}
    for source in _package_sources(tree)
    if _layer(source.module) == 'program'
  }
  try:
    graphlib.TopologicalSorter(above).prepare()
  except graphlib.CycleError as e:
    pytest.fail(' -> '.join(e.args[1]))


def test_only_its_command_knows_the_federation(tree):
  for source in _package_sources(tree):
    if '/program/deploy' not in source.path:
      deploy = [m for m in tree.imports(source) if '.program.deploy.' in m]
      assert not deploy, source.path


def test_every_package_is_a_layer(tree):
  packages = {
    s.module.split('.')[1]
    for s in tree.sources.values()
    if s.path.startswith('tff_fssl/') and s.path.count('/') > 1
  }
  assert packages <= _RANK.keys() | {'runtime'}


def test_runtime_knows_nothing_of_fssl_and_only_programs_know_it(tree):
  for source in _package_sources(tree):
    layers = {_layer(m) for m in tree.imports(source) if m in tree.sources}
    if _layer(source.module) == 'runtime':
      assert layers <= {'runtime', 'tff_fssl'}, source.path
    elif 'runtime' in layers:
      assert _layer(source.module) in ('program', 'programs'), source.path


def test_local_layers_do_not_import_tff(tree):
  for source in _package_sources(tree):
    is_without = _layer(source.module) in _WITHOUT_FEDERATED
    if is_without and source.module != 'tff_fssl.lazy':
      imported = _top_level_names(tree.imports(source))
      assert 'tensorflow_federated' not in imported, source.path


def _loaded(tree, module):
  """All that importing a module imports, but within functions."""
  seen, todo = set(), [module]
  while todo:
    name = todo.pop()
    if name not in seen:
      seen.add(name)
      if name in tree.sources:
        todo.extend(tree.imports(tree.sources[name], deferred=False))
  return seen


def test_modules_for_flags_are_free_of_tensorflow(tree):
  claimed = [
    source.module
    for source in _package_sources(tree)
    if 'tensorflow-free' in (ast.get_docstring(source.tree) or '').lower()
    or source.module.endswith('hparams')
  ]
  for module in {*_TENSORFLOW_FREE, *claimed}:
    loaded = _top_level_names(_loaded(tree, module))
    assert not loaded & _TENSORFLOW, module


def test_programs_check_flags_before_tensorflow(tree):
  for source in tree.sources.values():
    if source.folder == 'programs':
      loaded = _top_level_names(_loaded(tree, source.module))
      assert not loaded & _TENSORFLOW, source.path


def _papers():
  """The module of each algorithm: a file, or the folder that holds it."""
  return {a.hparams.__module__ for a in registry.REGISTRY.values()}


def test_papers_do_not_import_each_other(tree):
  papers = _papers()
  # The baselines without federation are others' clients.
  alone = 'tff_fssl.algorithms.local_training'
  assert alone in papers and len(papers) > 5
  for source in _package_sources(tree):
    paper = next((p for p in papers if source.module.startswith(p)), None)
    if paper is not None and paper != alone:
      others = {
        module
        for module in tree.imports(source)
        if any(module.startswith(p) for p in papers - {paper})
      }
      assert not others, source.path


def test_machinery_imports_no_paper(tree):
  papers = _papers()
  for source in _package_sources(tree):
    if _layer(source.module) in ('program', 'programs', 'algorithms'):
      continue
    imported = {
      module
      for module in tree.imports(source)
      if any(module.startswith(p) for p in papers)
    }
    assert not imported, source.path


def test_the_interface_is_short(tree):
  lines = _code_lines(tree.sources['tff_fssl.interface.base'].text)
  assert lines <= _MAX_INTERFACE_LINES


def test_graphs_are_traced_without_autograph(tree):
  wrong = [
    f'{source.path}:{node.lineno}'
    for source in _package_sources(tree)
    for node in ast.walk(ast.parse(source.text))
    if isinstance(node, (ast.Call, ast.FunctionDef))
    for call in getattr(node, 'decorator_list', [node])
    if ast.unparse(call).startswith('tf.function')
    and 'autograph=False' not in ast.unparse(call)
  ]
  assert not wrong, 'see loops.py'


def test_what_is_printed_is_cleaned(tree):
  """`console.show` escapes what a name in a file may hold."""
  allowed = {
    'tff_fssl.program.console',
    'tff_fssl.program.main',  # To standard error, cleaned.
  }
  found = {
    source.module
    for source in _package_sources(tree)
    for node in ast.walk(source.tree)
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Name)
    and node.func.id == 'print'
  }
  assert found == allowed


def test_programs_are_wiring_only(tree):
  programs = [s for s in tree.sources.values() if s.folder == 'programs']
  assert programs
  logic = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.Try)
  for source in programs:
    assert _code_lines(source.text) <= _MAX_PROGRAM_LINES, source.path
    assert not [n for n in ast.walk(source.tree) if isinstance(n, logic)]


def _long_functions(text, most):
  """Names of functions whose signature, docstring and body exceed `most`."""
  return [
    node.name
    for node in ast.walk(ast.parse(text))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    and node.end_lineno - node.lineno + 1 > most
  ]


def test_lines_of_functions_include_signature_and_docstring():
  text = (
    '@a\ndef f(\n  x,\n):\n  """D.\n  """\n\n  return x\n\n'
    'class C:\n  async def g(self):\n    def h():\n      pass\n    h()\n'
  )
  assert _long_functions(text, 6) == ['f']
  assert _long_functions(text, 7) == []
  assert sorted(_long_functions(text, 3)) == ['f', 'g']


def test_functions_fit_on_a_page(tree):
  places = ('tff_fssl/', 'programs/', 'benchmarks/', 'tools/')
  found = {
    (source.path, name)
    for source in tree.sources.values()
    if source.path.startswith(places)
    for name in _long_functions(source.text, _MAX_FUNCTION_LINES)
  }
  assert not found


def _public_functions(body):
  """Public functions, and public or `__init__` methods of public classes."""
  for node in body:
    if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
      yield from _public_functions(node.body)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      if not node.name.startswith('_') or node.name == '__init__':
        yield node


def _missing_annotations(function):
  arguments = function.args
  named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
  every = [*named, arguments.vararg, arguments.kwarg]
  missing = [
    a.arg
    for a in every
    if a and a.annotation is None and a.arg not in ('self', 'cls')
  ]
  if function.returns is None and function.name != '__init__':
    missing.append('return')
  return missing


def test_public_functions_are_annotated(tree):
  wrong = [
    f'{source.path}:{function.lineno} {function.name}: {missing}'
    for source in _package_sources(tree)
    for function in _public_functions(source.tree.body)
    if (missing := _missing_annotations(function))
  ]
  assert not wrong
