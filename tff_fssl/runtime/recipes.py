"""The interface of clients' data that are made on another machine.

A recipe travels once to each process that works. Of each client, only the
recipe's arguments follow.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


class Recipe(Protocol):
  """Makes clients' values in any process. It is small, and can be pickled."""

  def load(self, report: Callable[[Any], None]) -> Callable[..., Any]:
    """Loads everything needed to make values, once in each process.

    Args:
      report: Sends something small, which can be pickled, to `received`.

    Returns:
      A client's arguments -> its value, as the runtime takes it. Called when
      the client's turn comes, perhaps in several threads at a time, perhaps
      several times for a client.

    Raises:
      tff_fssl.hparams.UsageError: If this machine lacks something.
    """

  def received(self, item: Any) -> None:
    """Takes, in the process that has made the recipe, what `report` got."""


@runtime_checkable
class MadeByRecipe(Protocol):
  """A sequence of clients' values that a recipe can make, too.

  Attributes:
    recipe: The recipe, or None if there is none.
  """

  recipe: Recipe | None

  def arguments_of(self, index: int) -> tuple[Any, ...]:
    """Returns the recipe's arguments for a client's value."""
