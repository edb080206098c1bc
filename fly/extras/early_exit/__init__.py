"""Early exit (SpecEE, arXiv 2504.08850). Predictors estimate whether more layers would change the target's choice, and
an executor skips the layers where they would not. ``fly.extras.train`` trains the predictors."""

from pathlib import Path

from fly.early_exit.executor import EarlyExit
from fly.early_exit.predictors import ExitConfig, Exits, load_exits, save_exits
from fly.runner.executor import Executor

__all__ = ["EarlyExit", "ExitConfig", "Exits", "exit_early", "load_exits", "save_exits"]


def exit_early(executor: Executor, exits: str | Path) -> EarlyExit:
    """Make a loaded target exit early by the predictors in the directory ``exits``, which ``fly train-exit`` writes.

    Raises ``ValueError`` if the predictors cannot be read, or do not fit the target or its kernels.
    """
    return EarlyExit(executor, load_exits(exits))
