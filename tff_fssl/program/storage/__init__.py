"""The files of a run."""
