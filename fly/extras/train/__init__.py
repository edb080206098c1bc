"""Train EAGLE-3, DFlash and DSpark draft heads on the target's own answers."""

from fly.extras.train.answers import Answer, answers, prompts_of
from fly.extras.train.card import card
from fly.extras.train.head import train_head
from fly.extras.train.plan import Plan, Training

__all__ = [
    "Answer",
    "Plan",
    "Training",
    "answers",
    "card",
    "prompts_of",
    "train_head",
]
