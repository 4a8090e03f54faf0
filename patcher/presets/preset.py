"""A patcher that has a name here, by which it is shown."""

from __future__ import annotations

from patcher import Patcher


class Preset(Patcher):
    """What is made of it, by `replace` and `|`, is a plain `Patcher`."""

    def __repr__(self) -> str:
        return f"presets.{self.name}"
