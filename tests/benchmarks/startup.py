"""How long `opdcheck --help` takes, beside the bare interpreter, best of several starts of each.

    python tests/benchmarks/startup.py [--repeat 10]

Exits 1 above 0.4 s.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

LIMIT_SECONDS = 0.4


def best(command: list[str], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10)
    repeat = parser.parse_args().repeat
    bare = best([sys.executable, "-c", "pass"], repeat)
    help_ = best([sys.executable, "-m", "opdcheck", "--help"], repeat)
    print(f"opdcheck --help {help_:.2f} s, python -c pass {bare:.2f} s, ratio {help_ / bare:.0f}")
    return int(help_ > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
