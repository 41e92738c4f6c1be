"""More processes for one calibration: each trains what no other one has claimed (see `RunStore.claimed`)."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opdcheck.calibration.ladder import Level
from opdcheck.errors import ExitCode, OpdcheckError
from opdcheck.progress import Silent


@contextmanager
def workers(count: int, file: Path, seeds: Sequence[int], levels: Sequence[Level]) -> Iterator[None]:
    """Keeps `count` processes training while the block runs, and ends them with it.

    What goes wrong in one of them is not told: its training is then free again, and fails in this process.

    Args:
        file: the calibration.
        levels: those of the ladder, or what stands in its place, without the unperturbed one.
    """
    context = multiprocessing.get_context("spawn")
    arguments = (file, list(seeds), list(levels), _threads_each(count + 1))
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(count)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _threads_each(processes: int) -> int:
    """This process's threads, shared out; it takes its own share at once."""
    import torch

    if processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    return torch.get_num_threads()


def _work(file: Path, seeds: list[int], levels: list[Level], threads: int) -> None:
    import torch

    from opdcheck.calibration.calibrator import Calibrator
    from opdcheck.calibration.file import load_calibration

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        located = load_calibration(file)
        located = located.replace(located.value.model_copy(update={"seeds": seeds}))
        Calibrator(located, Silent(), instead_of_ladder=levels).trainings()
    except (OpdcheckError, KeyboardInterrupt):
        pass


def _end_with_parent() -> None:
    """A killed parent cannot end this process; whoever calls again shall not find it still at work."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(ExitCode.FAILED)


__all__ = ["workers"]
