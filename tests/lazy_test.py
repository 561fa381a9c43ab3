import subprocess
import sys

import pytest

from tff_fssl import lazy


def _run(script):
  subprocess.run([sys.executable, '-c', script], check=True)


def test_a_module_is_imported_when_an_attribute_is_read():
  _run(
    'import sys\n'
    'from tff_fssl import lazy\n'
    'module = lazy.LazyImport("colorsys")\n'
    'assert "colorsys" not in sys.modules\n'
    'assert module.rgb_to_hsv(0, 0, 0) == (0, 0, 0)\n'
    'assert "colorsys" in sys.modules\n'
    'assert "rgb_to_hsv" in vars(module)\n'
  )


def test_an_unknown_attribute_is_an_attribute_error():
  module = lazy.LazyImport('colorsys')
  with pytest.raises(AttributeError, match='no_such_name'):
    module.no_such_name  # noqa: B018


def test_probing_for_special_names_imports_nothing():
  _run(
    'import sys\n'
    'from tff_fssl import lazy\n'
    'module = lazy.LazyImport("colorsys")\n'
    'assert not hasattr(module, "__wrapped__")\n'
    'assert "colorsys" not in sys.modules\n'
  )


def test_a_missing_package_is_an_import_error():
  with pytest.raises(ModuleNotFoundError, match='no_such_package'):
    lazy.LazyImport('no_such_package').name  # noqa: B018
