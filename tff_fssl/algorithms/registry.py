"""All algorithms by name. TensorFlow-free until one is built."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from tff_fssl import hparams
from tff_fssl.algorithms import fixmatch_hparams
from tff_fssl.algorithms import fl2_hparams
from tff_fssl.algorithms import supervised_hparams
from tff_fssl.rounds import round_hparams

_SERVER = round_hparams.LABELS_AT_SERVER
_CLIENTS = round_hparams.LABELS_AT_CLIENTS


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """What an algorithm can do and what it requires of a deployment.

  Attributes:
    scenarios: The supported scenarios, which say where the labels are.
    trains_clients: The scenarios in which clients train; in the others a round
      needs no cohort.
    client_state: Whether the server keeps state for each client, by its
      identity (which rules out cross-device deployments).
    per_client_broadcast: Whether clients receive different messages.
    extra_uploads: Other values that a client sends with its update and its
      statistics.
    client_phases: Client phases in a round, without static batch norm's.
    weight_sets_down: Weight sets sent to a client in a phase.
    weight_sets_up: Weight sets received from a client in a phase.
    own_weights: The hyper-parameter that, if true, makes the algorithm set the
      weights of updates, instead of `client_weighting`; '' if there is none.
  """

  scenarios: tuple[str, ...] = (_SERVER, _CLIENTS)
  trains_clients: tuple[str, ...] = (_SERVER, _CLIENTS)
  client_state: bool = False
  per_client_broadcast: bool = False
  extra_uploads: tuple[str, ...] = ()
  client_phases: int = 1
  weight_sets_down: int = 1
  weight_sets_up: int = 1
  own_weights: str = ''


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """A registry entry.

  Attributes:
    name: The value for `--algorithm`, and the prefix of the algorithm's flags.
    summary: One line.
    hparams: The dataclass of its hyper-parameters.
    builder: 'module:function'; called with the arguments of `build`.
    capabilities: What the algorithm can do.
    round_defaults: The paper's values of fields of `RoundHparams`, by name. The
      programs use them unless the user gives the flag; an embedder writes
      `RoundHparams(**{**entry.round_defaults, ...})`.
    tiny_hparams: Values for `hparams` with which the algorithm does all of its
      work on a few examples of noise: a threshold that untrained networks
      reach, no warm-up. For tests that run every algorithm.
  """

  name: str
  summary: str
  hparams: type[Any]
  builder: str
  capabilities: Capabilities = Capabilities()
  round_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tiny_hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    # An unknown name or a value out of range is a mistake of the entry.
    try:
      round_hparams.RoundHparams(**self.round_defaults)
      self.hparams(**self.tiny_hparams)
    except (TypeError, hparams.UsageError) as error:
      raise TypeError(
        f'the registry entry {self.name!r} has a wrong value in round_defaults'
        f' or tiny_hparams: {error}'
      ) from error

  def build(self, model_fn: Any, **kwargs: Any) -> Any:
    """Builds the learning process.

    Args:
      model_fn: Builds a Keras model, images -> logits.
      **kwargs: views, element_spec, server_data_fn, round_hparams, seed, and
        optionally model_aggregator and num_classes, for which see
        `assemble.build_process`; optionally hparams, an instance of
        `self.hparams`, by default one with its defaults.

    Returns:
      A `tff.learning.templates.LearningProcess`.

    Raises:
      UsageError: If the algorithm does not support the scenario, or from
        `build_process`.
    """
    scenario = kwargs['round_hparams'].scenario
    if scenario not in self.capabilities.scenarios:
      raise hparams.UsageError(
        f'--scenario={scenario}: {self.name} is not defined for it, only for'
        f' {", ".join(self.capabilities.scenarios)}'
      )
    kwargs.setdefault('hparams', self.hparams())
    return hparams.import_function(self.builder)(model_fn, **kwargs)


REGISTRY = {
  algorithm.name: algorithm
  for algorithm in (
    Algorithm(
      'supervised',
      'Labels only: FedAvg at clients, or training at the server only.',
      supervised_hparams.SupervisedHparams,
      'tff_fssl.algorithms.supervised:build_supervised',
      Capabilities(trains_clients=(_CLIENTS,)),
    ),
    Algorithm(
      'fixmatch',
      'FixMatch at clients, with FedAvg or FedProx.',
      fixmatch_hparams.FixMatchHparams,
      'tff_fssl.algorithms.fixmatch:build_fixmatch',
    ),
    Algorithm(
      'fl2',
      '(FL)^2: adaptive thresholds, sharpness-aware consistency,'
      ' learning-status-aware aggregation.',
      fl2_hparams.Fl2Hparams,
      'tff_fssl.algorithms.fl2:build_fl2',
      Capabilities(
        scenarios=(_SERVER,),
        trains_clients=(_SERVER,),
        extra_uploads=('learning status (in the weight)',),
        own_weights='learning_status_aggregation',
      ),
    ),
  )
}
