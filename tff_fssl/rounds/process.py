"""The construction of an algorithm's learning process."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tff_fssl import hparams as hparams_lib
from tff_fssl.aggregators import grouped
from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.interface import base
from tff_fssl.interface import channels
from tff_fssl.interface import round_hparams as round_hparams_lib
from tff_fssl.lazy import tf, tff
from tff_fssl.models import adapter
from tff_fssl.rounds import client_work
from tff_fssl.rounds import composer
from tff_fssl.rounds import plan as plan_lib
from tff_fssl.rounds import screen
from tff_fssl.rounds import statistics_phase

RoundHparams = round_hparams_lib.RoundHparams
DataSpec = plan_lib.DataSpec


def build_process(
  model_fn: adapter.ModelFn,
  algorithm: base.Algorithm,
  data: DataSpec,
  *,
  seed: int,
  aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
) -> composer.FsslProcess:
  """Builds the learning process of an algorithm.

  Its state is TFF's `LearningAlgorithmState`, whose `client_work` is the number
  of the next round. The first round is `1 - num_pretraining_rounds`, and
  `process.rounds(10)` counts them. In a round:

  1.  The server broadcasts weights and batch norm statistics.
  2.  Clients train (from round 1 on) and upload updates and weights.
  3.  The aggregator combines them. The server optimizer applies the result.
  4.  With labels at the server, the server trains on them.
  5.  With static batch norm, further client phases gather statistics: one for
      the model, and one for each set of weights that has its own.

  An algorithm may add to each of these. With groups of clients, their elements
  may need a `slot`, too: see `groups`.

  If clients took part but none sent a usable update, or there are fewer usable
  clients than `min_clients`, the round changes nothing but its number, and what
  is due by that: ProtoFSSL's sent prototypes and FedMatch's choice of helpers.

  Args:
    model_fn: Builds a Keras model, images -> logits.
    algorithm: The algorithm. Its `round` says where the labels are.
    data: Describes the data.
    seed: Seed of the initial weights and of the server's training.
    aggregator: Combines updates, by default into their weighted mean. With a
      `privacy.PrivateMeanFactory`, or an aggregator that sums securely, only
      the number of clients is released besides the aggregate.

  Returns:
    The process.

  Raises:
    UsageError: If arguments do not fit together, or the model is unsuitable.

  Examples:
    >>> import tff_fssl as fssl
    >>> shape, digits = (8, 8, 1), fssl.load('digits').train
    >>> process = fssl.build_process(
    ...   lambda: fssl.build_network('linear', shape, num_classes=10),
    ...   fssl.FixMatch(
    ...     round=fssl.RoundHparams(scenario=fssl.LABELS_AT_CLIENTS)
    ...   ),
    ...   fssl.DataSpec(
    ...     fssl.element_spec(shape),
    ...     fssl.build_views(shape, mean=(0,), std=(1,), flip=False),
    ...   ),
    ...   seed=0,
    ... )
    >>> def load_client(round_num, client_id):
    ...   x, y = digits.x[client_id::9], digits.y[client_id::9]
    ...   return (x[:20], y[:20]), (x[20:], None)  # Labelled, unlabelled.
    >>> source = fssl.build_data_source(
    ...   process, load_client, seed=0, num_clients=9, clients_per_round=2
    ... )
    >>> cohort = source.iterator().select(2)
    >>> state, metrics = process.next(process.initialize(), cohort)
    >>> int(metrics['client_work']['train']['num_clients'])
    2
  """
  _check(algorithm, data, aggregator)
  plan = plan_lib.build_plan(
    model_fn, algorithm, data, seed=seed, aggregator=aggregator
  )
  combine, is_confidential = _build_aggregator(plan)
  plan = dataclasses.replace(plan, is_confidential=is_confidential)
  process = composer.compose(plan, combine)
  _describe(process, plan)
  return process


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
    process: A process of `build_process`.

  Returns:
    The form.

  Raises:
    UsageError: If a round has two client phases. The error names alternatives.
  """
  if getattr(process, 'num_phases', 1) > 1:
    raise hparams_lib.UsageError(
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


def _check(
  algorithm: base.Algorithm,
  data: DataSpec,
  aggregator: tff.aggregators.WeightedAggregationFactory | None,
) -> None:
  """Raises `UsageError` if arguments of `build_process` do not fit together."""
  if not isinstance(algorithm, base.Algorithm):
    name = getattr(algorithm, '__name__', None)
    raise hparams_lib.UsageError(
      f'algorithm={name or repr(algorithm)}: give an instance of an algorithm'
      f'{f", {name}()" if name else ""}'
    )
  scenario = algorithm.round.scenario
  if scenario not in algorithm.scenarios:
    raise hparams_lib.UsageError(
      f'--scenario={scenario}: {algorithm.name} is not defined for it, only for'
      f' {", ".join(algorithm.scenarios)}'
    )
  if algorithm.round.labels_at_clients != (data.server_data_fn is None):
    given = 'None' if data.server_data_fn is None else '(given)'
    raise hparams_lib.UsageError(
      f'scenario={scenario} and server_data_fn={given}: the server needs'
      ' labelled data if, and only if, labels are at the server'
    )
  if isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory):
    raise hparams_lib.UsageError(
      f'aggregator={type(aggregator).__name__}: must be weighted;'
      ' for equal weights set client_weighting=uniform; for differential'
      ' privacy use aggregators.factory.build_aggregator, with which nothing is'
      ' released without noise'
    )


def _build_aggregator(
  plan: plan_lib.Plan,
) -> tuple[tff.templates.AggregationProcess, bool]:
  """Builds the process that combines what clients send.

  Args:
    plan: The plan.

  Returns:
    (the process, whether clients may release nothing besides its sum).

  Raises:
    UsageError: If they would release more.
  """
  specs = plan.networks.weight_specs
  of_model = plan.select(specs.trainable)
  if plan.networks.tracks_moving_averages:
    of_model += tuple(s for s in specs.non_trainable if s.dtype.is_floating)
  sums = channels.sent_as(plan.uploads, channels.SUM)
  combined: dict[str, Any] = {
    channels.MODEL: of_model,
    **dict.fromkeys(plan.sent_networks, tuple(specs.trainable)),
    **{name: upload.spec for name, upload in sums.items()},
  }
  factory = plan.aggregator
  if plan.groups is not None:
    factory = grouped.GroupedMeanFactory(
      plan.groups.num_groups,
      plan.groups.num_starts,
      plan.networks.num_trainable,
    )
    combined[channels.PLACE] = tf.TensorSpec([2], tf.float32)
  # A private mean has its own screen: see `aggregators.privacy`.
  if not plan.is_private:
    allowed = screen.build_bounds(plan.algorithm).weights
    factory = guarded.GuardedFactory(factory, allowed)
  process = factory.create(
    tff.types.tensorflow_to_type(channels.sort_by_name(combined)),
    tff.TensorType(np.float32),
  )
  secure = guarded.sums_securely(process)
  if plan.is_private or secure:
    aggregator_hparams.check_confidential(
      aggregator_hparams.DP if plan.is_private else aggregator_hparams.SECURE,
      own_weights=plan.algorithm.sets_weights,
      client_weighting=plan.hparams.client_weighting,
      batch_norm=plan.networks.has_batch_norm,
      static=plan.networks.is_static,
      also_sends=len(sums) < len(plan.uploads) or plan.exchange is not None,
    )
  return process, plan.is_private or secure


def _describe(process: composer.FsslProcess, plan: plan_lib.Plan) -> None:
  """Sets the attributes that describe the process."""
  process.first_round = plan.hparams.first_round
  process.num_classes = plan.networks.num_classes
  if plan.exchange is not None:
    process.num_clients = plan.exchange.num_clients
    process.outside = plan.exchange.outside
  process.needs_slots = 'slot' in plan.element_spec
  process.start = plan.states.start
  process.prediction = plan.states.prediction
  process.plateau = plan.states.plateau
  process.min_clients = plan.hparams.min_clients
  process.num_phases = 1
  if plan.has_last_phases:
    process.num_phases += len(statistics_phase.when_gathered(plan))
  process.find_non_finite = client_work.build_find_non_finite(plan)
  process.find_rejected = client_work.build_find_rejected(plan)
  # Clients without the last layer, or with models of their own, have no version
  # of the server's model.
  if not (plan.algorithm.head_stays or plan.algorithm.alone):
    process.local_model = client_work.build_local_model(plan)
