"""Draft strategies: who proposes."""

from fly.drafts.base import DraftStrategy
from fly.drafts.model import CascadeDraft, SingleDraft, parse_draft
from fly.drafts.ngram import NGramDraft

__all__ = ["CascadeDraft", "DraftStrategy", "NGramDraft", "SingleDraft", "parse_draft"]
