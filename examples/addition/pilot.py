"""How much do trainings differ without any mismatch? Unperturbed trainings of a calibration file, one per seed.

The margin is a share of their gain, so a method whose gain spreads little needs few seeds:

    python pilot.py calibration.yaml --jobs 2
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from opdcheck.calibration.calibrator import Calibrator
from opdcheck.calibration.file import load_calibration
from opdcheck.progress import Silent


def main() -> None:
    """Trains what is not kept yet, and prints gain and spread."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    located = load_calibration(arguments.calibration)
    runs = Calibrator(located, Silent(), instead_of_ladder=[], jobs=arguments.jobs).trainings()
    quality = located.value.quality
    gains = [run.outcome.start(quality) - run.outcome.reached(quality) for run in runs]
    mean, spread = statistics.mean(gains), statistics.stdev(gains)
    print("gains", *(f"{gain:.4f}" for gain in gains))
    print(f"mean {mean:.4f}, standard deviation {spread:.4f}: {spread / mean:.3f} of the mean")


if __name__ == "__main__":
    main()
