import json

import written_runs

from tff_fssl.program.storage import output_tree
from tff_fssl.program.storage import summary


def test_the_first_best_round_counts():
  values = ('', '0.5', '0.75', '0.75', 'nan')
  rows = [
    {'round': str(r), 'validation/accuracy': value}
    for r, value in enumerate(values)
  ]
  assert summary.best_round(rows)['round'] == '2'
  assert summary.best_round(rows[:1]) is None


def test_the_summary_of_a_run(tmp_path):
  tree = output_tree.OutputTree(str(written_runs.write(tmp_path / 'run')))
  result = summary.write(tree)
  assert result['rounds'] == 12 and result['last']['round'] == 12
  with open(tree.summary_json) as file:
    assert json.load(file) == result
