"""Have an OpenAI-compatible server make the completions of a plan, each by the rule that its request names."""

from __future__ import annotations

import hashlib
import platform
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, TypeVar, get_args

from fly.extras.client import BUSY, Client, Failed, Received, Refused
from fly.extras.eval.decoder import Finished
from fly.extras.eval.plan import AUTOREGRESSIVE, FLY_FIELD, SERVERS_OWN, Plan, RuleField, Turn, Way
from fly.extras.eval.records import Key

__all__ = ["Served"]

_OWNERS: dict[str, RuleField] = {"fly": FLY_FIELD, "vllm": "vllm_xargs.fly", "sglang": "custom_params.fly"}
_AGAIN = BUSY | {500, 502, 504}
_NO_RULE = "no_such_rule(1)"
_WARM_TOKENS = 24
# Where servers count drafts: rounds with a draft, drafted tokens, accepted tokens.
_COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")  # fly and vLLM, of the answer
_SGLANG_COUNTS = ("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num")  # of a choice
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Served:
    """A server that makes completions.

    Args:
        client: the server.
        probe: whether to send an invalid rule first, which the server has to refuse. One that accepts it reads no
            rules.
    """

    def __init__(self, client: Client, probe: bool = True) -> None:
        self._client, self._probe = client, probe

    def settle(self, plan: Plan) -> Plan:
        """Return the plan with the server's own model, rule field, draft and k where it leaves them open.

        Raises ``Unreachable`` if the server does not list its models, and ``ValueError`` if they do not tell the rule
        field, or if the server drafts nothing.
        """
        drafts_are_open = plan.rule_field == FLY_FIELD and (SERVERS_OWN in plan.drafts or None in plan.k)
        if plan.model and plan.rule_field and not drafts_are_open:
            return plan
        models = self._client.list_models("--model")
        model = next((each for each in models if each.get("id") == plan.model), models[0])
        field = plan.rule_field or _OWNERS.get(str(model.get("owned_by")).lower())
        if field is None:
            raise ValueError(
                f"{self._client.root} is owned by {model.get('owned_by')!r}, so where it reads a rule is unknown; name "
                f"it: --rule-field {', '.join(get_args(RuleField))}"
            )
        settled: dict[str, Any] = {"model": plan.model or str(model["id"]), "rule_field": field}
        speculation = model.get("speculation")
        if field == FLY_FIELD and isinstance(speculation, dict):
            if speculation.get("drafts") == ["none"]:
                raise ValueError(f"{self._client.root} has no draft, so rules have nothing to judge")
            if plan.drafts == (SERVERS_OWN,):
                settled["drafts"] = (speculation["draft"],)
            if plan.k == (None,):
                settled["k"] = (speculation["k"],)
        return Plan.of({**plan.model_dump(), **settled})

    def decode(self, plan: Plan, todo: Sequence[Turn], texts: Mapping[Key, str]) -> Iterator[Finished]:
        """Have the completions ``todo`` of a settled plan made in their order, after every way has been warmed up.
        ``texts`` has the answers made before, since a later turn of a conversation continues them.

        Raises ``ValueError`` with the URL, the status and the server's words if it does not answer, refuses a rule or a
        problem, or accepts an invalid rule.
        """
        self._warm_up(plan, todo)
        environment = self._environment(plan)
        reference = plan.ways[0].label
        texts = dict(texts)
        for turns in plan.together_of(todo):
            bodies = [_body(plan, turn, turn.earlier(texts)) for turn in turns]
            names = [f"task {turn.key.task!r}, problem {turn.problem.id}, {turn.key.way}" for turn in turns]
            answers = self._ask_together([(*body, name) for body, name in zip(bodies, names)])
            longest = max(received.seconds for received, _ in answers)
            tokens = sum(completion["generated"] for _, completion in answers)
            for turn, (received, completion) in zip(turns, answers):
                part = completion["generated"] / tokens if tokens else 1 / len(answers)
                record = {
                    **turn.facts(reference),
                    **completion,
                    "policy": str(turn.way.policy),
                    "seconds": {"request": received.seconds, "share": longest * part},
                    "tries": received.tries,
                    "at": datetime.now(UTC).isoformat(timespec="seconds"),
                    "environment": environment["id"],
                }
                texts[turn.key] = record["text"]
                yield Finished(record, environment, None)

    def _warm_up(self, plan: Plan, todo: Sequence[Turn]) -> None:
        """Have every way answer a prompt that no task has, as many times as problems are decoded together, and find out
        whether the server reads rules."""
        for chat in sorted({turn.task.chat for turn in todo}):
            path, prompt = _prompt(chat, [{"role": "user", "content": "Hello"}], "Hello")
            body = {"model": plan.model, "max_tokens": _WARM_TOKENS, "temperature": 0.0, **prompt}
            if self._probe:
                self._check_rules_are_read(path, {**body, **_nested(str(plan.rule_field), _NO_RULE)}, plan)
            for way in dict.fromkeys(turn.way for turn in todo):
                request = path, {**body, **_speculation(plan, way)}, f"a first request, {way.label}"
                self._ask_together([request] * plan.together)

    def _check_rules_are_read(self, path: str, body: Mapping[str, Any], plan: Plan) -> None:
        try:
            self._client.post(path, body, _AGAIN, patient=True)
        except Refused:
            return
        except Failed as error:
            raise ValueError(f"{self._client.root}{path}: a first request: {error}") from None
        raise ValueError(
            f"{self._client.root} accepts {_NO_RULE!r} as a rule in {plan.rule_field}, so it reads no rules there: is "
            f"fly's plug-in loaded? --rule-field names another place ({', '.join(get_args(RuleField))}), --no-probe "
            "goes on without this check"
        )

    def _ask_together(
        self, requests: Sequence[tuple[str, Mapping[str, Any], str]]
    ) -> list[tuple[Received, dict[str, Any]]]:
        """Send requests at the same time: path, body, and a name for errors. Returns what was received, and its fields
        of a record."""
        return at_once(self._ask, requests)

    def _ask(self, request: tuple[str, Mapping[str, Any], str]) -> tuple[Received, dict[str, Any]]:
        path, body, name = request
        try:
            received = self._client.post(path, body, _AGAIN, patient=True)
            try:
                return received, _read(received.document)
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                excerpt = self._client.excerpt(str(received.document))
                raise Failed(f"the answer cannot be read ({type(error).__name__}: {error}): {excerpt}") from None
        except Refused as error:
            hint = " (the task's 'only' leaves problems out)" if name.startswith("task ") else ""
            raise ValueError(f"{self._client.root}{path}: {name}: {error}{hint}") from None
        except Failed as error:
            raise ValueError(f"{self._client.root}{path}: {name}: {error}") from None

    def _environment(self, plan: Plan) -> dict[str, Any]:
        """Return what makes records, as far as it is known; ``id`` is a digest of it."""
        answer = self._client.fetch("/version")
        number = answer.get("version") if isinstance(answer, dict) else None
        owner = next(owner for owner, field in _OWNERS.items() if field == plan.rule_field)
        facts = {
            "kind": "environment",
            "fly": version("flyspec"),
            "python": platform.python_version(),
            "system": platform.platform(),
            "model": plan.model,
            "server": self._client.root,
            "software": f"{owner} {number}" if isinstance(number, str) else owner,
            "rule_field": plan.rule_field,
        }
        return {"id": hashlib.sha256(repr(facts).encode()).hexdigest()[:8], **facts}


def at_once(call: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Call with each item at the same time, and return the results in order. The first error is raised at once, and so
    is an interrupt: threads that are not done end with the process."""
    if len(items) == 1:
        return [call(items[0])]
    ended: queue.SimpleQueue[tuple[int, _Result | None, BaseException | None]] = queue.SimpleQueue()

    def run(number: int) -> None:
        try:
            ended.put((number, call(items[number]), None))
        except BaseException as error:
            ended.put((number, None, error))

    for number in range(len(items)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    results: dict[int, Any] = {}
    for _ in items:
        number, result, error = ended.get()
        if error is not None:
            raise error
        results[number] = result
    return [results[number] for number in range(len(items))]


def _prompt(chat: bool, messages: Iterable[Mapping[str, str]], text: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a request and the field with its prompt. The server's own template writes a conversation."""
    return ("/v1/chat/completions", {"messages": [*messages]}) if chat else ("/v1/completions", {"prompt": text})


def _body(plan: Plan, turn: Turn, answers: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a completion's request."""
    task, temperature = turn.task, turn.key.temperature
    if task.chat:
        path, prompt = _prompt(True, task.messages(turn.problem, answers), "")
    else:
        path, prompt = _prompt(False, (), task.text(turn.problem, answers))
    ours = plan.rule_field == FLY_FIELD
    return path, {
        "model": plan.model,
        **prompt,
        "max_tokens": plan.max_tokens or task.max_tokens,
        "temperature": temperature,
        # Named though they change nothing, since servers replace what is missing by the checkpoint's own values.
        "top_p": plan.top_p,
        "top_k": plan.top_k or (0 if ours else -1),
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        **({"stop": list(task.stop)} if task.stop else {}),
        **({"seed": turn.row_seed} if temperature else {}),
        # No request finds its prompt in the cache, where the way before it has left it.
        "cache_salt": uuid.uuid4().hex,
        "return_token_ids": True,
        **({"return_meta_info": True} if plan.rule_field == "custom_params.fly" else {}),
        **_speculation(plan, turn.way),
    }


def _speculation(plan: Plan, way: Way) -> dict[str, Any]:
    """Return the fields of a request that name its rule and, for fly's server, its draft and k."""
    if way.label == AUTOREGRESSIVE:
        return {"speculation": {"off": True}}
    fields = _nested(str(plan.rule_field), str(way.policy))
    if plan.rule_field == FLY_FIELD:
        known = {"draft": None if way.draft == SERVERS_OWN else way.draft, "k": way.k}
        fields["speculation"] |= {name: value for name, value in known.items() if value is not None}
    return fields


def _nested(place: str, value: str) -> dict[str, Any]:
    outer, _, inner = place.partition(".")
    return {outer: {inner: value}}


def _read(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that an answer tells. Token ids and counts of drafts are left out if it does not
    tell them. Raises ``LookupError``, ``TypeError``, ``AttributeError`` or ``ValueError`` if it is no answer."""
    choice, usage = document["choices"][0], document["usage"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    generated = usage["completion_tokens"]
    if not isinstance(generated, int) or generated < 0:
        raise ValueError(f"usage.completion_tokens is {generated!r}")
    if not isinstance(text, (str, type(None))):
        raise ValueError(f"the text is {text!r}")
    fields = {
        "text": text or "",
        "finish_reason": choice.get("finish_reason"),
        "generated": generated,
        **_counts((document.get("metrics") or {}).get("speculative_decoding"), _COUNTS),
        **_counts(choice.get("meta_info"), _SGLANG_COUNTS),
    }
    if isinstance(ids := choice.get("token_ids"), list):
        fields["token_ids"] = ids
    if isinstance(prompt_tokens := usage.get("prompt_tokens"), int):
        fields["prompt_tokens"] = prompt_tokens
    return fields


def _counts(listed: Any, names: Sequence[str]) -> dict[str, int]:
    """Return the rounds with a draft, what they emitted, and their drafted and accepted tokens; empty if one is not
    told. A round emits what it accepts, and a token of the target's own."""
    values = [listed.get(name) for name in names] if isinstance(listed, dict) else []
    counts = [value for value in values if isinstance(value, int)]
    if len(counts) < len(names):
        return {}
    rounds, drafted, accepted = counts
    return {"rounds": rounds, "emitted": accepted + rounds, "drafted": drafted, "accepted": accepted}
