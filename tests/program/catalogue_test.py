from tff_fssl import metrics
from tff_fssl.program import catalogue


def test_texts_of_the_file_are_one_line_and_columns_are_declared_once():
  tables = catalogue.tables()
  assert list(tables) == ['train.csv', 'eval.csv', 'timing.csv']
  for table in tables.values():
    assert all(metric.meaning.isprintable() for metric in table)
    columns = [column for metric in table for column in metric.columns()]
    assert len(columns) == len(set(columns))
  loss = metrics.index_columns(tables['train.csv'])[
    'client_work/train/loss_labeled'
  ]
  assert loss.curve == metrics.Curve('Loss at clients', 'labelled', '--')
  assert (loss.unit, loss.better, loss.figure) == (
    'nats',
    'lower',
    'label loss',
  )
