"""Factories of `tff.aggregators` that combine clients' updates."""
