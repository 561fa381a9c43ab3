"""The server's table: frequencies of classes, and the two projections.

The table is OrderedDict(prior float32 [C], and the weights of the projections).
Clients receive all of it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import functools
from typing import TypeAlias

from tff_fssl import seeds
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.hparams import UsageError
from tff_fssl.interface import exchange as exchange_lib
from tff_fssl.lazy import tf
from tff_fssl.models import server_model
from tff_fssl.models.weights import all_finite
from tff_fssl.semisup import frequencies

PRIOR, COUNTS, CLASSIFIER = 'prior', 'counts', 'classifier'
FEATURES, PROXIES = 'features', 'proxies'
# The trainable weights of each projection, in Keras's order.
WEIGHTS = {
  FEATURES: ('features_kernel', 'features_bias'),
  PROXIES: ('proxies_kernel',),
}
# Rounding may take a client's share this far above 1.
_TOLERANCE = 1.001

_Table: TypeAlias = 'Mapping[str, tf.Tensor]'


def build_table(
  population: exchange_lib.Population, *, decay: float, sends_rows: bool
) -> exchange_lib.Exchange:
  """Builds the exchange.

  Args:
    population: The classes and the projections' weights.
    decay: The share of the old frequencies in the new ones.
    sends_rows: Whether clients also send their classifier's kernel, apart from
      others. Then their other values are apart, too.

  Returns:
    The exchange.

  Raises:
    UsageError: If `sends_rows` with an aggregator that must bound the influence
      of each client.
  """
  if sends_rows and population.robust:
    raise UsageError(
      f'--proxyfl.tuning=gpt: --aggregator={aggregator_hparams.ROBUST} does not'
      " bound what a lying client's classifier does to the tuned one; set"
      ' --proxyfl.tuning=none'
    )
  specs = {
    name: spec
    for network, names in WEIGHTS.items()
    for name, spec in zip(
      names, population.of_peers[network].trainable, strict=True
    )
  }
  row_specs = {COUNTS: tf.TensorSpec([population.num_classes]), **specs}
  if sends_rows:
    (kernel,) = specs['proxies_kernel'].shape[:1]
    row_specs[CLASSIFIER] = tf.TensorSpec([kernel, population.num_classes])

  def accept(
    table: _Table,
    rows: exchange_lib.Rows,
    model: server_model.ServerModel,
    round_num: tf.Tensor,
  ) -> _Table:
    del model, round_num
    num_rows = tf.cast(tf.size(rows.client_id), tf.float32)
    means = {
      name: tf.math.divide_no_nan(tf.reduce_sum(values, axis=0), num_rows)
      for name, values in rows.values.items()
    }
    new = {name: table[name] - means[name] for name in specs}
    new[PRIOR] = frequencies.follow(table[PRIOR], means[COUNTS], decay)
    return collections.OrderedDict(
      (name, tf.where(all_finite([new[name]]), new[name], old))
      for name, old in table.items()
    )

  return exchange_lib.Exchange(
    initialize=functools.partial(_initialize, specs, population),
    message=lambda table, model, round_num: table,
    receive=lambda table, client_id: dict(table),
    row_specs=row_specs,
    accept=accept,
    is_possible=_is_possible,
    in_sum=not sends_rows,
    for_update=sends_rows,
    # The server knows it from the update.
    not_counted=(CLASSIFIER,) if sends_rows else (),
  )


def _initialize(
  specs: Mapping[str, tf.TensorSpec], population: exchange_lib.Population
) -> _Table:
  """Makes the first table: equal frequencies, PyTorch's initial weights."""
  seed = seeds.fold_in(seeds.server_seed(population.seed, 0), seeds.EXCHANGE)
  limit = specs['proxies_kernel'].shape[0] ** -0.5
  num_classes = population.num_classes
  return collections.OrderedDict(
    [(PRIOR, tf.fill([num_classes], 1.0 / num_classes))],
    **{
      name: tf.random.stateless_uniform(
        spec.shape, seeds.fold_in(seed, i), -limit, limit
      )
      for i, (name, spec) in enumerate(specs.items())
    },
  )


def _is_possible(values: _Table) -> tf.Tensor:
  """Tells whether these may be a client's counts."""
  counts = values[COUNTS]
  return tf.logical_and(
    tf.reduce_all(counts >= 0.0), tf.reduce_sum(counts) <= _TOLERANCE
  )
