"""A plugin of pytest that has transformers take whatever release of the package `kernels` is installed.

transformers 5.23 asks for 0.18.2 or newer, transformers 5.17 for 0.16; what they call of the package is the same. Use
it before transformers has its models: `python -m pytest -p tests.support.any_kernels`.
"""

from __future__ import annotations

import inspect

from transformers.utils.import_utils import is_kernels_available

inspect.unwrap(is_kernels_available).__defaults__ = ("0", "1")
is_kernels_available.cache_clear()
