"""`python -m diloco_common.codec`: says whether the native kernels are in use, and if not, why."""

import sys

from diloco_common.codec import native

found = native.find()
if isinstance(found, str):
    sys.exit(f"no native kernels, torch does their work: {found}")
print(f"native kernels: {found.path}")
