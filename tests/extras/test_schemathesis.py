"""Requests that schemathesis makes up from the OpenAPI description, valid and not: none is an error of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from serving import image, open_client, send

EXAMPLES = 20  # of each operation


def test_no_request_is_an_error_of_the_service(tmp_path: Path) -> None:
    with open_client(tmp_path, slots=2, max_upload=100_000, max_pixels=100_000) as (client, _):
        send(client, "0", image(0))  # a name that is likely to be made up
        schema: Any = schemathesis.openapi.from_url(str(client.base_url.join("/openapi.json")))
        paths, answered = set(), 0
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path == "/v1/events":  # never ends
                continue
            paths.add(operation.path)

            @given(case=operation.as_strategy())
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def send_any(case: Any) -> None:
                nonlocal answered
                response = case.call(base_url=str(client.base_url).rstrip("/"))
                assert response.status_code < 500, (case.method, case.path, response.text)
                answered += 1

            send_any()
        assert "/v1/streams/{stream}/predict" in paths
        assert answered >= 200
        assert client.get("/readyz").json()["ready"]
