from tff_fssl import metrics
from tff_fssl.program import compare_main
from tff_fssl.program import csv_table
from tff_fssl.program import main
from tff_fssl.program import output_tree

_TRAIN = metrics.CLIENTS


def _run(
  folder, algorithm, seed, accuracies, validation=(), every=2, **of_clients
):
  """A run with a test accuracy every second round.

  Args:
    folder: The run's.
    algorithm: Its algorithm.
    seed: Its seed.
    accuracies: Of the evaluated rounds.
    validation: The validation accuracies, if any.
    every: How often it is evaluated.
    **of_clients: Further columns about the test accuracies of clients.
  """
  tree = output_tree.OutputTree(str(folder))
  (folder / 'metrics').mkdir(parents=True)
  with open(tree.flags_file, 'w') as file:
    file.write(f'--algorithm={algorithm}\n--seed={seed}\n')
  train = csv_table.CsvTable(tree.train_csv)
  evaluation = csv_table.CsvTable(tree.eval_csv)
  for r in range(1, every * len(accuracies) + 1):
    row = {
      f'{_TRAIN}/num_clients': 5,
      'communication/bytes_up': 10_000_000,
    }
    if algorithm != 'supervised':
      row[f'{_TRAIN}/pseudo_label_ratio'] = 0.25
    train.log(r, row)
    if r % every == 0:
      row = {'test/accuracy': accuracies[r // every - 1]}
      row |= {f'test/accuracy_{k}': v for k, v in of_clients.items()}
      if validation:
        row['validation/accuracy'] = validation[r // every - 1]
      evaluation.log(r, row)
  return str(folder)


def _compare(capsys, *argv):
  code = main.run(compare_main.compare_main, list(argv))
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def test_what_cannot_be_compared(tmp_path, capsys):
  assert _compare(capsys)[0] == 2
  assert _compare(capsys, 'x', '--last_round=-1')[0] == 2
  assert 'is not a run' in _compare(capsys, str(tmp_path))[2]
  first = _run(tmp_path / 'a', 'fl2', 0, [0.1], every=2)
  other = _run(tmp_path / 'b', 'fl2', 1, [0.1], every=3)
  code, _, err = _compare(capsys, first, other)
  assert code == 2 and 'no evaluated round in common' in err
  none = _run(tmp_path / 'c', 'fl2', 2, [0.1])
  csv_table.CsvTable(output_tree.OutputTree(none).eval_csv).truncate_after(0)
  assert 'no evaluation yet' in _compare(capsys, first, none)[2]
  same = _run(tmp_path / 'd', 'fl2', 0, [0.2])
  code, _, err = _compare(capsys, first, same)
  assert code == 2 and 'unequal results (test/accuracy in round 2' in err
