"""The conversion of a process to the form that TFF deploys."""

from __future__ import annotations

from tff_fssl import hparams
from tff_fssl.lazy import tf, tff


def get_map_reduce_form(
  process: tff.learning.templates.LearningProcess,
) -> tff.backends.mapreduce.MapReduceForm:
  """Compiles a process's `next` to TFF's MapReduceForm.

  MapReduceForm describes a round with one client phase by a few TensorFlow
  functions. Clients run `work`. `zero`, `accumulate` and `merge` combine their
  results. The server runs `update`. The check of clients' values
  (`aggregators.guarded`) becomes part of `work`, so a server that does not
  trust clients' programs must repeat it on the values that it receives.

  Args:
    process: A process of `process.build_process`.

  Returns:
    The form.

  Raises:
    UsageError: If a round has two client phases. The error names alternatives.
  """
  if getattr(process, 'num_phases', 1) > 1:
    raise hparams.UsageError(
      'MapReduceForm has one client phase a round: a broadcast, work, a sum.'
      ' Static batch norm (--norm=sbn) has a second one, since statistics of'
      " the round's new weights can only be gathered once these are known and"
      ' broadcast: build the process with --statistics_phase=training, which'
      ' takes those of the weights before, with group norm (--norm=gn), or with'
      ' moving averages (--norm=bn)'
    )
  # Grappler would replace loops by cycles of nodes. TensorFlow infers shapes of
  # functions with these in the order of addresses in memory, and sometimes
  # fails ("Missing src context").
  config = tf.compat.v1.ConfigProto()
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return tff.backends.mapreduce.get_map_reduce_form_for_computation(
    process.next, config
  )
