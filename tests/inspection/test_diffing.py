"""`patcher.diff(model, p)` shows what a patcher changes in the code, and nothing else."""

from __future__ import annotations

import dataclasses
import html
import json
import linecache
import re
import textwrap
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Data2VecVisionConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from patcher import Diff, InvalidPatcherError, Patcher, diff, forward_of
from patcher.codegen import PatchConfig, generate
from tests.support import shared
from tests.support.remote_code import remote_code_model
from tests.support.replacements import JOINED, OWN, OtherMLP, OwnMLP, OwnNorm
from tests.support.tiny import (
    build_tiny,
    tiny_bert_config,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_vl_config,
)


class Scaled(LlamaMLP):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


class Wrapped(LlamaMLP):
    """Calls what it overrides."""

    scale, power = 2.0, 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


class Counting:
    def count(self) -> int:
        return 3


class Mixed(Counting, Scaled):
    # Ours.
    @property
    def half(self) -> int:
        return 1

    @half.setter
    def half(self, value: int) -> None: ...


class Times(nn.Module):
    def forward(self, hidden_states):  # type: ignore[no-untyped-def]
        return hidden_states * self.weight


class Alone(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Any) -> Any: return x  # fmt: skip

    text = """
left
    inside
"""


def llama(patcher: Patcher, **options: Any) -> Diff:
    return diff(tiny_llama_config(), patcher, **options)


def changed(text: str) -> list[str]:
    """The lines that a diff adds or removes."""
    return [line for line in text.splitlines() if line[:1] in "+-" and line[:4] not in ("+++ ", "--- ")]


# --- what is shown -------------------------------------------------------------------------------------------------


def test_a_subclass_is_shown_against_the_methods_that_it_replaces() -> None:
    shown = llama(Patcher({"LlamaMLP": Scaled}))
    assert changed(str(shown)) == [
        "-    def forward(self, x):",
        "-        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
        "-        return down_proj",
        "+class Scaled(LlamaMLP):",
        "+    def forward(self, x):  # type: ignore[no-untyped-def]",
        "+        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)",
    ]
    (entry,) = shown.classes
    assert entry.modules == ("model.layers.{0..1}.mlp",)
    assert entry.was == "transformers.models.llama.modeling_llama.LlamaMLP"
    assert entry.becomes == "tests.inspection.test_diffing.Scaled"
    assert str(shown).splitlines()[:3] == [f"# {entry.modules[0]}", f"--- {entry.was}", f"+++ {entry.becomes}"]


def test_methods_that_are_called_by_their_overrides_are_not_shown_as_removed() -> None:
    (entry,) = llama(Patcher({"LlamaMLP": Wrapped})).classes
    lines = changed(entry.text)
    assert [line for line in lines if line.startswith("-")] == []
    assert lines[0] == "+class Wrapped(LlamaMLP):"
    assert "+        super().__init__(config)" in lines


def test_what_is_inherited_from_elsewhere_is_shown() -> None:
    (entry,) = llama(Patcher({"LlamaMLP": Mixed})).classes
    added = "\n".join(changed(entry.text))
    assert "+    def count(self) -> int:" in added
    assert "self.up_proj(x) * 2)" in added
    assert added.count("def half") == 2
    assert added.index("# Ours.") < added.index("@property") < added.index("@half.setter")


def test_a_class_that_only_looks_alike_is_shown_whole() -> None:
    (entry,) = llama(Patcher({"LlamaMLP": OtherMLP})).classes
    text = "\n".join(changed(entry.text))
    assert "-    def __init__(self, config):" in text
    assert "+class OwnMLP(nn.Module):" in text
    assert "+class OtherMLP(OwnMLP):" in text
    assert "+        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))" in text
    assert "+        super().__init__()" not in text  # as the class that is shipped


def test_of_a_forward_in_the_place_of_another_only_that_is_shown() -> None:
    (entry,) = llama(Patcher({"LlamaRMSNorm": forward_of(Times)})).classes
    assert "-    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:" in entry.text
    assert [line for line in changed(entry.text) if line.startswith("+")] == [
        "+    def forward(self, hidden_states):  # type: ignore[no-untyped-def]",
        "+        return hidden_states * self.weight",
    ]


def test_the_same_code_is_said_to_be_the_same() -> None:
    shown = llama(Patcher({"LlamaRMSNorm": OwnNorm}))
    (entry,) = shown.classes
    assert entry.text == ""
    assert not shown
    assert "LlamaRMSNorm -> tests.support.replacements.OwnNorm: the same code" in str(shown)
    assert entry.modules[-1] == "model.norm"


def test_classes_are_in_the_order_of_the_modules() -> None:
    shown = llama(Patcher({"LlamaMLP": Scaled, "LlamaRMSNorm": OwnNorm}))
    assert [entry.becomes.rpartition(".")[2] for entry in shown.classes] == ["OwnNorm", "Scaled"]


def test_text_inside_of_strings_stays_where_it_is() -> None:
    (entry,) = llama(Patcher({"LlamaMLP": Alone})).classes
    assert '+    text = """\n+left\n+    inside\n+"""' in entry.text
    assert "+    def forward(self, x: Any) -> Any: return x  # fmt: skip" in entry.text


def test_an_overridden_method_that_was_inherited_is_shown_too() -> None:
    class Narrow(LlamaForCausalLM):
        def get_input_embeddings(self) -> Any:
            return None

    shown = diff(tiny_llama_config(), Patcher({"LlamaForCausalLM": Narrow}))
    (entry,) = shown.classes
    assert entry.modules == ("",)
    assert "# (the model)" in str(shown)
    assert "-    def get_input_embeddings(self)" in entry.text
    assert "+            return None" not in entry.text
    assert "+        return None" in entry.text


def test_an_init_of_a_fused_class_that_was_inherited_is_shown_too() -> None:
    config = Data2VecVisionConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config.architectures = ["Data2VecVisionModel"]
    (entry,) = diff(config, Patcher(fusions="qkv")).classes
    assert entry.was.endswith(".Data2VecVisionSdpaSelfAttention")
    assert [line for line in changed(entry.text) if "def __init__" in line] == []
    assert any(line.startswith("-        self.query = nn.Linear(") for line in changed(entry.text))


@pytest.mark.parametrize(
    ("config", "fusion", "was", "removed", "added"),
    [
        (
            tiny_llama_config,
            "qkv",
            "LlamaAttention",
            "key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
            "key_states = k_proj_output.view(hidden_shape).transpose(1, 2)",
        ),
        (
            tiny_bert_config,
            "qkv",
            "BertSelfAttention",
            "value_layer = self.value(hidden_states).view(*hidden_shape).transpose(1, 2)",
            "value_layer = value_output.view(*hidden_shape).transpose(1, 2)",
        ),
        (
            tiny_mixtral_config,
            "sequential_experts",
            "MixtralExperts",
            "gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)",
            "gate, up = expert.gate_proj(rows), expert.up_proj(rows)",
        ),
        (
            tiny_qwen2_vl_config,
            "patch_embeddings",
            "Conv3d",
            "padding_ = padding if isinstance(padding, str) else _triple(padding)",
            "output = self.linear(",
        ),
    ],
    ids=["qkv", "qkv of bert", "sequential_experts", "patch_embeddings"],
)
def test_a_fused_forward_is_shown_against_the_one_it_was(
    config: Any, fusion: str, was: str, removed: str, added: str
) -> None:
    (entry,) = diff(config(), Patcher(fusions=fusion)).classes
    assert entry.was.endswith(f".{was}")
    assert entry.becomes == f"{entry.was}, fused by '{fusion}'"
    lines = [(line[0], line[1:].strip()) for line in changed(entry.text)]
    assert ("-", removed) in lines
    assert any(sign == "+" and line.startswith(added) for sign, line in lines)


def test_pages_of_documentation_of_torch_are_left_out() -> None:
    (entry,) = diff(tiny_qwen2_vl_config(), Patcher(fusions="patch_embeddings")).classes
    assert "Applies a 3D convolution" in nn.Conv3d.__doc__  # type: ignore[operator]
    assert "Applies a 3D convolution" not in entry.text


def test_it_is_deterministic_and_names_no_file_of_this_machine() -> None:
    patcher = Patcher({"LlamaMLP": Scaled}, fusions=["qkv"])
    first = llama(patcher)
    assert llama(patcher) == first
    assert str(llama(patcher)) == str(first)
    assert str(Path(__file__).parent) not in str(first)
    assert len(first.classes) == 2


# --- notebooks -----------------------------------------------------------------------------------------------------

_CELLS = iter(range(1000))


def define(text: str, namespace: dict[str, Any]) -> None:
    """What a notebook does: the text of a cell is known to linecache only, and all cells are one module."""
    name = f"<ipython-input-diff-{next(_CELLS)}>"
    text = textwrap.dedent(text)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace.setdefault("__name__", "__main__")
    exec(compile(text, name, "exec"), namespace)


CELL = """
    class InACell(LlamaMLP):
        def forward(self, x):
            return {} * self.up_proj(x)
"""


def test_a_class_of_a_cell_is_shown_as_the_cell_that_made_it_says() -> None:
    namespace: dict[str, Any] = {"LlamaMLP": LlamaMLP}
    define(CELL.format(1), namespace)
    first = namespace["InACell"]
    define(CELL.format(2), namespace)
    for number, cls in ((1, first), (2, namespace["InACell"])):
        (entry,) = llama(Patcher({"LlamaMLP": cls})).classes
        assert f"+        return {number} * self.up_proj(x)" in entry.text
        assert entry.becomes == "__main__.InACell"


def test_a_class_of_a_cell_without_methods_is_told_by_its_values() -> None:
    namespace: dict[str, Any] = {"LlamaMLP": LlamaMLP, "__name__": "__main__"}
    define("class InACell(LlamaMLP):\n    scale = 2\n    table = {}\n", namespace)
    (entry,) = llama(Patcher({"LlamaMLP": namespace["InACell"]})).classes
    assert changed(entry.text) == [
        "+class InACell(LlamaMLP):",
        "+    scale = 2",
        "+    # table: a dict whose source can't be read",
    ]


def test_what_has_no_source_says_so() -> None:
    namespace: dict[str, Any] = {"LlamaMLP": LlamaMLP, "__name__": "nowhere"}
    exec("class Hidden(LlamaMLP):\n    def forward(self, x): return x\n", namespace)
    (entry,) = llama(Patcher({"LlamaMLP": namespace["Hidden"]})).classes
    assert "+    # forward: a function whose source can't be read" in changed(entry.text)


@pytest.mark.project
@pytest.mark.nightly
def test_it_works_in_a_real_notebook(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    define_class = (
        "class Mine(LlamaMLP):\n    def forward(self, x):\n        return {} + super().forward(x)\n"
        "print(diff(config, Patcher({{'LlamaMLP': Mine}})))"
    )
    cells = [
        "from transformers import LlamaConfig\n"
        "from transformers.models.llama.modeling_llama import LlamaMLP\nfrom patcher import Patcher, diff\n"
        "config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)",
        define_class.format(1),
        define_class.format(2),
        "class Bare(LlamaMLP):\n    scale = 3\ndiff(config, Patcher({'LlamaMLP': Bare}))",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(book, timeout=120, resources={"metadata": {"path": str(Path(__file__).parents[2])}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in book.cells]
    assert "+        return 1 + super().forward(x)" in printed[1]
    assert "+        return 2 + super().forward(x)" in printed[2]
    assert "+++ __main__.Mine" in printed[2]
    (output,) = [output for output in book.cells[3].outputs if output.output_type == "execute_result"]
    assert "scale = 3" in output.data["text/html"]


# --- what names a model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.mark.parametrize(
    "named",
    [
        lambda folder: folder,
        lambda folder: str(folder),
        lambda folder: tiny_llama_config(),
        lambda folder: build_tiny(tiny_llama_config()),
        lambda folder: LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"LlamaMLP": OwnMLP})),
    ],
    ids=["folder", "text", "config", "model", "patched model"],
)
def test_a_model_is_named_in_any_way(folder: Path, named: Callable[[Path], Any]) -> None:
    assert diff(named(folder), JOINED) == llama(JOINED)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_what_has_no_effect_is_said_above_the_diff(strict: bool) -> None:
    shown = llama(Patcher({"LlamaMLP": OwnMLP, "LlamaMlp": OtherMLP}, strict=strict))
    text = "class_mapping: no class of the model matches 'LlamaMlp'; nearest: LlamaMLP"
    (problem,) = shown.problems
    assert text in problem
    assert f"#   {text}" in str(shown).partition("\n--- ")[0]
    assert text in html.unescape(shown._repr_html_())
    assert [entry.modules for entry in shown.classes] == [("model.layers.{0..1}.mlp",)]


def test_a_class_and_an_auto_class_name_a_model() -> None:
    def paths(shown: Diff) -> list[tuple[str, ...]]:
        return [entry.modules for entry in shown.classes]

    assert paths(diff(LlamaModel, OWN)) == [("layers.{0..31}.mlp",)]
    assert paths(llama(OWN, model_class=LlamaModel)) == [("layers.{0..1}.mlp",)]
    assert llama(OWN).model == "LlamaForCausalLM"


def test_without_a_patcher_a_loaded_model_tells_its_own(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, patcher=OWN)
    assert diff(model) == llama(OWN)
    assert str(diff(build_tiny(tiny_llama_config()))) == "# LlamaForCausalLM: no class is replaced"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((tiny_llama_config(), "qkv"), r"diff takes a patcher.Patcher, found 'qkv' \(str\)"),
        ((tiny_llama_config(),), r"(?s)^diff needs a patcher for LlamaConfig.{,40}, which isn't loaded"),
        ((3, OWN), r"a model is given by its repo, its folder or its config, found 3"),
    ],
    ids=["patcher", "no patcher", "model"],
)
def test_what_means_nothing_raises(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        diff(*arguments)


def test_remote_code_in_a_folder_whose_name_begins_with_a_digit_has_a_diff(tmp_path: Path) -> None:
    """transformers names the folder by a hash of the code."""
    folder = remote_code_model(tmp_path / "remote")
    text = (folder / "modeling_tiny_remote.py").read_text()
    for comment in range(100):
        (folder / "modeling_tiny_remote.py").write_text(f"{text}# {comment}\n")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        if type(model).__module__.split(".")[-2][0].isdigit():
            break
    (entry,) = diff(folder, Patcher(fusions="gate_up"), trust_remote_code=True).classes
    assert "+        self.gate_up_proj = " in entry.text


# --- how it is shown -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown() -> Diff:
    class Compared(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            input_dtype = hidden_states.dtype
            return hidden_states if 1 < 2 else "[red]<b>&".to(input_dtype)  # type: ignore[attr-defined]

    return llama(Patcher({"LlamaRMSNorm": Compared}))


def test_it_is_a_frozen_value(shown: Diff) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        shown.model = ""  # type: ignore[misc]
    assert hash(shown) == hash(dataclasses.replace(shown))


def test_it_is_data(shown: Diff) -> None:
    data = json.loads(json.dumps(shown.to_dict()))
    assert data == {
        "model": "LlamaForCausalLM",
        "classes": [
            {
                "modules": list(shown.classes[0].modules),
                "was": "transformers.models.llama.modeling_llama.LlamaRMSNorm",
                "becomes": "tests.inspection.test_diffing.shown.<locals>.Compared",
                "text": shown.classes[0].text,
            }
        ],
        "functions": [],
        "problems": [],
    }


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_colours_and_a_file_has_the_plain_text(shown: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, terminal = StringIO(), Terminal()
    shown.show(plain)
    assert plain.getvalue() == f"{shown}\n"
    assert "\x1b" not in str(shown)
    shown.show(terminal)
    coloured = terminal.getvalue()
    assert "\x1b[32m+        return hidden_states if 1 < 2" in coloured
    assert "\x1b[31m-" in coloured
    assert "\x1b[36m@@" in coloured
    assert "\x1b[1m--- transformers" in coloured


class _Lines(HTMLParser):
    """The lines of code of a page, each with its class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self._kind = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._kind = (dict(attrs).get("class") or "") if "text-indent" in (dict(attrs).get("style") or "") else ""

    def handle_data(self, data: str) -> None:
        if self._kind:
            self.lines.append((self._kind, data.removesuffix("\n")))


def test_jupyter_has_the_same_lines_in_colours(shown: Diff) -> None:
    lines = _Lines(shown._repr_html_()).lines

    assert [line for _, line in lines] == str(shown).splitlines()
    assert {kind for kind, line in lines if "return hidden_states if 1 < 2" in line} == {"ins"}
    assert {kind: line[:1] for kind, line in lines} == {
        "dim": "#", "head": "+", "gap": "@", "same": " ", "ins": "+", "del": "-"
    }  # fmt: skip


@pytest.mark.parametrize("fusion", ["qkv", "gate_up"])
def test_a_fused_class_is_shown_without_what_all_fused_classes_have(fusion: str) -> None:
    text = str(diff(tiny_llama_config(), Patcher(fusions=[fusion])))

    assert ".split(self." in text
    assert "Rewritten by" not in text
    assert "text-indent:-13ch" in diff(tiny_llama_config(), Patcher(fusions=[fusion]))._repr_html_()  # of a method
    assert not re.findall(r"^\+.*(?:_made_by|__setattr__|_joined|fuse_in_place|def are_values)", text, re.MULTILINE)


def test_a_fused_class_is_built_as_in_a_generated_file() -> None:
    patcher = Patcher(fusions=["qkv", "gate_up"])
    written = generate(PatchConfig.from_patcher(patcher, LlamaForCausalLM)).splitlines()
    for entry in diff(tiny_llama_config(), patcher).classes:
        added = [line[1:] for line in changed(entry.text) if line[0] == "+"]
        assert any(re.match(r" +self\.\w+ = nn\.Linear\(.*, sum\(self\.\w+_sizes\)", line) for line in added)
        assert set(added) <= {*written}


@pytest.mark.parametrize(
    ("config", "fusion"), [(tiny_mixtral_config, "sequential_experts"), (tiny_qwen2_vl_config, "patch_embeddings")]
)
def test_of_a_class_that_is_written_only_what_its_forward_runs_is_shown(config: Any, fusion: str) -> None:
    (entry,) = diff(config(), Patcher(fusions=fusion)).classes
    added = {line[1:].strip() for line in changed(entry.text) if line[0] == "+"}
    internal = re.compile(r"@classmethod|_\w+ ?[:=]|# _|def (?:stacks|from_module|__setattr__)")
    assert not list(filter(internal.match, added))
    assert any(line.startswith(("def run_expert", "output = self.linear(")) for line in added)
