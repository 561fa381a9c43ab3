"""The choice of a runtime, of devices and of threads."""

import os

import pytest
import tensorflow as tf

from tff_fssl import hparams
from tff_fssl import runtime
from tff_fssl.runtime import devices


def test_auto_is_the_cpu_where_there_is_no_gpu():
  expected = [d.name for d in tf.config.list_logical_devices('GPU')]
  assert devices.resolve_client_devices('auto') == (
    expected or ['/device:CPU:0']
  )


def test_names_may_be_repeated():
  assert devices.resolve_client_devices('CPU:0, cpu') == ['/device:CPU:0'] * 2


@pytest.mark.parametrize('name', ['gpu:9', 'cpu:0,tpu:0', '', 'gqu'])
def test_a_missing_device_names_those_that_exist(name):
  with pytest.raises(hparams.UsageError) as error:
    devices.resolve_client_devices(name)
  assert 'cpu:0' in str(error.value)
  assert f'--client_devices={name}' in str(error.value)


@pytest.mark.parametrize(
  'flags, names, emulates',
  [
    ('fma avx2 avx512f', ['cpu:0'], True),
    ('fma avx2 avx512f', ['/device:GPU:0', '/device:CPU:0'], True),
    ('fma avx2 avx512f', ['/device:GPU:0'], False),
    ('avx512f avx512_bf16', ['/device:CPU:0'], False),
    ('avx512f amx_bf16', ['/device:CPU:0'], False),
  ],
)
def test_emulated_bfloat16(flags, names, emulates, tmp_path, monkeypatch):
  path = tmp_path / 'cpuinfo'
  path.write_text(f'processor\t: 0\nflags\t\t: {flags}\n')
  monkeypatch.setattr(devices, '_CPU_INFO', str(path))
  assert devices.is_bfloat16_emulated(names) == emulates


def test_threads(monkeypatch):
  gpus = ['/device:GPU:0', '/device:GPU:1']
  assert devices.resolve_client_threads(0, gpus) == 2
  assert devices.resolve_client_threads(0, gpus[:1]) == 1
  # A container, or `taskset`, may have fewer cores than the machine.
  for cores, threads in (({3}, 1), ({0, 3}, 2), ({0, 1, 2}, 2)):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _, c=cores: c)
    assert devices.resolve_client_threads(0, ['/device:CPU:0']) == threads
  assert devices.resolve_client_threads(5, gpus) == 5
  with pytest.raises(hparams.UsageError, match='--client_threads=-1'):
    devices.resolve_client_threads(-1, gpus)


def test_an_unknown_runtime_names_those_known():
  with pytest.raises(hparams.UsageError, match="did you mean 'in_process'"):
    runtime.build_context(runtime.Settings('inprocess'))
  with pytest.raises(hparams.UsageError, match='in_process, tff_worker'):
    runtime.build_async_context(runtime.Settings('remote'))


def test_tffs_worker_takes_no_gpu():
  with pytest.raises(hparams.UsageError, match='CPU only'):
    runtime.build_context(
      runtime.Settings('tff_worker', client_devices='gpu:0')
    )
