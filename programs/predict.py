"""Predicts classes of new files. `--help` lists the flags."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tff_fssl import this_python

if __name__ == '__main__':
  this_python.check()

  from tff_fssl.program import main
  from tff_fssl.program import predict_main

  main.start(predict_main.predict_main)
