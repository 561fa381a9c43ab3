"""Unlabelled examples that arrive at clients in parts."""

import dataclasses

import numpy as np

from tff_fssl.data import seeds


@dataclasses.dataclass(frozen=True)
class Streaming:
  """The schedule by which a client's unlabelled examples arrive.

  FedMatch's Streaming-NonIID (Jeong et al., 2021) has 10 steps of 10 rounds.
  Parts are a function of the seed, the client and the round's number, so that a
  resumed run has the same parts.

  Attributes:
    steps: The number of equal parts into which each client's examples are cut
      at random, >= 1. 1: clients always have all.
    rounds: The number of rounds of each part, >= 1.
    cycles: Whether the first part follows the last one. Otherwise the last part
      stays.
    seed: Any integer.

  Examples:
    >>> import numpy as np
    >>> from tff_fssl.data.streaming import Streaming
    >>> streaming = Streaming(steps=3, rounds=10)
    >>> for round_num in (1, 10, 11, 21, 99):
    ...   print(round_num, streaming.part(np.arange(6), 0, round_num))
    1 [2 5]
    10 [2 5]
    11 [3 4]
    21 [0 1]
    99 [0 1]
  """

  steps: int = 1
  rounds: int = 1
  cycles: bool = False
  seed: int = 0

  @property
  def last_begins(self) -> int:
    """Returns the first round with the last part."""
    return (self.steps - 1) * self.rounds + 1

  def step(self, round_num: int) -> int:
    """Returns the part of a round >= 1, in [0, steps)."""
    step = (round_num - 1) // self.rounds
    return step % self.steps if self.cycles else min(step, self.steps - 1)

  def part(
    self, examples: np.ndarray, client_id: int, round_num: int
  ) -> np.ndarray:
    """Returns a client's examples in a round.

    Args:
      examples: int64 [N], all unlabelled examples of the client, ascending.
      client_id: The client.
      round_num: The round, >= 1.

    Returns:
      int64, ascending: floor(N / steps) examples, or one more.
    """
    if self.steps == 1:
      return examples
    # One order for all rounds, so that parts do not overlap.
    rng = seeds.generator(self.seed, seeds.Purpose.STREAMING, client_id)
    order = rng.permutation(len(examples))
    step = self.step(round_num)
    start, stop = (len(examples) * s // self.steps for s in (step, step + 1))
    return examples[np.sort(order[start:stop])]
