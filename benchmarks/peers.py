"""Compares engines on this machine: `python benchmarks/peers.py run`, or `setup` first. The code is in `peer/`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, the root is not on the path
    runpy.run_module("benchmarks.peer", run_name="__main__")
