"""`python -m deltamesh`, and `torchrun -m deltamesh`."""

import sys

from deltamesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
