"""A target that skips its last layers where they would not change its choice (SpecEE, arXiv 2504.08850). The predictors
are trained by ``fly.train.exits``."""

from fly.early_exit.executor import EarlyExit
from fly.early_exit.predictors import ExitConfig, Exits, load_exits, save_exits

__all__ = ["EarlyExit", "ExitConfig", "Exits", "load_exits", "save_exits"]
