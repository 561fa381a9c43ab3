"""Writes docs/metrics.md from the declarations of the metrics."""

import pathlib

from tff_fssl.program import catalogue

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'metrics.md'

if __name__ == '__main__':
  PAGE.write_text(catalogue.page())
