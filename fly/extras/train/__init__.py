"""Train EAGLE-3 draft heads and predictors of early exits, on the target's own answers."""

from fly.extras.train.answers import Answer, answers, prompts_of
from fly.extras.train.card import card
from fly.extras.train.exits import ExitPlan, Look, exit_card, looks_of, train_exits
from fly.extras.train.head import Plan, Training, train_head

__all__ = [
    "Answer",
    "ExitPlan",
    "Look",
    "Plan",
    "Training",
    "answers",
    "card",
    "exit_card",
    "looks_of",
    "prompts_of",
    "train_exits",
    "train_head",
]
