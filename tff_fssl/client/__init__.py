"""Local training: the batch loop, and the interface of algorithms to it."""
