"""Suffix decoding: propose the tokens that most often followed where earlier text ended like this text."""

from __future__ import annotations

from collections import Counter, abc, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from fly.drafts.base import DraftSetup, DraftStrategy, pad, until_end
from fly.ops import common_prefix
from fly.runner.request import Row
from fly.types import Draft

__all__ = ["SuffixDraft"]

_ANCHORS = (8, 4, 2, 1)  # lengths of the indexed n-grams, longest first; longer matches are found by comparing texts

_Place = tuple[list[int], int]  # a text, and a position in it at which an n-gram ends


@dataclass
class _Places:
    """For each n-gram, the places at which it ends and another token follows, oldest first."""

    depth: int
    ends: defaultdict[tuple[int, ...], list[_Place]] = field(default_factory=lambda: defaultdict(list))

    def add(self, text: list[int], end: int) -> None:
        """Index the n-grams that end at ``end``. Call this in order of positions."""
        for gram in self._grams(text, end):
            self.ends[gram].append((text, end))

    def drop(self, text: list[int], end: int, at: int) -> None:
        """Undo ``add`` for the latest place (``at`` -1) or the oldest (``at`` 0)."""
        for gram in self._grams(text, end):
            del self.ends[gram][at]
            if not self.ends[gram]:
                del self.ends[gram]

    def longest(self, text: list[int], lookback: int) -> tuple[int, list[_Place]]:
        """Find the longest match with the end of ``text``. Return its length and its places, latest first."""
        gram = next((gram for gram in self._grams(text, len(text) - 1) if gram in self.ends), ())
        best, places = len(gram), list[_Place]()
        for other, end in self.ends[gram][: -lookback - 1 : -1] if gram else ():
            if other[max(0, end + 1 - best) : end + 1] != text[-best:]:
                continue
            n, most = best, min(self.depth, len(text), end + 1)
            while n < most and other[end - n] == text[-1 - n]:
                n += 1
            if n > best:
                best, places = n, []
            places.append((other, end))
        return best, places

    def _grams(self, text: list[int], end: int) -> Iterator[tuple[int, ...]]:
        longest = min(self.depth, end + 1)
        return (tuple(text[end + 1 - n : end + 1]) for n in _ANCHORS if n <= longest)


class SuffixDraft(DraftStrategy):
    """Suffix decoding (Oliaro et al., arXiv 2411.04975; ArcticInference). Find the longest suffix of the text, up to
    ``depth`` tokens, that also occurs earlier. Propose, token by token, the tokens that most often followed it.

    It searches the request's own text, and the outputs of finished requests with the same ``cache_salt``. Each of the
    two searches gives a proposal, and the one with the higher score is used (on a tie, that from the request's own
    text). Each step takes the most frequent next token (on a tie, that of the latest place). The probability of this
    token is the fraction of the matching places that continue with it. The score is the expected number of accepted
    tokens: the sum over steps of the product of the probabilities so far.

    It differs from the published method in four ways. First, an index of short n-grams replaces suffix trees. Only the
    latest ``lookback`` places of the longest indexed n-gram (8, 4, 2 or 1 tokens) are compared, so a longer match
    further back may be missed. Second, only the longest match is followed, not the best of all lengths. Third, a place
    that reaches the end of the request's own text continues with the draft's tokens, so a repetition goes on. Fourth,
    it proposes chains, not trees.

    The cost of a lookup does not grow with the context, except for comparing the text with the indexed text. Shared
    outputs change where a request's rounds begin, and so which tokens a seed gives, but never their distribution. With
    ``shared_tokens`` 0, requests do not influence each other.

    Args:
        depth: the longest match, in tokens.
        factor, offset: at most ``factor * match + offset`` tokens are proposed.
        min_prob: a proposal ends before the product of its probabilities falls below this.
        lookback: how many places are compared in a lookup, at least 1.
        shared_tokens: how many tokens of finished requests are kept, including up to ``depth`` tokens of each prompt.
            The oldest outputs are dropped first. If one output is longer than this, its end is kept. 0 turns sharing
            off.
        k: the most tokens that it proposes (None: as many as the caller asks for).
    """

    learns = True

    def __init__(
        self,
        depth: int = 64,
        factor: float = 1.0,
        offset: int = 0,
        min_prob: float = 0.1,
        lookback: int = 32,
        shared_tokens: int = 100_000,
        k: int | None = None,
    ) -> None:
        for name, count in (("depth", depth), ("lookback", lookback), ("k", k)):
            if count is not None and count < 1:
                raise ValueError(f"{name} {count} must be at least 1")
        for name, amount in (("factor", factor), ("offset", offset), ("shared_tokens", shared_tokens)):
            if not 0 <= amount < float("inf"):
                raise ValueError(f"{name} {amount} must be at least 0 and finite")
        if not 0 <= min_prob <= 1:
            raise ValueError(f"min_prob {min_prob} must lie in 0..1")
        self.depth = depth
        self.factor = factor
        self.offset = offset
        self.min_prob = min_prob
        self.lookback = lookback
        self.shared_tokens = shared_tokens
        self.k = k
        # Each request's own text. It is indexed up to the last token but one, since no token follows the last one yet.
        self._own: dict[int, tuple[list[int], _Places]] = {}
        self._shared: dict[str, _Places] = {}  # by ``cache_salt``
        # The shared outputs: tokens, the first indexed position, salt.
        self._outputs: deque[tuple[list[int], int, str]] = deque()
        self._held = 0  # tokens in all outputs

    def attach(self, setup: DraftSetup) -> None:
        """Note the target's vocabulary. Raises ``ValueError`` if shared outputs come from a target with another one."""
        if not self.shared_tokens:
            return
        size = setup.target.executor.config.vocab_size
        if self.vocab_size not in (None, size):
            raise ValueError(
                f"this strategy shares outputs of a target with {self.vocab_size} tokens in its vocabulary, "
                f"and cannot draft for one with {size}; give each its own, or shared_tokens=0"
            )
        self.vocab_size = size

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        proposals = [self._lookup(row, n if self.k is None else min(n, self.k)) for row, n in zip(rows, max_len)]
        return pad([until_end(tokens, row) for row, tokens in zip(rows, proposals)])

    def commit(self, rows: abc.Sequence[Row]) -> None:
        for row in rows:
            self._sync(row)

    def release(self, row: Row) -> None:
        """Free the row's own state, and share its output. A fork shares nothing: its tokens have no provenance."""
        if self._own.pop(row.id, None) is not None and row.provenance and self.shared_tokens:
            self._share(row)

    def _lookup(self, row: Row, most: int) -> list[int]:
        if most < 1:
            return []
        text, row_index = self._sync(row)
        shared = self._shared.get(row.params.cache_salt)
        proposals = [self._follow(text, index, most) for index in (row_index, shared) if index is not None]
        _, drafted = max(proposals, key=itemgetter(0))  # on a tie the first, the row's own
        return drafted

    def _follow(self, text: list[int], index: _Places, most: int) -> tuple[float, list[int]]:
        """Propose from one index. Return the score and the tokens."""
        match, places = index.longest(text, self.lookback)
        most = min(most, int(self.factor * match + self.offset))
        drafted: list[int] = []
        score, chance = 0.0, 1.0
        while places and len(drafted) < most:
            following = [_token_after(place, text, drafted) for place in places]
            counts = Counter(token for token in following if token is not None)
            if not counts:
                break
            token, count = counts.most_common(1)[0]  # on a tie the first, which comes from the latest place
            chance *= count / len(places)
            if chance < self.min_prob:
                break
            places = [place for place, follows in zip(places, following) if follows == token]
            drafted.append(token)
            score += chance
        return score, drafted

    def _sync(self, row: Row) -> tuple[list[int], _Places]:
        """Update the indexed copy of the row's text and its index. Return both."""
        text, places = entry = self._own.setdefault(row.id, ([], _Places(self.depth)))
        keep = common_prefix(text, row.tokens)
        indexed = max(0, keep - 1)
        for end in range(len(text) - 2, indexed - 1, -1):
            places.drop(text, end, -1)
        text[keep:] = row.tokens[keep:]
        for end in range(indexed, len(text) - 1):
            places.add(text, end)
        return entry

    def _share(self, row: Row) -> None:
        start = max(0, row.prompt_length - self.depth, len(row.tokens) - self.shared_tokens)
        text = row.tokens[start:]
        first = max(0, row.prompt_length - 1 - start)  # the prompt's last token: the output follows it
        while self._held + len(text) > self.shared_tokens:
            oldest, indexed, salt = self._outputs.popleft()
            for end in range(indexed, len(oldest) - 1):
                self._shared[salt].drop(oldest, end, 0)
            if (shared_index := self._shared.get(salt)) is not None and not shared_index.ends:
                del self._shared[salt]
            self._held -= len(oldest)
        salt = row.params.cache_salt
        index = self._shared.setdefault(salt, _Places(self.depth))
        for end in range(first, len(text) - 1):
            index.add(text, end)
        self._outputs.append((text, first, salt))
        self._held += len(text)


def _token_after(place: _Place, text: list[int], drafted: list[int]) -> int | None:
    """Skip as many tokens after ``place`` as ``drafted`` has, and return the next one; None if the text of ``place``
    ends there."""
    other, end = place
    at = end + 1 + len(drafted)
    if at < len(other):
        return other[at]
    return drafted[at - len(other)] if other is text else None
