"""fly in EleutherAI's lm-evaluation-harness: its likelihoods, its answers, its command, and its own client."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

from fly import LLM, cli
from fly.bundled import load_bundled, problems  # noqa: F401
from fly.eval.harness import Fly
from tests.serving import running
