"""Training of draft heads: answers by the target itself, the training-time test of EAGLE-3, checkpoints, a card."""

from fly.train.answers import Answer, answers, prompts_of
from fly.train.card import card
from fly.train.head import Plan, Training, train_head

__all__ = ["Answer", "Plan", "Training", "answers", "card", "prompts_of", "train_head"]
