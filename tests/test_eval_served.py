"""``fly eval --server``: runs whose completions a server makes, fly's own and others in small."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.extras import client as http
from fly.extras.client import Client, Failed, Refused, Unreachable
from fly.extras.eval import Plan, Served, check_folder, remaining, report, score_run, write_run
from fly.extras.eval.archive import Archive
from fly.extras.eval.beside import compare_with_run
from fly.extras.eval.decoder import Decoder
from fly.extras.eval.plan import AUTOREGRESSIVE, FLY_FIELD, SERVERS_OWN, Turn
from fly.extras.eval.records import Key, read_records
from fly.extras.eval.render import as_html, as_json, as_markdown, columns, legend, write_spec_bench
from fly.extras.eval.replay import load_blocks
from fly.extras.eval.run import decode_run
from fly.extras.eval.task import Task
from fly.policies import parse_policy
from tests.commands import plain, words
from tests.commands import run as command
from tests.serving import MODEL, Running, running

KEY = "sk-secret-of-the-tests"
RULE = "fly(window=1, hold=1)"
TASKS: list[Any] = [
    {"task": "bundled-middle", "max_tokens": 24, "limit": 2},
    {
        "task": "spec-bench",
        "name": "talk",
        "rows": [{"question_id": 1, "category": "writing", "turns": ["List 3 1 2.", "Now sort it."]}],
        "max_tokens": 12,
    },
    {
        "task": "spec-bench",
        "name": "plain",
        "rows": [{"question_id": 1, "category": "x", "turns": ["The list 4 9 5 7 in reverse order is"]}],
        "chat": False,
        "stop": ["9"],
        "max_tokens": 12,
    },
]
VLLM = {"num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 4}
SGLANG = {"spec_verify_ct": 3, "spec_draft_token_num": 9, "spec_accept_token_num": 4}


def finish(plan: Plan, folder: Path, client: Client, probe: bool = True, die_after: int = 10**9) -> Plan:
    """Run a plan to its end, as ``fly eval --server`` does."""
    server = Served(client, probe)
    plan = server.settle(plan)
    check_folder(plan, folder)
    records = read_records(folder)
    left = iter(range(die_after))

    def advance(record: dict[str, Any]) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    if todo := remaining(plan, records):
        write_run(folder, records, server.decode(plan, todo, records.texts), advance)
    score_run(plan, folder)
    return plan


def turn_of(prompt: str, plan: Plan, way: int = 0, temperature: float = 0.0, **fields: Any) -> Turn:
    """A turn that asks for the completion of ``prompt``; ``fields`` are those of its task."""
    task = Task.model_validate({"name": "any", "rows": [{"q": prompt}], "prompt": "{{ q }}", **fields})
    chosen_way = plan.ways[way]
    return Turn(Key("any", "0", 0, 0, temperature, chosen_way.label), 0, task, task.problems[0], chosen_way)


# --- fly's own server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fly_server() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def served(fly_server: Running, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    fields = {"server": fly_server.url, "policies": [RULE], "tasks": TASKS, "temperatures": [0, 0.8], "seeds": [1, 2]}
    plan = finish(Plan.of(fields), folder, Client(fly_server.url))
    assert (plan.model, plan.rule_field, plan.drafts, plan.k) == (MODEL, FLY_FIELD, ("ngram",), (6,))
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same plan, decoded in this process."""
    folder = tmp_path_factory.mktemp("local")
    fields = {"model": MODEL, "drafts": "ngram", "k": 6, "policies": [RULE], "dtype": "float32", "tasks": TASKS}
    plan = Plan.of({**fields, "temperatures": [0, 0.8], "seeds": [1, 2]})
    check_folder(plan, folder)
    records = read_records(folder)
    decode_run(plan, folder, remaining(plan, records), records)
    score_run(plan, folder)
    return folder


def test_a_servers_records_are_those_of_a_local_run(served: Path, local: Path) -> None:
    """Texts, tokens, ends, scores and counts: at temperature 0, and drawn with the same seeds. Chats, later turns,
    plain texts and stop strings."""
    ours, theirs = read_records(local), read_records(served)
    assert ours.completions.keys() == theirs.completions.keys() and len(ours.completions) == 3 * (1 + 2) * 5
    for key, record in theirs.completions.items():
        same = ("text", "token_ids", "finish_reason", "prompt_tokens", "generated", "policy", "guarantee", "row_seed")
        for name in (*same, "drafted", "accepted"):
            assert record[name] == ours.completions[key][name], (key, name)
        assert record.get("asked") == ours.completions[key].get("asked")
        assert not {"relaxed", "why", "excused", "gates", "drafts", "judged", "nats"} & record.keys()
        assert record["seconds"]["request"] == record["seconds"]["share"] > 0
    assert {k: s["right"] for k, s in ours.scores.items()} == {k: s["right"] for k, s in theirs.scores.items()}
    assert len(ours.scores) == 2 * 9


@pytest.fixture(scope="module")
def both(fly_server: Running) -> Iterator[tuple[Plan, Served, Decoder]]:
    """A plan settled by the server, the server, and a decoder of the same plan here."""
    with contextlib.closing(Client(fly_server.url)) as client:
        server = Served(client, probe=False)
        plan = server.settle(Plan.of({"server": fly_server.url, "policies": RULE}))
        here = Plan.of({"model": MODEL, "drafts": "ngram", "k": 6, "policies": RULE, "dtype": "float32"})
        yield plan, server, Decoder(here, here.ways)


@given(
    prompt=st.text("ab 1.,\n<é€", max_size=12).map(lambda text: f"Sort {text}"),
    way=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    chat=st.booleans(),
    stop=st.sampled_from([(), ("a", "1"), (" ",)]),
)
@settings(max_examples=12)
def test_a_server_answers_any_prompt_as_a_local_run(
    both: tuple[Plan, Served, Decoder], prompt: str, way: int, temperature: float, chat: bool, stop: tuple[str, ...]
) -> None:
    plan, server, decoder = both
    turn = turn_of(prompt, plan, way, temperature, chat=chat, stop=stop, max_tokens=10)
    (theirs,), (ours,) = server.decode(plan, [turn], {}), decoder.decode([turn], {})
    for name in ("text", "token_ids", "finish_reason", "prompt_tokens", "generated", "drafted", "accepted"):
        assert theirs.record[name] == ours.record[name], name


def test_a_report_of_a_server_leaves_out_what_it_cannot_know(served: Path, local: Path) -> None:
    found, ours = report([served]), report([local])
    for table, own in zip(found.tables, ours.tables):
        assert table.reference == AUTOREGRESSIVE and table.title == own.title
        for row, expected in zip(table.rows, own.rows):
            assert (row.way, row.tokens, row.accuracy, row.same) == (
                expected.way,
                expected.tokens,
                expected.accuracy,
                expected.same,
            )
            assert row.relaxed is None and row.python is None and row.neutral is None and not row.curve
            assert row.kept == expected.kept and row.latency == pytest.approx(row.seconds / row.completions)
            if row.way != AUTOREGRESSIVE:
                assert row.over_ar is not None and row.over_exact is not None
        cells = columns(table)
        assert {"request", "τ", "over AR"} <= cells["Speed"].keys() and list(cells) == ["Speed", "Answers"]
        assert not {"relaxed", "gate", "Python", "at no cost"} & {*cells["Speed"], *cells["Answers"]}
    assert "request: mean seconds" in legend(found.tables)
    page = as_html(found, "served") + as_markdown(found)
    assert "fly-tiny at http://127.0.0.1:" in page and "rules in speculation.policy" in page
    assert any("HTTP does not show which tokens a rule relaxed" in note for note in found.notes)
    assert any("the server's own counts" in note for note in found.notes)
    json.dumps(as_json(found), allow_nan=False)
    with pytest.raises(ValueError, match="does not tell the steps"):
        write_spec_bench(served, served / "answers")


def test_a_local_report_has_no_column_of_requests(local: Path) -> None:
    assert all("request" not in columns(table)["Speed"] for table in report([local]).tables)


def test_a_killed_run_goes_on_at_another_address(fly_server: Running, served: Path, tmp_path: Path) -> None:
    fields = {"policies": [RULE], "tasks": TASKS[:1]}
    with pytest.raises(KeyboardInterrupt):
        finish(Plan.of({**fields, "server": fly_server.url}), tmp_path, Client(fly_server.url), die_after=3)
    first = read_records(tmp_path).completions
    assert len(first) == 4  # the last was written before the interrupt
    elsewhere = fly_server.url.replace("127.0.0.1", "localhost")
    finish(Plan.of({**fields, "server": elsewhere}), tmp_path, Client(elsewhere))
    found = read_records(tmp_path)
    assert len(found.completions) == 6 and {key: found.completions[key] for key in first} == first
    assert len(found.environments) == 2 and any("2 different setups" in note for note in report([tmp_path]).notes)
    with pytest.raises(ValueError, match=r"server: 'http.*' then, None now"):
        check_folder(Plan.of({"model": MODEL, "drafts": "ngram", "k": 6, **fields}), tmp_path)


def test_problems_sent_together_share_the_time(fly_server: Running, served: Path, tmp_path: Path) -> None:
    fields = {"server": fly_server.url, "policies": [RULE], "tasks": TASKS[:1], "seeds": 1, "together": 2}
    finish(Plan.of(fields), tmp_path, Client(fly_server.url))
    alone = read_records(served).completions
    together = read_records(tmp_path).completions
    times: dict[str, list[dict[str, Any]]] = {}
    for key, record in together.items():
        assert record["text"] == alone[key]["text"]
        times.setdefault(key.way, []).append(record)
    for records in times.values():
        longest = max(record["seconds"]["request"] for record in records)
        assert sum(record["seconds"]["share"] for record in records) == pytest.approx(longest)
    assert "2 problems, 2 at a time" in report([tmp_path]).tables[0].title


def test_replays_compare_with_a_run_of_a_server(fly_server: Running, served: Path, tmp_path: Path) -> None:
    fields = {"model": MODEL, "drafts": "ngram", "k": 6, "dtype": "float32", "tasks": TASKS[:1], "record": True}
    plan = Plan.of(fields)
    check_folder(plan, tmp_path)
    records = read_records(tmp_path)
    decode_run(plan, tmp_path, remaining(plan, records), records)
    compared = compare_with_run(load_blocks(tmp_path), tmp_path, served)
    ways = {(each.task, each.way): each for each in compared.predictions}
    assert {("bundled-middle", "exact k6"), ("bundled-middle", f"{RULE} k6")} == ways.keys()
    assert all(each.relaxed is None for each in ways.values())
    assert any("those with a draft measured" in line for line in compared.unlike)
    shown = command("replay", str(tmp_path), "--policy", RULE, "--beside", str(served))
    assert shown.exit_code == 0 and "predicted" in shown.output, shown.output


def test_drafts_and_lengths_are_asked_of_flys_server(fly_server: Running, tmp_path: Path) -> None:
    fields = {"server": fly_server.url, "k": [2, 4], "tasks": TASKS[:1], "limit": 1, "max_tokens": 8}
    plan = finish(Plan.of(fields), tmp_path, Client(fly_server.url))
    assert [way.label for way in plan.ways] == [AUTOREGRESSIVE, "exact k2", "exact k4"] and plan.drafts == ("ngram",)
    with pytest.raises(ValueError, match=r"a first request, exact k3: 400 .*'absent' is not enabled here"):
        finish(Plan.of({**fields, "k": 3, "drafts": "absent"}), tmp_path / "other", Client(fly_server.url))


def test_the_command_asks_a_server(fly_server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    task = tmp_path / "mine.yaml"
    rows = [{"q": "Take the list 4 9 5 7. Reverse the list.", "a": "7 5 9 4"}]
    task.write_text(yaml.safe_dump({"rows": rows, "prompt": "{{ q }}", "answer": "{{ a }}", "scorer": "exact"}))
    run = str(tmp_path / "run")
    first = command("eval", "--server", fly_server.url, "--policy", RULE, "--task", str(task), "--max-tokens", "16",
                    "--out", run)  # fmt: skip
    assert first.exit_code == 0 and f"{RULE} k6" in words(first.output), first.output
    again = command("eval", run)
    assert again.exit_code == 0 and "has 3 of 3 answers: nothing to decode" in words(again.stderr), again.stderr
    shown = command("report", run, "--html", str(tmp_path / "page.html"))
    assert shown.exit_code == 0, shown.output
    texts = [path.read_text() for path in [*Path(run).iterdir(), tmp_path / "page.html"]]
    assert not any(KEY in text for text in [*texts, first.output, again.output])
    assert Archive.read(run).plan.model == MODEL


# --- other servers ---------------------------------------------------------------------------------------


@dataclass
class Fake:
    """A server that answers as it is told. ``said`` has every body, and ``refuses`` the rules that it refuses."""

    owner: str = "vllm"
    counts: dict[str, Any] = field(default_factory=dict)  # fields of the answer
    of_choice: dict[str, Any] = field(default_factory=dict)
    faults: list[tuple[int, bytes, dict[str, str]]] = field(default_factory=list)  # before the answers
    reads: Callable[[dict[str, Any]], str | None] = lambda body: (body.get("vllm_xargs") or {}).get("fly")
    text: Callable[[dict[str, Any]], str] = lambda body: "7 5 9 4"
    said: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any, dict[str, str]]:
        if body is None:
            models = {"data": [{"id": "big", "owned_by": self.owner}]}
            listed = {"/v1/models": models, "/version": {"version": "0.33.0"}}
            return (200, listed[path], {}) if path in listed else (404, {}, {})
        self.said.append(body)
        if (rule := self.reads(body)) is not None:
            try:
                parse_policy(rule)
            except ValueError as error:
                return 400, {"error": {"message": str(error)}}, {}
        if self.faults:
            return self.faults.pop(0)
        text = self.text(body)
        chat = "messages" in body
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice |= {"index": 0, "finish_reason": "stop", **self.of_choice}
        usage = {"prompt_tokens": 5, "completion_tokens": len(text.split())}
        return 200, {"choices": [choice], "usage": usage, **self.counts}, {}


@contextlib.contextmanager
def faking(**options: Any) -> Iterator[Fake]:
    fake = Fake(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet: else 40 ms late

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def reply(self, body: dict[str, Any] | None) -> None:
            fake.keys.append(self.headers.get("authorization", ""))
            status, document, headers = fake.answer(self.path, body)
            if not status:  # a broken connection
                self.close_connection = True
                return
            content = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def rule_in(outer: str) -> Callable[[dict[str, Any]], str | None]:
    return lambda body: (body.get(outer) or {}).get("fly")


ONE = {"policies": [RULE], "tasks": [{"task": "bundled-middle", "max_tokens": 24}], "limit": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Do not wait between tries; return how long each wait would have been."""
    waits: list[float] = []
    monkeypatch.setattr(http, "sleep", waits.append)
    return waits


@pytest.mark.parametrize(
    ("owner", "outer", "answers"),
    [
        ("vllm", "vllm_xargs", {"counts": {"metrics": {"speculative_decoding": VLLM}}}),
        ("sglang", "custom_params", {"of_choice": {"meta_info": SGLANG}}),
        ("vllm", "vllm_xargs", {"counts": {"metrics": None}}),
        ("sglang", "custom_params", {"of_choice": {"meta_info": {"spec_verify_ct": 3}}}),
    ],
)
def test_engines_are_asked_in_their_own_words(owner: str, outer: str, answers: dict[str, Any], tmp_path: Path) -> None:
    text = lambda body: "7 5 9 4" if body[outer]["fly"] == "exact" else "7 5 4 9 1"  # noqa: E731
    with faking(owner=owner, reads=rule_in(outer), text=text, **answers) as fake:
        plan = finish(Plan.of({**ONE, "server": fake.url, "temperatures": [0, 0.5]}), tmp_path, Client(fake.url, KEY))
        said = fake.said
    assert [way.label for way in plan.ways] == ["exact", RULE] and plan.rule_field == f"{outer}.fly"
    assert plan.drafts == (SERVERS_OWN,) and plan.k == (None,)
    assert said[0][outer]["fly"] == "no_such_rule(1)" and {*fake.keys} == {f"Bearer {KEY}"}
    asked = said[3:]  # after the probe and a first request for each way
    assert [body[outer] for body in asked] == [{"fly": "exact"}, {"fly": RULE}] * 2
    for body in asked:
        expected = {
            "model": "big",
            "max_tokens": 24,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        assert expected.items() <= body.items() and ("seed" in body) == bool(body["temperature"])
    assert len({body["cache_salt"] for body in asked}) == len(asked)
    found = report([tmp_path])
    table = found.tables[0]
    exact, rule = table.rows
    assert (table.reference, table.best_exact) == ("exact", "exact")
    assert rule.same == 0 and rule.diverges is None and exact.recovery is None and rule.over_ar is None
    assert rule.over_exact is not None and rule.length == pytest.approx((5 / 4,) * 3)
    assert "over AR" not in columns(table)["Speed"] and "over exact" in columns(table)["Speed"]
    assert "equal to exact's" in legend([table])
    if answers.get("counts", {}).get("metrics") or "spec_draft_token_num" in answers.get("of_choice", {}).get(
        "meta_info", {}
    ):
        assert (rule.tau, rule.kept) == (7 / 3, 4 / 9)
    else:
        assert rule.tau is None and rule.kept is None and "τ" not in columns(table)["Speed"]
        assert any("does not say how many drafted tokens it accepts" in note for note in found.notes)
    assert any("a rule cannot switch drafts off" in note for note in found.notes)
    assert f"{owner} 0.33.0" in as_html(found, "x") and all(row.accuracy is not None for row in table.rows)
    assert Archive.read(tmp_path).plan.k == (None,)
    assert not any(KEY in path.read_text() for path in tmp_path.iterdir())


def test_a_server_that_reads_no_rules_is_refused(tmp_path: Path) -> None:
    with faking(reads=lambda body: None) as fake:
        plan = Plan.of({**ONE, "server": fake.url})
        with pytest.raises(ValueError, match=r"accepts 'no_such_rule.*in vllm_xargs.fly, so it reads no rules there"):
            finish(plan, tmp_path, Client(fake.url))
        assert len(fake.said) == 1 and not read_records(tmp_path).completions
        finish(plan, tmp_path, Client(fake.url), probe=False)
        assert len(read_records(tmp_path).completions) == 2


def test_an_unknown_server_has_to_be_told_where_rules_stand(tmp_path: Path) -> None:
    with faking(owner="somebody", reads=rule_in("custom_params")) as fake:
        result = command("eval", "--server", fake.url, "--problems", "1")
        assert result.exit_code == 2, result.output
        message = plain(result.output)
        assert "owned by 'somebody'" in message and "vllm_xargs.fly, custom_params.fly" in message
        result = command("eval", "--server", fake.url, "--problems", "1", "--rule-field", "custom_params.fly",
                         "--policy", RULE, "--json", str(tmp_path / "x.json"))  # fmt: skip
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / "x.json").read_text())["tables"][0]["reference"] == "exact"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rule-field", "policy"], "'vllm_xargs.fly' or 'custom_params.fly', got 'policy'"),
        (["--rule-field", "vllm_xargs.fly", "--k", "4"], "k: requests choose drafts and k on fly's server alone"),
        (["--rule-field", "vllm_xargs.fly", "--draft", "ngram"], "drafts: requests choose drafts and k"),
        (["--dtype", "float32"], "dtype: 'float32' does nothing with a server"),
        (["--record"], "record: True does nothing with a server"),
        (["--ranks", "2"], "--ranks does nothing with --server"),
        (["--timeout", "0"], "must be a finite number of at least 1"),
        (["--policy", "nonsense"], "nonsense"),
    ],
)
def test_options_that_a_server_cannot_follow_are_errors(options: list[str], told: str) -> None:
    result = command("eval", "--server", "http://127.0.0.1:9", *options)
    assert result.exit_code == 2 and told in plain(result.output), result.output


@pytest.mark.parametrize("option", ["--rule-field=speculation.policy", "--timeout=9", "--no-probe"])
def test_options_of_servers_do_nothing_without_one(option: str) -> None:
    result = command("eval", option)
    assert result.exit_code == 2 and "does nothing without" in plain(result.output), result.output


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:9", "write 'http://127.0.0.1:9'"),
        ("http://me:secret@127.0.0.1:9", "holds more than host, port and path"),
        ("http://127.0.0.1:9/v1?key=secret", "holds more than host, port and path"),
        ("ftp://127.0.0.1", "no address of HTTP"),
        ("http://127.0.0.1:9", "does not answer"),
    ],
)
def test_addresses_that_are_none_are_errors_in_words(url: str, told: str) -> None:
    result = command("eval", "--server", url)
    assert result.exit_code == 2 and told in plain(result.output) and "secret" not in result.output, result.output


BUSY = (429, b'{"error": {"message": "come back"}}', {"retry-after": "7"})
DOWN = (502, b"bad gateway", {})
CUT = (0, b"", {})


@pytest.mark.parametrize("fault", [BUSY, DOWN, CUT])
def test_a_fault_that_passes_is_waited_for(fault: Any, quick: list[float], tmp_path: Path) -> None:
    with faking() as fake:
        server = Served(Client(fake.url), probe=False)
        plan = server.settle(Plan.of({**ONE, "server": fake.url}))
        check_folder(plan, tmp_path)
        records = read_records(tmp_path)

        def advance(record: dict[str, Any]) -> None:
            if len(records.completions) == 1:
                fake.faults += [fault] * 3

        write_run(tmp_path, records, server.decode(plan, remaining(plan, records), {}), advance)
    assert quick == ([7.0] * 3 if fault is BUSY else [1.0, 2.0, 4.0])
    assert [record["tries"] for record in read_records(tmp_path).completions.values()] == [1, 4]
    assert any("1 answers took several tries" in note for note in report([tmp_path]).notes)


@pytest.mark.parametrize(
    ("fault", "tries", "told"),
    [
        (BUSY, 6, "problem 0, .*: 429 .*come back.* \\(after 6 tries\\)"),
        (DOWN, 6, "problem 0, .*: 502 bad gateway \\(after 6 tries\\)"),
        (CUT, 6, "problem 0, .*: RemoteProtocolError: .*\\(after 6 tries\\)"),
        ((400, b'{"error": {"message": "too long"}}', {}), 1, "problem 0, .*: 400 .*too long.*'only' leaves problems"),
        ((401, f"no key {KEY}".encode(), {}), 1, r"401 no key \[key\]"),
        ((200, b"<html>", {}), 1, "the answer cannot be read .*<html>"),
        ((200, b"[]", {}), 1, "no object of JSON"),
        ((200, b'{"choices": []}', {}), 1, "the answer cannot be read"),
        ((200, b'{"choices": [{"text": "a"}], "usage": null}', {}), 1, "the answer cannot be read"),
        (
            (200, b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": null}}', {}),
            1,
            "completion_tokens is None",
        ),
        ((200, b'{"error": "overloaded"}', {}), 1, "200 with an error"),
    ],
)
@pytest.mark.parametrize("together", [1, 2])
def test_a_fault_that_stays_is_an_error_in_words_and_keeps_what_there_is(
    fault: Any, tries: int, told: str, together: int, quick: list[float], tmp_path: Path
) -> None:
    with faking() as fake:
        fields = {**ONE, "limit": 2, "together": together, "server": fake.url}
        server = Served(Client(fake.url, KEY))
        plan = server.settle(Plan.of(fields))
        check_folder(plan, tmp_path)
        records = read_records(tmp_path)

        def advance(record: dict[str, Any]) -> None:
            if len(records.completions) == together:
                fake.faults += [fault] * tries * together

        with pytest.raises(ValueError, match=told.replace("problem 0", r"problem \d")) as caught:
            write_run(tmp_path, records, server.decode(plan, remaining(plan, records), {}), advance)
        assert str(caught.value).startswith(f"{fake.url}/v1/chat/completions: task 'bundled-middle', problem ")
        assert len(read_records(tmp_path).completions) == together
        fake.faults.clear()
        finish(plan, tmp_path, Client(fake.url))
    assert len(read_records(tmp_path).completions) == 4


def test_an_answer_that_does_not_come_is_an_error_of_time(tmp_path: Path) -> None:
    waiting = threading.Event()
    with faking(text=lambda body: "x" if waiting.wait(5) else "") as fake:
        with pytest.raises(ValueError, match=r"a first request, exact: no answer within 0\.2 s"):
            finish(Plan.of({**ONE, "server": fake.url}), tmp_path, Client(fake.url, timeout=0.2))
        waiting.set()


def test_answers_without_a_token_are_reported(tmp_path: Path) -> None:
    with faking(text=lambda body: "") as fake:
        finish(Plan.of({**ONE, "server": fake.url, "together": 2, "limit": 2}), tmp_path, Client(fake.url))
    (table,) = report([tmp_path]).tables
    assert all(row.seconds > 0 and not row.speed for row in table.rows) and table.rows[1].same == 1
    assert "–" in columns(table)["Speed"]["over exact"](table.rows[1])


@pytest.fixture(scope="module")
def any_fake() -> Iterator[tuple[Fake, Client]]:
    with faking() as fake, contextlib.closing(Client(fake.url)) as client:
        yield fake, client


@given(st.text(max_size=30), st.booleans())
@settings(max_examples=30)
def test_any_text_of_a_server_is_recorded_as_it_is(any_fake: tuple[Fake, Client], text: str, chat: bool) -> None:
    fake, client = any_fake
    fake.text = lambda body: text
    server = Served(client, probe=False)
    plan = server.settle(Plan.of({"server": fake.url}))
    (finished,) = server.decode(plan, [turn_of(text, plan, chat=chat)], {})
    assert (finished.record["text"], finished.record["asked"]) == (text, text)
    last = fake.said[-1]
    assert (last["messages"][-1]["content"] if chat else last["prompt"]) == text


@given(st.lists(st.sampled_from([200, 400, 404, 429, 500, 502, 503, 504]), min_size=6, max_size=6))
@settings(max_examples=30)
def test_tries_end_with_the_first_answer_or_the_sixth(any_fake: tuple[Fake, Client], statuses: list[int]) -> None:
    again = {429, 503}
    last = next((n for n, status in enumerate(statuses, 1) if status not in again), 6)
    fake, client = any_fake
    fake.faults[:] = [(status, b'{"a": 1}', {}) for status in statuses]
    tries: list[int] = []
    status = statuses[last - 1]
    expected: Any = contextlib.nullcontext()
    if status != 200:
        expected = pytest.raises(Refused if status < 500 else Failed, match=str(status))
    with expected:
        assert client.post("/v1/x", {"messages": []}, again, before=lambda: tries.append(1)).tries == last
    assert len(tries) == last
    fake.faults.clear()


def test_a_client_names_what_is_no_server() -> None:
    with pytest.raises(Unreachable, match="no address"):
        Client("http://[::1")
