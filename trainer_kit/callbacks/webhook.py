"""Webhook: tells a URL that a run has finished or failed, as a callback."""

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

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import ExitCode, UsageError, find_trainer_kit_error
from trainer_kit.telemetry.scalars import flatten_scalars, to_json_number

_LOG = logging.getLogger(__name__)
_MAX_ERROR_LENGTH = 500  # characters of an error's message


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, after which urllib would send a GET without the record."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        """Returns None, so that urllib reports the redirect as an error."""


class Webhook(Callback):
    """Posts a JSON object to a URL when a training run has finished, or when an error ends it.

    The object has `text`, a line that chat programs show; `status`, which is "finished" or
    "failed"; `model_dir`, `host` and `step`. Of a finished run it also has all that is in
    final.json, and of a failed one `error` and `exit_code`. Numbers that are not finite are texts,
    such as "nan".

    A preemption or Ctrl-C posts nothing, since the run goes on later, and neither does a start of a
    finished run. A request that fails, or takes too long, is a warning: it never ends a run. The
    address may be a secret. So the log names its host only; give it in an environment variable,
    since params.yaml would record it.

    Args:
      url: The address, http or https.
      url_variable: The name of an environment variable that holds the address.
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
        self._url, self._variable, self._timeout = url, url_variable, timeout_seconds

    def run_begin(self, run: Run) -> None:
        """Warns when the environment has no address, long before it is needed."""
        if not self._address():
            _LOG.warning(
                "webhook: the environment variable %s has no http address: nothing will be sent",
                self._variable,
            )

    def run_finished(self, run: Run, record: Mapping[str, Any]) -> None:
        """Posts the record of the run."""
        how = (
            f"stopped early at step {record['step']}: {record['stopped']}"
            if record.get("stopped")
            else ""
        )
        numbers = ", ".join(
            f"{name} {value:.4g}" for name, value in flatten_scalars(record["metrics"]).items()
        )
        text = " ".join(
            [how or f"finished at step {record['step']}", *([f"({numbers})"] if numbers else [])]
        )
        self._post(run, "finished", text, record)

    def run_end(self, run: Run) -> None:
        """Posts the error that ends the run, if there is one."""
        if not isinstance(
            run.error, Exception
        ):  # also KeyboardInterrupt, and errors that stand for it, are no failure
            return
        known = find_trainer_kit_error(run.error)
        code = known.exit_code if known else ExitCode.BUG
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            return
        error = f"{'' if known and str(known) else type(run.error).__name__ + ': '}{run.error}"[
            :_MAX_ERROR_LENGTH
        ]
        text = f"failed at step {run.step} with exit code {int(code)}: {error.splitlines()[0]}"
        self._post(run, "failed", text, {"step": run.step, "error": error, "exit_code": int(code)})

    def _address(self) -> str:
        found = self._url or os.environ.get(self._variable, "")
        return found if _is_http(found) else ""

    def _post(self, run: Run, status: str, text: str, record: Mapping[str, Any]) -> None:
        """Posts in a thread, since urllib's own timeout is that of each single read."""
        url, folder = self._address(), os.path.abspath(run.directory)
        if not url:
            return
        name = os.path.join(
            *Path(folder).parts[-2:]
        )  # of job-1/checkpoints the last part alone says nothing
        told = {"text": f"{name} {text}", "status": status, "model_dir": folder}
        body = json.dumps(
            _to_strict_json({**told, "host": socket.gethostname(), **record}),
            allow_nan=False,
            default=str,
        )
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


def _to_strict_json(value: Any) -> Any:
    """Returns a value of JSON with texts in place of the numbers that strict JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(name): _to_strict_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_strict_json(one) for one in value]
    return to_json_number(value) if isinstance(value, float) else value


def _send_request(url: str, body: bytes, timeout: float) -> str:
    """Sends the request; returns "" or what is wrong, in words that do not hold the address."""
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
        return type(error).__name__  # the message may have the address in it
