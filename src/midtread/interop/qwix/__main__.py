"""`python -m midtread.interop.qwix -m module ...`: a program on Midtread for Qwix."""

import sys

from midtread.interop.qwix import run

run(sys.argv[1:])
