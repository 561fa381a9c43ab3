"""Compares runs over seeds; `--help` lists the flags."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tff_fssl.program.commands import compare_main
from tff_fssl.program.commands import main

if __name__ == '__main__':
  sys.exit(main.run(compare_main.compare_main))
