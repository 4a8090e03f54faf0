"""What matched nothing is said, with what was meant (row 9); strict=False says it in one warning."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2MoeForCausalLM, pipeline
from transformers.core_model_loading import WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

from patcher import PatchedWeightsError, Patcher, PatcherWarning, UnmatchedPatchError
from tests.support import shared
from tests.support.replacements import JOIN, JOINED, OWN, Both, JoinedMLP, OwnMLP, With, joining
from tests.support.tiny import tiny_llama_config, tiny_qwen2_moe_config, tiny_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_qwen2_moe_config())


def load(folder: Path, patcher: Patcher, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, patcher=patcher, **options)


# --- what matched nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("LlamaMPL", "no class of the model matches 'LlamaMPL'; nearest: LlamaMLP"),
        ("llamamlp", "no class of the model matches 'llamamlp'; nearest: LlamaMLP"),
        ("MLP", "no class of the model matches 'MLP'; nearest: LlamaMLP"),
        ("LlamaAttn", "no class of the model matches 'LlamaAttn'; nearest: LlamaAttention"),
        ("^Llama.*Norm2$", r"no class of the model matches '\^Llama\.\*Norm2\$'; nearest: LlamaRMSNorm"),
        ("Xyz", r"no class of the model matches 'Xyz'; it has Embedding, Linear, LlamaAttention, "),
        ("Linear", "no class of the model matches 'Linear': the model has it, but not from modeling code: "),
        ("^Embedding", r"no class of the model matches '\^Embedding': the model has it, but not from modeling code"),
    ],
)
def test_a_class_key_that_matches_nothing_is_named_with_what_was_meant(key: str, text: str, llama: Path) -> None:
    patcher = OWN | Patcher({key: OwnMLP})
    with pytest.raises(UnmatchedPatchError, match=rf"(?s)have no effect in LlamaForCausalLM:\n.*{text}"):
        load(llama, patcher)
    with pytest.raises(UnmatchedPatchError, match=text):
        AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
    with pytest.raises(UnmatchedPatchError, match=text), patcher.applied():
        LlamaForCausalLM(tiny_llama_config())


def test_a_class_key_is_judged_before_anything_is_read(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(UnmatchedPatchError, match="LlamaMPL"):
        load(tmp_path, Patcher({"LlamaMPL": OwnMLP}))


def test_all_that_matches_nothing_is_said_at_once(moe: Path) -> None:
    patcher = Patcher(
        {"Qwen2MoeMPL": OwnMLP, "Nothing.*": OwnMLP}, "expertz", WeightRenaming("self_atn", "attn"), name="mine"
    )
    with pytest.raises(UnmatchedPatchError) as caught:
        Qwen2MoeForCausalLM.from_pretrained(moe, patcher=patcher.replace(class_mapping={}))
    assert str(caught.value).count("\n  ") == 2
    with pytest.raises(
        UnmatchedPatchError, match=r"^These parts of the patcher 'mine' have no effect in Qwen2MoeFor"
    ) as e:
        Qwen2MoeForCausalLM.from_pretrained(moe, patcher=patcher)
    assert str(e.value).count("\n  ") == 2
    assert str(e.value).endswith("Correct or remove them; with strict=False this is a warning.")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"filtered_weight_conversion_patterns": "mlp.expertz"},
            r"filtered_weight_conversion_patterns: 'mlp\.expertz' matches no conversion of the model; "
            r"nearest: .*mlp\.experts",
        ),
        (
            {"filtered_weight_conversion_patterns": ["gate_up_proj", "vision"], "new_weights": "experts.gate_up_proj"},
            r"filtered_weight_conversion_patterns: 'vision' matches no conversion of the model",
        ),
        (
            {"extra_weight_conversions": joining("self_attn.q_prj.weight", "self_attn.k_prj.weight", target="qk")},
            r"extra_weight_conversions: self_attn\.q_prj\.weight, self_attn\.k_prj\.weight -> qk "
            r"\[Concatenate\(dim=0\)\] took no tensor; nearest: .*self_attn\.q_proj\.weight",
        ),
        (
            {"extra_weight_conversions": WeightRenaming("shared_expert_gates", "gate")},
            r"extra_weight_conversions: shared_expert_gates -> gate \[rename\] took no tensor; "
            r"nearest: .*shared_expert_gate",
        ),
    ],
    ids=["filter", "second filter", "converter", "renaming"],
)
def test_a_conversion_that_does_nothing_is_named_with_what_was_meant(
    changes: dict[str, Any], text: str, moe: Path
) -> None:
    patcher = Patcher(**changes)
    with pytest.raises(UnmatchedPatchError, match=f"have no effect in Qwen2MoeForCausalLM:\n  {text}"):
        Qwen2MoeForCausalLM.from_pretrained(moe, patcher=patcher)
    with pytest.raises(UnmatchedPatchError, match=text), patcher.applied():
        Qwen2MoeForCausalLM.from_pretrained(moe)


def test_a_filter_for_a_model_that_has_other_conversions_lists_them(llama: Path) -> None:
    text = r"'experts' matches no conversion of the model; it has .*weight_g"
    with pytest.raises(UnmatchedPatchError, match=text):  # renamings of old names are for every model
        load(llama, Patcher(filtered_weight_conversion_patterns="experts"))


def test_a_renaming_to_what_no_parameter_is_called_does_nothing(llama: Path) -> None:
    """transformers takes back such a renaming, and forgets to say that it didn't use it."""
    patcher = Patcher(extra_weight_conversions=WeightRenaming("mlp.up_proj", "mlp.upper"))
    text = (
        r"mlp\.up_proj -> mlp\.upper \[rename\] makes model\.layers\.\{0\.\.1\}\.mlp\.upper\.weight, which the model"
    )
    with pytest.raises(UnmatchedPatchError, match=text):
        load(llama, patcher)


def test_conversions_are_judged_only_where_a_checkpoint_was_read(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": JoinedMLP}, "nothing", [JOIN, WeightRenaming("nothing_else", "x")])
    AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
    with patcher.applied():
        LlamaForCausalLM(tiny_llama_config())
    with pytest.raises(UnmatchedPatchError, match=r"(?s)'nothing' matches no.*nothing_else -> x"):
        load(llama, patcher)


class SharedExpert(Qwen2MoeMLP):
    pass


def test_a_block_is_judged_over_all_that_was_built_in_it(llama: Path, moe: Path) -> None:
    mapping = {"LlamaMLP": JoinedMLP, "Qwen2MoeMLP": SharedExpert}
    patcher = Patcher(mapping, "mlp.experts", JOIN, new_weights=r"mlp\.experts\.")
    both = r"(?s)'Qwen2MoeMLP'.*'mlp\.experts' matches no conversion"
    with pytest.raises(UnmatchedPatchError, match=both), patcher.applied():
        LlamaForCausalLM.from_pretrained(llama)
    with pytest.raises(UnmatchedPatchError, match="'LlamaMLP'") as caught, patcher.applied():
        Qwen2MoeForCausalLM.from_pretrained(moe)
    assert "Qwen2MoeMLP" not in str(caught.value).split("nearest", maxsplit=1)[0]
    with patcher.applied():
        LlamaForCausalLM.from_pretrained(llama)
        Qwen2MoeForCausalLM.from_pretrained(moe)


def test_a_layer_that_is_constructed_alone_counts_in_a_block() -> None:
    with Patcher({"LlamaMLP": OwnMLP}).applied():
        assert type(LlamaMLP(tiny_llama_config())) is OwnMLP


@pytest.mark.parametrize(
    ("patcher", "part"),
    [
        (Patcher({"LlamaMLP": OwnMLP}), "class_mapping: 'LlamaMLP'"),
        (Patcher(module_mapping={"**.mlp": OwnMLP}), r"module_mapping: '\*\*\.mlp'"),
        (Patcher(fusions="qkv"), "fusions: 'qkv'"),
    ],
    ids=["class", "path", "fusion"],
)
def test_a_block_without_a_model_says_so(patcher: Patcher, part: str, llama: Path) -> None:
    with pytest.raises(UnmatchedPatchError, match=f"{part}; no model was built in the block"), patcher.applied():
        pass
    with (
        ThreadPoolExecutor() as pool,
        pytest.raises(UnmatchedPatchError, match="no model was built"),
        patcher.applied(),
    ):
        pool.submit(LlamaForCausalLM.from_pretrained, llama).result()


def test_an_error_inside_of_a_block_is_not_hidden_by_what_did_not_match() -> None:
    def fails() -> None:
        with Patcher({"LlamaMPL": OwnMLP}).applied():
            raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        fails()


# --- strict=False --------------------------------------------------------------------------------------------------


def line_of(call: Callable[..., Any]) -> tuple[str, int, int]:
    lines, first = inspect.getsourcelines(call)
    return inspect.getsourcefile(call) or "", first, first + len(lines)


def in_block(folder: Path, patcher: Patcher) -> Any:
    with patcher.applied():
        return LlamaForCausalLM.from_pretrained(folder)


WAYS: dict[str, Callable[[Path, Patcher], Any]] = {
    "class": lambda folder, patcher: LlamaForCausalLM.from_pretrained(folder, patcher=patcher),
    "auto": lambda folder, patcher: AutoModelForCausalLM.from_pretrained(folder, patcher=patcher),
    "pipeline": lambda folder, patcher: pipeline(
        "text-generation", str(folder), tokenizer=tiny_tokenizer(), model_kwargs={"patcher": patcher}
    ),
    "from_config": lambda folder, patcher: AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher),
    "block": in_block,
}


@pytest.mark.parametrize("way", WAYS)
def test_without_strictness_there_is_one_warning_at_the_callers_line(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": OwnMLP, "LlamaMPL": OwnMLP}, strict=False)
    with pytest.raises(UnmatchedPatchError) as caught:
        WAYS[way](llama, patcher.replace(strict=True))
    with pytest.warns() as seen:
        WAYS[way](llama, patcher)
    (warning,) = seen
    assert warning.category is PatcherWarning
    assert str(warning.message) == str(caught.value)
    file, first, last = line_of(WAYS[way])
    assert warning.filename == file
    assert first <= warning.lineno < last


@pytest.mark.parametrize("way", ["class", "auto", "pipeline", "block"])
def test_without_strictness_all_complaints_of_a_load_are_one_warning(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Both, "Nothing": OwnMLP}, "filter", WeightRenaming("renaming", "x"), strict=False)
    with pytest.warns() as seen:
        WAYS[way](llama, patcher)
    texts = [str(warning.message) for warning in seen]
    if way == "block":  # the weights are the load's affair, the keys the block's
        assert len(texts) == 2
        assert {warning.filename for warning in seen} == {__file__}
    else:
        assert len(texts) == 1
    text = "\n".join(texts)
    for expected in (
        "'Nothing'",
        "'filter' matches no",
        "renaming -> x",
        "  model.layers.{0..1}.mlp.upper.weight\n",
        "  model.layers.{0..1}.mlp.up_proj.weight\n",
    ):
        assert text.count(expected) == 1


def test_the_warning_says_what_the_error_says_about_weights(llama: Path) -> None:
    with pytest.raises(PatchedWeightsError) as caught:
        load(llama, Patcher({"LlamaMLP": Both}))
    with pytest.warns() as seen:
        load(llama, Patcher({"LlamaMLP": Both}, strict=False))
    assert [str(warning.message) for warning in seen] == [str(caught.value)]
    with pytest.warns(PatcherWarning, match="model.layers"):
        model = load(llama, Patcher({"LlamaMLP": With}, strict=False))
    assert (model.model.layers[0].mlp.adapter.weight == 2).all()


def test_a_load_that_does_as_it_was_told_says_nothing(llama: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(llama, OWN.replace(strict=False))
        load(llama, JOINED)
