"""Draft strategies, which propose tokens."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.drafts.adaptive import AdaptiveDraft
    from fly.drafts.base import DraftSetup, DraftStrategy, pad, pad_trees
    from fly.drafts.block import BlockDraft, LookupDraft
    from fly.drafts.choose import ChooseDraft
    from fly.drafts.eagle import Eagle3Draft
    from fly.drafts.model import CascadeDraft, SingleDraft
    from fly.drafts.ngram import NGramDraft
    from fly.drafts.registry import draft_types, parse_draft
    from fly.drafts.suffix import SuffixDraft
    from fly.drafts.translate import TranslatedDraft
    from fly.drafts.tree import TreeDraft
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = [
    "AdaptiveDraft",
    "BlockDraft",
    "CascadeDraft",
    "ChooseDraft",
    "DraftSetup",
    "DraftStrategy",
    "Eagle3Draft",
    "LookupDraft",
    "NGramDraft",
    "SingleDraft",
    "SuffixDraft",
    "TranslatedDraft",
    "TreeDraft",
    "draft_types",
    "pad",
    "pad_trees",
    "parse_draft",
]
