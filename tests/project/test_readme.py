"""The README's program runs as it is printed there, and prints the output below it."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import safe_open

from tests.support import fresh

README = Path(__file__).parents[2] / "README.md"
SECONDS = re.compile(r"\d+\.\d\d( s)?(?=[ ,)])")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [text for name, text in found if name == language]


def test_readme_program_prints_what_the_readme_says_and_saves_what_it_loaded(smollm2: Path, tmp_path: Path) -> None:
    program, expected = blocks("python")[0], blocks("")[0]
    repo_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert repo_id in program
    script = tmp_path / "program.py"
    script.write_text(program.replace(repo_id, str(smollm2)), encoding="utf-8")
    done = fresh.run_file(script, cwd=tmp_path)
    assert SECONDS.sub("0", done.stdout).split("\n") == SECONDS.sub("0", expected).split("\n")
    with (
        safe_open(smollm2 / "model.safetensors", "pt") as original,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as saved,
    ):
        assert set(saved.keys()) == set(original.keys())
        for key in original.keys():  # noqa: SIM118 - not a dict
            assert saved.get_tensor(key).numpy().tobytes() == original.get_tensor(key).numpy().tobytes(), key
