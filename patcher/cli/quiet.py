"""Commands don't show what libraries warn of while they are imported: it is about packages that aren't used."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any


def hear_nothing_of_imports() -> None:
    """From here on warnings are shown and logged where nothing is being imported; errors always are."""
    logging.setLoggerClass(_Logger)
    show = warnings.showwarning

    def shown(*arguments: Any, **more: Any) -> None:
        if not _importing():
            show(*arguments, **more)

    warnings.showwarning = shown


class _Logger(logging.Logger):
    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return super().isEnabledFor(level) and (level >= logging.ERROR or not _importing())


def _importing() -> bool:
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return any(getattr(spec, "_initializing", False) for spec in specs)
