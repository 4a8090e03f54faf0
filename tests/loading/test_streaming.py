"""Weights that stream: what a save would write, tensor after tensor, and into a model in place."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import (
    InvalidPatcherError,
    PatchedWeightsError,
    Patcher,
    PatcherWarning,
    checkpoint_metadata,
    checkpoint_weights,
    load_checkpoint_weights,
)
from patcher.compat.models import state_tensors, without_tied
from patcher.loading import saving
from tests.compatibility.rows import ROWS, Row
from tests.support.checkpoints import tensors
from tests.support.computing import Twice, TwiceInPlace
from tests.support.offloaded import DEVICE_MAPS, offloaded
from tests.support.replacements import JOINED
from tests.support.tiny import (
    build_tiny,
    save_tiny,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
)

EXPERTS = Patcher(fusions=["sequential_experts", "qkv"])
MORE = (
    Row("experts of Qwen2", EXPERTS, tiny_qwen2_moe_config),
    Row("tied", Patcher(fusions=["qkv", "gate_up"]), lambda: tiny_llama_config(tie_word_embeddings=True)),
    Row("a conversion and a fusion", JOINED | Patcher(fusions="qkv"), tiny_llama_config),
)
rows = pytest.mark.parametrize("row", [*ROWS, *MORE], ids=lambda row: row.name)


def streamed(model: nn.Module, **options: Any) -> dict[str, bytes]:
    """As `tensors` has what is in files."""
    return {
        name: repr((tensor.dtype, tensor.shape)).encode() + tensor.numpy().tobytes()
        for name, tensor in checkpoint_weights(model, **options)
    }


def overwritten(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


# --- out of a model ------------------------------------------------------------------------------------------------


def test_a_misspelt_choice_is_an_error_without_adapters_too() -> None:
    model: Any = build_tiny(tiny_llama_config())
    for read in (checkpoint_weights, checkpoint_metadata):
        with pytest.raises(InvalidPatcherError, match=r"adapters='mergd' doesn't say .* Write adapters=\"merged\""):
            list(read(model, adapters="mergd"))  # type: ignore[operator]


@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_what_a_save_writes(row: Row, dtype: torch.dtype, tmp_path: Path) -> None:
    models = {"patched": row.patched(dtype=dtype), "stock": row.stock(dtype=dtype), "made": row.from_config()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        found, expected = streamed(model), tensors(tmp_path / name)
        assert found == expected, name
        shown = checkpoint_metadata(model)
        assert list(shown) == list(found), name
        for key, tensor in load_file(tmp_path / name / "model.safetensors").items():
            assert (shown[key].dtype, shown[key].shape, shown[key].is_meta) == (tensor.dtype, tensor.shape, True)
    assert streamed(models["patched"]) == streamed(models["stock"])


@pytest.mark.parametrize(
    "patcher", [None, Patcher(fusions=["qkv"]), Patcher(fusions=["sequential_experts", "qkv"])], ids=str
)
def test_what_is_only_moved_is_not_copied_and_has_no_graph(patcher: Patcher | None) -> None:
    model = MixtralForCausalLM._from_config(tiny_mixtral_config(), patcher=patcher)
    places = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in model.parameters()]
    for name, tensor in checkpoint_weights(model):
        assert any(start <= tensor.data_ptr() < end for start, end in places), name
        assert not tensor.requires_grad
        assert tensor.is_contiguous()


def test_the_first_tensor_waits_for_no_other_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an engine is given the first of thousands at once, and no more than a layer is made at a time."""
    seen: list[str] = []
    stock = saving.SavePlan.saved_state_dict

    def noted(self: saving.SavePlan, state_dict: Any) -> Any:
        seen.extend(state_dict)
        return stock(self, state_dict)

    monkeypatch.setattr(saving.SavePlan, "saved_state_dict", noted)
    for row in MORE:
        for model in (row.patched(), row.stock(), row.from_config(), row.from_config(patcher=row.patcher)):
            seen.clear()
            stream = checkpoint_weights(model)
            layers = set()
            for name, _ in stream:
                assert seen, row.name
                layers |= {each.split(".")[2] for each in seen if each.startswith("model.layers.")}
                if name.startswith("model.layers."):
                    assert layers == set(map(str, range(int(name.split(".")[2]) + 1))), (row.name, name)
                else:
                    assert len(layers) in (0, 2), (row.name, name)


def test_the_order_is_that_of_a_save() -> None:
    for row in (*ROWS, *MORE):
        for model in (row.patched(), row.stock(), row.from_config(), row.from_config(patcher=row.patcher)):
            expected = saving.saved_state_dict(model, {n: model.state_dict()[n] for n in _names_once(model)})
            assert [name for name, _ in checkpoint_weights(model)] == list(expected), row.name


def _names_once(model: Any) -> list[str]:
    return without_tied(model, model.state_dict(), state_tensors(model))


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (0, 3)])
def test_layers_that_a_conversion_joins_stay_together(layers: tuple[int, int], tmp_path: Path) -> None:
    names = [f"layers.{number}.mlp.up_proj.weight" for number in layers]
    model = build_tiny(tiny_llama_config(num_hidden_layers=4))
    model._weight_conversions = [WeightConverter("both.weight", names, operations=[Chunk(dim=0)])]
    model.save_pretrained(tmp_path)
    assert "model.both.weight" in tensors(tmp_path)
    assert streamed(model) == tensors(tmp_path)


def test_in_inference_mode() -> None:
    for row in (*ROWS, *MORE):
        trained, engine = row.patched(), row.stock()
        expected = streamed(trained)
        with torch.inference_mode():
            assert streamed(trained) == expected, row.name
            load_checkpoint_weights(overwritten(engine), checkpoint_weights(trained))
        assert streamed(engine) == expected, row.name


def test_a_loop_that_ends_early_leaves_the_model_as_it_was() -> None:
    model = build_tiny(tiny_mixtral_config())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    next(checkpoint_weights(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(DEVICE_MAPS))
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_what_is_on_the_disk_is_read_when_its_turn_comes(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(), tmp_path / "stock")
    for patcher in (None, Patcher(fusions=["qkv", "gate_up"])):
        model = offloaded(folder, name, tmp_path / "parts", patcher=patcher)
        assert streamed(model) == tensors(folder)
        if any(parameter.is_meta for parameter in model.parameters()):
            with pytest.raises(InvalidPatcherError, match=r"is on the disk, or nowhere yet, so nothing can be"):
                load_checkpoint_weights(model, load_file(folder / "model.safetensors"))


def test_models_around_it() -> None:
    model = build_tiny(tiny_llama_config())
    assert streamed(torch.compile(model, backend="eager")) == streamed(nn.Sequential(model)) == streamed(model)  # type: ignore[arg-type]
    for several in (nn.ModuleList([model, build_tiny(tiny_llama_config())]), nn.Linear(2, 2)):
        with pytest.raises(
            InvalidPatcherError, match=r"(ModuleList contains 0, 1|Linear contains none)\. Pass the model"
        ):
            checkpoint_weights(several)


def test_only_one_process_is_given_tensors() -> None:
    model = build_tiny(tiny_llama_config())
    assert streamed(model, only_on=0) == streamed(model)


# --- into a model --------------------------------------------------------------------------------------------------


@rows
def test_either_way_and_in_any_order_and_in_place(row: Row) -> None:
    for source, target in ((row.patched(), row.stock()), (row.stock(), row.patched()), (row.patched(), row.patched())):
        expected = {name: value.clone() for name, value in target.state_dict().items()}
        held = {name: (value, value.data_ptr()) for name, value in target.named_parameters()}
        weights = list(checkpoint_weights(source))
        for seed in range(3):
            random.Random(seed).shuffle(weights)
            load_checkpoint_weights(overwritten(target), weights)
            found = target.state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        for name, parameter in target.named_parameters():
            assert (parameter, parameter.data_ptr()) == held[name]
            assert parameter.requires_grad


def test_values_take_the_type_of_the_model() -> None:
    row = ROWS[2]
    half = row.patched(dtype=torch.float16)
    load_checkpoint_weights(overwritten(half), checkpoint_weights(row.stock()))
    assert streamed(half) == streamed(row.stock(dtype=torch.float16))


def test_a_sender_may_use_its_memory_again() -> None:
    row = next(row for row in ROWS if "sequential_experts" in row.patcher.fusions)
    model = overwritten(row.patched())
    buffers: dict[torch.Size, torch.Tensor] = {}

    def received() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint_weights(row.stock()):
            buffer = buffers.setdefault(tensor.shape, torch.empty_like(tensor))
            yield name, buffer.copy_(tensor)
            buffer.fill_(7)

    load_checkpoint_weights(model, received())
    assert streamed(model) == streamed(row.stock())


WRONG = {
    "missing": (lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"), [
        "missing: model.layers.1.self_attn.k_proj.weight"]),
    "left over": (lambda weights: weights.update(other=torch.zeros(2)), ["left over: other"]),
    "of another shape": (lambda weights: weights.update({"model.norm.weight": torch.zeros(2)}), [
        "of another shape: model.norm.weight: found (2,), expected (64,)"]),
}  # fmt: skip
WRONG["all three"] = (
    lambda weights: [change(weights) for name, (change, _) in WRONG.items() if name != "all three"],  # type: ignore[no-untyped-call]
    [line for _, lines in WRONG.values() for line in lines],
)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["patched", "stock"])
def test_what_does_not_fit_is_named_in_one_error(wrong: str, kind: str) -> None:
    row = ROWS[2]
    model, (change, lines) = overwritten(getattr(row, kind)()), WRONG[wrong]
    weights = dict(checkpoint_weights(row.stock()))
    change(weights)
    with pytest.raises(PatchedWeightsError, match="These weights aren't those of the model's checkpoint") as raised:
        load_checkpoint_weights(model, weights)
    assert [line.strip() for line in str(raised.value).splitlines() if line.startswith("  ")] == lines
    with pytest.warns(PatcherWarning) as warned:
        load_checkpoint_weights(model, weights, strict=False)
    assert [str(each.message) for each in warned] == [str(raised.value)]
    expected = dict(checkpoint_weights(row.stock()))
    for name, tensor in checkpoint_weights(model):
        fits = name in weights and weights[name].shape == tensor.shape
        assert torch.equal(tensor, expected[name] if fits else torch.full_like(tensor, 0.5)), name


@pytest.mark.parametrize("weights", [{"model.norm.weight": [1.0]}, [("model.norm.weight", None)], ["a", "b"], 3])
def test_what_are_no_tensors_with_names_is_said(weights: Any) -> None:
    said = (
        r"takes pairs of a name and a torch\.Tensor, found .*\. torch\.from_numpy\(array\) makes a tensor of an array"
    )
    with pytest.raises(InvalidPatcherError, match=said):
        load_checkpoint_weights(build_tiny(tiny_llama_config()), weights)


def test_a_name_that_comes_twice_is_left_over() -> None:
    model, source = build_tiny(tiny_llama_config(), seed=1), build_tiny(tiny_llama_config())
    weights = [*checkpoint_weights(source), ("lm_head.weight", torch.zeros(128, 64))]
    with pytest.raises(PatchedWeightsError, match=r"left over: lm_head\.weight"):
        load_checkpoint_weights(model, weights)
    assert streamed(model) == streamed(source)


def test_a_checkpoint_may_have_what_is_tied_twice() -> None:
    """As files on the hub do: a load takes the tensor that a save writes, and ties the other one to it."""
    config = tiny_llama_config(tie_word_embeddings=True)
    model, source = build_tiny(config, seed=1), build_tiny(config)
    weights = dict(checkpoint_weights(source))
    assert "lm_head.weight" not in weights
    load_checkpoint_weights(model, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert streamed(model) == streamed(source)


@pytest.mark.parametrize("first", ["lm_head.weight", "model.embed_tokens.weight"])
def test_what_is_tied_here_and_was_not_there_is_told(first: str) -> None:
    """Of what has two values where it came from, a tied model would keep one, and compute otherwise."""
    source = build_tiny(tiny_llama_config())
    weights = dict(checkpoint_weights(source))
    weights = {first: weights.pop(first)} | weights
    for patcher in (None, Patcher(fusions="qkv")):
        model = AutoModelForCausalLM.from_config(tiny_llama_config(tie_word_embeddings=True), patcher=patcher)
        (second,) = {"lm_head.weight", "model.embed_tokens.weight"} - {first}
        with pytest.raises(PatchedWeightsError, match=rf"not as tied: {second}: it is one with {first}, of which oth"):
            load_checkpoint_weights(model, weights)
        load_checkpoint_weights(model, weights | {second: weights[first]})
        assert torch.equal(model.lm_head.weight, weights[first])


def test_a_stream_that_breaks_off_is_no_whole_one() -> None:
    model, source = build_tiny(tiny_llama_config(), seed=1), build_tiny(tiny_llama_config())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(checkpoint_weights(source))
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError, match="the trainer is gone"):
        load_checkpoint_weights(model, broken())
    with pytest.raises(PatchedWeightsError, match=r"missing: model\.layers"):
        load_checkpoint_weights(model, [next(checkpoint_weights(source))])


@pytest.mark.parametrize("only_on", [1, -1, "0"])
def test_a_process_that_there_is_not_is_given_nothing(only_on: Any) -> None:
    with pytest.raises(InvalidPatcherError, match=r"isn't one of the 1 processes.*only_on=0"):
        next(checkpoint_weights(build_tiny(tiny_llama_config()), only_on=only_on))


class OtherMLP(LlamaMLP):
    """What the conversion is for."""


def scaled(folder: Path, operation: type[Twice]) -> Any:
    conversion = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[operation()])
    patcher = Patcher({"LlamaMLP": OtherMLP}, extra_weight_conversions=conversion)
    return AutoModelForCausalLM.from_pretrained(save_tiny(tiny_llama_config(), folder), patcher=patcher)


def test_what_a_conversion_computes_streams_and_is_converted_back(tmp_path: Path) -> None:
    model = scaled(tmp_path, Twice)
    assert streamed(model) == tensors(tmp_path)
    load_checkpoint_weights(overwritten(model), load_file(tmp_path / "model.safetensors"))
    assert streamed(model) == tensors(tmp_path)
    model = scaled(tmp_path, TwiceInPlace)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for use in (lambda: list(checkpoint_weights(model)), lambda: model.save_pretrained(tmp_path / "saved")):
        with pytest.raises(PatchedWeightsError, match="writes into the tensors that it is given"):
            use()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- again and again -----------------------------------------------------------------------------------------------


def test_a_hundred_times_leave_nothing_behind() -> None:
    row = next(row for row in ROWS if "sequential_experts" in row.patcher.fusions)
    trained, engine = row.patched(), row.stock()

    def sync(times: int) -> int:
        for _ in range(times):
            load_checkpoint_weights(engine, checkpoint_weights(trained))
        gc.collect()
        return len(gc.get_objects())

    sync(3)
    before = sync(10)
    assert sync(100) - before < 100


def test_compiled_graphs_go_on() -> None:
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=Patcher(fusions="gate_up"))
    source = build_tiny(tiny_llama_config())
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled, x = torch.compile(model.model.layers[1].mlp, backend=compiler), torch.randn(1, 3, 64)
    with torch.no_grad():
        before = compiled(x)
        load_checkpoint_weights(model, checkpoint_weights(source))
        after = compiled(x)
        assert len(graphs) == 1
        assert torch.allclose(after, source.model.layers[1].mlp(x), atol=1e-6)
    assert not torch.allclose(after, before)


def test_optimizers_and_views_go_on() -> None:
    row = ROWS[2]
    model, source = row.patched(), row.stock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    part = model.model.layers[0].self_attn.k_proj.weight
    load_checkpoint_weights(overwritten(model), checkpoint_weights(source))
    assert torch.equal(part, source.model.layers[0].self_attn.k_proj.weight)
    model(**row.training_inputs()).loss.backward()
    optimizer.step()
    assert streamed(model) != streamed(source)
    load_checkpoint_weights(source, checkpoint_weights(model))
    assert streamed(model) == streamed(source)
