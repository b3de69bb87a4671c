"""`python -m diloco_demo`."""

from diloco_common.command import leave
from diloco_demo.cli import main

leave(main())
