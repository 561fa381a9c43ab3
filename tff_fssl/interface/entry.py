"""Entries of the registry of algorithms."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import inspect
from typing import Any

from tff_fssl import hparams as hparams_lib
from tff_fssl import metrics as metrics_lib
from tff_fssl.interface import round_hparams as round_hparams_lib


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """Demands of an algorithm on a deployment that its methods do not tell.

  Properties of hyper-parameters are given by name. '' means that there is none.

  Attributes:
    extra_uploads: Other values that a client sends with its update and its
      statistics, in words.
    without_own_weights: 'name=value', the hyper-parameter by which
      `client_weighting` decides. By its other values the algorithm sets the
      weights of updates. '' if the algorithm never does.
    signals: The hyper-parameter or property that, if true, makes clients send
      uploads outside of the sum of updates. Aggregators that protect the sum
      then refuse the algorithm, as they refuse one with an `exchange`.
    without_signals: 'name=value', the hyper-parameter that turns these uploads
      and the exchange off.
    without_groups: 'name=value', the hyper-parameter that leaves one of
      `Algorithm.groups`.
    labels_of_class: The hyper-parameter or property that is the number of
      labels of a class which a client needs.
    without_mixing: 'name=value', the hyper-parameter that turns the mixing of
      network inputs off. Any other value that is true turns it on. '' if the
      algorithm never mixes inputs.
    without_quota: Why `--pseudo_label_quota` does not fit, in words. '' if it
      does, or if methods tell.
  """

  extra_uploads: tuple[str, ...] = ()
  without_own_weights: str = ''
  signals: str = ''
  without_signals: str = ''
  without_groups: str = ''
  labels_of_class: str = ''
  without_mixing: str = ''
  without_quota: str = ''


@dataclasses.dataclass(frozen=True)
class Entry:
  """A registry entry.

  Attributes:
    name: The value for `--algorithm`.
    summary: A description in one line.
    hparams: The class, a `base.Algorithm`. Its fields are its
      hyper-parameters.
    capabilities: Its demands on a deployment.
    round_defaults: The paper's values of fields of `RoundHparams`, by name. The
      programs use them unless the user gives the flag. From Python, write
      `RoundHparams(**{**entry.round_defaults, ...})`.
    norm: The paper's normalization layers, the default of `--norm`. With '',
      the programs' default.
    normalization: The authors' normalization of images, the default of
      `--normalization` for images. With '', the programs' default.
    tiny_hparams: Values for `hparams` with which the algorithm does all of its
      work on a few examples of noise, such as a threshold that untrained
      networks reach. For tests that run every algorithm.
    metrics: Declarations of the metrics that only such algorithms have.
    paper: Authors, venue and year of the source.
    flags_of: The algorithm whose flags it reads. With '', it has its own.
  """

  name: str
  summary: str
  hparams: type[Any]
  capabilities: Capabilities = Capabilities()
  round_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  norm: str = ''
  normalization: str = ''
  tiny_hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metrics: tuple[metrics_lib.Metric, ...] = ()
  paper: str = ''
  flags_of: str = ''

  @classmethod
  def describe(cls, algorithm: Any) -> Entry:
    """Makes the entry of a `base.Algorithm`."""
    # The first paragraph, without the details.
    docstring = inspect.cleandoc(algorithm.__doc__).partition('\n\n')[0]
    return cls(
      algorithm.name,
      ' '.join(docstring.split()),
      algorithm,
      capabilities=algorithm.capabilities,
      round_defaults=algorithm.round_defaults,
      norm=algorithm.norm,
      normalization=algorithm.normalization,
      tiny_hparams=algorithm.tiny,
      metrics=algorithm.metrics,
      paper=algorithm.paper,
      flags_of=vars(algorithm).get('flags_of', ''),
    )

  @property
  def prefix(self) -> str:
    """Returns the prefix of the algorithm's flags."""
    return f'{self.flags_of or self.name}.'

  @property
  def scenarios(self) -> tuple[str, ...]:
    """Returns the supported scenarios, that is, places of the labels."""
    scenarios: tuple[str, ...] = self.hparams.scenarios
    return scenarios

  @property
  def trains_clients(self) -> tuple[str, ...]:
    """Returns the scenarios in which clients train.

    In others a round needs no cohort.
    """
    trains: tuple[str, ...] | None = self.hparams.trains_clients
    return self.scenarios if trains is None else trains

  @property
  def is_alone(self) -> bool:
    """Tells whether clients train alone, so that nothing is aggregated."""
    return bool(self.hparams.alone)

  @property
  def learns_unlabeled(self) -> bool:
    """Tells whether clients learn from unlabelled examples."""
    streams = self.hparams().streams().values()
    return not all(stream.labeled for stream in streams)

  def keeps_client_state(self, hparams: Any = None) -> bool:
    """Tells whether the server keeps a state of each client, by its identity.

    Args:
      hparams: An instance of the class. None stands for the defaults.
    """
    hparams = self.hparams() if hparams is None else hparams
    return hparams.exchange() is not None

  @property
  def weight_sets_up(self) -> int:
    """Counts the weight sets that a client uploads, by the defaults."""
    if self.is_alone:
      return 0
    networks = self.hparams().networks().values()
    return 1 + len([network for network in networks if network.uploaded])

  @property
  def predicts_otherwise(self) -> bool:
    """Tells whether the server predicts by more than the model's weights."""
    # The last class before `object`: `base` imports this module.
    base = self.hparams.__mro__[-2]
    return any(
      getattr(self.hparams, name) is not getattr(base, name)
      for name in ('prediction', 'predicting_weights', 'other_predictions')
    )

  @property
  def run_defaults(self) -> Mapping[str, Any]:
    """Returns the algorithm's defaults of flags without a prefix."""
    own = {'norm': self.norm, 'normalization': self.normalization}
    # An empty value stands for the program's default.
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
    """Returns the `base.Algorithm` of hyper-parameters.

    Args:
      hparams: An instance of the class. None stands for the defaults.
      round_hparams: Hyper-parameters that all algorithms share.

    Returns:
      The algorithm.
    """
    hparams = self.hparams() if hparams is None else hparams
    return dataclasses.replace(hparams, round=round_hparams)
