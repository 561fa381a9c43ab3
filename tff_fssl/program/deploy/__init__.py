"""Federations: a process as an app whose clients need no simulation."""
