"""What conversions hand on unchanged is read as it is: found where it is so, and never where it isn't."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from transformers import MixtralForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist

from patcher import Patcher
from patcher.fusions.experts.matrices import Matrices
from patcher.layouts.sources import Computed, Conversion, fused_sources
from patcher.layouts.unchanged import Trace
from tests.support import shared
from tests.support.checkpoints import same_checkpoint
from tests.support.tiny import tiny_mixtral_config

Tensors = list[torch.Tensor]


def unchanged(run: Callable[[Tensors], Tensors], inputs: Tensors) -> list[int | None]:
    trace = Trace()
    with torch.no_grad(), trace:
        made = run([trace.input(torch.empty_like(each, device="meta")) for each in inputs])
    return [trace.unchanged(each) for each in made]


def matrices(count: int, *shape: int) -> Tensors:
    return [torch.randn(shape) for _ in range(count)]


def stacked_and_cut(x: Tensors) -> Tensors:
    gate, up = torch.stack(x[:3]), torch.stack(x[3:])
    cut = torch.cat([gate, up], dim=1).chunk(2, dim=1)
    return [piece.contiguous() for expert in zip(*(part.unbind() for part in cut), strict=True) for piece in expert]


#: what is run, on how many tensors of which shape, and which input each result is
FOUND: dict[str, tuple[Callable[[Tensors], Tensors], tuple[int, ...], list[int | None]]] = {
    "experts": (stacked_and_cut, (6, 4, 2), [0, 3, 1, 4, 2, 5]),
    "transposed twice": (lambda x: [torch.stack(x).transpose(1, 2)[1].t()], (2, 3, 4), [1]),
    "a slice that is all": (lambda x: [torch.cat(x)[3:6], torch.cat(x)[-3:]], (3, 3, 2), [1, 2]),
    "selected from behind": (lambda x: [torch.stack(x, dim=-1)[..., -1]], (2, 3, 4), [1]),
    "split by sizes": (lambda x: list(torch.cat(x, -1).split([2, 2], dim=-1)), (2, 3, 2), [0, 1]),
    "the input": (lambda x: x[::-1], (2, 3), [1, 0]),
    "in another order": (lambda x: [torch.stack(x).permute(2, 0, 1).permute(1, 2, 0)[0]], (2, 3, 4), [0]),
    "the first dimension last": (lambda x: [torch.stack(x).permute(1, 2, 0)[..., 1]], (2, 3, 4), [1]),
    "beside nothing": (lambda x: [torch.cat([x[0].new_empty(0), x[0]])], (1, 3, 4), [None]),
    "a part": (lambda x: [x[0][:2], torch.cat(x)[2:5], torch.stack(x)[:1]], (2, 3, 2), [None] * 3),
    "every other row": (lambda x: [torch.cat(x)[::2]], (2, 3, 2), [None]),
    "square, transposed": (lambda x: [x[0].t()], (1, 3, 3), [None]),
    "another dimension": (lambda x: [x[0][None], torch.stack(x)], (1, 3, 3), [None] * 2),
    "another dtype": (lambda x: [x[0].double().float()], (1, 3), [None]),
    "a sum": (lambda x: [x[0] + 0], (1, 3), [None]),
    "written to": (lambda x: [x[0].zero_(), x[1]], (2, 3), [None] * 2),
    "a view that is written to": (lambda x: [x[0].view(-1).zero_(), x[0]], (1, 3), [None] * 2),
    "rolled": (lambda x: [x[0].roll(1, 0)], (1, 3, 3), [None]),
    "nothing": (lambda x: [x[0]], (1, 0), [None]),
}


@pytest.mark.parametrize(("run", "inputs", "expected"), FOUND.values(), ids=FOUND.keys())
def test_it_is_found(run: Callable[[Tensors], Tensors], inputs: tuple[int, ...], expected: list[int | None]) -> None:
    assert unchanged(run, matrices(*inputs)) == expected


def sizes_of(tensor: torch.Tensor, dim: int, cut: int) -> list[int]:
    size = tensor.shape[dim]
    return [cut % (size + 1), size - cut % (size + 1)]


#: (tensors so far, two of them, a dimension, a number) -> what is made of them
STEPS: list[Callable[[torch.Tensor, torch.Tensor, int, int], Tensors]] = [
    lambda a, b, dim, n: [torch.cat([a, b], dim % a.dim())],
    lambda a, b, dim, n: [torch.stack([a, b], dim % (a.dim() + 1))],
    lambda a, b, dim, n: [torch.stack([b, a], -(dim % (a.dim() + 1)) - 1)],
    lambda a, b, dim, n: list(a.chunk(2 + n % 2, dim % a.dim())),
    lambda a, b, dim, n: list(a.split(sizes_of(a, dim % a.dim(), n), dim % a.dim())),
    lambda a, b, dim, n: list(a.split(1 + n, dim % a.dim())),
    lambda a, b, dim, n: list(a.unbind(dim % a.dim())),
    lambda a, b, dim, n: [a.select(dim % a.dim(), n % a.shape[dim % a.dim()] - a.shape[dim % a.dim()])],
    lambda a, b, dim, n: [a.narrow(dim % a.dim(), 0, min(n, a.shape[dim % a.dim()]))],
    lambda a, b, dim, n: [a[n:], a[: -n - 1], a[-n:], a[:: 1 + n % 2]],
    lambda a, b, dim, n: [a.transpose(dim % a.dim(), n % a.dim())],
    lambda a, b, dim, n: [a.permute([(each + n) % a.dim() for each in range(a.dim())])],
    lambda a, b, dim, n: [a.unsqueeze(dim % (a.dim() + 1))],
    lambda a, b, dim, n: [a.squeeze(dim % a.dim())],
    lambda a, b, dim, n: [a.reshape(-1), a.flatten().view_as(a), a.contiguous(), a.clone(), a.detach(), a[...]],
    lambda a, b, dim, n: [a.flip(0), a.roll(1, 0), a.repeat_interleave(2, 0), a.expand(2, *a.shape)],
    lambda a, b, dim, n: [a * 2, a.double().float(), a.to(torch.float16), a.new_zeros(a.shape), torch.zeros_like(a)],
    lambda a, b, dim, n: [a.copy_(b.clone())] if a.shape == b.shape else [],  # on meta it takes any
    lambda a, b, dim, n: [a.select(0, 0).fill_(float(n)), a],
    lambda a, b, dim, n: [torch.where(a.new_ones(()).bool(), a, b), a.index_select(0, torch.arange(a.shape[0]))],
]
PROGRAMS = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), *(st.integers(0, 30),) * 2, *(st.integers(0, 3),) * 2), max_size=8
)


def program(steps: list[tuple[int, ...]]) -> Callable[[Tensors], Tensors]:
    def run(inputs: Tensors) -> Tensors:
        known = list(inputs)
        for step, first, second, dim, number in steps:
            a, b = known[first % len(known)], known[second % len(known)]
            try:
                known += STEPS[step](a, b, dim, number)
            # The shapes don't fit: on the meta device of torch 2.6 that is an AssertionError.
            except (RuntimeError, IndexError, ZeroDivisionError, NotImplementedError, AssertionError):
                continue
        return known

    return run


@settings(max_examples=300, deadline=None)
@given(steps=PROGRAMS, shapes=st.lists(st.sampled_from([(2, 2), (2, 3), (1, 2), (2,)]), min_size=1, max_size=4))
def test_what_is_found_is_the_input(steps: list[tuple[int, ...]], shapes: list[tuple[int, ...]]) -> None:
    run, inputs = program(steps), [torch.randn(shape) for shape in shapes]
    found = unchanged(run, inputs)
    made = run([each.clone() for each in inputs])

    assume(len(found) == len(made))  # some steps fit on the meta device only, as those that write to what is expanded
    for number, tensor in zip(found, made, strict=True):
        assert number is None or (tensor.dtype == torch.float32 and torch.equal(tensor, inputs[number]))


# --- in a load -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_conversion_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of stock raise for what has values."""

    def on_meta(convert: Any) -> Any:
        def checked(self: Any, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            for tensors in input_dict.values():
                assert all(tensor.is_meta for tensor in (tensors if isinstance(tensors, list) else [tensors]))
            return convert(self, input_dict, *args, **kwargs)

        return checked

    for operation in (MergeModulelist, Concatenate):
        monkeypatch.setattr(operation, "convert", on_meta(operation.convert))


EXPERTS = Patcher(fusions="sequential_experts")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config())


def weights_of(experts: Any) -> dict[str, torch.Tensor]:
    return {f"{number}.{name}": value for number, one in enumerate(experts) for name, value in one.named_parameters()}


@pytest.mark.usefixtures("no_conversion_of_values")
def test_experts_that_a_checkpoint_has_one_by_one_are_read_so(mixtral: Path, tmp_path: Path) -> None:
    """transformers stacks them, and a stack that is cut again is twice the time and twice the memory."""
    model = MixtralForCausalLM.from_pretrained(mixtral, patcher=EXPERTS)
    stored = load_file(mixtral / "model.safetensors")

    read = weights_of(model.model.layers[1].mlp.experts)
    for name, key in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        for number in range(model.config.num_local_experts):
            expected = stored[f"model.layers.1.block_sparse_moe.experts.{number}.{key}.weight"]
            assert torch.equal(read[f"{number}.{name}.weight"], expected)
    model.save_pretrained(tmp_path)
    assert same_checkpoint(tmp_path, mixtral)


def test_where_one_has_another_dtype_all_are_as_in_stock(mixtral: Path, tmp_path: Path) -> None:
    stored = load_file(mixtral / "model.safetensors")
    odd = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    save_file({**stored, odd: stored[odd].to(torch.float64)}, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(mixtral / "config.json", tmp_path)

    model, stock = (
        MixtralForCausalLM.from_pretrained(tmp_path, patcher=each, dtype="auto") for each in (EXPERTS, None)
    )
    (stack,) = (layer.mlp.experts.gate_up_proj for layer in stock.model.layers[:1])
    for number, expert in enumerate(model.model.layers[0].mlp.experts):
        joined = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
        assert joined.dtype == stack.dtype
        assert torch.equal(joined, stack[number])


def test_what_shares_a_storage_in_a_file_is_not_shared_in_the_model(mixtral: Path, tmp_path: Path) -> None:
    """As a `.bin` has it whose experts were views of a stack; a save would take them for tied."""
    stored = load_file(mixtral / "model.safetensors")
    names = [key for key in stored if "layers.0" in key and ".w1." in key]
    stored |= zip(names, torch.stack([stored[key] for key in names]), strict=True)
    torch.save(stored, tmp_path / "pytorch_model.bin")
    shutil.copy(mixtral / "config.json", tmp_path)

    model = MixtralForCausalLM.from_pretrained(tmp_path, patcher=EXPERTS)
    places = {value.untyped_storage().data_ptr() for value in weights_of(model.model.layers[0].mlp.experts).values()}
    assert len(places) == 3 * model.config.num_local_experts
    model.save_pretrained(tmp_path / "saved")
    assert same_checkpoint(tmp_path / "saved", mixtral)


def test_a_tensor_that_becomes_two_parameters_is_read_for_neither() -> None:
    """They would be one tensor, which saves and optimizers take for tied."""
    tensor = torch.randn(2, 3)

    def twice(tensors: Any) -> dict[str, torch.Tensor]:
        first, second = torch.stack([tensors["x"], tensors["x"]])
        return {"first": first, "second": second, "third": tensors["y"]}

    assert Conversion(twice, {"x": tensor, "y": tensor}).unchanged() == {"third": tensor}


def test_what_nobody_reads_is_not_kept() -> None:
    """A converter that makes two stacks of which one is cut: the other is read, and the first not held meanwhile."""
    parts = {name: torch.randn(2, 3) for name in "abcd"}

    def stack(tensors: Any) -> dict[str, torch.Tensor]:
        return {"cut": torch.stack([tensors["a"], tensors["b"]]), "whole": torch.stack([tensors["c"], tensors["d"]])}

    group = Conversion(stack, parts)
    cut, whole = (Computed(group, name, (2, 2, 3), "F32") for name in ("cut", "whole"))
    layout = Matrices("experts", layers=("weight",), stock_shapes=((2, 2, 3),), fused=("0.weight", "1.weight"))

    assert fused_sources(layout, [cut]) == [parts["a"], parts["b"]]
    assert torch.equal(whole[...], torch.stack([parts["c"], parts["d"]]))
    assert not group._left
