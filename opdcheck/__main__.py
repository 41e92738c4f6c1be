"""Where `opdcheck` and `python -m opdcheck` start.

Python exits with 1 when a module cannot be imported, and 1 means "rejected" here. So even the command line itself is
imported under guard: a broken installation exits with 4.
"""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Imports the command line and runs it; see `opdcheck.cli.main`."""
    # libgomp reads it once, when torch loads. By default its threads spin at every barrier, and beside any other busy
    # process on the same cores vLLM's CPU kernels were seen to take 20 times as long (8 s became 80 s).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        from opdcheck import cli
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        print(f"error: opdcheck cannot start: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        print("Its installation is broken: pip install --force-reinstall opdcheck", file=sys.stderr)  # noqa: T201
        sys.exit(4)
    cli.main()


if __name__ == "__main__":
    main()
