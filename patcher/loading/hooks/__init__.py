"""The seams of the core: loads and constructors accept `patcher=`, and saves are those of stock."""

from __future__ import annotations

from patcher.compat.seams import check_used, install as install_seams, seams_in, show_in_auto_classes
from patcher.loading.hooks import loads, making, recorders, saves
from patcher.source.importing import when_imported


def install_core() -> None:
    """Install the seams of the core."""
    check_used()
    install_seams(seams_in(*(module.__name__ for module in (loads, making, recorders, saves))))
    when_imported(
        "transformers.models.auto.modeling_auto",
        lambda module: show_in_auto_classes(module, loads.from_pretrained, "patcher"),
    )
