"""The files of checkpoints; tests of the manager have those of folders."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tff_fssl.program.storage import checkpoint


@hypothesis.given(st.data())
@hypothesis.settings(
  max_examples=150, deadline=None, derandomize=True, database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_of_whatever_edit_a_checkpoint_is_refused(tmp_path, data):
  """No edit is read as if nothing were, and none raises something else."""
  path = tmp_path / 'x.ckpt'
  content = b''.join(
    checkpoint.encode({'a': np.arange(3), 'b': b'x', 'c': np.float32(2)})
  )
  start = data.draw(st.integers(0, len(content)))
  end = data.draw(st.integers(start, min(start + 60, len(content))))
  new = data.draw(st.one_of(st.binary(max_size=9), st.just(content[:end] * 2)))
  edited = content[:start] + new + content[end:]
  path.write_bytes(edited)
  if edited == content:
    return
  for read in (checkpoint.read, checkpoint.read_header):
    try:
      read(str(path))
    except checkpoint.CheckpointError as error:
      assert '\n' not in str(error)
      continue
    # The header alone does not see what the leaves hold.
    assert read is checkpoint.read_header


def test_a_checkpoint_of_an_older_version_does_not_say_its_name(tmp_path):
  path = tmp_path / 'round_4.ckpt'
  path.write_bytes(b''.join(checkpoint.encode({'a': np.arange(3)})))
  np.testing.assert_array_equal(checkpoint.read(str(path))['a'], [0, 1, 2])


def test_what_a_checkpoint_cannot_hold(tmp_path):
  with pytest.raises(TypeError, match='x: a checkpoint cannot hold'):
    checkpoint.write(str(tmp_path / 'a.ckpt'), {'x': 'text'})
  assert not list(tmp_path.iterdir())


def test_the_weights_of_models_are_compared():
  here = {'trainable': ['a float32 [1]', 'b'], 'non_trainable': []}
  there = {'trainable': ['a float32 [2]', 'b'], 'non_trainable': ['c']}
  assert not checkpoint.model_differences(here, here)
  assert checkpoint.model_differences(there, here) == (
    'a float32 [2] there, a float32 [1] here;'
    ' 1 non_trainable_variables there, 0 here'
  )
