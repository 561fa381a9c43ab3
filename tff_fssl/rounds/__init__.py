"""The parts of a round, independent of the algorithm."""
