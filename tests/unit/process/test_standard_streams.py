"""Standard streams whose readers go away, in real processes."""

import subprocess
import sys

import pytest

_PROGRAM = """
import logging, os, sys
from trainer_kit.process.standard_streams import outlast_readers
logging.basicConfig(format="%(message)s")
outlast_readers()
sys.stdin.readline()
for number in range(3000):
    print("line", number, flush=number % 100 == 0)
os.write(1, b"of another library")
print("done", file=sys.stderr)
"""


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_the_program_goes_on_and_says_so_once(options: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, *options, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    errors = process.stderr.read()
    assert process.wait(timeout=30) == 0
    assert errors == "nobody reads the standard output any more; the run continues without it\ndone\n"
