"""Plans for tests of single parts of a round."""

import functools
import types

import tensorflow_federated as tff
import tiny_task

from tff_fssl.algorithms import supervised
from tff_fssl.data import clients
from tff_fssl.interface import base
from tff_fssl.rounds import plan as plan_lib
from tff_fssl.rounds import states


def bare(
  algorithm=supervised.Supervised(),
  setup=base.Setup(num_classes=3),
  head=None,
  **fields,
):
  """A plan without data and networks, of which `head` stays at the server."""
  networks = types.SimpleNamespace(
    variances=(), is_static=False, tracks_moving_averages=False
  )
  defaults = {
    'data': plan_lib.DataSpec(None, tiny_task.VIEWS),
    'networks': networks,
    'states': states.States(algorithm, setup),
    'aggregator': tff.aggregators.MeanFactory(),
  }
  plan = plan_lib.Plan(algorithm, **{**defaults, **fields})
  vars(plan)['kept'] = head or {}
  return plan


def build(algorithm, norm='bn', labels=None, seed=0):
  """The plan of a process for the tiny task."""
  data = plan_lib.DataSpec(
    clients.element_spec(tiny_task.IMAGE_SHAPE),
    tiny_task.VIEWS,
    clients.build_server_data_fn(*labels) if labels else None,
    tiny_task.NUM_CLASSES,
    tiny_task.NUM_CLIENTS,
  )
  model_fn = functools.partial(tiny_task.model_fn, norm)
  return plan_lib.build_plan(model_fn, algorithm, data, seed=seed)
