"""`patcher.verify`: right patchers pass at every stage, and what was found is a value."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    Concatenate,
    EncodecConfig,
    EsmForMaskedLM,
    LlamaForCausalLM,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    T5Config,
    WeightConverter,
    WhisperConfig,
)
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.whisper.modeling_whisper import WhisperAttention

from patcher import InvalidPatcherError, Patcher, Verification, compare, verify
from tests.support.caches import CACHE
from tests.support.offloaded import DEVICE_MAPS
from tests.support.replacements import JOINED, OWN, JoinedMLP
from tests.support.sampling import sampled
from tests.support.small_configs import small_configs
from tests.support.tiny import build_tiny, tiny_bert_config, tiny_llama_config, tiny_llava_config
from tests.verification.models import ESM, LLAMA, T5, VIT, WHISPER
from tests.verification.plainly_wrong import WRONG_ORDER, NeverCalled

RIGHT: dict[str, tuple[Any, Patcher, set[str]]] = {
    "a class": (tiny_llama_config(), OWN, {"windows"}),
    "an encoder": (tiny_bert_config(), Patcher(fusions="qkv"), {"windows", "generation"}),
    "encoder and decoder": (T5, Patcher(fusions=["qkv", "gate_up"]), {"windows"}),
    "vision": (VIT, Patcher(fusions=["qkv", "patch_embeddings"]), {"windows", "generation"}),
}


@pytest.mark.parametrize("name", sampled(RIGHT, {"a class", "encoder and decoder"}))
def test_what_is_right_passes_at_every_stage(name: str) -> None:
    config, patcher, unchecked = RIGHT[name]
    found = verify(config, patcher)

    assert found.failures == ()
    assert found
    assert found.passed
    assert found.replaced > 0
    found.raise_on_failure()
    assert [stage.name for stage in found.stages] == STAGES
    assert {stage.name for stage in found.stages if not stage.checked} == unchecked


STAGES = "load outputs arguments recorded windows precision generation gradients training save reload".split()


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_offloaded_weights_of_one_model_are_not_those_of_another(llama: Path, tmp_path: Path) -> None:
    """Each model that is loaded on the way writes its own: under the same names, and some in another type."""
    options = {"device_map": DEVICE_MAPS["a layer on disk"], "offload_folder": tmp_path}
    found = verify(llama, Patcher(fusions=["qkv", "gate_up"]), **options)
    found.raise_on_failure()
    assert {stage.name for stage in found.stages if not stage.checked} == {"windows", "gradients", "training"}


def test_inputs_go_to_weights_that_are_there(llama: Path, tmp_path: Path) -> None:
    """The first weight of the model is on the disk."""
    first = DEVICE_MAPS["a layer on disk"] | {"model.embed_tokens": "disk"}
    verify(
        llama, Patcher(fusions="qkv"), stages="outputs", device_map=first, offload_folder=tmp_path
    ).raise_on_failure()


class NormAsShipped(LlamaRMSNorm):
    pass


def test_half_precision_is_compared_module_by_module(llama: Path) -> None:
    found = verify(llama, JOINED | Patcher({"LlamaRMSNorm": NormAsShipped}), dtype=torch.bfloat16)
    (precision,) = [stage for stage in found.stages if stage.name == "precision"]

    assert found.failures == ()
    assert precision.figures[1:] == (("modules compared with float64", 2.0), ("of", 2.0))


def test_in_half_precision_all_towers_are_reached() -> None:
    found = verify(tiny_llava_config(), Patcher(fusions=["qkv", "patch_embeddings"]), dtype=torch.bfloat16)
    (precision,) = [stage for stage in found.stages if stage.name == "precision"]

    assert found.failures == ()
    assert precision.figures[1:] == (("modules compared with float64", 3.0), ("of", 3.0))


def test_in_half_precision_inputs_are_too() -> None:
    """Whisper takes sounds as they are; most other models cast what they are given."""
    found = verify(WHISPER, Patcher(fusions="qkv"), dtype=torch.bfloat16)

    assert found.failures == ()
    assert found.replaced > 0


def test_it_is_a_value_that_goes_to_json(llama: Path) -> None:
    found = verify(llama, OWN)

    with pytest.raises(dataclasses.FrozenInstanceError):
        found.model = "another"  # type: ignore[misc]
    assert hash(found) == hash(dataclasses.replace(found))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["passed"] is True
    assert data["failures"] == []
    assert data["checkpoint"] == str(llama)
    assert [stage["name"] for stage in data["stages"]] == STAGES
    assert "<script" not in found._repr_html_()
    assert "equal byte for byte" in found._repr_html_()


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def test_of_functions_the_modules_that_call_them_are_counted(llama: Path) -> None:
    found = verify(llama, Patcher(function_mapping={"rotate_half": rotated}), quick=True)
    assert str(found).startswith("LlamaForCausalLM: 2 modules call replaced functions, the same as stock")


def test_two_runs_measure_the_same(llama: Path) -> None:
    one, other = (verify(llama, JOINED, seed=3) for _ in range(2))

    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(other, seconds=0)


def test_nothing_is_not_passed() -> None:
    nothing = Verification("M", "", "", "float32")
    assert not nothing
    assert not nothing.passed


def test_stages_are_chosen_and_each_says_its_seconds(llama: Path) -> None:
    found = verify(llama, JOINED, stages=["generation", "gradients", "save"])

    assert [stage.name for stage in found.stages] == ["load", "generation", "gradients", "save"]
    assert found.passed
    assert all(stage.checked for stage in found.stages)
    seconds = [stage["seconds"] for stage in found.to_dict()["stages"]]
    assert all(each > 0 for each in seconds)
    assert sum(seconds) <= found.seconds


class Swapped(JoinedMLP):
    """The halves of what is joined, in the other order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


class OneLayer(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        OneLayer.count = getattr(OneLayer, "count", 0) + 1
        self.is_off = OneLayer.count % 2 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.02 if self.is_off else 1)


QUICK = {
    "a wrong weight": Patcher({"LlamaMLP": JoinedMLP}, extra_weight_conversions=WeightConverter(
        ["mlp.up_proj.weight", "mlp.gate_proj.weight"], ["mlp.gate_up_proj.weight"], operations=[Concatenate(0)])),
    "a swapped join": JOINED.replace(class_mapping={"LlamaMLP": Swapped}),
    "a wrong layer": Patcher({"LlamaMLP": OneLayer}),
    "saved in another order": WRONG_ORDER,
}  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_quick_sees_what_is_wrong_everywhere(llama: Path, name: str) -> None:
    found = verify(llama, QUICK[name], quick=True)
    assert found.failures
    assert "raises" not in found.failures[0]


def test_quick_passes_what_is_right_in_few_runs(llama: Path) -> None:
    found = verify(llama, Patcher(fusions=["qkv", "gate_up"]), quick=True)
    assert found.passed
    assert [stage.name for stage in found.stages] == ["load", "outputs", "weights"]
    assert dict(found.stages[1].figures)["inputs"] == 3


def stages_of(found: Verification) -> list[str]:
    return [stage.name for stage in found.stages]


@pytest.mark.parametrize("options", [{"quick": True}, {}], ids=["quick", "whole"])
def test_two_models_in_memory_are_compared_and_stay_as_they_are(llama: Path, options: dict[str, Any]) -> None:
    stock, patched = (LlamaForCausalLM.from_pretrained(llama, **each) for each in ({}, {"patcher": JOINED}))
    stock.train()
    stock.lm_head.weight.grad = gradient = torch.ones_like(stock.lm_head.weight)
    found = compare(stock, patched, **options)

    assert found.failures == ()
    assert (found.checkpoint, found.patcher) == ("in memory", "the model in memory")
    assert "the same as the first model" in str(found)
    assert (stock.training, patched.training) == (True, False)
    assert stock.lm_head.weight.grad is gradient
    assert stock.config._attn_implementation == "sdpa"
    with torch.no_grad():
        patched.model.layers[1].mlp.down_proj.weight[0] += 0.5
    told = compare(llama, patched, **options)
    saved = {"weights", "save", "reload"}
    assert {text.partition(":")[0] for text in told.failures} == {"outputs", *saved.intersection(stages_of(told))}
    assert told.stages[1].layers.begins == "model.layers.1.mlp.down_proj"


def test_what_no_input_reaches_is_not_the_same_without_a_patcher_too() -> None:
    """Of two models, of which nothing says what was patched: their code does. It isn't a fault of the patcher."""
    stock, same, other = (build_tiny(ESM, model_class=EsmForMaskedLM) for _ in range(3))
    other.load_state_dict(stock.state_dict())
    same.load_state_dict(stock.state_dict())
    head: Any = other.esm.contact_head
    head.forward = lambda *args: None
    assert compare(stock, same, quick=True).passed
    assert compare(stock, other, quick=True).failures == (
        "outputs: no input that was tried reaches esm.contact_head, so it wasn't compared",
    )
    found = verify(ESM, Patcher({"EsmContactPredictionHead": NeverCalled}), quick=True)
    assert (found.passed, found.guilty) == (False, None)


class SharedEmbedding(BartScaledWordEmbedding):
    pass


def test_a_module_that_only_holds_the_weights_of_others_need_not_be_reached() -> None:
    """`model.shared` of BART is never called: encoder and decoder have embeddings of their own, with its weight."""
    config = next(small_configs(BartConfig))
    config.tie_word_embeddings = True
    verify(config, Patcher({"BartScaledWordEmbedding": SharedEmbedding}), quick=True).raise_on_failure()


class OwnWhisperAttention(WhisperAttention):
    pass


def test_precision_is_measured_on_what_stock_takes() -> None:
    """A row of 128 tokens is longer than the 64 positions, which a decoder has under another name than most."""
    config = next(small_configs(WhisperConfig))
    verify(config, Patcher({"WhisperAttention": OwnWhisperAttention}), stages=["precision"]).raise_on_failure()


def test_a_sound_of_the_length_that_the_config_says() -> None:
    config = copy.deepcopy(WHISPER)
    config.max_source_positions = 100
    verify(config, Patcher(fusions=["siblings"]), quick=True).raise_on_failure()


def test_a_text_encoder_beside_a_decoder_that_computes_sounds() -> None:
    """`get_text_config()` of such a config raises, since both are called text configs."""
    kinds = {"text_encoder": T5Config, "audio_encoder": EncodecConfig, "decoder": MusicgenDecoderConfig}
    config = MusicgenConfig(**{name: next(small_configs(kind)) for name, kind in kinds.items()})
    found = verify(config, Patcher(fusions=["qkv"]), quick=True, model_class=MusicgenForConditionalGeneration)
    found.raise_on_failure()


def test_a_model_that_raises_on_every_input_is_not_passed(llama: Path) -> None:
    """All of its layers ran before."""
    stock, other = (LlamaForCausalLM.from_pretrained(llama) for _ in range(2))

    def fail(*_: Any) -> None:
        raise ValueError("late")

    stock.model.register_forward_hook(fail)
    found = compare(stock, other, quick=True)
    assert (
        "the first model runs on none of the inputs that were tried; the first error: ValueError: late"
        in found.failures[0]
    )


def test_how_far_models_may_be_apart_can_be_said(llama: Path) -> None:
    stock, other = (LlamaForCausalLM.from_pretrained(llama) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight *= 1 + 2**-20
    near, exact = (compare(stock, other, stages="outputs", quick=True, tolerance=each) for each in (1e-3, 0.0))
    assert (bool(near), bool(exact)) == (True, False)
    assert 0 < near.figures("outputs")["max abs"] < 1e-3
    assert compare(stock, stock, quick=True, tolerance=0.0)
    assert near.figures("gradients") == {}


def test_threads_are_those_of_before_and_one_for_a_tiny_model(llama: Path) -> None:
    class Counts(LlamaMLP):
        counted: ClassVar[set[int]] = set()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counted.add(torch.get_num_threads())
            return super().forward(x)

    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        assert verify(llama, Patcher({"LlamaMLP": Counts}), quick=True).passed
        assert torch.get_num_threads() == 8
        with pytest.raises(InvalidPatcherError):
            compare(llama, 3)
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)
    assert Counts.counted == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (LLAMA, None),
            r"verify takes a patcher.Patcher, found None \(NoneType\); write for instance verify\(model, Patcher\(",
        ),
        ((LLAMA, OWN, torch.int8), r"dtype=torch\.int8 can't be compared; write one of torch\.float64"),
        ((LlamaForCausalLM, OWN), r"a model is given by its repo, its folder or its config"),
    ],
    ids=["no patcher", "dtype", "no model"],
)
def test_wrong_use_raises(arguments: Any, message: str) -> None:
    model, patcher, *dtype = arguments
    with pytest.raises(InvalidPatcherError, match=message):
        verify(model, patcher, **({"dtype": dtype[0]} if dtype else {}))


@pytest.mark.parametrize("stages", [[], ["load"], ["windows"]], ids=str)
def test_stages_that_compare_nothing_do_not_pass(llama: Path, stages: list[str]) -> None:
    reason = r"\n  windows: not checked: the config has no window" if "windows" in stages else "$"
    with pytest.raises(InvalidPatcherError, match=f"compare nothing; name others, or none, for all.{reason}"):
        verify(llama, OWN, stages=stages)
    assert verify(llama, OWN, stages=[*stages, "outputs"])


def test_a_stage_that_is_not_there_is_said() -> None:
    with pytest.raises(InvalidPatcherError, match=r"stage 'saves': there is no such stage; did you mean 'save'"):
        verify(LLAMA, OWN, stages=["saves"])
    wrapper = nn.Sequential(build_tiny(LLAMA))
    with pytest.raises(InvalidPatcherError, match="takes a PreTrainedModel, found a Sequential; pass the model"):
        compare(wrapper, wrapper)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(InvalidPatcherError, match=rf"tolerance={tolerance} can't be met; write 0, for bitwise"):
            compare(build_tiny(LLAMA), build_tiny(LLAMA), quick=True, tolerance=tolerance)
    with pytest.raises(InvalidPatcherError, match=r"compare takes models, repo ids and folders, found 3 \(int\)"):
        compare(3, 4)


class WithAnother(LlamaDecoderLayer):
    """A layer with an attention of its own, at a path that stock doesn't have."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.another = LlamaAttention(config, layer_idx)

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        self.another(hidden_states, **{**kwargs, CACHE: None, "attention_mask": None})
        return super().forward(hidden_states, **kwargs)


def test_modules_that_only_the_patched_model_has_are_left_out() -> None:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    patcher = Patcher(
        {"LlamaDecoderLayer": WithAnother}, function_mapping={"rotate_half": rotated}, new_weights=r"\.another\."
    )
    verify(tiny_llama_config(), patcher, stages=["outputs", "precision"]).raise_on_failure()
