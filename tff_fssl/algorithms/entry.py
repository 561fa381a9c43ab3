"""What the registry says of an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import inspect
from typing import Any, NamedTuple

from tff_fssl import hparams as hparams_lib
from tff_fssl import metrics as metrics_lib
from tff_fssl.rounds import round_hparams as round_hparams_lib

_SERVER = round_hparams_lib.LABELS_AT_SERVER
_CLIENTS = round_hparams_lib.LABELS_AT_CLIENTS


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """What an algorithm can do and what it requires of a deployment.

  Attributes:
    scenarios: The supported scenarios, which say where the labels are.
    trains_clients: The scenarios in which clients train; in the others a round
      needs no cohort.
    client_state: Whether the server keeps state for each client, by its
      identity (which rules out cross-device deployments).
    client_state_if: The property of hyper-parameters that, if true, makes the
      algorithm keep such state; '' if there is none.
    per_client_broadcast: Whether clients receive different messages.
    extra_uploads: Other values that a client sends with its update and its
      statistics.
    client_phases: Client phases in a round, without static batch norm's.
    head_stays: Whether the model's last layer stays at the server.
    weight_sets_down: Weight sets sent to a client in a phase, at most.
    weight_sets_up: Weight sets received from a client in a phase; 0: clients
      train alone, so that nothing is aggregated and there is no common model.
    own_weights: The hyper-parameter that, if true, makes the algorithm set the
      weights of updates, instead of `client_weighting`; '' if there is none.
    signals: The hyper-parameter, or property of them, that, if true, makes
      clients send numbers that are not part of the sum of updates, so that
      aggregators that protect the sum refuse the algorithm; '' if there is
      none.
    without_signals: 'name=value', the hyper-parameter that turns these off; ''
      if there is none.
    groups: The property of hyper-parameters that, if true, makes the server
      combine the updates of several groups apart, so that it sees sums over
      less than all clients, and other aggregators than the mean refuse the
      algorithm; '' if there is none.
    without_groups: 'name=value', the hyper-parameter that turns these off.
    labels_of_class: The hyper-parameter, or property of them, that says how
      many labels of a class a client needs; '' if it needs none.
    without_mixing: 'name=value', the hyper-parameter by whose value the
      algorithm does not mix the inputs of networks, as it does by any other
      that is true; '' if it never does.
  """

  scenarios: tuple[str, ...] = (_SERVER, _CLIENTS)
  trains_clients: tuple[str, ...] = (_SERVER, _CLIENTS)
  client_state: bool = False
  client_state_if: str = ''
  per_client_broadcast: bool = False
  extra_uploads: tuple[str, ...] = ()
  client_phases: int = 1
  head_stays: bool = False
  weight_sets_down: int = 1
  weight_sets_up: int = 1
  own_weights: str = ''
  signals: str = ''
  without_signals: str = ''
  groups: str = ''
  without_groups: str = ''
  labels_of_class: str = ''
  without_mixing: str = ''

  def keeps_client_state(self, hparams: Any) -> bool:
    """Whether there is a state for each client, by its identity."""
    name = self.client_state_if
    return self.client_state or (bool(name) and bool(getattr(hparams, name)))


class Passes(NamedTuple):
  """Passes over the network for one example.

  Attributes:
    forward: Forward passes.
    backward: Backward passes, two forward-equivalents each.
  """

  forward: int = 0
  backward: int = 0

  @property
  def equivalents(self) -> int:
    """Their cost in forward-equivalents."""
    return self.forward + 2 * self.backward


@dataclasses.dataclass(frozen=True)
class Compute:
  """What a client has to compute for an example; a test measures the same.

  Attributes:
    unlabeled: In each step, for an unlabelled example, with the default
      hyper-parameters and in the most expensive case.
    labeled: The same for a labelled example, if clients hold labels.
    once: In each round, for an unlabelled example.
    authors: What the authors' code spends instead of `unlabeled`; None if there
      is no such code.
    note: Why it is more, or which case is the most expensive one.
  """

  unlabeled: Passes = Passes()
  labeled: Passes = Passes(1, 1)
  once: Passes = Passes()
  authors: Passes | None = None
  note: str = ''


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A registry entry.

  Attributes:
    name: The value for `--algorithm`, and the prefix of the algorithm's flags.
    summary: One line.
    hparams: The class, a `base.Algorithm`. Its fields are its
      hyper-parameters.
    capabilities: What the algorithm can do.
    compute: What clients compute for an example.
    round_defaults: The paper's values of fields of `RoundHparams`, by name. The
      programs use them unless the user gives the flag; an embedder writes
      `RoundHparams(**{**entry.round_defaults, ...})`.
    norm: The paper's normalization, the default of `--norm`; '': the programs'.
    normalization: What the authors feed images as, the default of
      `--normalization` for them; '': the programs'.
    tiny_hparams: Values for `hparams` with which the algorithm does all of its
      work on a few examples of noise: a threshold that untrained networks
      reach, no warm-up. For tests that run every algorithm.
    metrics: Declarations of the metrics that only such algorithms have.
    paper: Its source: authors, venue, year.
  """

  name: str
  summary: str
  hparams: type[Any]
  capabilities: Capabilities = Capabilities()
  compute: Compute = Compute()
  round_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  norm: str = ''
  normalization: str = ''
  tiny_hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metrics: tuple[metrics_lib.Metric, ...] = ()
  paper: str = ''

  @classmethod
  def describe(cls, algorithm: Any) -> Algorithm:
    """Makes the entry of a `base.Algorithm`."""
    docstring = inspect.cleandoc(algorithm.__doc__).partition('\n\n')[0]
    return cls(
      algorithm.name,
      ' '.join(docstring.split()),
      algorithm,
      capabilities=algorithm.capabilities,
      compute=algorithm.compute,
      round_defaults=algorithm.round_defaults,
      norm=algorithm.norm,
      normalization=algorithm.normalization,
      tiny_hparams=algorithm.tiny,
      metrics=algorithm.metrics,
      paper=algorithm.paper,
    )

  @property
  def predicts_otherwise(self) -> bool:
    """Whether not the model alone predicts, but what the server adds to it."""
    return any(
      getattr(self.hparams, name) is not getattr(base, name)
      for base in self.hparams.__mro__
      if base.__name__ == 'Algorithm'
      for name in ('prediction', 'predicting_weights', 'other_predictions')
    )

  @property
  def run_defaults(self) -> Mapping[str, Any]:
    """All flags without a prefix that have defaults of the algorithm's."""
    own = {'norm': self.norm, 'normalization': self.normalization}
    given = {name: value for name, value in own.items() if value}
    return {**self.round_defaults, **given}

  def __post_init__(self) -> None:
    # An unknown name or a value out of range is a mistake of the entry.
    try:
      round_hparams_lib.RoundHparams(**self.round_defaults)
      self.hparams(**self.tiny_hparams)
    except (TypeError, hparams_lib.UsageError) as error:
      raise TypeError(
        f'the registry entry {self.name!r} has a wrong value in round_defaults'
        f' or tiny_hparams: {error}'
      ) from error

  def configure(
    self, hparams: Any, round_hparams: round_hparams_lib.RoundHparams
  ) -> Any:
    """Returns the `base.Algorithm` of hyper-parameters; None: the defaults."""
    hparams = self.hparams() if hparams is None else hparams
    return dataclasses.replace(hparams, round=round_hparams)
