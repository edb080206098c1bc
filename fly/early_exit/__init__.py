"""Early exit (SpecEE, arXiv 2504.08850): predictors of whether more layers would change the target's choice, and the
executor that skips layers where they would not. ``fly.train`` trains the predictors."""

from pathlib import Path

from fly.early_exit.executor import EarlyExit
from fly.early_exit.predictors import ExitConfig, Exits, load_exits, save_exits
from fly.runtime.executor import Executor

__all__ = ["EarlyExit", "ExitConfig", "Exits", "exit_early", "load_exits", "save_exits"]


def exit_early(executor: Executor, exits: str | Path) -> EarlyExit:
    """Make a loaded target exit early, by the predictors in the directory ``exits`` (``fly train-exit`` writes them).

    Raises ``ValueError`` if they cannot be read, or are for another target or other kernels.
    """
    return EarlyExit(executor, load_exits(exits))
