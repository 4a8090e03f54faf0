"""`like(target)` means what computes the same as the target, and nothing else."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, rotate_half
from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralRMSNorm

from patcher import Patcher, fingerprint, like
from patcher.codegen import PatchConfig, generate
from patcher.errors import (
    CodegenError,
    InvalidPatcherError,
    PatchConflictError,
    PresetDriftError,
    UnmatchedPatchError,
)
from patcher.source.alike import difference, without_kernel
from tests.support.remote_code import remote_code_model
from tests.support.tiny import DECODER_SIZES

OTHER_TABLE = dict(ACT2FN)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class RenamedNorm(nn.Module):
    """With a docstring, other names, annotations, and a way to print it."""

    def __init__(self, size, eps: float | None = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        """Normalize."""
        before = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(before)

    def extra_repr(self):
        return f"eps={self.eps}"


# Near misses. None of them is constructed: where `__init__` is the very one of `Norm`, the forward alone differs.


class OnePlus(nn.Module):
    __init__ = Norm.__init__

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (1 + self.weight) * x.to(dtype)


class CastAfter(nn.Module):
    __init__ = Norm.__init__

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * x).to(dtype)


class OtherDefault(nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    forward = Norm.forward


class Clamped(nn.Module):
    __init__ = Norm.__init__

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(1) + self.eps)
        return self.weight * x.to(dtype)


class Biased(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    forward = Norm.forward


class OtherDtype(nn.Module):
    __init__ = Norm.__init__

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float64)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class CallsTheOriginal(Norm):
    def forward(self, x):
        return super().forward(x)


class Extended(RenamedNorm):
    def reset(self):
        self.weight.data.fill_(1)


@pytest.mark.parametrize(
    "other", [OnePlus, CastAfter, OtherDefault, Clamped, Biased, OtherDtype, CallsTheOriginal, Extended, nn.RMSNorm]
)
def test_a_near_miss_is_not_alike(other: type[nn.Module]) -> None:
    assert not like(Norm).matches(other)
    assert difference(Norm, other)


def test_names_docstrings_annotations_and_what_only_shows_make_no_difference() -> None:
    assert like(Norm).matches(RenamedNorm)
    assert like(RenamedNorm).matches(Norm)


def activated(x):
    return ACT2FN["silu"](x)


def activated_too(x):
    return ACT2FN["silu"](x)


def activated_by_another_table(x):
    table = OTHER_TABLE
    return table["silu"](x)


def test_a_global_counts_by_what_it_means() -> None:
    assert like(activated).matches(activated_too)
    other = type(activated)(activated_too.__code__, {**globals(), "ACT2FN": OTHER_TABLE})
    assert not like(activated).matches(other)
    assert "ACT2FN" in difference(activated, other)
    assert not like(activated).matches(activated_by_another_table)


def closures() -> list[Callable[..., Any]]:
    """Functions whose code is the same, instruction by instruction, but for the variables that they close over."""

    def one(x):
        p = x + 1
        q = x + 2
        return lambda: p - q

    def same(x):
        first = x + 1
        second = x + 2
        return lambda: first - second

    def swapped(x):
        p = x + 1
        q = x + 2
        return lambda: q - p

    return [one, same, swapped]


def test_variables_of_inner_functions_are_not_mixed_up() -> None:
    one, same, swapped = closures()
    assert not difference(one, same)
    assert difference(one, swapped)


def counts() -> list[Callable[..., Any]]:
    def ints(x):
        return x * 1

    def floats(x):
        return x * 1.0

    def bools(x):
        return x * True

    def negative(x):
        return x * -0.0

    def zero(x):
        return x * 0.0

    return [ints, floats, bools, negative, zero]


def test_constants_count_by_their_type_and_sign() -> None:
    for number, one in enumerate(counts()):
        assert [not difference(one, other) for other in counts()] == [number == each for each in range(5)]


def named_one(self):
    return type(self).__name__ == "LlamaRMSNorm"


def named_other(self):
    return type(self).__name__ == "LlamaRMSNorm"


def lists_locals(x):
    return locals()


def lists_locals_too(y):
    return locals()


def test_code_that_reads_names_is_not_alike() -> None:
    assert "__name__" in difference(named_one, named_other)
    assert difference(lists_locals, lists_locals_too)


def assigns(x):
    global COUNT
    COUNT = x


def test_a_function_that_assigns_a_global_of_another_module_is_not_alike() -> None:
    there = type(assigns)(assigns.__code__.replace(co_name="there"), {**globals()})
    assert "assigns a global" in difference(assigns, there)


def decorated(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def test_what_a_decorator_closes_over_counts() -> None:
    one, same, other = decorated(activated), decorated(activated_too), decorated(named_one)
    assert not difference(one, same)
    assert difference(one, other)


def test_a_rebound_method_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    key = like("LlamaRMSNorm")
    assert key.matches(MistralRMSNorm)
    monkeypatch.setattr(MistralRMSNorm, "forward", GemmaRMSNorm.forward)
    assert not key.matches(MistralRMSNorm)


def test_it_is_a_frozen_value() -> None:
    key = like("LlamaRMSNorm")
    assert key == like("like:LlamaRMSNorm") == copy.deepcopy(key) == pickle.loads(pickle.dumps(key))
    assert key == "like:LlamaRMSNorm"
    assert type(pickle.loads(pickle.dumps(key))) is type(key)
    assert repr(key) == "like('LlamaRMSNorm')"
    assert like(LlamaRMSNorm).target == "transformers.models.llama.modeling_llama:LlamaRMSNorm"
    with pytest.raises(AttributeError):
        key.other = 1  # type: ignore[attr-defined]
    assert "only one has _norm" in key.why_not(GemmaRMSNorm)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("LlamaRMSNrm", "transformers has no class 'LlamaRMSNrm': not in the modeling files"),
        ("apply_rotary_pos_emb", r"write like\('module:apply_rotary_pos_emb'\)"),
        ("Llama.*Norm", r"'Llama\.\*Norm' is not a class or .*, or a name; write like\('LlamaRMSNorm'\)"),
        (functools.partial(print), "is not a class or function that its module has"),
        (lambda x: x, "<lambda> at .* is not a class or function that its module has"),
        (3, "3 is not a class or function that its module has"),
    ],
)
def test_a_target_that_does_not_exist_is_an_error_at_once(target: Any, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        like(target)


def test_a_name_that_a_module_lacks_is_an_error_when_it_is_used() -> None:
    with pytest.raises(InvalidPatcherError, match=r"modeling_llama:Nrm can't be imported: AttributeError"):
        like("transformers.models.llama.modeling_llama:Nrm").matches(Norm)


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Tripled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 3 * super().forward(hidden_states)


def not_rotated(q, k, cos, sin, unsqueeze_dim=1):
    return q, k


def built(config_class: type, patcher: Patcher | None = None) -> Any:
    config = config_class(**DECODER_SIZES)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **({"patcher": patcher} if patcher else {})).eval()


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen3Config])
def test_a_class_key_replaces_what_is_alike_wherever_it_is(config_class: type) -> None:
    model = built(config_class, Patcher({like("LlamaRMSNorm"): Doubled}))
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm") or type(module) is Doubled]
    assert norms
    assert all(type(module) is Doubled for module in norms)


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig])
def test_a_function_key_replaces_what_is_alike(config_class: type) -> None:
    plain = built(config_class)
    model = built(config_class, Patcher(function_mapping={like(apply_rotary_pos_emb): not_rotated}))
    by_name = built(config_class, Patcher(function_mapping={"apply_rotary_pos_emb": not_rotated}))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, by_name(tokens).logits)
        assert not torch.equal(model(tokens).logits, plain(tokens).logits)


def test_what_is_not_alike_stays_and_a_key_without_effect_raises() -> None:
    with pytest.raises(
        UnmatchedPatchError,
        match=r"like\('LlamaRMSNorm'\); nearest: GemmaRMSNorm, which differs: LlamaRMSNorm: only one has _norm",
    ):
        built(GemmaConfig, Patcher({like("LlamaRMSNorm"): Doubled}))
    with pytest.raises(UnmatchedPatchError, match=r"nearest: LlamaRMSNorm, which is a replacement itself"):
        built(LlamaConfig, Patcher({like("LlamaRMSNorm"): LlamaRMSNorm}))
    with pytest.raises(UnmatchedPatchError, match=r"nothing in the modeling code calls like\("):
        built(LlamaConfig, Patcher(function_mapping={like(f"{__name__}:activated"): activated_too}))


def test_precedence() -> None:
    key = like("LlamaRMSNorm")
    for mapping in ({key: Doubled, "MistralRMSNorm": Tripled}, {key: Doubled, "^Mistral.*Norm$": Tripled}):
        model = built(MistralConfig, Patcher(mapping))
        assert type(model.model.norm) is Tripled
    model = built(MistralConfig, Patcher({key: Doubled}, module_mapping={"model.norm": Tripled}))
    assert type(model.model.norm) is Tripled
    assert type(model.model.layers[0].input_layernorm) is Doubled
    with pytest.raises(PatchConflictError, match="both match MistralRMSNorm"):
        built(MistralConfig, Patcher({key: Doubled, like(MistralRMSNorm): Tripled}))
    both = {key: Doubled, like(MistralRMSNorm): Doubled}
    assert type(built(MistralConfig, Patcher(both)).model.norm) is Doubled


def test_remote_code(tmp_path: Path) -> None:
    """Also where the load itself is what imports the code."""
    folder = remote_code_model(tmp_path / "remote_like")
    file = folder / "modeling_tiny_remote.py"
    source = inspect.getsource(LlamaRMSNorm).partition("class LlamaRMSNorm")[2]
    code = file.read_text().replace("self.norm = nn.LayerNorm", "self.norm = RemoteNorm")
    near_miss = code.replace("self.mlp_norm = nn.LayerNorm", "self.mlp_norm = NearMiss")
    other = source.replace("1e-6", "1e-5")
    file.write_text(f"{near_miss}\n\nclass RemoteNorm{source}\n\nclass NearMiss{other}")

    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, patcher=Patcher({like("LlamaRMSNorm"): Doubled})
        )
        assert type(model.model.norm) is Doubled
        assert {type(layer.mlp_norm).__name__ for layer in model.model.layers} == {"NearMiss"}
    plain = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(plain.model.norm).__name__ == "RemoteNorm"


def test_it_travels_as_data() -> None:
    patcher = Patcher({like("LlamaRMSNorm"): Doubled}, function_mapping={like(rotate_half): not_rotated})
    data = json.loads(json.dumps(patcher.to_dict()))
    assert data["class_mapping"] == {"like:LlamaRMSNorm": f"{__name__}:Doubled"}
    again = Patcher.from_dict(data, allowed=[Doubled, not_rotated])
    assert again == patcher
    assert hash(again) == hash(patcher)
    assert pickle.loads(pickle.dumps(patcher)) == patcher
    assert type(next(iter(again.class_mapping))) is type(like("LlamaRMSNorm"))
    assert repr(patcher).startswith("Patcher(class_mapping={like('LlamaRMSNorm'): Doubled}")


def test_inside_of_a_block_and_of_another() -> None:
    """The target itself has another `__init__` while it is replaced: it is compared as it is without that."""
    with Patcher({"LlamaRMSNorm": Doubled}).applied():
        assert type(built(LlamaConfig).model.norm) is Doubled
        model = built(MistralConfig, Patcher({like("LlamaRMSNorm"): Tripled}))
    assert type(model.model.norm) is Tripled
    assert type(built(MistralConfig).model.norm) is MistralRMSNorm
    assert modeling_llama.LlamaRMSNorm is LlamaRMSNorm


def test_a_pin_of_the_target_counts_for_every_model() -> None:
    pins = {"LlamaRMSNorm": fingerprint(LlamaRMSNorm)}
    patcher = Patcher({like("LlamaRMSNorm"): Doubled}, fingerprints=pins)
    assert type(built(MistralConfig, patcher).model.norm) is Doubled
    with pytest.raises(PresetDriftError, match=r"LlamaRMSNorm: pinned 0123456789abcdef, found"):
        built(MistralConfig, patcher.replace(fingerprints={"LlamaRMSNorm": "0123456789abcdef"}))


def test_a_generated_file_has_what_is_alike_replaced() -> None:
    patcher = Patcher({like("LlamaRMSNorm"): Doubled})
    text = generate(PatchConfig.from_patcher(patcher, MistralForCausalLM))
    assert text == generate(PatchConfig.from_patcher(Patcher({"MistralRMSNorm": Doubled}), MistralForCausalLM))
    with pytest.raises(CodegenError, match=r"no class of .* matches the class key like\('GemmaRMSNorm'\)"):
        PatchConfig.from_patcher(Patcher({like("GemmaRMSNorm"): Doubled}), MistralForCausalLM)


def test_a_global_whose_type_has_a_descriptor_for_a_module_is_itself() -> None:
    """As the functions of Cython."""
    kind = type("cython_function", (), {"__module__": property(lambda self: "elsewhere")})
    assert without_kernel(value := kind()) is value
