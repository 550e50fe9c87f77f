"""Webhook: posts to a URL when a run has finished or failed, as a callback."""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import ExitCode, UsageError, find_trainer_kit_error
from trainer_kit.telemetry.scalars import flatten_scalars, to_json_number

_LOG = logging.getLogger(__name__)
# Characters of an error's message.
_MAX_ERROR_LENGTH = 500


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, after which urllib would send a GET without the record."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        """Returns None, so that urllib reports the redirect as an error."""


class Webhook(Callback):
    """Posts a JSON object to a URL when a training run has finished, or when an error ends it.

    The object contains `text`, a line that chat programs show, `status`, which is "finished" or
    "failed", `model_dir`, `host` and `step`. For a finished run it also contains all that is in
    final.json, and for a failed one `error` and `exit_code`. Numbers that are not finite are texts,
    such as "nan".

    A preemption or Ctrl-C posts nothing, since the run continues later, and neither does a start of
    a finished run. A request that fails, or takes too long, only causes a warning: it never ends a
    run. The address may be a secret, so the log names only its host. Give the address in an
    environment variable, since params.yaml would record it.

    Runs eagerly, on the host, on the chief.

    Args:
      url: The address, http or https.
      url_variable: The name of an environment variable that contains the address.
      timeout_seconds: The longest time that the run waits for the answer.

    Raises:
      UsageError: when not exactly one of `url` and `url_variable` is given, or an argument cannot
        be used.
    """

    name: str = "webhook"
    required = False

    def __init__(self, url: str = "", url_variable: str = "", timeout_seconds: float = 10) -> None:
        if bool(url) == bool(url_variable):
            raise UsageError(
                "webhook: give either url or url_variable, the environment variable that holds it"
            )
        if url and not _is_http(url):
            raise UsageError("webhook: url is not an address that begins with http:// or https://")
        if not 0 < timeout_seconds < math.inf:
            raise UsageError(
                f"webhook: timeout_seconds is {timeout_seconds!r}; use a number of seconds above 0"
            )

        self._url = url
        self._variable = url_variable
        self._timeout = timeout_seconds

    def run_begin(self, run: Run) -> None:
        """Warns when the environment contains no address, long before the address is needed."""
        if not self._address():
            _LOG.warning(
                "webhook: the environment variable %s has no http address: nothing will be sent",
                self._variable,
            )

    def run_finished(self, run: Run, record: Mapping[str, Any]) -> None:
        """Posts the record of the run."""
        if record.get("stopped"):
            outcome = f"stopped early at step {record['step']}: {record['stopped']}"
        else:
            outcome = f"finished at step {record['step']}"
        metrics = flatten_scalars(record["metrics"])
        texts = [f"{name} {value:.4g}" for name, value in metrics.items()]
        numbers = ", ".join(texts)
        text = f"{outcome} ({numbers})" if numbers else outcome
        self._post(run, "finished", text, record)

    def run_end(self, run: Run) -> None:
        """Posts the error that ends the run, if an error does."""
        # KeyboardInterrupt is no failure, and neither are the errors that stand for it below.
        if not isinstance(run.error, Exception):
            return
        own_error = find_trainer_kit_error(run.error)
        code = own_error.exit_code if own_error else ExitCode.BUG
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            return

        # An error of trainer_kit explains itself. Others need the name of their type.
        prefix = ""
        if not own_error or not str(own_error):
            prefix = f"{type(run.error).__name__}: "
        error = f"{prefix}{run.error}"[:_MAX_ERROR_LENGTH]
        first_line = error.splitlines()[0]
        text = f"failed at step {run.step} with exit code {int(code)}: {first_line}"
        self._post(run, "failed", text, {"step": run.step, "error": error, "exit_code": int(code)})

    def _address(self) -> str:
        url = self._url or os.environ.get(self._variable, "")
        return url if _is_http(url) else ""

    def _post(self, run: Run, status: str, text: str, record: Mapping[str, JsonValue]) -> None:
        """Posts in a thread, since urllib's own timeout is that of each single read."""
        url = self._address()
        if not url:
            return

        folder = os.path.abspath(run.directory)
        # The last part alone says nothing in a folder such as job-1/checkpoints.
        last_parts = Path(folder).parts[-2:]
        name = os.path.join(*last_parts)
        message: dict[str, JsonValue] = {
            "text": f"{name} {text}",
            "status": status,
            "model_dir": folder,
            "host": socket.gethostname(),
            **record,
        }
        body = json.dumps(_to_strict_json(message), allow_nan=False, default=str)

        answer: list[str] = []
        sender = threading.Thread(
            target=lambda: answer.append(_send_request(url, body.encode(), self._timeout)),
            name="webhook",
            daemon=True,
        )
        sender.start()
        sender.join(self._timeout)

        problem = answer[0] if answer else f"there was no answer in {self._timeout:g} s"
        if problem:
            _LOG.warning(
                "webhook: the request to %s failed: %s",
                urllib.parse.urlsplit(url).hostname,
                problem,
            )


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _to_strict_json(value: JsonValue) -> JsonValue:
    """Returns a value of JSON with texts in place of the numbers that strict JSON cannot store."""
    if isinstance(value, Mapping):
        return {str(name): _to_strict_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_strict_json(item) for item in value]
    if isinstance(value, float):
        return to_json_number(value)
    return value


def _send_request(url: str, body: bytes, timeout: float) -> str:
    """Sends the request. Returns "" or the problem, in words that do not contain the address."""
    try:
        request = urllib.request.Request(
            url, body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, ValueError, http.client.HTTPException) as error:
        # The message of the error may contain the address.
        return type(error).__name__
