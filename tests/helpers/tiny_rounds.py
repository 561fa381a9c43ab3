"""Rounds of the tiny task's processes, for comparisons to the bit."""

import numpy as np
import tensorflow as tf
import tiny_plan
import tiny_task

from tff_fssl.interface import base
from tff_fssl.rounds import screen

SERVER, CLIENTS = 'labels_at_server', 'labels_at_clients'


def build(name, scenario=SERVER, norm='none', own=(), **settings):
  """`tiny_task.build` with FedProx; `own` are the algorithm's values."""
  settings.setdefault('proximal_strength', 0.1)
  return tiny_task.build(
    name,
    scenario,
    norm=norm,
    hparams=tuple(sorted(dict(own).items())),
    **settings,
  )


def run(process, scenario=SERVER, num_rounds=2):
  """The outputs of rounds with clients; one of pre-training comes before."""
  state, outputs = process.initialize(), []
  if int(state.client_work) < 1:
    state = process.next(state, []).state
  for round_num in range(1, num_rounds + 1):
    cohort = [
      tiny_task.dataset(element, process)
      for element in tiny_task.cohort(scenario, round_num=round_num)
    ]
    outputs.append(process.next(state, cohort))
    state = outputs[-1].state
  return outputs


def model(output):
  """The `ServerModel` after a round."""
  return output.state.global_model_weights


def assert_same(first, second, atol=0.0):
  """All tensors of two structures are equal, NaNs too."""
  for a, b in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
    np.testing.assert_allclose(a, b, atol=atol, rtol=0)


def differ(first, second):
  """Whether any tensor of two structures differs."""
  pairs = zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True)
  return any(np.any(a != b) for a, b in pairs)


def is_possible(algorithm, uploads, setup=base.Setup(num_classes=3)):
  """Whether a client may send these uploads; those left out are 0."""
  plan = tiny_plan.bare(algorithm, setup)
  values = {
    name: tf.zeros(upload.spec.shape, upload.spec.dtype)
    for name, upload in plan.uploads.items()
  }
  checks = screen.checks_of_uploads(plan, {**values, **uploads})
  return all(bool(check.is_possible) for check in checks.values())
