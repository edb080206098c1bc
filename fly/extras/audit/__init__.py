"""A judge of any OpenAI-compatible server: are its answers those of its model, whatever makes them fast?"""

from fly.extras.audit.client import Unreachable
from fly.extras.audit.report import Finding, Report, Verdict
from fly.extras.audit.run import audit, check_names

__all__ = ["Finding", "Report", "Unreachable", "Verdict", "audit", "check_names"]
