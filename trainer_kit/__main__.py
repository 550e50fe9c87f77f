"""`python -m trainer_kit VERB`: the same as the command `trainer-kit VERB`."""

import sys

from trainer_kit.process.startup_signals import install_exit_handlers


def main() -> int:
    """Runs the command and returns its exit code."""
    install_exit_handlers()  # before the imports, which take time
    from trainer_kit.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
