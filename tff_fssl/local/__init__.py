"""Local training: the one batch loop, and what algorithms give it."""
