"""`python -m trainer_kit VERB`: the same as the command `trainer-kit VERB`."""

import sys

from trainer_kit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
