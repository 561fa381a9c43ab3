"""The clients' side of a process: its part of a round, and its phases."""

import functools

import pytest
import tiny_task

from tff_fssl.algorithms import fedrgd
from tff_fssl.algorithms import fedswitch
from tff_fssl.algorithms import protofssl
from tff_fssl.algorithms import supervised
from tff_fssl.data import clients
from tff_fssl.hparams import UsageError
from tff_fssl.interface import round_hparams
from tff_fssl.rounds import client_side
from tff_fssl.rounds import delivery
from tff_fssl.rounds import network_factory
from tff_fssl.rounds import states


def _side(algorithm=supervised.Supervised, norm='bn', groups=None, **settings):
  algorithm = algorithm(
    round=round_hparams.RoundHparams(
      scenario=round_hparams.LABELS_AT_CLIENTS, **settings
    )
  )
  networks = network_factory.NetworkFactory(
    network_factory.network_fn(
      functools.partial(tiny_task.model_fn, norm), algorithm
    ),
    algorithm.round,
    image_shape=tiny_task.IMAGE_SHAPE,
    num_classes=tiny_task.NUM_CLASSES,
    seed=0,
  )
  return client_side.ClientSide(
    networks,
    algorithm,
    states.States(algorithm),
    tiny_task.VIEWS,
    clients.element_spec(tiny_task.IMAGE_SHAPE),
    None,
    delivery.Delivery(groups),
  )


@pytest.mark.parametrize('weighting', ['examples', 'uniform'])
def test_the_part_follows_the_hyper_parameters(weighting):
  side = _side(client_weighting=weighting, client_learning_rate=0.25)
  part = side.part(release_metrics=False)
  assert part.weigh_by_examples == (weighting == 'examples')
  assert float(part.learning_rate_fn(3)) == 0.25
  assert part.num_classes == tiny_task.NUM_CLASSES
  assert not (part.draws_episodes or part.release_metrics)


def test_the_part_follows_the_algorithm():
  assert _side(protofssl.ProtoFssl).part(True).draws_episodes
  side = _side(fedswitch.FedSwitch)
  uploads = side.part(True).uploads
  assert uploads and uploads == side.algorithm.uploads(side.states.setup)


@pytest.mark.parametrize(
  'norm, settings, has_second_phase',
  [
    ('bn', {}, True),
    ('bn', {'statistics_phase': 'training'}, False),
    ('bn', {'batch_norm_statistics': 'moving_average'}, False),
    ('none', {}, False),
  ],
)
def test_the_second_phase_gathers_static_statistics(
  norm, settings, has_second_phase
):
  assert _side(norm=norm, **settings).has_second_phase == has_second_phase


def test_a_model_without_batch_norm_keeps_its_own_statistics():
  side = _side(norm='none')
  model = object()
  assert side.own_statistics()(model, None) is model
  assert side.statistics_phases(None, None, None) == ([], 0)


def test_statistics_of_groups_cannot_be_gathered_in_training():
  groups = fedrgd.FedRgd(
    round=round_hparams.RoundHparams(scenario=round_hparams.LABELS_AT_CLIENTS)
  ).groups()
  side = _side(fedrgd.FedRgd, groups=groups, statistics_phase='training')
  with pytest.raises(UsageError, match='--statistics_phase=own'):
    side.statistics_phases(None, None, None)
