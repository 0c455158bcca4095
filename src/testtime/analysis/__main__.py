"""`python -m testtime.analysis`: gradient correlation on many test sets."""

import sys

from testtime.analysis.study import main

sys.exit(main())
