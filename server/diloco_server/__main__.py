"""`python -m diloco_server`."""

import sys

from diloco_server.cli import main

sys.exit(main())
