"""`python -m diloco_worker`."""

from diloco_common.command import leave
from diloco_worker.cli import main

leave(main())
