"""Tells which run and which model a checkpoint belongs to. TF-free."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from tff_fssl import hparams
from tff_fssl.program.configuration import config as config_lib
from tff_fssl.program.configuration import continuation

TRAINABLE, NON_TRAINABLE = 'trainable', 'non_trainable'
_NUM_SHOWN = 3

# Kind -> a line for each weight: its name, dtype and shape.
Model = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Owner:
  """A run and its model.

  Attributes:
    flags: The run's flags that must not differ, as text; None if there is no
      run.
    model: The model's weights; None if not known.
  """

  flags: dict[str, str] | None = None
  model: Model | None = None

  def difference(self, other: 'Owner') -> str:
    """Describes how another owner differs; '' if it does not.

    Args:
      other: The owner of a file. What this owner states and `other` does not
        counts as a difference.
    """
    if self.flags is not None:
      if other.flags is None:
        return 'it does not say which run it belongs to'
      names, _ = continuation.differences(other.flags, self.flags)
      if names:
        return 'it belongs to another run (' + (
          '; '.join(
            f'--{name}={_shown(other.flags, name)} there,'
            f' {_shown(self.flags, name)} here'
            for name in names[:_NUM_SHOWN]
          )
          + _more(len(names))
          + ')'
        )
    if self.model is not None:
      wrong = model_differences(other.model or {}, self.model)
      if wrong:
        return f'it belongs to another model ({wrong})'
    return ''

  def to_json(self) -> dict[str, Any]:
    """Values for JSON, which `from_json` reads."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Owner':
    """Reads what `to_json` wrote; raises KeyError, TypeError or ValueError."""
    given, model = value['flags'], value['model']
    if given is not None:
      given = {str(name): str(text) for name, text in given.items()}
    if model is not None:
      model = {
        kind: [str(weight) for weight in model[kind]]
        for kind in (TRAINABLE, NON_TRAINABLE)
      }
    return cls(given, model)


NOBODY = Owner()


def of_flags(given: Mapping[str, str]) -> Owner:
  """The run with these flags; those that may differ are ignored."""
  may_differ = continuation.may_differ()
  return Owner({n: v for n, v in given.items() if n not in may_differ})


def of_config(config: config_lib.Config) -> Owner:
  """The run with this configuration."""
  return of_flags({n: hparams.to_text(v) for n, v in config.flags().items()})


def with_model(owner: Owner, model: Any) -> Owner:
  """The owner with a Keras model's weights."""
  return dataclasses.replace(owner, model=describe_model(model))


def describe_model(model: Any) -> Model:
  """The weights of a Keras model, in words."""
  return {
    kind: [
      describe(variable.name, variable.dtype, variable.shape)
      for variable in getattr(model, f'{kind}_variables')
    ]
    for kind in (TRAINABLE, NON_TRAINABLE)
  }


def describe(name: str, dtype: Any, shape: Sequence[int]) -> str:
  """A weight in words: 'conv1/kernel float32 [3, 3, 1, 32]'."""
  dtype = np.dtype(getattr(dtype, 'as_numpy_dtype', dtype)).name
  return f'{name.removesuffix(":0")} {dtype} {[int(n) for n in shape]}'


def model_differences(
  there: Mapping[str, Sequence[str]], here: Mapping[str, Sequence[str]]
) -> str:
  """Describes how the weights of two models differ; '' if they do not."""
  wrong = []
  for kind in (TRAINABLE, NON_TRAINABLE):
    a, b = there.get(kind, []), here.get(kind, [])
    if len(a) != len(b):
      wrong.append(f'{len(a)} {kind}_variables there, {len(b)} here')
    else:
      wrong += [f'{x} there, {y} here' for x, y in zip(a, b) if x != y]
  if not wrong:
    return ''
  return '; '.join(wrong[:_NUM_SHOWN]) + _more(len(wrong))


def _more(count: int) -> str:
  return f'; and {count - _NUM_SHOWN} more' if count > _NUM_SHOWN else ''


def _shown(given: Mapping[str, str], name: str) -> str:
  return given.get(name, '(its default)')
