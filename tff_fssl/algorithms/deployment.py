"""From a process to TFF's forms for deployment."""

import tensorflow_federated as tff

from tff_fssl import hparams


def get_map_reduce_form(
  process: tff.learning.templates.LearningProcess,
) -> tff.backends.mapreduce.MapReduceForm:
  """Compiles a process's `next` to MapReduceForm: one client phase a round.

  The form's `work` is what clients run, `zero`, `accumulate` and `merge` how
  their results are combined, `update` the server's part. What screens clients'
  values (`aggregators.guarded`) becomes part of `work`: a server that does not
  trust clients' programs has to repeat it on what it receives.

  Args:
    process: Built by an algorithm of the registry.

  Returns:
    The form.

  Raises:
    UsageError: If a round has two client phases; names what helps.
  """
  metrics_type = process.next.type_signature.result.metrics.member
  if getattr(metrics_type, 'last_phase', None) is not None:
    raise hparams.UsageError(
      'MapReduceForm has one client phase a round: a broadcast, work, a sum.'
      ' Static batch norm (--norm=sbn) has a second one, since statistics of'
      " the round's new weights can only be gathered once these are known and"
      ' broadcast: build the process with group norm (--norm=gn), or with'
      ' moving averages (--norm=bn)'
    )
  return tff.backends.mapreduce.get_map_reduce_form_for_computation(
    process.next
  )
