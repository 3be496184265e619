"""`python -m deltamesh.cli`, for launchers that want a module."""

import sys

from deltamesh.cli import main

sys.exit(main())
