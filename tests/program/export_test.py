import os

import pytest

from tff_fssl.program import export


@pytest.mark.parametrize(
  'before, kept',
  [
    ([], []),
    (['model.new'], []),  # Killed while it wrote the first one,
    (['model', 'model.new'], ['model']),  # or a later one,
    (['model.old', 'model.new'], ['model.old']),  # or between two renames,
    (['model.old', 'model'], ['model']),  # or before the old one was removed.
  ],
)
def test_what_a_killed_export_left_is_put_right(before, kept, tmp_path):
  for name in before:
    (tmp_path / name).mkdir()
    (tmp_path / name / 'file').write_text(name)
  export.remove_leftovers(str(tmp_path / 'model'))
  assert os.listdir(tmp_path) == ['model'] * len(kept)
  for name in kept:
    assert (tmp_path / 'model' / 'file').read_text() == name
