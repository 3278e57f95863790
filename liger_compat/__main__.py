"""`python -m liger_compat`."""

import sys

from .cli import main

sys.exit(main())
