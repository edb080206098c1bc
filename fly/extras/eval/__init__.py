"""Evaluate what a rule gains and costs on your task: tasks, runs that decode them in many ways, and reports."""

from fly.extras.eval.compare import Result, compare, decode
from fly.extras.eval.decoder import Decoder, Finished
from fly.extras.eval.plan import Plan
from fly.extras.eval.replay import Replay, replay
from fly.extras.eval.report import Report, report
from fly.extras.eval.run import RunWriter, check_folder, decode_run, remaining, score_run, write_run
from fly.extras.eval.served import Served
from fly.extras.eval.task import Task, load_task, task_names
from fly.extras.eval.timed import Setting

__all__ = [
    "Decoder",
    "Finished",
    "Plan",
    "Replay",
    "Report",
    "Result",
    "RunWriter",
    "Served",
    "Setting",
    "Task",
    "check_folder",
    "compare",
    "decode",
    "decode_run",
    "load_task",
    "remaining",
    "replay",
    "report",
    "score_run",
    "task_names",
    "write_run",
]
