"""A plan says what the load then does, and reads no weight to know it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.jamba.modeling_jamba import JambaAttentionDecoderLayer
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeRMSNorm

import patcher as package
from patcher import InvalidPatcherError, Patcher, PatcherError, PatcherWarning, Plan, plan
from patcher.fusions import QKV
from patcher.patterns import compress
from patcher.source.call_sites import why_unfit
from tests.support import shared
from tests.support.comparing import logits
from tests.support.computing import Twice
from tests.support.memory import peak
from tests.support.replacements import (
    JOIN,
    JOINED,
    OWN,
    Both,
    JoinedMLP,
    OwnLayer,
    OwnMLP,
    OwnNorm,
    With,
    Without,
    joining,
)
from tests.support.sampling import sampled
from tests.support.tiny import (
    build_tiny,
    remote_code_model,
    save_tiny,
    tiny_bert_config,
    tiny_gpt2_config,
    tiny_jamba_config,
    tiny_llama_config,
    tiny_llava_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen2_vl_config,
)

MODELS: dict[str, tuple[Callable[..., Any], Any]] = {
    "llama": (tiny_llama_config, AutoModelForCausalLM),
    "tied": (lambda: tiny_llama_config(tie_word_embeddings=True), AutoModelForCausalLM),
    "moe": (tiny_qwen2_moe_config, AutoModelForCausalLM),
    "mixtral": (tiny_mixtral_config, AutoModelForCausalLM),
    "jamba": (tiny_jamba_config, AutoModelForCausalLM),
    "bert": (tiny_bert_config, AutoModelForMaskedLM),
    "gpt2": (tiny_gpt2_config, AutoModelForCausalLM),
    "llava": (tiny_llava_config, AutoModelForImageTextToText),
    "qwen2_vl": (tiny_qwen2_vl_config, AutoModelForImageTextToText),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name -> the folder of a tiny model, saved when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            config, _ = MODELS[name]
            made[name] = shared.checkpoint(config(), max_shard_size="150KB")
        return made[name]

    return folder


def held(folder: Path, auto: Any, patcher: Patcher, **options: Any) -> tuple[Plan, Any]:
    """The plan, held against the load: whatever one of them says of modules and weights the other says as well."""
    planned = plan(folder, patcher, model_class=auto, **options)
    assert bool(planned) is planned.ok
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, info = auto.from_pretrained(folder, patcher=patcher, output_loading_info=True, **options)
        except (PatcherError, RuntimeError) as raised:
            error = raised
    if error is not None:
        assert not planned.ok
        assert planned.problems[0] == str(error) or isinstance(error, RuntimeError)
        assert ("transformers would raise a RuntimeError" in planned.problems[0]) == isinstance(error, RuntimeError)
        return planned, error
    assert planned.ok, planned.problems
    report = package.report(model)
    assert planned.model == report.model
    for name in ("patchers", "replaced", "fused", "refused", "conversions_dropped", "warnings"):
        assert getattr(planned, name) == getattr(report, name), name
    said = [str(each.message) for each in caught if each.category is PatcherWarning]
    assert "\n".join(planned.warnings) == "\n".join(said)  # a load says all at once
    assert tuple(text for text, _ in planned.conversions_added) == report.conversions_added
    fired = {text for text, _ in report.conversions_fired}
    assert {text for text, keys in planned.conversions_added if keys} <= fired
    # From 5.24 on a model that was dequantized as it was loaded has the conversions that it has without a quantizer:
    # none that only dequantizes, and the others with other sources.
    planned_kept = [text for text, keys in planned.conversions_kept if keys and not text.endswith(" [Fp8Dequantize]")]
    kept, planned_targets = (
        {text.partition(" [")[0].rpartition(" -> ")[2] for text in texts} for texts in (fired, planned_kept)
    )
    assert planned_targets <= kept
    assert {text for text, keys in planned.conversions_added if not keys}.isdisjoint(fired)
    assert set(planned.missing) == set(info["missing_keys"])
    assert set(planned.left_over) == set(info["unexpected_keys"])
    assert (planned.new_weights, planned.dropped_weights) == (report.new_weights, report.dropped_weights)
    return planned, model


class OwnAttention(LlamaAttention):
    pass


class OwnQwenNorm(Qwen2MoeRMSNorm):
    pass


CASES: dict[str, tuple[str, Patcher]] = {
    "nothing": ("llama", Patcher()),
    "own": ("llama", OWN),
    "tied": ("tied", OWN),
    "root": ("llama", Patcher({"LlamaForCausalLM": type("OwnLlama", (LlamaForCausalLM,), {})})),
    "joined": ("llama", JOINED),
    "expression": ("llama", Patcher({"^Llama.*Norm$": OwnNorm})),
    "misspelt": ("llama", OWN | Patcher({"LlamaMPL": OwnMLP})),
    "misspelt, loosely": ("llama", Patcher({"LlamaMPL": OwnMLP}, strict=False)),
    "new and left over": ("llama", Patcher({"LlamaMLP": Both})),
    "new and left over, loosely": ("llama", Patcher({"LlamaMLP": Both}, strict=False)),
    "declared": ("llama", Patcher({"LlamaMLP": Both}, new_weights="upper", dropped_weights="up_proj")),
    "new": ("llama", Patcher({"LlamaMLP": With}, new_weights=["adapter", "scales"])),
    "some new": ("llama", Patcher({"LlamaMLP": With}, new_weights="adapter")),
    "no conversion": ("llama", Patcher({"LlamaMLP": JoinedMLP})),
    "wrong conversion": ("llama", Patcher({"LlamaMLP": JoinedMLP}, (), joining("mlp.gate_proj.weight"))),
    "failing conversion": (
        "llama",
        Patcher({"LlamaMLP": JoinedMLP}, (), joining("mlp.gate_proj.weight", "self_attn.q_proj.weight")),
    ),
    "joined in another dimension": (
        "llama",
        Patcher(
            {"LlamaMLP": JoinedMLP},
            (),
            WeightConverter(
                ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], [Concatenate(dim=1)]
            ),
        ),
    ),
    "joined in another dimension, loosely": (
        "llama",
        Patcher(
            {"LlamaMLP": JoinedMLP},
            (),
            WeightConverter(
                ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.gate_up_proj.weight"], [Concatenate(dim=1)]
            ),
            strict=False,
        ),
    ),
    "conversion that takes nothing": ("llama", OWN.replace(extra_weight_conversions=joining("nothing", "nowhere"))),
    "renaming": ("llama", OWN.replace(extra_weight_conversions=WeightRenaming("mlp.up_proj", "mlp.upper"))),
    "filter": ("moe", Patcher({}, "gate_up_proj")),
    "filter, declared": ("moe", Patcher({}, "gate_up_proj", new_weights="gate_up_proj", strict=False)),
    "filter that finds nothing": ("llama", Patcher({}, "experts")),
    "namesake": (
        "llava",
        Patcher(
            {"LlamaAttention": OwnAttention},
            (),
            WeightConverter(["q_proj.weight", "k_proj.weight"], ["qk.weight"], [Concatenate(dim=0)]),
        ),
    ),
    "tower": ("llava", OWN),
    "qkv": ("llama", Patcher(fusions="qkv")),
    "qkv twice": ("llama", Patcher({"LlamaAttention": OwnAttention}, fusions="qkv")),
    "qkv where it is joined already": ("gpt2", Patcher(fusions="qkv")),
    "qkv of an encoder": ("bert", Patcher(fusions="qkv")),
    "fusions of experts": ("moe", Patcher(fusions=["qkv", "gate_up", "sequential_experts"])),
    "fusions of some layers": ("jamba", Patcher(fusions=["qkv", "gate_up"])),
    "listed experts": ("mixtral", Patcher(fusions="sequential_experts")),
    "patch embeddings": ("qwen2_vl", Patcher(fusions="patch_embeddings")),
    "a layer": ("llama", Patcher({"LlamaDecoderLayer": OwnLayer}, fusions="gate_up")),
}


@pytest.mark.parametrize("case", sampled(CASES, [*CASES][::3]))
def test_a_plan_says_what_the_load_does(case: str, folders: Callable[[str], Path]) -> None:
    name, patcher = CASES[case]
    held(folders(name), MODELS[name][1], patcher)


def test_the_cases_are_good_and_bad(folders: Callable[[str], Path]) -> None:
    verdicts = {plan(folders(name), patcher).ok for name, patcher in CASES.values() if name == "llama"}
    assert verdicts == {True, False}


def test_all_problems_are_said_and_each_of_them_once(folders: Callable[[str], Path]) -> None:
    first, second = plan(folders("llama"), Patcher({"LlamaMLP": Both, "LlamaMPL": OwnMLP}, "experts")).problems
    assert "'LlamaMPL'" in first
    assert "'experts'" not in first
    assert "'experts' matches no conversion" in second
    assert "'LlamaMPL'" not in second


def test_a_plan_lists_only_parameters_of_the_patched_model(folders: Callable[[str], Path]) -> None:
    """transformers stacks the experts of a checkpoint, and the fusion takes the stacks apart again."""
    planned = plan(folders("mixtral"), Patcher(fusions="sequential_experts"))
    experts = [name for _, names, _ in planned.weights for name in names if ".experts." in name]
    assert {name.rpartition(".")[2] for name in experts} == {"weight"}
    assert " -> down_proj" not in str(planned)


# --- many patchers -------------------------------------------------------------------------------------------------

MAPPINGS = [
    ("LlamaMLP", OwnMLP),
    ("LlamaMLP", JoinedMLP),
    ("LlamaMLP", With),
    ("LlamaMLP", Without),
    ("LlamaMLP", Both),
    ("LlamaMPL", OwnMLP),
    ("^Llama.*Norm$", OwnNorm),
    ("LlamaRMSNorm", OwnNorm),
    ("Llama.*Atten$", OwnAttention),
    ("LlamaAttention", OwnAttention),
    ("LlamaDecoderLayer", OwnLayer),
]
CONVERSIONS = [
    JOIN,
    joining("mlp.gate_proj.weight"),
    joining("mlp.up_proj.weight", "mlp.gate_proj.weight"),
    joining("mlp.gate_proj.weight", "self_attn.q_proj.weight"),
    joining("nothing", "nowhere", target="somewhere"),
    WeightRenaming("mlp.up_proj", "mlp.upper"),
    WeightRenaming("mlp.up_proj", "mlp.no_such"),
]
PATTERNS = ["adapter", "scales", "upper", "up_proj", "gate_proj", "gate_up_proj"]


@st.composite
def patchers(draw: st.DrawFn) -> Patcher:
    def some(values: list[Any], most: int) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), max_size=most))

    try:
        return Patcher(
            dict(some(MAPPINGS, 3)),
            some(["experts", "weight_g", "gamma"], 1),
            some(CONVERSIONS, 2),
            fusions=some(["qkv", "gate_up", "sequential_experts"], 2),
            new_weights=some(PATTERNS, 3),
            dropped_weights=some(PATTERNS, 2),
            strict=draw(st.sampled_from([True, True, False])),
        )
    except PatcherError:  # two conversions of the same tensors
        return Patcher(dict(some(MAPPINGS, 2)))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(patcher=patchers())
def test_what_any_patcher_is_planned_to_do_is_what_it_does(patcher: Patcher, folders: Callable[[str], Path]) -> None:
    held(folders("llama"), AutoModelForCausalLM, patcher)


# --- what is read --------------------------------------------------------------------------------------------------


def test_no_weight_is_read_from_a_safetensors_file(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The files are as long as they say, and hold nothing but holes: who read one would need 64 GiB."""
    shutil.copytree(folders("llama"), tmp_path, dirs_exist_ok=True)
    key, shape = "model.layers.0.mlp.extra", [1 << 34]
    header = json.dumps({key: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0]]}}).encode()
    large = tmp_path / "large.safetensors"
    large.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(large, large.stat().st_size + 4 * shape[0])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"][key] = large.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    asked, whole = JOINED.replace(dropped_weights="extra"), plan(folders("llama"), JOINED)
    planned, before = plan(tmp_path, asked), peak()
    assert (planned.ok, planned.weights) == (True, whole.weights)
    assert plan(tmp_path, asked) == planned
    assert peak() - before < 1 << 30

    os.truncate(large, 8 + len(header) + 100)  # the download broke off
    with pytest.raises(InvalidPatcherError, match="can't be read as a load would read it: SafetensorError"):
        plan(tmp_path, asked)
    with pytest.raises(Exception, match=r"incomplete metadata|not fully covered"):
        LlamaForCausalLM.from_pretrained(tmp_path, patcher=asked)


def test_an_index_whose_shards_are_missing_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(folders("moe") / name, tmp_path)
    for options in ({}, {"checkpoint": tmp_path / "model.safetensors.index.json"}):
        with pytest.raises(InvalidPatcherError, match=r"-of-\d+\.safetensors is missing, and a load needs it"):
            plan(tmp_path, Patcher(), **options)


@pytest.mark.parametrize("old_format", [False, True])
def test_a_bin_file_is_read_by_its_structure(old_format: bool, folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders("llama"))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    planned = plan(tmp_path, JOINED)
    assert planned.checkpoint.endswith("pytorch_model.bin")
    assert planned.weights == plan(folders("llama"), JOINED).weights


@pytest.mark.parametrize("wrong", ["another", "model"])
def test_of_two_keys_of_one_parameter_the_load_takes_the_first(wrong: str, tmp_path: Path) -> None:
    config = tiny_llama_config()
    model = LlamaForCausalLM(config)
    tensors = {key: value for key, value in model.state_dict().items() if key != "model.norm.weight"}
    for name in ("another", "model"):
        tensors[f"{name}.norm.weight"] = torch.ones(3 if name == wrong else config.hidden_size)
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    renamed = {"key_mapping": {"^another": "model"}}

    planned = plan(tmp_path, Patcher({"LlamaMLP": OwnMLP}), model_class=LlamaForCausalLM, **renamed)
    assert planned.ok == (wrong == "model")
    if planned.ok:
        LlamaForCausalLM.from_pretrained(tmp_path, **renamed)
    else:
        with pytest.raises(RuntimeError, match="mismatched"):
            LlamaForCausalLM.from_pretrained(tmp_path, **renamed)


def test_a_config_with_a_checkpoint_from_elsewhere(tmp_path: Path) -> None:
    config, file = tiny_llama_config(), tmp_path / "other.safetensors"
    tensors = AutoModelForCausalLM.from_config(config).state_dict()
    save_file(tensors, file)
    assert plan(config, JOINED, checkpoint=file).ok
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
    save_file(tensors, file)
    for patcher in (JOINED, Patcher()):
        (problem,) = plan(config, patcher, checkpoint=file).problems
        assert "model.layers.1.mlp.up_proj.weight: found (95, 64), expected (96, 64)" in problem
    assert plan(config, Patcher(), checkpoint=file, ignore_mismatched_sizes=True).ok


def test_a_config_alone_has_no_weights_to_judge() -> None:
    planned = plan(tiny_llama_config(), Patcher({"LlamaMLP": With}, "experts"))
    assert planned.ok
    assert planned.checkpoint == ""
    assert (planned.weights, planned.missing, planned.left_over) == ((), (), ())
    assert "no checkpoint was given, so conversions and weights are not checked" in str(planned)
    assert [path for path, *_ in planned.replaced] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    dropped = plan(tiny_qwen2_moe_config(), Patcher({}, "gate_up_proj")).conversions_dropped
    assert {filtered for _, filtered in dropped} == {"gate_up_proj"}
    assert "'LlamaMPL'" in plan(tiny_llama_config(), Patcher({"LlamaMPL": With})).problems[0]


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (tiny_llama_config(), {}, "LlamaForCausalLM"),
        (tiny_bert_config(), {}, "BertForMaskedLM"),
        (tiny_bert_config(is_decoder=True), {}, "BertLMHeadModel"),
        (tiny_llava_config(), {}, "LlavaForConditionalGeneration"),
        (tiny_llama_config(architectures=["LlamaModel"]), {}, "LlamaModel"),
        (tiny_llama_config(), {"model_class": LlamaModel}, "LlamaModel"),
        (tiny_llama_config(), {"model_class": AutoModelForSequenceClassification}, "LlamaForSequenceClassification"),
    ],
)
def test_the_class_is_the_one_that_is_given_or_that_the_config_means(
    config: Any, options: dict[str, Any], expected: str
) -> None:
    assert plan(config, Patcher(), **options).model == expected


def test_a_plan_leaves_nothing_behind(folders: Callable[[str], Path]) -> None:
    folder = folders("llama")
    for patcher in (JOINED, Patcher({"LlamaMLP": Both}), Patcher({"LlamaMPL": OwnMLP})):
        plan(folder, patcher)
        model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert package.report(model).patchers == ()
        assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_replacement_that_looks_at_its_values_is_built_with_values(folders: Callable[[str], Path]) -> None:
    class Looks(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.size = int(torch.arange(5).sum().item())
            assert self.size == 10

    held(folders("llama"), AutoModelForCausalLM, Patcher({"LlamaMLP": Looks}))


def test_what_is_in_force_around_it_counts(folders: Callable[[str], Path]) -> None:
    with OWN.applied():
        planned, _ = held(folders("llama"), AutoModelForCausalLM, Patcher({"LlamaRMSNorm": OwnNorm}))
        assert {new for _, _, new in planned.replaced} == {"OwnMLP", "OwnNorm"}
        assert [origin for _, origin in planned.patchers] == ["patcher=", "applied()"]


def test_a_checkpoint_in_a_fused_layout_is_planned_in_that(folders: Callable[[str], Path], tmp_path: Path) -> None:
    fused = AutoModelForCausalLM.from_pretrained(folders("llama"), patcher=Patcher(fusions="qkv"))
    fused.save_pretrained(tmp_path, save_original_format=False)
    planned, _ = held(tmp_path, AutoModelForCausalLM, OWN)
    assert len(planned.fused) == 2
    assert planned.conversions_added[0][1] == ()  # it has nothing to do


def test_a_variant_in_shards_is_planned_as_it_is_loaded(tmp_path: Path) -> None:
    build_tiny(tiny_llama_config()).save_pretrained(tmp_path / "fp16", variant="fp16", max_shard_size="20KB")
    assert not held(tmp_path / "fp16", AutoModelForCausalLM, Patcher(fusions="qkv"), variant="fp16")[0].missing
    fused = AutoModelForCausalLM.from_pretrained(tmp_path / "fp16", variant="fp16", patcher=Patcher(fusions="qkv"))
    fused.save_pretrained(tmp_path / "fused", save_original_format=False, max_shard_size="20KB")
    assert (tmp_path / "fused" / "model.safetensors.index.patcher.json").is_file()
    assert len(held(tmp_path / "fused", AutoModelForCausalLM, OWN)[0].fused) == 2


@pytest.mark.parametrize("key", ["TinyRemoteMLP", "TinyRemoteMPL"])
def test_remote_code_is_planned_as_it_is_loaded(key: str, tmp_path: Path) -> None:
    folder = remote_code_model(tmp_path)
    patcher = Patcher({key: OwnMLP})
    assert held(folder, AutoModelForCausalLM, patcher, trust_remote_code=True)[0].ok == (key == "TinyRemoteMLP")
    assert plan(folder, patcher, trust_remote_code=True).ok == (key == "TinyRemoteMLP")


# --- signatures ----------------------------------------------------------------------------------------------------


def replacement(base: type[nn.Module], **methods: Any) -> type[nn.Module]:
    return type("Mine", (base,), methods)


MISFITS: dict[str, tuple[Patcher, str]] = {
    "one too many": (
        Patcher({"LlamaMLP": replacement(OwnMLP, forward=lambda self, x, scale: x)}),
        r"Mine\.forward doesn't fit a call of it, LlamaDecoderLayer\.forward, line \d+ of modeling_llama\.py: "
        r"self\.mlp\(hidden_states\): missing a required argument: 'scale'\.",
    ),
    "a keyword is missing": (
        Patcher({"LlamaAttention": replacement(LlamaAttention, forward=lambda self, hidden_states: hidden_states)}),
        r"Mine\.forward doesn't fit a call of it, LlamaDecoderLayer\.forward, .* got an unexpected keyword "
        r"argument 'attention_mask'",
    ),
    "of a list": (
        Patcher({"LlamaDecoderLayer": replacement(OwnLayer, forward=lambda self, hidden_states: hidden_states)}),
        r"Mine\.forward doesn't fit a call of it, LlamaModel\.forward, .*decoder_layer\(hidden_states, .* got an unex",
    ),
    "a function": (
        Patcher(fusions="qkv", function_mapping={"apply_rotary_pos_emb": lambda q, k: (q, k)}),
        r"test_planning:<lambda> doesn't fit a call of it, LlamaAttention\.forward, line \d+ of modeling_llama\.py: "
        r"apply_rotary_pos_emb\(query_states, key_states, cos, sin\): too many positional arguments\. Give it",
    ),
    "a function that another one calls": (
        Patcher(function_mapping={"rotate_half": lambda: None}),
        r"doesn't fit a call of it, apply_rotary_pos_emb, line \d+ of modeling_llama\.py: rotate_half\(k\): too",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_signature_that_a_call_does_not_fit_is_a_problem(case: str, folders: Callable[[str], Path]) -> None:
    patcher, text = MISFITS[case]
    planned = plan(folders("llama"), patcher)
    assert not planned.ok
    assert planned.misfits
    assert len(planned.misfits) == len({*planned.misfits})
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(planned.problems[-1])


def test_a_constructor_that_does_not_fit_is_told_of_as_in_a_load(folders: Callable[[str], Path]) -> None:
    (problem,) = plan(
        folders("llama"), Patcher({"LlamaMLP": replacement(OwnMLP, __init__=lambda self: None)})
    ).problems
    assert (
        "Mine could not be built in place of LlamaMLP, in __init__ of LlamaDecoderLayer (modeling_llama.py:" in problem
    )
    assert "It was called as Mine(<LlamaConfig>)." in problem


def test_a_call_of_a_class_from_a_table_is_found_by_what_the_model_holds(folders: Callable[[str], Path]) -> None:
    """Jamba takes its layers out of a dict: no line of it says of which class they are."""
    layer = replacement(JambaAttentionDecoderLayer, forward=lambda self, hidden_states: hidden_states)
    ((name, where, problem),) = plan(folders("jamba"), Patcher({"JambaAttentionDecoderLayer": layer})).misfits
    assert name == "Mine"
    assert "JambaModel.forward" in where
    assert "got an unexpected keyword argument" in problem


@pytest.mark.parametrize(
    "function", [lambda q, k, *rest: (q, k), lambda q, k, c, s, unsqueeze_dim=1: (q, k), lambda *all, **more: all[:2]]
)
def test_a_function_that_every_call_fits_is_none(function: Any, folders: Callable[[str], Path]) -> None:
    assert plan(folders("llama"), Patcher(function_mapping={"apply_rotary_pos_emb": function})).ok


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, hidden_states: hidden_states,
        lambda self, x, *more: x,
        lambda self, *args, **kwargs: args[0],
        lambda self, x, scale=1.0, *, shift=0.0: x,
    ],
)
def test_a_signature_that_every_call_fits_is_none(forward: Any, folders: Callable[[str], Path]) -> None:
    planned = plan(folders("llama"), Patcher({"LlamaMLP": replacement(OwnMLP, forward=forward)}))
    assert planned.ok
    assert planned.misfits == ()


def test_a_call_that_the_original_would_not_take_either_is_not_reported() -> None:
    """Some decorator takes arguments out of it."""
    call: Any = ast.parse("self.mlp(x, y)", mode="eval").body
    narrow = OwnMLP.forward
    assert why_unfit(call, narrow, narrow) == ""
    assert why_unfit(call, nn.Bilinear.forward, narrow) == "too many positional arguments"


# --- what no load can see ------------------------------------------------------------------------------------------

ORDER, TRANSPOSED = "the order of tensors in conversions", "whether a square weight is transposed"
OPERATIONS = "the values of operations that transformers doesn't have"
UNSEEN: dict[str, tuple[Patcher, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "stock": (Patcher(), ()),
    "fusions": (Patcher(fusions=["qkv", "gate_up"]), ()),
    "no square weight": (OWN, ()),
    "sources of one shape": (JOINED, ((ORDER, ("model.layers.{0..1}.mlp.gate_up_proj.weight",)),)),
    "an operation of one's own": (
        OWN.replace(extra_weight_conversions=WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Twice()])),
        ((OPERATIONS, ("model.layers.{0..1}.mlp.up_proj.weight",)),),
    ),
    "square weights": (
        Patcher({"LlamaAttention": OwnAttention}),
        ((TRANSPOSED, tuple(f"model.layers.{{0..1}}.self_attn.{name}_proj.weight" for name in "qo")),),
    ),
    "some layers": (
        Patcher(module_mapping={"model.layers.0.self_attn": OwnAttention}, fusions=QKV(modules="model.layers.1.**")),
        ((TRANSPOSED, tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")),),
    ),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_a_plan_says_what_fits_in_another_order_too(case: str, folders: Callable[[str], Path]) -> None:
    patcher, expected = UNSEEN[case]
    planned = plan(folders("llama"), patcher)
    assert planned.ok, planned.problems
    assert {what: set(names) for what, names in planned.unseen} == {what: set(names) for what, names in expected}
    assert ("patcher.verify(model, patcher)" in str(planned)) == bool(expected)


def test_what_verify_alone_sees_is_what_a_plan_says(folders: Callable[[str], Path]) -> None:
    """The wrong patcher has the plan of the right one, and the weights that it names are those that it gets wrong."""
    swapped = JOINED.replace(extra_weight_conversions=joining("mlp.up_proj.weight", "mlp.gate_proj.weight"))
    right, wrong = (AutoModelForCausalLM.from_pretrained(folders("llama"), patcher=each) for each in (JOINED, swapped))
    ((_, names),) = plan(folders("llama"), swapped).unseen
    theirs = dict(right.named_parameters())
    assert compress(key for key, value in wrong.named_parameters() if not value.equal(theirs[key])) == list(names)


def test_sources_are_shown_in_the_order_in_which_they_are_joined(folders: Callable[[str], Path]) -> None:
    swapped = JOINED.replace(extra_weight_conversions=joining("mlp.up_proj.weight", "mlp.gate_proj.weight"))
    report = package.report(AutoModelForCausalLM.from_pretrained(folders("llama"), patcher=swapped))
    for shown in (plan(folders("llama"), swapped), report):
        assert "up_proj.weight, gate_proj.weight -> gate_up_proj.weight  Concatenate(dim=0)" in str(shown)


# --- as a value ----------------------------------------------------------------------------------------------------


def test_a_plan_is_read_in_a_terminal_in_a_notebook_and_as_json(folders: Callable[[str], Path]) -> None:
    planned = plan(folders("llama"), Patcher({"LlamaMLP": Both}))
    text = str(planned)
    for expected in ("There are problems", "model.layers.{0..1}.mlp", "missing", "left over", "LlamaMLP", "the same"):
        assert expected in text
        assert expected in planned._repr_html_()
    data = json.loads(json.dumps(planned.to_dict()))
    assert data["ok"] is False
    assert data["problems"] == list(planned.problems)
    assert data["missing"] == ["model.layers.0.mlp.upper.weight", "model.layers.1.mlp.upper.weight"]
    with pytest.raises(AttributeError, match="cannot assign"):
        planned.model = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((tiny_llama_config(), None), {}, r"plan takes a patcher\.Patcher, found None"),
        (
            (nn.Linear(1, 1), OWN),
            {},
            r"a model is given by its repo, its folder or its config, found Linear.*\.config",
        ),
        ((tiny_llama_config(), OWN), {"model_class": nn.Linear}, "model_class= takes a model class, or an Auto"),
        ((tiny_llama_config(architectures=["Nothing"]), OWN), {}, "names Nothing as its architecture"),
        ((tiny_llama_config(), OWN), {"checkpoint": {"x": "y"}}, "checkpoint= is a dict; pass a folder, a file, an"),
        ((tiny_llama_config(), OWN), {"gguf_file": "x.gguf"}, "plan can't read GGUF files"),
        (
            (tiny_llama_config(), OWN),
            {"checkpoint": __file__},
            "isn't a checkpoint that can be read by name and shape",
        ),
        ((tiny_llama_config(), OWN), {"checkpoint": Path(__file__).parent}, "has no checkpoint: none of model.safe"),
        ((tiny_llama_config(), OWN), {"checkpoint": "no/such"}, "it isn't in the cache, and nothing may be fetched"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidPatcherError, match=text):
        plan(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 8),
        ("model.safetensors", struct.pack("<Q", 3) + b"[1]"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b"nonsense"),
    ],
)
def test_a_broken_header_is_said(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidPatcherError, match=rf"{name} can't be read as a load would read it: \w+"):
        plan(tiny_llama_config(), OWN, checkpoint=tmp_path)


# --- quantized checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "patcher",
    [
        Patcher({"Qwen2MoeRMSNorm": OwnQwenNorm}),
        Patcher(fusions="qkv"),
        Patcher(fusions="gate_up"),
        Patcher(fusions="sequential_experts"),
    ],
    ids=["mapping", "qkv", "gate_up", "sequential_experts"],
)
def test_a_checkpoint_in_float8_is_planned_as_it_is_loaded(patcher: Patcher, tmp_path: Path) -> None:
    """A quantizer makes conversions of its own out of those that it finds, ours among them."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tiny_qwen2_moe_config(), tmp_path / "whole"))
    tensors: dict[str, torch.Tensor] = {}
    for key, value in load_file(tmp_path / "whole" / "model.safetensors").items():
        quantized = value.ndim == 2 and "proj" in key
        tensors[key] = value.to(torch.float8_e4m3fn) if quantized else value
        if quantized:
            tensors[f"{key}_scale_inv"] = torch.rand(value.shape[0] // 16, value.shape[1] // 16)
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    model.config.quantization_config = blocks
    model.config.save_pretrained(tmp_path / "fp8")
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    held(tmp_path / "fp8", AutoModelForCausalLM, patcher)
    fused, stock = (AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", patcher=each) for each in (patcher, None))
    torch.testing.assert_close(logits(fused), logits(stock), atol=1e-5, rtol=1e-5)
