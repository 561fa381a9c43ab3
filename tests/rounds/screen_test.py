import pytest

from tff_fssl.aggregators import guarded
from tff_fssl.local import algorithm as algorithm_lib
from tff_fssl.local import objective
from tff_fssl.rounds import round_hparams
from tff_fssl.rounds import screen

_UNLABELED = objective.SUPERVISED._replace(
  streams={objective.UNLABELED: algorithm_lib.Stream({'weak': 'weak'})}
)
_BOTH = _UNLABELED._replace(
  streams={**_UNLABELED.streams, **objective.SUPERVISED.streams}
)


# Two epochs over at most 20 examples, in batches of 8 (unlabelled) and 5
# (labelled); the client that has no unlabelled stream takes 8 labelled ones.
@pytest.mark.parametrize(
  'local, most',
  [
    (_UNLABELED, 2 * 3 * 8),
    (objective.SUPERVISED, 2 * 3 * 8),
    (_BOTH, 2 * 4 * (8 + 5)),
  ],
  ids=['unlabeled', 'labeled', 'both'],
)
def test_most_examples_are_those_of_the_longest_stream(local, most):
  hparams = round_hparams.RoundHparams(
    scenario=round_hparams.LABELS_AT_CLIENTS,
    client_epochs=2,
    client_batch_size=8,
    client_labeled_batch_size=5,
    max_client_examples=20,
    client_weighting='examples',
  )
  bounds = screen.build_bounds(local, hparams, None, 3)
  assert bounds.num_examples == most
  assert bounds.weights == guarded.AllowedWeights(most)


@pytest.mark.parametrize('weighs', [False, True])
def test_uniform_weights_are_0_or_1_unless_the_algorithm_sets_them(weighs):
  local = objective.SUPERVISED._replace(weighs=weighs)
  hparams = round_hparams.RoundHparams(client_weighting='uniform')
  weights = screen.build_bounds(local, hparams, None, 3).weights
  assert weights == guarded.AllowedWeights(1.0, all_or_nothing=not weighs)
