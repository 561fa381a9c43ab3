"""An extension of griffe, which reads sources for the site's reference.

Fields made by `hparam` get their default and their help: griffe sees the call.
"""

import dataclasses
import importlib
from typing import Any

import griffe

from tff_fssl import hparams
from tff_fssl.program import usage

_MAKERS = ('hparam', 'borrow')


def _maker(attribute: Any) -> str:
  """Returns the name of the function whose call is the attribute's value."""
  value = attribute.value
  if not isinstance(value, griffe.ExprCall):
    return ''
  return str(value.function).rpartition('.')[2]


class HparamFields(griffe.Extension):
  """Shows `hparam` fields as users set them."""

  def on_class_members(self, *, cls: Any, **_: Any) -> None:
    """Replaces values and docstrings, before griffe makes `__init__`."""
    made = {
      name: member
      for name, member in cls.members.items()
      if member.is_attribute and _maker(member) in _MAKERS
    }
    if not made:
      return
    # Modules of hyper-parameters do not import TensorFlow.
    module = importlib.import_module(cls.module.path)
    fields = dataclasses.fields(getattr(module, cls.name))
    for field in fields:
      if field.name not in made:
        continue
      attribute, text = made[field.name], field.metadata['help']
      default = field.default
      attribute.value = (
        hparams.format_value(default)
        if isinstance(default, float)
        else repr(default)
      )
      attribute.docstring = griffe.Docstring(
        f'{text}{usage.allowed(field)}', parent=attribute
      )
