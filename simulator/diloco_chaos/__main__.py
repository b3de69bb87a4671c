"""`python -m diloco_chaos`."""

import sys

from diloco_chaos.command import main

sys.exit(main())
