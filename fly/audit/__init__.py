"""A judge of any OpenAI-compatible server: are its answers those of its model, whatever makes them fast?"""

from fly.audit.client import Unreachable
from fly.audit.report import Finding, Report, Verdict
from fly.audit.run import audit, check_names

__all__ = ["Finding", "Report", "Unreachable", "Verdict", "audit", "check_names"]
