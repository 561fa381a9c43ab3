import pytest
import tiny_vectors


@pytest.fixture(name='own_data')
def _own_data(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tiny_vectors.write('a.npz', 2, 120)
  lines = ''.join(f'word {i},{"ab"[i % 2]}\n' for i in range(120))
  (tmp_path / 'a.csv').write_text(f'text,label\n{lines}')
