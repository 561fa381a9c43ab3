"""A differentially private mean that reports the privacy it has spent."""

from __future__ import annotations

import collections

import dp_accounting
import numpy as np

from tff_fssl.aggregators import guarded
from tff_fssl.aggregators import hparams as aggregator_hparams
from tff_fssl.lazy import tf, tff
from tff_fssl.models.weights import zero_unless

_ANY_FINITE = guarded.AllowedWeights()


class PrivateMeanFactory(tff.aggregators.WeightedAggregationFactory):
  """The unweighted mean of clipped updates, with Gaussian noise.

  It wraps `tff.aggregators.DifferentiallyPrivateFactory`. Every client counts
  equally: weights are ignored. The sum is divided by `clients_per_round`, no
  matter how many clients take part. Neither weights nor counts of clients are
  released. An update that is not finite counts as 0. A round without clients
  gives NaN, which the server skips, and spends no privacy.

  Its measurements include the `epsilon` and `delta` spent so far. Their meaning
  and their limits:

  *   They state client-level privacy under replacement: the models of all
      rounds hardly reveal whether a client's whole data were replaced by other
      data. Replacement moves the sum by up to twice the clipping norm, which is
      accounted for.
  *   They assume that clients are sampled uniformly, `clients_per_round` out of
      `population`, without replacement and independently each round, and that
      nobody who sees the models knows the sample. In a simulation the sample is
      a function of the run's seed, which is then part of the secret.
  *   They come from Renyi accounting of the sampled Gaussian mechanism without
      replacement (Wang, Balle and Kasiviswanathan 2019), by `dp_accounting`.
  *   They also hold for smaller samples, such as after drop-outs, if drop-outs
      do not depend on data: smaller samples reveal less.
  *   They count one noise draw per round. They do not cover a round that is
      repeated after its result was seen, or other runs on the same clients.
  *   They do not cover labels at the server, which are not protected.
  *   The noise comes from TensorFlow's float32 generator, which is not
      cryptographic. Clipping is trusted to run (see `guarded.GuardedFactory`).

  If a round has more clients than declared, epsilon is infinite from then on.
  """

  def __init__(
    self,
    *,
    noise_multiplier: float,
    clipping_norm: float,
    delta: float,
    clients_per_round: int,
    population: int,
  ):
    """Initializes the factory.

    Args:
      noise_multiplier: Standard deviation of the noise on the sum, in clipping
        norms, > 0. It covers the privacy cost of adaptive clipping.
      clipping_norm: L2 norm to which updates are clipped. 0: the median,
        adaptively (Andrew et al. 2021).
      delta: The delta for which epsilon is reported, in (0, 1 / population).
      clients_per_round: The number of clients that take part in a round.
      population: The number of clients from which they are drawn.

    Raises:
      UsageError: If the numbers do not fit together.
    """
    aggregator_hparams.check_sizes(
      delta=delta, clients_per_round=clients_per_round, population=population
    )
    if clipping_norm:
      dp_factory = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        noise_multiplier, float(clients_per_round), clipping_norm
      )
    else:
      # In small cohorts the usual deviation, 5% of the cohort, would leave no
      # room for the noise on the updates.
      stddev = max(0.05 * clients_per_round, noise_multiplier)
      dp_factory = (
        tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
          noise_multiplier,
          float(clients_per_round),
          clipped_count_stddev=stddev,
        )
      )
    self._inner = dp_factory
    self._delta = delta
    self._clients_per_round = clients_per_round
    self._orders, self._rdp = renyi_divergences(
      noise_multiplier, clients_per_round, population
    )

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the process: <S@SERVER, V@CLIENTS, W@CLIENTS> -> V@SERVER."""
    inner = self._inner.create(value_type)
    inner_type = inner.initialize.type_signature.result.member
    result_type = inner.next.type_signature.result.result.member

    @tff.tensorflow.computation(value_type)
    def screen(value):
      accepted = guarded.is_acceptable(value, tf.constant(0.0), _ANY_FINITE)
      return zero_unless(accepted, value)

    @tff.tensorflow.computation
    def no_releases():
      return tf.constant(0.0)

    @tff.federated_computation
    def init_fn():
      return tff.federated_zip(
        collections.OrderedDict(
          inner=inner.initialize(),
          num_releases=tff.federated_eval(no_releases, tff.SERVER),
        )
      )

    state_type = init_fn.type_signature.result.member

    @tff.tensorflow.computation(state_type, inner_type, result_type, tf.int32)
    def finish(old_state, new_inner, result, num_clients):
      some = num_clients > 0
      new_inner, result = guarded.keep_if(
        some, old_state['inner'], new_inner, result
      )
      # A larger cohort breaks the assumption of the accounting.
      spent = tf.where(num_clients > self._clients_per_round, np.inf, 1.0)
      num_releases = old_state['num_releases'] + tf.where(some, spent, 0.0)
      epsilon = spent_epsilon(
        num_releases, self._orders, self._rdp, self._delta
      )
      state = collections.OrderedDict(
        inner=new_inner, num_releases=num_releases
      )
      return state, result, epsilon, tf.constant(self._delta)

    @tff.federated_computation(
      init_fn.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      # A weight could move the sum by more than the clipping norm.
      del weight
      output = inner.next(state.inner, tff.federated_map(screen, value))
      num_clients = tff.federated_sum(tff.federated_value(1, tff.CLIENTS))
      new_state, result, epsilon, delta = tff.federated_map(
        finish, (state, output.state, output.result, num_clients)
      )
      measurements = collections.OrderedDict(
        inner=output.measurements, epsilon=epsilon, delta=delta
      )
      return tff.templates.MeasuredProcessOutput(
        new_state, result, tff.federated_zip(measurements)
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)


def renyi_divergences(
  noise_multiplier: float, clients_per_round: int, population: int
) -> tuple[np.ndarray, np.ndarray]:
  """Computes the privacy cost of a round: (orders, divergences), float64.

  Under replacement the sensitivity of the sum is twice the clipping norm. The
  sensitivity of adaptive clipping's count, +-1/2, is also twice as large.

  Args:
    noise_multiplier: Standard deviation of the noise, in clipping norms.
    clients_per_round: The cohort's size.
    population: The number of clients.

  Returns:
    The orders and the round's Renyi divergences.

  Examples:
    >>> from tff_fssl.aggregators import privacy
    >>> for noise_multiplier in (1.0, 4.0):
    ...   orders, divergences = privacy.renyi_divergences(
    ...     noise_multiplier, clients_per_round=10, population=1000
    ...   )
    ...   print(orders[:3], divergences[:3].round(2))
    [2. 3. 4.] [0.01 0.15 2.09]
    [2. 3. 4.] [0. 0. 0.]
  """
  event = dp_accounting.SampledWithoutReplacementDpEvent(
    population,
    clients_per_round,
    # Replacement moves the sum by twice the clipping norm.
    dp_accounting.GaussianDpEvent(noise_multiplier / 2.0),
  )
  orders = np.array([*range(2, 64), 80, 96, 128, 192, 256, 512, 1024], float)
  # `dp_accounting` does not expose divergences. Epsilon for a single order is
  # the divergence plus a known summand.
  tiny = 1e-12
  divergences = []
  for order in orders:
    accountant = dp_accounting.rdp.RdpAccountant(
      [order], dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    epsilon = accountant.compose(event).get_epsilon(tiny)
    divergences.append(max(epsilon - _conversion(order, tiny), 1e-15))
  return orders, np.array(divergences)


def _conversion(orders, delta):
  """Computes the excess of epsilon at `delta` over an order's divergence.

  See Canonne, Kamath and Steinke 2020, proposition 12.
  """
  return np.log1p(-1.0 / orders) - np.log(delta * orders) / (orders - 1.0)


def spent_epsilon(
  num_releases: tf.Tensor, orders: np.ndarray, rdp: np.ndarray, delta: float
) -> tf.Tensor:
  """Computes epsilon after `num_releases` rounds: float32 scalar, 0 after none.

  Args:
    num_releases: float32 scalar.
    orders: The orders of `renyi_divergences`.
    rdp: The divergences of a round.
    delta: The delta.

  Returns:
    The least epsilon that any order proves.

  Examples:
    >>> from tff_fssl.aggregators import privacy
    >>> orders, divergences = privacy.renyi_divergences(
    ...   4.0, clients_per_round=10, population=1000
    ... )
    >>> for num_rounds in (0.0, 1.0, 100.0, 1000.0):
    ...   spent = privacy.spent_epsilon(num_rounds, orders, divergences, 1e-5)
    ...   print(f'{num_rounds:.0f} {spent:.2f}')
    0 0.00
    1 0.20
    100 0.43
    1000 1.45
  """
  total = tf.cast(num_releases, tf.float64) * tf.constant(rdp)
  epsilon = tf.reduce_min(total + tf.constant(_conversion(orders, delta)))
  epsilon = tf.where(num_releases > 0.0, tf.maximum(epsilon, 0.0), 0.0)
  return tf.cast(epsilon, tf.float32)
