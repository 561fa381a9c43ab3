"""What clients report."""

import numpy as np
import tiny_task


def test_clients_that_keep_no_pseudo_label_count_in_the_kept_ratio():
  process = tiny_task.build(
    'fl2',
    hparams=(
      ('adaptive_threshold', False),
      ('confidence_threshold', 0.45),
      ('consistency', 'none'),
      ('learning_status_aggregation', False),
    ),
  )
  state = process.next(process.initialize(), []).state

  def train(*elements):
    cohort = [tiny_task.dataset(element) for element in elements]
    return process.next(state, cohort).metrics['client_work']['train']

  keeps_some = tiny_task.client(0)  # 12 examples.
  keeps_none = tiny_task.client(2, unlabeled=4)
  report = train(keeps_some)
  for name in ('min', 'mean', 'max'):  # The one that is applied.
    for kind in ('lowest', 'mean'):
      np.testing.assert_allclose(report[f'{kind}_class_threshold_{name}'], 0.45)
  # Known whatever decides what is kept.
  assert 1 / 3 < report['learning_status_mean'] < 0.6
  alone = report['pseudo_label_ratio']
  assert 0.0 < alone < 1.0
  none = train(keeps_none)
  assert none['pseudo_label_ratio'] == 0.0
  assert np.isnan(none['pseudo_label_accuracy'])
  both = train(keeps_some, keeps_none)
  np.testing.assert_allclose(both['pseudo_label_ratio'], alone * 12 / 16)
  assert both['aggregation_weight_min'] == 0.0
  assert both['aggregation_weight_max'] == 1.0
