"""Checks of how answers end, of their form, and of unknown fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fly.extras.audit.client import Refused, Reply
from fly.extras.audit.context import Context, check
from fly.extras.audit.distributions import is_plain
from fly.extras.audit.report import Finding, Verdict, found_in

_NONE: Mapping[str, Any] = {}
_SOME_IDS = (1000, 1100, 1200, 1300)
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 23)
_SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green", "blue"]},
        "large": {"type": "boolean"},
        "shape": {"type": "string", "enum": ["circle", "square"]},
    },
    "required": ["colour", "large", "shape"],
    "additionalProperties": False,
}


class _Thing(BaseModel):
    """The form of an answer under the schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    colour: Literal["red", "green", "blue"]
    large: bool
    shape: Literal["circle", "square"]


def _fact(
    name: str,
    seen: str,
    wrong: list[str],
    finds: str = "",
    figures: Mapping[str, Any] = _NONE,
    share: float | None = None,
) -> Finding:
    """Return a finding without a p-value: it passes if nothing is ``wrong``."""
    if not wrong:
        return Finding(name, "", Verdict.PASS, seen, None, finds, "", figures, share)
    suffix = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Finding(name, "", Verdict.FAIL, seen, None, finds, f"{wrong[0]}{suffix}", {**figures, "wrong": len(wrong)})


@check("unknown-field", "A field that does not exist is refused, not ignored.")
def unknown_field(context: Context) -> Finding:
    try:
        context.server.ask("Hello", {"max_tokens": 1, "no_such_field_of_any_server": 1}, top=False)
    except Refused:
        return _fact("unknown-field", "1 request", [])
    faults = ["'no_such_field_of_any_server' was taken and ignored, as a misspelt field would be"]
    return _fact("unknown-field", "1 request", faults)


@check("log-probabilities", "Reported log-probabilities are those of a distribution, for every token of the answer.")
def log_probabilities(context: Context) -> Finding:
    if context.server.partly:
        return Finding("log-probabilities", "", Verdict.FAIL, "1 answer", detail=context.server.partly)
    if not context.server.top:
        return Finding("log-probabilities", "", Verdict.UNSUPPORTED, detail="the server gives none")
    faults, count = [], 0
    for number, reply in enumerate(context.greedy):
        answer, label = reply.answer, f"prompt {number + 1}"
        if reply.generated is not None and not 0 <= reply.generated - len(answer.places) <= 1:
            faults.append(f"{label}: {len(answer.places)} places for {reply.generated} tokens")
        for at, place in enumerate(answer.places):
            count += 1
            total = sum(math.exp(value) for _, value in place.top)
            if not place.top:
                faults.append(f"{label}, token {at + 1}: none are listed")
            elif total > 1.01 or place.logprob > 1e-4:
                faults.append(f"{label}, token {at + 1}: the listed probabilities add up to {total:.3f}")
            elif len({value for _, value in place.top}) == 1 and len(place.top) > 2:
                faults.append(f"{label}, token {at + 1}: all are {place.top[0][1]:g}")
    figures = {"after_the_fields": context.as_is}
    return _fact("log-probabilities", f"{count:,} places", faults, "", figures)


@check("max_tokens", "An answer has no more tokens than max_tokens, and as many if it did not end by itself.")
def max_tokens(context: Context) -> Finding:
    faults, requests = [], []
    for at, length in enumerate(_LENGTHS):
        fields = context.fields({"temperature": 0.0, "max_tokens": length})
        requests += [(prompt, fields) for prompt in context.prompts[at : at + 2]]
    for (_, fields), reply in zip(requests, context.server.ask_all(requests)):
        length = fields["max_tokens"]
        finish = reply.answer.finish
        places = len(reply.answer.places)
        count = reply.generated if reply.generated is not None else places
        if max(count, places) > length:
            faults.append(f"max_tokens {length} gives {max(count, places)} tokens")
        elif count < length and finish == "length":
            faults.append(f"max_tokens {length} gives {count} tokens, and finish_reason 'length'")
        elif count == length and finish not in ("length", "stop"):
            faults.append(f"finish_reason {finish!r} after {length} tokens")
    return _fact("max_tokens", f"{len(requests)} answers", faults)


@check("stop", "An answer ends just before a stop string, wherever it falls.")
def stop(context: Context) -> Finding:
    fields = context.fields({"temperature": 0.0, "max_tokens": 48})
    cases = [
        (number, text, word)
        for number, reply in enumerate(context.greedy)
        for word in _stops(reply)
        if (text := reply.answer.text).find(word) > 0
    ]
    replies = context.server.ask_all(
        [(context.prompts[number], {**fields, "stop": [word]}) for number, _, word in cases]
    )
    faults, compared = [], 0
    for (number, text, word), reply in zip(cases, replies):
        answer = reply.answer
        until = text.find(word)
        label = f"prompt {number + 1}, stop {word!r}"
        compared += 1
        if word in answer.text:
            faults.append(f"{label}: it is in the answer")
        elif answer.text.rstrip() == text[:until].rstrip():
            if answer.finish != "stop":
                faults.append(f"{label}: finish_reason is {answer.finish!r}")
        elif text.startswith(answer.text):
            faults.append(f"{label}: the answer ends {until - len(answer.text)} characters before it")
        else:
            compared -= 1  # rounding changed the answer before the stop string
    if not compared:
        return Finding("stop", "", Verdict.UNDECIDED, "0 answers", detail="no greedy answer could be cut")
    return _fact("stop", f"{compared} answers", faults, share=found_in(compared))


def _stops(reply: Reply) -> list[str]:
    """Return two stop strings: one joins the end of a token and the start of the next, the other is four letters from
    the middle."""
    text, tokens = reply.answer.text, reply.answer.tokens
    words = []
    if len(tokens) > 6:
        joined = tokens[4][-2:] + tokens[5][:2]
        words.append(joined)
    if len(text) > 20:
        words.append(text[len(text) // 2 :][:4])
    return [word for word in words if word.strip() and "�" not in word]


@check("response_format", "An answer under a JSON schema is valid under it, if max_tokens did not cut it.")
def response_format(context: Context) -> Finding:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": _SCHEMA}}
    prompts = [
        f"Describe thing number {number} as JSON: its colour, whether it is large, its shape." for number in range(12)
    ]
    chat = True
    try:
        context.server.ask(prompts[0], {"max_tokens": 1}, top=False, chat=True)
    except Refused:  # no chat template
        chat = False

    def answers(**more: Any) -> list[Reply]:
        fields = context.fields({"max_tokens": 100, **more})
        return context.server.ask_all([(prompt, fields) for prompt in prompts], top=False, chat=chat)

    replies = answers(response_format=form)
    complete_texts = [reply.answer.text for reply in replies if reply.answer.finish != "length"]
    faults = [f"{text[:60]!r} is not valid under the schema" for text in complete_texts if not _valid(text)]
    cut_texts = [reply.answer.text.lstrip() for reply in replies if reply.answer.finish == "length"]
    faults += [f"{text[:60]!r} begins no such object" for text in cut_texts if text and not text.startswith("{")]
    valid_without = sum(_valid(reply.answer.text) for reply in answers())
    figures = {"ended": len(complete_texts), "valid_without": valid_without}
    if not faults and (len(complete_texts) < 4 or valid_without == len(prompts)):
        detail = (
            f"only {len(complete_texts)} of {len(prompts)} answers ended"
            if len(complete_texts) < 4
            else "answers are valid without it"
        )
        return Finding(
            "response_format", "", Verdict.UNDECIDED, f"{len(prompts)} answers", detail=detail, figures=figures
        )
    return _fact(
        "response_format", f"{len(complete_texts)} answers", faults, "", figures, found_in(len(complete_texts))
    )


def _valid(text: str) -> bool:
    try:
        _Thing.model_validate_json(text)
    except ValidationError:
        return False
    return True


@check("logit_bias", "A token biased by 100 is always drawn, one biased by -100 never, at every place.")
def logit_bias(context: Context) -> Finding:
    faults: list[str] = []
    length, kinds_by_token = 8, []
    tokens = _some_ids(context)
    for at, token in enumerate(tokens):
        prompt = context.prompts[context.lively[at]]
        fields = context.fields({"max_tokens": length, "logit_bias": {str(token): 100}})
        answer = context.server.ask(prompt, fields).answer
        kinds = {*answer.tokens} if answer.places else {*_pieces(answer.text, length)}
        kinds_by_token.append(frozenset(kinds))
        if len(kinds) > 1:
            faults.append(f"token {token} biased by 100: the answer is {answer.text!r}")
    if not faults and len(tokens) > 1 and len({*kinds_by_token}) == 1:
        faults.append("answers are the same whichever token is biased")
    banned, expected = _banned(context, faults)
    finds = f"ignored on {230.3 / expected:.2g}% of tokens" if expected > 2.303 else "ignored altogether"
    return _fact("logit_bias", f"{length * len(tokens) + banned} tokens", faults, finds)


def _pieces(text: str, count: int) -> list[str]:
    size = max(1, len(text) // count)
    return [text[at : at + size] for at in range(0, size * count, size)]


def _banned(context: Context, wrong: list[str]) -> tuple[int, float]:
    """Ban the tokens of some greedy answers, if their ids are known. Return the number of tokens drawn under the ban,
    and the number of banned tokens to expect among them if the ban were ignored."""
    count, expected = 0, 0.0
    for number, reply in enumerate(context.greedy[:8]):
        ids = _ids(context, list(reply.answer.tokens[:16]))
        if not ids:
            break
        bias = {str(token): -100 for token in ids.values()}
        fields = context.fields({"max_tokens": 16, "logit_bias": bias})
        for place in context.server.ask(context.prompts[number], fields).answer.places:
            count += 1
            expected += sum(math.exp(value) for token, value in place.top if token in ids)
            if place.token in ids:
                wrong.append(f"token {ids[place.token]} ({place.token!r}) came though biased by -100")
    return count, expected


def _some_ids(context: Context) -> list[int]:
    """Return the ids of four tokens of greedy answers, or any four ids if the server does not tell them."""
    answers = [reply.answer for reply in context.greedy[:8]]
    ids = list(_ids(context, [token for answer in answers for token in answer.tokens[:2]]).values())
    if not ids and not context.server.top:
        ids = [number for answer in answers for number in _tokenized(context, answer.text)[1:3]]
    return [*dict.fromkeys(ids)][:4] or list(_SOME_IDS)


def _ids(context: Context, tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids of the texts that are single tokens; nothing if the server does not tell them."""
    known_ids = context.ids
    for token in filter(is_plain, dict.fromkeys(tokens)):
        if token not in known_ids:
            ids = _tokenized(context, token)
            known_ids[token] = ids[0] if len(ids) == 1 else None
    return {token: number for token in tokens if (number := known_ids.get(token)) is not None}


def _tokenized(context: Context, text: str) -> list[int]:
    """Ask for the token ids of a text, at the endpoint of vLLM and fly, of llama-cpp-python or of llama.cpp. Return an
    empty list if the server has none of these."""
    for path, body in (
        ("/tokenize", {"model": context.server.name, "prompt": text, "add_special_tokens": False}),
        ("/extras/tokenize", {"input": text}),
        ("/tokenize", {"content": text}),
    ):
        content = context.server.fetch(path, body)
        # A server that does not know this form of the body may answer it with an empty list.
        if isinstance(content, dict) and isinstance(ids := content.get("tokens"), list) and ids:
            return [each for each in ids if isinstance(each, int)]
    return []
