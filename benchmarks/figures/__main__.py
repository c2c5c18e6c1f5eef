"""Writes the page."""

import argparse
from pathlib import Path

from benchmarks.figures.page import PAGE, page


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of the sources' figures.")
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.parse_args().output.write_text(page())


if __name__ == "__main__":
    main()
