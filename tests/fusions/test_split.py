"""`split`: packed layers part by part, with the outputs and the bytes of the packed ones; parts are what they say."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    GPTNeoXConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Phi3Config,
    Phi3ForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from patcher import (
    InvalidPatcherError,
    PatchConflictError,
    Patcher,
    UnmatchedPatchError,
    checkpoint_weights,
    original_optimizer_state_dict,
    original_state_dict,
    report,
)
from patcher.fusions import NotUnderstoodError, PackedRows, Split, packed_rows
from patcher.fusions.split import SplitLinear
from tests.support import shared
from tests.support.checkpoints import assert_saved_alike
from tests.support.comparing import logits
from tests.support.tiny import tiny_gpt2_config, tiny_inputs

SPLIT = Patcher(fusions="split")
SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NEOX = GPTNeoXConfig(**SIZES, intermediate_size=96)
PHI3 = Phi3Config(**SIZES, intermediate_size=96, num_key_value_heads=2, pad_token_id=0)
GPT2 = tiny_gpt2_config()
CODEGEN = CodeGenConfig(vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, tie_word_embeddings=False)
#: config, the packed layer, and the rows of queries, keys and values (gates and what they gate) by hand
Rows = tuple[list[int], ...]


def by_head(part: int, head: int = 16, heads: int = 4) -> list[int]:
    return [row for each in range(heads) for row in range((3 * each + part) * head, (3 * each + part + 1) * head)]


def codegen_rows(part: int) -> list[int]:
    """In four blocks for four TPU cores, each with queries, values, keys."""
    return [row for block in range(4) for row in range((3 * block + part) * 16, (3 * block + part + 1) * 16)]


def grouped(part: int) -> list[int]:
    """Falcon's: two groups, each with the queries of two heads, a key, a value."""
    start, rows = ((0, 32), (32, 16), (48, 16))[part]
    return [row for group in range(2) for row in range(64 * group + start, 64 * group + start + rows)]


PACKED: dict[str, tuple[Any, str, Rows]] = {
    "heads": (NEOX, "gpt_neox.layers.0.attention.query_key_value", tuple(map(by_head, range(3)))),
    "heads with alibi": (
        BloomConfig(**SIZES),
        "transformer.h.0.self_attention.query_key_value",
        tuple(map(by_head, range(3))),
    ),
    "blocks": (PHI3, "model.layers.1.self_attn.qkv_proj", ([*range(64)], [*range(64, 96)], [*range(96, 128)])),
    "gate and up": (PHI3, "model.layers.1.mlp.gate_up_proj", ([*range(96)], [*range(96, 192)])),
    "transposed": (
        GPT2,
        "transformer.h.0.attn.c_attn",
        tuple([*range(n, n + 64)] for n in (0, 64, 128)),
    ),
    "values first": (CODEGEN, "transformer.h.1.attn.qkv_proj", tuple(map(codegen_rows, (0, 2, 1)))),
    "groups": (
        FalconConfig(**SIZES, num_kv_heads=2, new_decoder_architecture=True),
        "transformer.h.0.self_attention.query_key_value",
        tuple(map(grouped, range(3))),
    ),
    "one key for all": (
        FalconConfig(**SIZES, multi_query=True, new_decoder_architecture=False, parallel_attn=True, bias=False),
        "transformer.h.0.self_attention.query_key_value",
        ([*range(64)], [*range(64, 80)], [*range(80, 96)]),
    ),
}
each = pytest.mark.parametrize("kind", PACKED)


def load(config: Any, patcher: Patcher | None = SPLIT, **options: Any) -> Any:
    model_class = type(shared.stock(config))
    return model_class.from_pretrained(shared.checkpoint(config), patcher=patcher, **options).eval()


# --- the same model ------------------------------------------------------------------------------------------------


@each
def test_parts_have_the_rows_that_the_forward_takes_for_them(kind: str) -> None:
    config, path, rows = PACKED[kind]
    packed, split = shared.stock(config).get_submodule(path), load(config).get_submodule(path)
    weight = packed.weight if isinstance(packed, nn.Linear) else packed.weight.T

    names = ("gate_proj", "up_proj") if "gate_up" in path else ("q_proj", "k_proj", "v_proj")
    for name, own in zip(names, rows, strict=True):
        part = getattr(split, name)
        assert type(part) is nn.Linear
        assert torch.equal(part.weight, weight[own])
        assert part.bias is None if packed.bias is None else torch.equal(part.bias, packed.bias[own])


@each
def test_parts_are_contiguous_and_have_memory_of_their_own(kind: str) -> None:
    """Of other ones the fused optimizers of torch on CPU train wrong rows, and safetensors leaves all but one out."""
    config, *_ = PACKED[kind]
    model, assigned = load(config), load(config)
    assigned.load_state_dict(shared.stock(config).state_dict(), assign=True)
    for parameter in [*model.parameters(), *assigned.parameters()]:
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


@each
def test_outputs_gradients_and_files_are_those_of_the_packed_model(kind: str, tmp_path: Path) -> None:
    config, *_ = PACKED[kind]
    stock, model = copy.deepcopy(shared.stock(config)), load(config)

    assert torch.equal(logits(model), logits(stock))
    assert_saved_alike(model, stock, tmp_path)
    for one in (stock, model):
        one(**tiny_inputs(config)).logits.square().mean().backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.copy_(parameter.grad)
    expected, found = (dict(checkpoint_weights(one)) for one in (stock, model))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("change", [copy.deepcopy, pickled])
def test_a_split_model_is_copied_and_pickled(change: Callable[[Any], Any], tmp_path: Path) -> None:
    model = change(load(CODEGEN))

    assert torch.equal(logits(model), logits(shared.stock(CODEGEN)))
    assert_saved_alike(model, shared.stock(CODEGEN), tmp_path)


@pytest.mark.parametrize("config", [NEOX, PHI3, GPT2], ids=lambda config: config.model_type)
def test_a_model_in_memory_is_split_and_packed_again(config: Any, tmp_path: Path) -> None:
    stock = copy.deepcopy(shared.stock(config))
    split = SPLIT.apply(stock)
    packed = Patcher().apply(split)

    assert torch.equal(logits(split), logits(stock))
    assert torch.equal(logits(packed), logits(stock))
    assert [(name, type(each)) for name, each in packed.named_modules()] == [
        (name, type(each)) for name, each in stock.named_modules()
    ]
    assert_saved_alike(packed, stock, tmp_path)


@pytest.mark.parametrize("config", [NEOX, PHI3, GPT2], ids=lambda config: config.model_type)
def test_a_new_model_starts_as_the_packed_one_would_from_the_same_seed(config: Any) -> None:
    model_class = type(shared.stock(config))
    torch.manual_seed(3)
    stock, state = model_class._from_config(config), torch.get_rng_state()
    torch.manual_seed(3)
    split = model_class._from_config(config, patcher=SPLIT)

    assert torch.equal(torch.get_rng_state(), state)  # what was read from the forward has drawn no numbers
    expected = dict(checkpoint_weights(stock))
    found = dict(checkpoint_weights(split))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_save_in_the_layout_of_the_parts_loads_by_its_config_alone(tmp_path: Path) -> None:
    load(PHI3).save_pretrained(tmp_path, save_original_format=False)
    again = Phi3ForCausalLM.from_pretrained(tmp_path).eval()

    assert type(again.model.layers[0].self_attn.qkv_proj.k_proj) is nn.Linear
    assert torch.equal(logits(again), logits(shared.stock(PHI3)))


@each
def test_a_split_layer_compiles_without_a_break(kind: str) -> None:
    config, path, _ = PACKED[kind]
    packed, features = load(config).get_submodule(path), torch.randn(2, 5, 64)
    compiled = torch.compile(packed, fullgraph=True, backend="eager")

    torch.testing.assert_close(compiled(features), shared.stock(config).get_submodule(path)(features))


# --- asked for by name ---------------------------------------------------------------------------------------------


def test_parts_get_the_names_that_are_asked_for() -> None:
    model = load(PHI3, Patcher(fusions=[Split({"qkv_proj": ["query", "key", "value"]}, modules="model.layers.0.**")]))

    assert [path for path, *_ in report(model).fused] == ["model.layers.0.self_attn.qkv_proj"]
    assert [name for name, _ in model.model.layers[0].self_attn.qkv_proj.named_children()] == ["query", "key", "value"]
    assert torch.equal(logits(model), logits(shared.stock(PHI3)))


def test_options_are_data() -> None:
    patcher = Patcher(fusions=[Split({"in_proj": ["gate", "hidden"]}, modules="**"), "split"])

    assert Patcher.from_dict(json.loads(json.dumps(patcher.to_dict()))) == patcher
    assert Patcher.from_fusion_config(
        {"split": {"parts": {"in_proj": ["gate", "hidden"]}, "modules": "**"}}
    ) == Patcher(fusions=[Split({"in_proj": ["gate", "hidden"]}, modules="**")])
    assert Patcher(fusions=[Split()]) == SPLIT
    assert pickle.loads(pickle.dumps(patcher)) == patcher


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "maps no packed layer to its parts; write Split({'qkv'"),
        ("qkv", "maps no packed layer to its parts; write Split({'qkv'"),
        ({"qkv": ["q"]}, "'qkv' has the parts ['q']; write the names of two or more"),
        ({"qkv": "qkv"}, "'qkv' has the parts 'qkv'; write the names of two or more"),
        ({"qkv": 3}, "'qkv' has the parts 3; write the names of two or more"),
        ({"qkv": ["q", 3]}, "'qkv' has the parts ['q', 3]; write the names of two or more"),
        ({"qkv": ["q", "k", "q"]}, "write the names of two or more, each once"),
        ({"attn.qkv": ["q", "k"]}, "'attn.qkv' has the parts"),
        ({"qkv": ["weight", "bias"]}, "'qkv' has the parts ['weight', 'bias']"),
    ],
)
def test_options_that_say_nothing_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=re.escape(message)):
        Split(parts)


# --- read, or refused ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Packed rows whose owner does with them what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 2, 4
        self.qkv = nn.Linear(8, 24)


class InTurns(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x)
        q, k, v = rows[..., 0::3], rows[..., 1::3], rows[..., 2::3]
        return q + k + v


class Mixed(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x)
        q, k, v = (rows + rows.mean(-1, keepdim=True)).chunk(3, -1)
        return q + k + v


class Lost(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, _ = self.qkv(x).split((8, 8, 4, 4), -1)
        return q + k + v.repeat(1, 1, 2)


class Shared(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x)
        q, k, v = rows[..., :8], rows[..., 8:16], rows[..., 12:]
        return q + k + v[..., 4:]


class Unnamed(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        return parts[0] + parts[1] * parts[2]


class Irregular(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x)
        q, k, v = torch.cat([rows[..., :4], rows[..., 20:]], -1), rows[..., 4:12], rows[..., 12:20]
        return q + k + v


class ByKind(Attention):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.qkv(x)
        if self.heads == 2:
            v, k, q = rows.chunk(3, -1)
        else:
            q, k, v = rows.chunk(3, -1)
        return q + k * v


class ThroughHelpers(Attention):
    def apart(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*rows.shape[:-1], self.heads, 3, self.size).unbind(-2)  # type: ignore[return-value]

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x * mask
        query_layer, key_layer, value_layer = self.apart(self.qkv(x))
        return query_layer + key_layer + value_layer


READ: dict[type[Attention], PackedRows] = {
    InTurns: PackedRows({"q_proj": 8, "k_proj": 8, "v_proj": 8}, 8),
    ByKind: PackedRows({"v_proj": 8, "k_proj": 8, "q_proj": 8}, 1),
    ThroughHelpers: PackedRows({"q_proj": 8, "k_proj": 8, "v_proj": 8}, 2),
}


@pytest.mark.parametrize("owner", READ, ids=lambda owner: owner.__name__)
def test_rows_are_read_from_what_runs(owner: type[Attention]) -> None:
    assert packed_rows(owner(), "qkv", ["q_proj", "k_proj", "v_proj"]) == READ[owner]


@pytest.mark.parametrize("owner", [Mixed, Lost, Shared, Unnamed, Irregular], ids=lambda owner: owner.__name__)
def test_rows_that_the_forward_doesnt_tell_are_refused_with_the_line(owner: type[Attention]) -> None:
    message = r"isn't taken apart into variables named like q_proj, k_proj, v_proj \(test_split.py:\d+\)"
    with pytest.raises(NotUnderstoodError, match=message):
        packed_rows(owner(), "qkv", ["q_proj", "k_proj", "v_proj"])


def test_a_forward_of_the_object_is_not_read() -> None:
    attention = InTurns()
    attention.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(NotUnderstoodError, match="was replaced on the object"):
        packed_rows(attention, "qkv", ["q_proj", "k_proj", "v_proj"])


def test_cross_attention_packs_keys_and_values_only() -> None:
    config = tiny_gpt2_config(add_cross_attention=True)
    attention = GPT2Attention(config, is_cross_attention=True)  # type: ignore[no-untyped-call]

    assert packed_rows(attention, "c_attn", ["k_proj", "v_proj"]) == PackedRows({"k_proj": 64, "v_proj": 64}, 1)


def test_a_layer_that_isnt_taken_apart_by_names_is_told_with_its_line() -> None:
    config = Zamba2Config(
        **SIZES | {"num_hidden_layers": 3}, layers_block_type=["mamba", "mamba", "hybrid"], mamba_headdim=16
    )
    with pytest.raises(UnmatchedPatchError, match=r"named like gate_proj, up_proj \(modeling_zamba2.py:\d+\)"):
        Zamba2ForCausalLM._from_config(config, patcher=SPLIT)


class HalfLinear(nn.Linear):
    """Linear, and not what `nn.Linear` computes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) / 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda attention: setattr(attention, "query_key_value", HalfLinear(64, 192)),
            "it is a HalfLinear, and not known",
        ),
        (lambda attention: attention.query_key_value.register_forward_hook(lambda *_: None), "it has hooks"),
        (
            lambda attention: attention.query_key_value.register_buffer("scale", torch.ones(1)),
            "it has parameters of its own besides weight and bias",
        ),
        (lambda attention: setattr(attention, "other", attention.query_key_value), "it is at several places"),
    ],
    ids=["another layer", "hooks", "a buffer", "shared"],
)
def test_a_layer_that_is_more_than_a_linear_one_is_left_alone(change: Callable[[Any], Any], reason: str) -> None:
    model = copy.deepcopy(shared.stock(NEOX))
    for layer in model.gpt_neox.layers:
        change(layer.attention)
    with pytest.raises(UnmatchedPatchError, match=reason):
        SPLIT.apply(model)


def test_falcons_layer_with_a_bias_rounds_otherwise_in_bfloat16() -> None:
    config = FalconConfig(**SIZES, bias=True, multi_query=True, new_decoder_architecture=False, parallel_attn=True)
    with pytest.raises(UnmatchedPatchError, match="it is a FalconLinear, and not known to compute"):
        load(config, dtype=torch.bfloat16)


# --- afterwards ----------------------------------------------------------------------------------------------------


@each
def test_the_packed_weight_says_where_its_values_are(kind: str) -> None:
    config, path, _ = PACKED[kind]
    stock, packed = shared.stock(config).get_submodule(path), load(config).get_submodule(path)

    assert isinstance(packed, SplitLinear)
    assert packed.weight.dtype == stock.weight.dtype
    assert (packed.bias is None) == (stock.bias is None)
    where = r"weight is fused: its values are in \w+\.weight, \w+\.weight"
    for use in (
        lambda: packed.weight.zero_(),
        lambda: packed.weight.data.zero_(),
        lambda: packed.weight.T,
        lambda: packed.weight.__setitem__(0, 1.0),
        lambda: setattr(packed, "weight", nn.Parameter(torch.ones(1))),
        lambda: delattr(packed, "weight"),
    ):
        with pytest.raises((AttributeError, PatchConflictError), match=where):
            use()


def test_initialisation_by_the_module_around_it_finds_that_weights_are_there() -> None:
    config = ModernBertConfig(**SIZES, intermediate_size=96, pad_token_id=0)
    folder = shared.checkpoint(config, model_class=ModernBertForMaskedLM)
    stock, model = (ModernBertForMaskedLM.from_pretrained(folder, patcher=one).eval() for one in (None, SPLIT))

    assert torch.equal(logits(model), logits(stock))


def test_what_is_trained_of_a_part_is_saved_in_its_rows(tmp_path: Path) -> None:
    model = load(CODEGEN)
    packed = model.transformer.h[0].attn.qkv_proj
    with torch.no_grad():
        packed.k_proj.weight += 1
    before = dict(checkpoint_weights(shared.stock(CODEGEN)))["transformer.h.0.attn.qkv_proj.weight"]
    changed = dict(checkpoint_weights(model))["transformer.h.0.attn.qkv_proj.weight"] - before

    assert changed.any(-1).nonzero().flatten().tolist() == codegen_rows(2)


def test_reading_is_by_module_and_leaves_it_as_it_is() -> None:
    attention = GPTNeoXAttention(NEOX, layer_idx=0)
    before = {**vars(attention)}, [*attention.named_modules()]
    packed_rows(attention, "query_key_value", ["q_proj", "k_proj", "v_proj"])

    assert ({**vars(attention)}, [*attention.named_modules()]) == before


@pytest.mark.parametrize("config", [NEOX, GPT2], ids=lambda config: config.model_type)
def test_the_state_of_an_optimizer_is_that_of_the_packed_weight(config: Any) -> None:
    states = []
    for patcher in (None, SPLIT):
        model = load(config, patcher)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(**tiny_inputs(config)).logits.square().mean().backward()
            optimizer.step()
        states.append(original_optimizer_state_dict(model, optimizer))

    expected, found = (state["state"] for state in states)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name]["exp_avg"], values["exp_avg"], msg=name)


def test_the_state_dict_of_the_packed_model_is_read_and_given() -> None:
    stock, model = shared.stock(CODEGEN), load(CODEGEN)
    with torch.no_grad():
        model.transformer.h[0].attn.qkv_proj.v_proj.weight.zero_()
    model.load_state_dict(stock.state_dict())

    assert torch.equal(logits(model), logits(stock))
    found = original_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in stock.state_dict().items())
