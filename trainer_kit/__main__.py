"""`python -m trainer_kit VERB`: the same as the command `trainer-kit VERB`."""

import runpy
import sys

from trainer_kit.process.startup_signals import install_exit_handlers


def main() -> int:
    """Runs the command and returns its exit code."""
    install_exit_handlers()  # before the imports, which take time
    if sys.argv[1:2] == ["train"]:
        # The module ends the process with its exit code.
        del sys.argv[1]
        runpy.run_module("trainer_kit.train", run_name="__main__", alter_sys=True)
    from trainer_kit.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
