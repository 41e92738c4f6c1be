"""opdcheck: may this rollout configuration feed this distillation run?

The public API is what the command line calls: `admit`, `calibrate`, `backtest`, `declare` and the records they return.
Imported lazily, so that `import opdcheck` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opdcheck.admission import admit as admit
    from opdcheck.budget import Budget as Budget
    from opdcheck.calibration.backtest import backtest as backtest
    from opdcheck.calibration.calibrator import calibrate as calibrate
    from opdcheck.config import Candidate as Candidate
    from opdcheck.declaration import declare as declare
    from opdcheck.report.record import Report as Report

__version__ = "0.1.0"

_HOMES = {
    "admit": "opdcheck.admission",
    "backtest": "opdcheck.calibration.backtest",
    "calibrate": "opdcheck.calibration.calibrator",
    "declare": "opdcheck.declaration",
    "Budget": "opdcheck.budget",
    "Candidate": "opdcheck.config",
    "Report": "opdcheck.report.record",
}

__all__ = ["Budget", "Candidate", "Report", "__version__", "admit", "backtest", "calibrate", "declare"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'opdcheck' has no attribute {name!r}")
