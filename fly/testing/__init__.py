"""The conformance kits check an acceptance policy (``check_policy``) or a draft strategy (``check_draft``) against its
contract. They need no trained model, and report each fault with a small counterexample."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.testing.drafts import DRAFT_CHECKS, check_draft
    from fly.testing.guarantees import check_trees
    from fly.testing.policies import CHECKS, check_policy, parametrize_with_checks
    from fly.testing.report import ConformanceError, Finding, Report, run_checks
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = [
    "CHECKS",
    "DRAFT_CHECKS",
    "ConformanceError",
    "Finding",
    "Report",
    "check_draft",
    "check_policy",
    "check_trees",
    "parametrize_with_checks",
    "run_checks",
]
