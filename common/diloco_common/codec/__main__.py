"""`python -m diloco_common.codec`: whether the kernels do the work; with --build, builds them first."""

import sys

from diloco_common.codec import library, native

built = library.KERNELS.build() if "--build" in sys.argv[1:] else library.KERNELS.find()
found = native.find()
if isinstance(found, str):
    sys.exit(f"no native kernels, torch does their work: {built if isinstance(built, str) else found}")
print(f"native kernels: {found.path}")
