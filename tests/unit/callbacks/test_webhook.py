"""Webhook: what it sends to a real server, and that a failing server does nothing to a run."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.callbacks.callback import Run
from trainer_kit.callbacks.webhook import Webhook
from trainer_kit.errors import DivergedError, PreemptedError, UsageError

SECRET = "T0/secret"


class Server:
    """A server on loopback that keeps what is posted to it.

    Attributes:
      url: Its address, with a secret in the path.
      posted: The JSON objects that it has received.
      status: The HTTP status of its answers; None: it answers by a byte at a time until `released`.
    """

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.status: int | None = 200
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.posted.append(
                    json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                )
                if server.status is None:  # each byte comes in time, but the answer never ends
                    while not server.released.wait(0.1):
                        self.wfile.write(b"H")
                    return
                self.send_response(server.status)
                self.send_header("Location", f"/{SECRET}/elsewhere")
                self.end_headers()

            do_GET = do_POST  # what urllib makes of a redirected POST

            def log_message(self, *arguments: Any) -> None:
                """Prints nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/{SECRET}"


@pytest.fixture
def server() -> Iterator[Server]:
    """A running server."""
    webhook_server = Server()
    threading.Thread(
        target=webhook_server.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()

    yield webhook_server

    webhook_server.released.set()
    webhook_server.http.shutdown()
    webhook_server.http.server_close()


def _run(folder: Path, error: BaseException | None = None) -> Run:
    run = Run(None, str(folder))
    run.step = 15
    run.error = error
    return run


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


RECORD = {
    "step": 20,
    "mode": "train",
    "metrics": {"accuracy": 0.98765, "dev": {"loss": float("nan")}},
}


def test_the_record_of_a_finished_run_is_posted(server: Server, tmp_path: Path) -> None:
    Webhook(server.url).run_finished(_run(tmp_path), RECORD)
    (posted,) = server.posted

    assert (
        posted["text"] == f"{_name(tmp_path)} finished at step 20 (accuracy 0.9877, dev/loss nan)"
    )
    assert posted["status"] == "finished"
    assert posted["model_dir"] == str(tmp_path)
    assert posted["mode"] == "train"
    assert posted["metrics"] == {"accuracy": 0.98765, "dev": {"loss": "nan"}}  # strict JSON


def test_why_a_run_stopped_early_is_in_the_text(server: Server, tmp_path: Path) -> None:
    Webhook(server.url).run_finished(
        _run(tmp_path), {"step": 10, "metrics": {}, "stopped": "no patience is left"}
    )

    assert (
        server.posted[0]["text"]
        == f"{_name(tmp_path)} stopped early at step 10: no patience is left"
    )


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            DivergedError("the loss is nan\nmore"),
            3,
            "failed at step 15 with exit code 3: the loss is nan",
        ),
        (KeyError("x"), 1, "failed at step 15 with exit code 1: KeyError: 'x'"),
        (DivergedError(), 3, "failed at step 15 with exit code 3: DivergedError: "),
        (RuntimeError(), 1, "failed at step 15 with exit code 1: RuntimeError: "),
    ],
)
def test_an_error_that_ends_a_run_is_posted(
    server: Server, tmp_path: Path, error: Exception, code: int, text: str
) -> None:
    Webhook(server.url).run_end(_run(tmp_path, error))
    (posted,) = server.posted

    assert posted["status"] == "failed"
    assert posted["exit_code"] == code
    assert posted["step"] == 15
    assert posted["text"] == f"{_name(tmp_path)} {text}"


@pytest.mark.parametrize("error", [None, PreemptedError("SIGTERM"), KeyboardInterrupt()])
def test_a_run_that_goes_on_later_posts_nothing(
    server: Server, tmp_path: Path, error: BaseException | None
) -> None:
    Webhook(server.url).run_end(_run(tmp_path, error))
    assert server.posted == []


@pytest.mark.parametrize("status", [500, 404, 302])
def test_a_refusal_is_a_warning_without_the_address(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server.status = status

    Webhook(server.url).run_finished(_run(tmp_path), RECORD)
    (warning,) = caplog.messages

    assert warning == f"webhook: the request to 127.0.0.1 failed: HTTP status {status}"
    assert len(server.posted) == 1


def test_a_server_that_does_not_answer_costs_the_time_limit(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.status = None
    begin = time.monotonic()

    Webhook(server.url, timeout_seconds=0.3).run_finished(_run(tmp_path), RECORD)

    assert 0.25 < time.monotonic() - begin < 5
    assert "the request to 127.0.0.1 failed" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9/{}", "http://127.0.0.1:port{}", "http://127.0.0.1/{} x\n", "http:///{}"],
)
def test_an_address_that_cannot_be_used_ends_no_run(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Webhook(url.format(SECRET)).run_finished(_run(tmp_path), RECORD)
    assert "the request to" in caplog.text
    assert SECRET not in caplog.text


def test_the_address_may_be_in_the_environment(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    webhook = Webhook(url_variable="MY_WEBHOOK")
    for value in ("", "file:///etc/passwd"):
        monkeypatch.setenv("MY_WEBHOOK", value)
        webhook.run_begin(_run(tmp_path))
        assert "MY_WEBHOOK has no http address" in caplog.text
        caplog.clear()
        webhook.run_finished(_run(tmp_path), RECORD)

    monkeypatch.setenv("MY_WEBHOOK", server.url)

    webhook.run_begin(_run(tmp_path))
    webhook.run_finished(_run(tmp_path), RECORD)

    assert len(server.posted) == 1
    assert caplog.text == ""


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"url": "http://a", "url_variable": "A"},
        {"url": f"ftp://a/{SECRET}"},
        {"url": "http://a", "timeout_seconds": 0},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        Webhook(**arguments)

    assert SECRET not in str(refused.value)
