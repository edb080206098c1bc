"""What a forward works on: requests and their settings, the seam to a backend, and the runner that pairs it with a
cache."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.runner.structured import Grammars
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = ["Grammars"]
