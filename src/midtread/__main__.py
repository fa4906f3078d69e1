"""`python -m midtread`."""

import sys

from midtread.cli import main

sys.exit(main())
