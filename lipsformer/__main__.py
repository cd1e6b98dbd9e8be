"""Run the console program as `python -m lipsformer`, which launchers such as torchrun can start."""

import sys

from lipsformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
