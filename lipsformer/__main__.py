"""`python -m lipsformer`, which launchers of several processes can start."""

import sys

from lipsformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
