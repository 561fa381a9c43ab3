"""Runs pytest with the given arguments: `main` of the tests in BUILD.bazel."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(sys.argv[1:]))
