"""What is known of a process before its first round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tff_fssl.hparams import UsageError
from tff_fssl.models.weights import Weights


class Setup(NamedTuple):
  """The process that an algorithm is part of, before its first round.

  Attributes:
    num_clients: The number of clients, whose ids are 0 .. num_clients - 1. 0:
      unknown.
    weights: `tf.TensorSpec`s of the model's weights.
    of_peers: Name of each auxiliary network with a `build` -> `tf.TensorSpec`s
      of its weights. Only an exchange gets them.
    num_classes: The number of classes.
    num_outputs: The width of the network's outputs, logits or embeddings.
    feature_size: Returns the width of the input of the network's last layer, or
      raises `UsageError` if that is not a dense one.
    plain_mean: Whether the aggregator is TFF's mean, and changes no update.
    robust: Whether the aggregator is `robust`. Then no single client should
      determine the values that others receive. Where it does, the algorithm's
      page says so.
    seed: The run's seed.
  """

  num_clients: int = 0
  weights: Weights = Weights((), (), None)  # type: ignore[arg-type]
  of_peers: Mapping[str, Weights] = {}
  num_classes: int = 1
  num_outputs: int = 1
  feature_size: Callable[[], int] = lambda: 1
  plain_mean: bool = True
  robust: bool = False
  seed: int = 0

  def known_clients(self) -> int:
    """Returns the number of clients.

    Raises:
      UsageError: If the number is unknown.
    """
    if not self.num_clients:
      raise UsageError(
        'num_clients=None: the server of this algorithm keeps values for each'
        ' client; give the number of clients, whose ids are 0 to num_clients'
        ' - 1'
      )
    return self.num_clients
