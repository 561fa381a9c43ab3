import types

import numpy as np
import pytest

from tff_fssl.data import partition_draw
from tff_fssl.hparams import UsageError
from tff_fssl.program import config
from tff_fssl.program import inputs
from tff_fssl.program import output_tree
from tff_fssl.program import run_folder


def test_settings_say_what_is_evaluated():
  flags = ['--dataset=digits', '--num_validation=100', '--max_bad_rounds=7']
  task = types.SimpleNamespace(
    config=config.parse_config([*flags, '--num_labels=40']),
    data=types.SimpleNamespace(test=range(1_500)),
  )
  settings = run_folder.build_settings(task)
  assert settings.evaluated_on == '1,500 test and 100 validation examples'
  assert settings.max_bad_rounds == 7 and settings.first_round == -9


def test_another_partition_is_refused(tmp_path):
  tree = output_tree.OutputTree(str(tmp_path))
  tasks = []
  for seed in (0, 1):
    given = ['--dataset=digits', '--num_labels=40', f'--seed={seed}']
    settings = config.parse_config(given).partition_settings
    partition = partition_draw.build_partition(np.arange(1_000) % 10, settings)
    data = types.SimpleNamespace(class_names=tuple('abcdefghij'))
    digests = inputs.Inputs(data.class_names, {}, str(seed), {})
    tasks.append(
      types.SimpleNamespace(partition=partition, data=data, inputs=digests)
    )
  run_folder.check_data(tasks[1], tree)  # There is none yet.
  run_folder.record_data(tasks[0], tree)
  run_folder.check_data(tasks[0], tree)
  with pytest.raises(UsageError, match='partition.json is not the partition'):
    run_folder.check_data(tasks[1], tree)
