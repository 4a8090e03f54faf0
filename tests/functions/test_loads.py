"""A function replaced for one load: the model that has it, the models beside it, and what else is done with it."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel, Qwen2VLForConditionalGeneration
from transformers.integrations.moe import use_experts_implementation
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

import patcher
from patcher import Patcher, PatcherWarning, plan, report
from patcher.compat.models import original_class
from patcher.errors import PatchConstructionError, PresetDriftError, UnmatchedPatchError
from patcher.loading.record import record_of
from tests.functions import functions
from tests.functions.functions import CALLS
from tests.support import fresh, shared, tiny
from tests.support.small_configs import small_configs

ROPE = Patcher(function_mapping={"apply_rotary_pos_emb": functions.counted_rope})
PLAIN = Patcher(function_mapping={"apply_rotary_pos_emb": functions.plain_rope})
IDS = torch.arange(3, 13)[None]
LLAMA = modeling_llama.__name__


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    shipped = names()
    CALLS.clear()
    yield
    assert names() == shipped


def names() -> list[dict[str, Any]]:
    """What transformers binds; what a compiler puts there besides begins with underscores."""
    spaces = vars(modeling_llama), vars(LlamaAttention)
    return [{name: value for name, value in space.items() if not name.startswith("__")} for space in spaces]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny.tiny_llama_config())


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder).eval()


def load(folder: Path, patcher: Patcher, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, patcher=patcher, **options).eval()


def logits(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, **options).logits  # type: ignore[no-any-return]


def same(model: Any, stock: Any) -> bool:
    return torch.equal(logits(model), logits(stock))


@pytest.mark.parametrize(
    ("mapping", "calls"),
    [
        ({"apply_rotary_pos_emb": functions.counted_rope}, ["rope"] * 2),
        ({f"{LLAMA}:apply_rotary_pos_emb": functions.counted_rope}, ["rope"] * 2),
        ({"rotate_half": functions.counted_half}, ["half"] * 4),
        ({"create_causal_mask": functions.counted_mask}, ["mask"]),
        ({"transformers.masking_utils:create_causal_mask": functions.counted_mask}, ["mask"]),
        ({"eager_attention_forward": functions.counted_eager}, ["eager"] * 2),
        (
            {"create_causal_mask": functions.counted_mask, "apply_rotary_pos_emb": functions.counted_rope},
            ["mask", "rope", "rope"],
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_load_calls_the_replacement_and_nobody_else_does(
    folder: Path, mapping: Any, calls: list[str], tmp_path: Path
) -> None:
    stock = load(folder, Patcher(), attn_implementation="eager")
    model = load(folder, Patcher(function_mapping=mapping), attn_implementation="eager")
    assert same(model, stock)
    assert calls == CALLS
    logits(stock)
    logits(load(folder, Patcher()))
    assert calls == CALLS
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model.model.layers[0].self_attn, LlamaAttention)
    model.save_pretrained(tmp_path / "patched")
    stock.save_pretrained(tmp_path / "stock")
    for file in (tmp_path / "stock").iterdir():
        assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes(), file.name


def test_every_way_to_make_a_model(folder: Path, stock: Any) -> None:
    config = tiny.tiny_llama_config()
    with ROPE.applied():
        by_hand = LlamaForCausalLM(config)
    made = [by_hand, AutoModelForCausalLM.from_config(config, patcher=ROPE), ROPE.apply(stock)]
    for model in made:
        CALLS.clear()
        logits(model)
        assert CALLS == ["rope"] * 2
        assert [row[2] for row in report(model).functions] == [("LlamaAttention",)]
    CALLS.clear()
    back = Patcher().apply(made[2])
    assert same(back, stock)
    assert not CALLS
    assert type(back) is LlamaForCausalLM
    assert type(back.model.layers[0].self_attn) is LlamaAttention
    assert type(type(made[0])(config).model.layers[0].self_attn) is LlamaAttention
    assert report(type(ROPE.apply(stock)).from_pretrained(folder)).functions == ()


def test_the_model_itself_may_be_what_calls_it(folder: Path, tmp_path: Path) -> None:
    masks = Patcher(function_mapping={"create_causal_mask": functions.counted_mask})
    model, stock = (LlamaModel.from_pretrained(folder, patcher=each) for each in (masks, Patcher()))
    model(IDS)
    assert CALLS == ["mask"]
    assert type(model) is not LlamaModel
    stock.save_pretrained(tmp_path / "stock")
    for each, name in ((model, "patched"), (pickle.loads(pickle.dumps(model)), "pickled")):
        each.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "config.json").read_bytes() == (tmp_path / "stock/config.json").read_bytes()
        record = record_of(each)
        assert record is not None
        assert record.model_class is LlamaModel
    back = Patcher().apply(model)
    assert type(back) is LlamaModel
    assert torch.equal(back(IDS).last_hidden_state, stock(IDS).last_hidden_state)
    assert len(patcher.diff(model).functions) == 1
    assert CALLS == ["mask"]


@pytest.mark.parametrize("fusions", [(), ("qkv", "gate_up")], ids=str)
def test_pickles_and_copies(folder: Path, stock: Any, fusions: Any, tmp_path: Path) -> None:
    model = load(folder, ROPE.replace(fusions=fusions))
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(written, weights_only=False)]
    for each in copies:
        CALLS.clear()
        assert torch.allclose(logits(each), logits(stock), atol=1e-5)
        assert CALLS == ["rope"] * 2
        assert type(each.model.layers[0].self_attn) is type(model.model.layers[0].self_attn)
        assert report(each).functions == report(model).functions
    if fusions:
        assert original_class(model.model.layers[0].self_attn) is LlamaAttention
    other = copy.deepcopy(stock)
    other.model.layers[1] = copy.deepcopy(model.model.layers[1])
    CALLS.clear()
    assert torch.allclose(logits(other), logits(stock), atol=1e-5)
    assert CALLS == ["rope"]
    for number, each in enumerate([*copies, other, model]):
        each.save_pretrained(tmp_path / str(number))
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / str(number) / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.libraries
@pytest.mark.parametrize("library", ["cloudpickle", "dill"])
@pytest.mark.parametrize("fusions", [(), ("qkv", "gate_up")], ids=str)
def test_other_libraries_pickle(library: str, fusions: Any, folder: Path, stock: Any, tmp_path: Path) -> None:
    """They write down classes that no process has by their names, with all that these refer to."""
    pickles = importlib.import_module(library)
    model = load(folder, ROPE.replace(fusions=fusions))
    (tmp_path / "model.pickle").write_bytes(pickles.dumps(model))
    again = pickles.loads((tmp_path / "model.pickle").read_bytes())
    assert torch.allclose(logits(again), logits(stock), atol=1e-5)
    assert CALLS == ["rope"] * 2
    assert type(again.model.layers[0].self_attn) is type(model.model.layers[0].self_attn)
    assert report(again).functions == report(model).functions
    code = (
        f"import sys, torch, {library} as pickles\n"
        "model = pickles.load(open(sys.argv[1] + '/model.pickle', 'rb'))\n"
        "from tests.functions.functions import CALLS\n"
        "with torch.no_grad(): model(torch.arange(3, 13)[None])\n"
        "assert CALLS == ['rope'] * 2, CALLS\n"
        "model.save_pretrained(sys.argv[1] + '/saved')\n"
    )
    fresh.run(code, tmp_path)
    assert (tmp_path / "saved/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.libraries
def test_cloudpickle_takes_a_replacement_that_no_module_has(folder: Path) -> None:
    def doubled(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        return q * 2, k * 2

    model = load(folder, Patcher(function_mapping={"apply_rotary_pos_emb": doubled}))
    again = pickle.loads(importlib.import_module("cloudpickle").dumps(model))
    assert torch.equal(logits(again), logits(model))


def test_an_object_of_a_class_derived_from_one_that_was_made_pickles(folder: Path) -> None:
    attention = load(folder, ROPE).model.layers[0].self_attn
    attention.__class__ = type("Derived", (type(attention),), {})
    assert type(copy.deepcopy(attention)) is type(attention)


@pytest.mark.process
def test_another_process_reads_a_pickle(folder: Path, tmp_path: Path) -> None:
    model = load(folder, ROPE.replace(fusions="qkv"))
    torch.save(model, tmp_path / "model.pt")
    torch.save(logits(model), tmp_path / "logits.pt")
    code = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1] + '/model.pt', weights_only=False)\n"
        "with torch.no_grad(): found = model(torch.arange(3, 13)[None]).logits\n"
        "assert torch.equal(found, torch.load(sys.argv[1] + '/logits.pt'))\n"
        "from tests.functions.functions import CALLS\n"
        "assert CALLS == ['rope'] * 2, CALLS\n"
        "model.save_pretrained(sys.argv[1] + '/saved')\n"
    )
    fresh.run(code, tmp_path)
    assert (tmp_path / "saved/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_fusions_are_proven_with_the_replacement_in_place(folder: Path) -> None:
    both = PLAIN.replace(fusions=["qkv", "gate_up"])
    assert torch.allclose(logits(load(folder, both)), logits(load(folder, PLAIN)), atol=1e-5)
    writing = Patcher(function_mapping={"apply_rotary_pos_emb": functions.writing_rope})
    alone, fused = load(folder, writing), load(folder, writing.replace(fusions="qkv"))
    assert "qkv_proj" in dict(fused.model.layers[0].self_attn.named_children())
    for model in (alone, fused):
        model(IDS, labels=IDS).loss.backward()
    assert torch.allclose(logits(alone), logits(fused), atol=1e-5)
    assert torch.allclose(
        alone.model.embed_tokens.weight.grad, fused.model.embed_tokens.weight.grad, atol=1e-5
    )  # a plain split would not let it be written into


class OwnAttention(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append("own")
        return super().forward(*args, **kwargs)


def test_a_part_that_from_config_builds() -> None:
    """Its code leads to functions of torch itself, beside which `torch.classes` raises for an unknown attribute."""
    model: Any = shared.stock(tiny.tiny_qwen2_vl_config(), Qwen2VLForConditionalGeneration)
    folder = shared.checkpoint(model.config)
    mapping = {"apply_rotary_pos_emb_vision": functions.unturned}
    patched = Qwen2VLForConditionalGeneration.from_pretrained(folder, patcher=Patcher(function_mapping=mapping))
    inputs = tiny.tiny_inputs(model.config)
    with torch.no_grad():
        assert not torch.equal(patched.eval()(**inputs).logits, model(**inputs).logits)


def test_with_a_class_mapping(folder: Path, stock: Any) -> None:
    model = load(folder, ROPE.replace(class_mapping={"LlamaAttention": OwnAttention}))
    assert same(model, stock)
    assert CALLS == ["own", "rope"] * 2
    assert isinstance(model.model.layers[0].self_attn, OwnAttention)
    assert report(model).replaced[0][1:] == ("LlamaAttention", "OwnAttention")
    assert report(model).functions[0][2] == ("OwnAttention",)
    other = load(folder, ROPE)
    with Patcher({"LlamaAttention": OwnAttention}, strict=False).applied():
        assert "__init__" in vars(LlamaAttention)
        assert "__init__" not in vars(type(other.model.layers[0].self_attn))
        LlamaForCausalLM(tiny.tiny_llama_config())
    CALLS.clear()
    logits(pickle.loads(pickle.dumps(model)))
    assert CALLS == ["own", "rope"] * 2


def test_the_inner_patcher_wins(folder: Path) -> None:
    with PLAIN.applied():
        model = load(folder, ROPE)
    logits(model)
    assert CALLS == ["rope"] * 2


# --- what is found before anything is built ------------------------------------------------------------------------


def fewer(q: Any, k: Any, cos: Any) -> Any: ...


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing calls it": (
        {"apply_rotary_emb": fewer},
        UnmatchedPatchError,
        "nothing in the modeling code calls 'apply_rotary_emb'; nearest: apply_rotary_pos_emb",
    ),
    "itself": (
        {"rotate_half": modeling_llama.rotate_half},
        UnmatchedPatchError,
        "nothing in the modeling code calls 'rotate_half' but its replacement, which is the same function",
    ),
    "that of another model": (
        {"transformers.models.mistral.modeling_mistral:rotate_half": fewer},
        UnmatchedPatchError,
        "the model calls another function of that name; write 'rotate_half' for any",
    ),
    "in a table of all models": (
        {"sdpa_attention_forward": fewer},
        UnmatchedPatchError,
        "'sdpa_attention_forward': the modeling code looks for it in ALL_ATTENTION_FUNCTIONS, which all models share",
    ),
    "only called by one that is replaced": (
        {"rotate_half": functions.counted_half, "apply_rotary_pos_emb": functions.counted_rope},
        UnmatchedPatchError,
        "'rotate_half': what calls it, apply_rotary_pos_emb, is itself replaced",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_right_is_found_before_anything_is_built(case: str, folder: Path) -> None:
    mapping, error, message = REFUSED[case]
    patcher_ = Patcher(function_mapping=mapping)
    with pytest.raises(error, match=message):
        load(folder, patcher_)
    (problem,) = patcher.plan(folder, patcher_).problems
    with pytest.warns(UserWarning, match=message):
        load(folder, patcher_.replace(strict=False))
    assert not CALLS
    assert next(iter(mapping)) in problem


def test_a_name_means_every_function_of_that_name(tmp_path: Path) -> None:
    """Text and vision have an `eager_attention_forward` each, one of them in another file."""
    config = tiny.tiny_llava_config()
    config._attn_implementation = "eager"
    text = "transformers.models.llama.modeling_llama:eager_attention_forward"
    both, one = (Patcher(function_mapping={key: functions.counted_eager}) for key in ("eager_attention_forward", text))
    model = tiny.build_tiny(config)
    found = both.resolve(type(model), config).functions.replaced
    assert len(found) == 2
    (only,) = one.resolve(type(model), config).functions.replaced
    assert only.name == text
    assert Qwen2VLForConditionalGeneration.__name__ not in only.callers


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        (
            {"eager_attention_forward": functions.counted_eager},
            r"nothing in the modeling code calls 'eager_attention_forward' under attn_implementation='sdpa': load the "
            r"model with attn_implementation='eager' \(in Python; .*\); or "
            r".* transformers\.AttentionInterface\.register\('mine', ",
        ),
        (
            {f"{LLAMA}:eager_attention_forward": functions.counted_eager},
            r"calls '\S+:eager_attention_forward' under attn_implementation='sdpa': load ",
        ),
        (
            {"repeat_kv": lambda hidden_states, n_rep: hidden_states},
            r"calls 'repeat_kv', for nothing calls eager_attention_forward under attn_implementation='sdpa': load .*"
            r"attn_implementation='eager' \(in Python; commands have no such option\)$",
        ),
    ],
)
@pytest.mark.parametrize("way", ["load", "from_config", "by hand", "plan"])
def test_what_the_chosen_implementation_does_not_call_is_unmatched(
    mapping: dict[str, Any], problem: str, way: str, folder: Path
) -> None:
    """Row 37."""
    made: dict[str, Callable[[Patcher], Any]] = {
        "load": lambda patcher: load(folder, patcher),
        "from_config": lambda patcher: LlamaForCausalLM._from_config(tiny.tiny_llama_config(), patcher=patcher),
        "by hand": by_hand,
    }
    patcher = Patcher(function_mapping=mapping)
    if way not in made:
        assert re.search(f"(?m){problem}", str(plan(folder, patcher).problems[0]))
        return
    with pytest.raises(UnmatchedPatchError, match=f"(?m){problem}"):
        made[way](patcher)
    with pytest.warns(PatcherWarning, match=f"(?m){problem}"):
        model = made[way](patcher.replace(strict=False))
    assert report(model).functions == ()
    if "repeat_kv" not in mapping:
        model.set_attn_implementation("eager")  # it is called all the same, once the implementation is another
        logits(model)
        assert CALLS == ["eager"] * 2


def by_hand(patcher: Patcher) -> Any:
    with patcher.applied():
        return LlamaForCausalLM(tiny.tiny_llama_config())


def test_a_registered_implementation_is_called_as_advised(folder: Path) -> None:
    transformers.AttentionInterface.register("mine", functions.counted_eager)
    try:
        model = load(folder, Patcher(), attn_implementation="mine")
        logits(model)
        assert CALLS == ["eager"] * 2
    finally:
        transformers.AttentionInterface._global_mapping.pop("mine")


def helped(states: torch.Tensor) -> torch.Tensor:
    return states


@use_experts_implementation
class HelpedExperts(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 4, 2))
        self.down_proj = torch.nn.Parameter(torch.ones(2, 2, 2))

    def forward(self, states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return helped(states)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_what_only_the_eager_experts_call_is_unmatched_under_another_implementation(implementation: str) -> None:
    config = tiny.tiny_mixtral_config()
    config._experts_implementation = implementation
    patcher = Patcher({"MixtralExperts": HelpedExperts}, function_mapping={"helped": torch.zeros_like})
    found = patcher.resolve(transformers.MixtralForCausalLM, config).functions
    assert [each.name.rpartition(":")[2] for each in found.replaced] == ["helped"] * (implementation == "eager")
    if implementation != "eager":
        assert found.hints["helped"].startswith(
            ", for nothing calls forward under experts_implementation='grouped_mm'"
        )


def test_what_is_called_through_a_table_of_all_models_as_well_is_refused() -> None:
    """The call by name could be changed for one model, and the one through the table could not."""
    cls = transformers.Gemma3ForConditionalGeneration
    with torch.device("meta"):
        config = next(iter(small_configs(cls.config_class)))
    for name in ("create_causal_mask", "_preprocess_mask_arguments"):
        patcher_ = Patcher(function_mapping={name: functions.counted_mask})
        said = (
            rf"'{name}' can't be replaced for .* reaches it through LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, which all"
        )
        with pytest.raises(PatchConstructionError, match=said):
            patcher_.resolve(cls, config)


class OwnLoss(torch.nn.CrossEntropyLoss):
    pass


def test_what_a_load_binds_for_a_while_is_in_no_copy() -> None:
    """While a mapping is in force, names of modeling code that are bound to classes of torch are bound to others."""
    both = Patcher(
        {"CrossEntropyLoss": OwnLoss},
        function_mapping={"create_bidirectional_mask": functions.counted_mask},
        strict=False,
    )
    with pytest.warns(UserWarning, match="no class of the model matches 'CrossEntropyLoss'"):
        model = transformers.BertForSequenceClassification._from_config(tiny.tiny_bert_config(), patcher=both)
    spaces = [inspect.unwrap(each).__globals__ for each in vars(type(model.bert)).values() if inspect.isfunction(each)]
    copies = [space for space in spaces if space.get("create_bidirectional_mask") is functions.counted_mask]
    assert copies
    assert all(space["CrossEntropyLoss"] is torch.nn.CrossEntropyLoss for space in copies)


# --- what is told --------------------------------------------------------------------------------------------------


def test_what_is_told(folder: Path) -> None:
    model, plan = load(folder, PLAIN), patcher.plan(folder, PLAIN)
    row = (f"{LLAMA}:apply_rotary_pos_emb", "tests.functions.functions:plain_rope", ("LlamaAttention",))
    assert report(model).functions == plan.functions == (row,)
    assert plan.ok
    assert report(model).to_dict()["functions"] == [[row[0], row[1], ["LlamaAttention"]]]
    for told in (report(model), plan):
        assert "1 function " in str(told)
        words = " ".join(str(told).replace("│", " ").split())  # long lines are wrapped
        assert f"self_attn LlamaAttention └── calls {row[0]} -> {row[1]} ├── mlp" in words
    resolution = PLAIN.resolve(LlamaForCausalLM, tiny.tiny_llama_config())
    assert str(resolution) == f"{row[0]}: {row[1]}, called by LlamaAttention"
    shown = patcher.diff(model)
    assert shown
    (function,) = shown.functions
    assert (function.callers, function.becomes) == (("LlamaAttention",), "tests.functions.functions.plain_rope")
    assert "-    q_embed = (q * cos) + (rotate_half(q) * sin)\n" in function.text
    assert "\n+    return q * cos.unsqueeze(unsqueeze_dim), k" in str(shown)
    assert shown.to_dict()["functions"][0]["callers"] == ["LlamaAttention"]
    assert not patcher.diff(model, Patcher())


def test_fingerprints_of_functions(folder: Path) -> None:
    found = patcher.fingerprint(modeling_llama.apply_rotary_pos_emb)
    for key in ("apply_rotary_pos_emb", f"{LLAMA}:apply_rotary_pos_emb"):
        load(folder, PLAIN.replace(fingerprints={key: found}))
        with pytest.raises(PresetDriftError, match=rf"{LLAMA}.apply_rotary_pos_emb: pinned 00, found {found}"):
            load(folder, PLAIN.replace(fingerprints={key: "00"}))
    with pytest.raises(PresetDriftError, match=r"transformers.masking_utils.create_causal_mask: pinned 00, found"):
        load(folder, PLAIN.replace(fingerprints={"create_causal_mask": "00"}))
    with pytest.raises(PresetDriftError, match=r"no_such_function: pinned 00, and there is no such class or function"):
        load(folder, PLAIN.replace(fingerprints={"no_such_function": "00"}))


def test_verify_knows_right_from_wrong(folder: Path) -> None:
    assert patcher.verify(folder, Patcher(function_mapping={"rotate_half": functions.counted_half})).passed
    wrong = patcher.verify(folder, PLAIN)
    assert not wrong.passed
    begins = "model.layers.0.self_attn (LlamaAttention, which calls replaced functions)"
    assert any(begins in failure for failure in wrong.failures)


# --- an ordinary model afterwards ----------------------------------------------------------------------------------


def test_it_generates_records_and_trains_as_stock(folder: Path, stock: Any) -> None:
    model = load(folder, ROPE, attn_implementation="eager")
    stock = load(folder, Patcher(), attn_implementation="eager")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), stock.generate(IDS, **options))
    found, expected = (each(IDS, output_attentions=True, output_hidden_states=True) for each in (model, stock))
    assert len(found.attentions) == len(expected.attentions) == 2
    assert len(found.hidden_states) == len(expected.hidden_states) == 3
    for each in (model, stock):
        each.set_attn_implementation("sdpa")
    assert same(model, stock)
    for each in (model, stock):
        getattr(each, "activation_checkpointing_enable", each.gradient_checkpointing_enable)()
        each.train()
        each(IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = zip(model.parameters(), stock.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in gradients)


def test_a_runtime_layout_is_that_of_the_fusions(folder: Path, tmp_path: Path) -> None:
    """Functions change no layout: `config.json` doesn't name them, and a load brings them as the first did."""
    model = load(folder, ROPE)
    model.save_pretrained(tmp_path / "plain", save_original_format=False)
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    fused = load(folder, PLAIN.replace(fusions="qkv"))
    fused.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert torch.equal(logits(load(tmp_path / "fused", PLAIN)), logits(fused))
    assert report(LlamaForCausalLM.from_pretrained(tmp_path / "fused")).functions == ()


def test_threads_with_and_without(folder: Path, stock: Any) -> None:
    barrier = threading.Barrier(4)

    def one(number: int) -> bool:
        barrier.wait()
        model = load(folder, PLAIN if number % 2 else Patcher())
        return same(model, stock)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [True, False, True, False]


@pytest.mark.libraries
def test_compiled_no_worse_than_stock_and_beside_it(folder: Path, stock: Any) -> None:
    """Two models in one process, one with and one without: neither has the other's code compiled anew."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    patched = load(folder, PLAIN)

    def compiled(*models: Any) -> tuple[int, int, list[torch.Tensor]]:
        torch._dynamo.reset()
        counters.clear()
        runs = [torch.compile(each, backend="eager") for each in models]
        with torch.no_grad():
            found = [run(IDS, use_cache=False).logits for _ in range(3) for run in runs]
        return counters["stats"]["unique_graphs"], counters["graph_break"].total(), found

    alone, with_functions = compiled(stock), compiled(patched)
    assert with_functions[:2] == alone[:2]
    both = compiled(stock, patched)
    assert both[:2] == (alone[0] + with_functions[0], 0)
    assert torch.equal(both[2][0], logits(stock))
    assert torch.equal(both[2][1], logits(patched))
    torch._dynamo.reset()


def test_compiled_code_is_not_that_of_stock(folder: Path, stock: Any) -> None:
    """What is compiled is kept by code object: of one that two models share, the second would be a recompilation."""
    import torch._dynamo

    hidden, cos = torch.rand(1, 10, 64), torch.rand(1, 10, 16)
    torch._dynamo.reset()
    found = []
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for model in (stock, load(folder, PLAIN), stock):
            run = torch.compile(model.model.layers[0].self_attn.forward, backend="eager")
            found.append(run(hidden, (cos, cos), None)[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    torch._dynamo.reset()


@pytest.mark.parametrize("patched_first", [True, False])
def test_compiled_together_with_stock(folder: Path, stock: Any, patched_first: bool) -> None:
    """A teacher and a student in one graph; torch looks up the global names of inlined code by the module's name."""
    import torch._dynamo

    hidden, cos = torch.rand(1, 10, 64), torch.rand(1, 10, 16)
    patched = load(folder, Patcher(function_mapping={"rotate_half": functions.doubled_half}))
    models = (patched, stock) if patched_first else (stock, patched)

    def both() -> list[torch.Tensor]:
        return [model.model.layers[0].self_attn(hidden, (cos, cos), None)[0] for model in models]

    torch._dynamo.reset()
    with torch.no_grad():
        expected, found = both(), torch.compile(both, backend="eager", fullgraph=True)()
    assert not torch.equal(*expected)
    assert all(map(torch.equal, found, expected))
    torch._dynamo.reset()


@pytest.mark.libraries
def test_exported(folder: Path) -> None:
    model = load(folder, PLAIN)
    exported = torch.export.export(model, (IDS,), {"use_cache": False})
    assert torch.allclose(exported.module()(IDS, use_cache=False).logits, logits(model), atol=1e-5)
