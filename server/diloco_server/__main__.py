"""`python -m diloco_server`."""

from diloco_common.command import leave
from diloco_server.cli import main

leave(main())
