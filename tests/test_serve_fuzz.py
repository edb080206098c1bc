"""Whatever a request looks like, the server answers it, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.serving import MODEL, Running, eventually, running


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running(max_tokens=8) as server:
        yield server
        assert server.service.llm.worker.alive and eventually(lambda: server.all_free and server.service.open == 0)


CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_is_the_servers_fault(here: Running, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{here.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 11
    for operation in operations:

        @settings(max_examples=15 if operation.method == "post" else 2, phases=[Phase.generate], database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL  # else all were about another model
            case.call_and_validate(checks=CHECKS)

        if mode == GenerationMode.POSITIVE or operation.method == "post":
            send()
