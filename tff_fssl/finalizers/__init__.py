"""Finalizers: the server's use of the combined update."""
