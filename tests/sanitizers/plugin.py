"""A pytest plugin: the native backend has the kernels of SANITIZED_KERNELS (VARIANT=PATH), and no other variant."""

import os
from pathlib import Path

from twostroke.backends.native import library

variant, _, path = os.environ["SANITIZED_KERNELS"].partition("=")
for other in library.VARIANTS:
    library.use(other, Path("/nonexistent"))
library.use(variant, Path(path))
