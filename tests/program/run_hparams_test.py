import importlib.util

import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.program import config
from tff_fssl.program import run_hparams


def _config(*argv):
  return config.parse_config(argv)


def test_figures():
  assert run_hparams.parse_figures('auroc,macro_f1,auroc') == (
    'auroc',
    'macro_f1',
  )
  with pytest.raises(UsageError, match="--metrics=auc: 'auc' is none; .*auroc"):
    _config('--metrics=auc')
  with pytest.raises(UsageError, match='--best_by=f1: allowed are accuracy, '):
    _config('--best_by=f1', '--num_validation=50')


def test_trackers(monkeypatch):
  assert run_hparams.parse_trackers('') == {}
  assert run_hparams.parse_trackers('mlflow:http://h:1/x,wandb:me/it') == {
    'mlflow': 'http://h:1/x',
    'wandb': 'me/it',
  }
  # A password is not printed.
  for text in (
    'mlflow:https://me:secret@h',
    'mlflow:postgresql://me:a/secret@h/db',
    'mlflow:http://h?token=secret',
  ):
    with pytest.raises(UsageError) as error:
      run_hparams.parse_trackers(text)
    assert 'secret' not in str(error.value)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UsageError, match='W.* is not installed; `make setup-tr'):
    _config('--track=wandb:it')
