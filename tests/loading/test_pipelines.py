"""`pipeline(..., patcher=)`: the patcher goes to the load, or there is an error; it is never ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, pipeline

from patcher import InvalidPatcherError, Patcher, UnmatchedPatchError, report
from tests.support.replacements import OWN, OwnMLP
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_tokenizer

FUSED = Patcher(fusions=["qkv", "gate_up"])
TASKS = ["text-generation", "feature-extraction", "text-classification"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_of_a_folder_is_patched(task: str, llama: Path) -> None:
    made = pipeline(task, model=str(llama), patcher=FUSED)
    assert {becomes for *_, becomes in report(made.model).fused} == {"FusedLlamaAttention", "FusedLlamaMLP"}
    assert "patcher" not in {**made._preprocess_params, **made._forward_params, **made._postprocess_params}
    made("w5 w6 w7")
    assert not report(pipeline(task, model=str(llama)).model).patchers


def test_the_models_options_are_kept_beside_it(llama: Path) -> None:
    options = {"attn_implementation": "eager"}
    made = pipeline("feature-extraction", model=str(llama), patcher=OWN, model_kwargs=options, dtype="bfloat16")
    assert (made.model.config._attn_implementation, str(made.model.dtype)) == ("eager", "torch.bfloat16")
    assert type(made.model.layers[0].mlp) is OwnMLP
    assert "patcher" not in options


@pytest.mark.parametrize("task", TASKS[:2])
def test_a_pipeline_of_a_loaded_model_takes_none(task: str, llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(
        InvalidPatcherError, match=r"was given one that is loaded; write model=patcher\.apply\(model\)"
    ):
        pipeline(task, model=model, tokenizer=tiny_tokenizer(), patcher=OWN)
    assert not report(pipeline(task, model=model, tokenizer=tiny_tokenizer(), patcher=None).model).patchers


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"patcher": "qkv"}, InvalidPatcherError, r"write for instance patcher=Patcher"),
        ({"patcher": Patcher({"LlamaMPL": OwnMLP})}, UnmatchedPatchError, "nearest: LlamaMLP"),
        ({"patcher": OWN, "model_kwargs": {"patcher": OWN}}, InvalidPatcherError, "two patchers, by patcher= and in"),
    ],
)
def test_errors_of_the_load_come_through(given: dict[str, Any], error: Any, text: str, llama: Path) -> None:
    with pytest.raises(error, match=text):
        pipeline("text-generation", model=str(llama), **given)


PROGRAM = """
import sys
{imports}
made = {pipeline}("feature-extraction", model=sys.argv[1], patcher=Patcher(fusions="qkv"))
assert type(made.model.layers[0].self_attn).__name__ == "FusedLlamaAttention"
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("imports", "name"),
    [
        pytest.param(
            "from transformers import pipeline\nfrom patcher import Patcher", "pipeline", marks=pytest.mark.nightly
        ),
        pytest.param(
            "from patcher import Patcher\nfrom transformers import pipeline", "pipeline", marks=pytest.mark.nightly
        ),
        pytest.param(
            "import transformers.pipelines\nfrom patcher import Patcher",
            "transformers.pipelines.pipeline",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "from patcher import Patcher\nimport transformers", "transformers.pipeline", marks=pytest.mark.nightly
        ),
        (
            "from patcher import Patcher\nfrom transformers.pipelines.base import Pipeline\nimport transformers",
            "transformers.pipeline",
        ),
    ],
)
def test_it_does_not_matter_what_is_imported_first(imports: str, name: str, llama: Path) -> None:
    program = PROGRAM.format(imports=imports, pipeline=name)
    done = subprocess.run([sys.executable, "-c", program, str(llama)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_watcher_is_gone_once_the_module_is_there() -> None:
    module = sys.modules["transformers.pipelines"]
    watched = [finder.name for finder in sys.meta_path if type(finder).__name__ == "Watcher"]  # type: ignore[union-attr]
    assert module.__name__ not in watched
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
