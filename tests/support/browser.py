"""Pages in a real browser: what they look like, and what a script in them measures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: No package of the index brings it: .ci/run installs that of the system.
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

_FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --force-color-profile=srgb
""".split()


class Seen(NamedTuple):
    """A page as it was seen."""

    measured: Any  # what the script returned
    image: Any  # a picture of PIL
    folder: Path  # where screenshots are kept


def look_at(body: str, script: str, screenshot: Path, width: int, height: int = 6000) -> Seen:
    """Open a page, and run the body of a function in it that returns what goes to JSON.

    Args:
        screenshot: where to; in the folder that PATCHER_TEST_SCREENSHOTS names, where it does.
    """
    from PIL import Image

    kept = os.environ.get("PATCHER_TEST_SCREENSHOTS")
    picture = Path(kept).resolve() / screenshot.name if kept else screenshot
    picture.parent.mkdir(parents=True, exist_ok=True)
    page = screenshot.with_suffix(".html")
    page.write_text(
        f"<!doctype html><meta charset='utf-8'>{body}<script>const found = (() => {{{script}}})();"
        "document.body.append(Object.assign(document.createElement('output'), {hidden: true, "
        "textContent: JSON.stringify(found)}))</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            str(CHROMIUM),
            *_FLAGS,
            f"--user-data-dir={screenshot.with_suffix('')}",
            f"--window-size={width},{height}",
            f"--screenshot={picture}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (measured,) = re.findall(r'<output hidden="">(.*?)</output>', done.stdout, flags=re.S)
    return Seen(json.loads(unescape(measured)), Image.open(picture).convert("RGB"), picture.parent)
