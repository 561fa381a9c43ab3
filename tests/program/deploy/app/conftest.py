"""The app's modules, as they are in an app."""

import importlib
import sys
import types

import fake_flwr
import pytest

from tff_fssl.runtime import artefact


@pytest.fixture(name='app')
def _app(monkeypatch):
  """The modules of the app, by name."""
  fake_flwr.install(monkeypatch)
  package = types.ModuleType('fssl_app')
  package.__path__ = []
  monkeypatch.setitem(sys.modules, 'fssl_app', package)
  monkeypatch.setitem(sys.modules, 'fssl_app.artefact', artefact)
  modules = types.SimpleNamespace(artefact=artefact)
  for name in (
    'work',
    'wire',
    'readers',
    'load_client',
    'client_app',
    'server_app',
  ):
    own = f'tff_fssl.program.deploy.app.{name}'
    monkeypatch.delitem(sys.modules, own, raising=False)
    module = importlib.import_module(own)
    monkeypatch.setitem(sys.modules, f'fssl_app.{name}', module)
    monkeypatch.setattr(package, name, module, raising=False)
    setattr(modules, name, module)
    monkeypatch.delitem(sys.modules, own)
  return modules
