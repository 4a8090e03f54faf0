"""Adapters of stacked experts, of which peft adapts the parameter, as those of the layers of each expert, and back.

For a stack of `E` experts peft has one `A` of `rank * E` rows, expert by expert, and one `B` of as many columns, in
which the experts take turns. Where the stack holds two layers of each expert (gate and up), these have one `A`; layers
with an `A` each are joined in it as in a joined projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from patcher.compat.adapters import is_targeted_parameter, lora_layer, rank_and_alpha
from patcher.errors import InvalidPatcherError, PatchedWeightsError
from patcher.loading.adapters.layers import Stack
from patcher.loading.adapters.lora import A, B, JoinedAdapter, alpha_for, have_one_input, join, scaling_of, separate
from patcher.patterns import compress, inside


def asked_parameters(config: Any, stacks: Iterable[Stack]) -> list[Stack]:
    """The stacks that a config has peft adapt as parameters."""
    return [stack for stack in stacks if is_targeted_parameter(config, stack.parameter)]


def _in_file(stacks: Sequence[Stack]) -> dict[Stack, str]:
    """Stack -> the path that the tensors of its adapter have in a file: peft wraps a module once for each."""
    result = {}
    for stack in stacks:
        around = [each for each in stacks if each.path == stack.path and each.place > stack.place]
        result[stack] = inside(stack.path) + "base_layer." * len(around)
    return result


def ranks_of_stacks(
    model: nn.Module, config: Any, stacks: Sequence[Stack], name: str
) -> dict[Stack, tuple[int, float] | None]:
    """Stack -> rank and alpha of its adapter: as a config says; None where it follows from the layers that stand."""
    if asked := asked_parameters(config, stacks):
        return {stack: rank_and_alpha(config, stack.parameter) for stack in asked}
    adapted = (stack for stack in stacks if any(lora_layer(model.get_submodule(path), name) for path in stack.paths()))
    return dict.fromkeys(adapted)


@torch.no_grad()
def onto_experts(
    asked: Mapping[Stack, tuple[int, float] | None], weights: Mapping[str, torch.Tensor], by_root: bool
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, float]], list[str]]:
    """The tensors of an adapter with those of layers in the place of those of stacks.

    Args:
        asked: the stacks that the adapter is for, with rank and alpha, None where the tensors say it.

    Returns:
        The tensors; layer -> rank and alpha; and the stacks whose layers have one `A`.

    Raises:
        PatchedWeightsError: the tensors don't fit.
    """
    result, adapted, shared = dict(weights), {}, []
    for stack, start in _in_file(list(asked)).items():
        keys = [f"{start}{kind}" for kind in (A, B)]
        if any(key not in weights for key in keys):
            continue
        down, up = (result.pop(key) for key in keys)
        rank, alpha = asked[stack] or (down.shape[0] // stack.count, 1.0)
        rows = (down if stack.turned else up.T).shape[1]
        if not down.shape[0] == up.shape[1] == rank * stack.count or rows != stack.rows * len(stack.layers):
            raise PatchedWeightsError(
                f"The adapter has {tuple(down.shape)} and {tuple(up.shape)} for {stack.parameter}, and its config "
                f"says that the rank is {rank}, of {stack.count} experts of {stack.rows * len(stack.layers)} rows."
            )
        down = down.view(stack.count, rank, -1)
        up = up.view(up.shape[0], rank, stack.count).permute(2, 0, 1)
        if stack.turned:
            down, up = up.transpose(1, 2), down.transpose(1, 2)
        up = stack.in_rows_of_parts(up.contiguous())
        settings, one_input = _settings(stack, up, rank, alpha, by_root)
        adapter = JoinedAdapter.of(stack.joined, settings, by_root, one_input)
        for expert in range(stack.count):
            made = separate(stack.joined, adapter, {A: down[expert], B: up[expert]}, rank, alpha)
            for number, (own_rank, own_alpha, tensors) in made.items():
                path = stack.layer(expert, number)
                adapted[path] = own_rank, own_alpha
                result |= {f"{path}.{kind}": value for kind, value in tensors.items()}
        if one_input and len(stack.layers) > 1:
            shared.append(stack.parameter)
    return result, adapted, shared


def _settings(
    stack: Stack, up: torch.Tensor, rank: int, alpha: float, by_root: bool
) -> tuple[dict[int, tuple[int, float]], bool]:
    """The ranks and alphas of the layers of an expert, and whether they have one `A`."""
    pieces = torch.split(up, stack.rows, dim=1)
    count = len(pieces)
    used = [number for number, piece in enumerate(pieces) if piece.any()]
    if len(used) == 1:
        return {used[0]: (rank, alpha)}, False
    if rank % count == 0:
        one = rank // count
        own = alpha_for(scaling_of(rank, alpha, by_root), one, by_root)
        blocks = [torch.split(piece, one, dim=2) for piece in pieces]
        if not any(block.any() for row, each in enumerate(blocks) for at, block in enumerate(each) if at != row):
            return dict.fromkeys(range(count), (one, own)), False
    return dict.fromkeys(range(count), (rank, alpha)), True


@torch.no_grad()
def onto_stacks(
    model: nn.Module, stacks: Sequence[Stack], name: str, weights: Mapping[str, torch.Tensor], by_root: bool
) -> tuple[dict[str, torch.Tensor], dict[Stack, tuple[int, float]]]:
    """The reverse of `onto_experts`: the tensors with those of stacks, and stack -> rank and alpha.

    Raises:
        PatchedWeightsError: experts have adapters of different ranks.
    """
    found: dict[Stack, list[dict[int, dict[str, torch.Tensor]]]] = {}
    settings = {stack: _ranks(model, stack, name) for stack in stacks}
    settings = {stack: ranks for stack, ranks in settings.items() if ranks}
    for stack, ranks in settings.items():
        experts: list[dict[int, dict[str, torch.Tensor]]] = []
        for expert in range(stack.count):
            experts.append({number: _taken(stack, expert, number, weights, ranks[number][0]) for number in ranks})
        found[stack] = experts
    result = {key: value for key, value in weights.items() if not key.startswith(tuple(_starts(settings)))}
    adapted = {}
    for stack, start in _in_file(list(settings)).items():
        one_input = len(settings[stack]) == len(stack.layers) and all(
            have_one_input(list(expert.values())) for expert in found[stack]
        )
        adapter = JoinedAdapter.of(stack.joined, settings[stack], by_root, one_input)
        made = [join(stack.joined, adapter, expert, _no_magnitudes)[1] for expert in found[stack]]
        down, up = (torch.stack([each[kind] for each in made]) for kind in (A, B))
        up = stack.in_rows_of_stack(up)
        if stack.turned:
            down, up = up.transpose(1, 2), down.transpose(1, 2)
        up = up.permute(1, 2, 0)
        result[f"{start}{A}"] = down.flatten(0, 1).contiguous()
        result[f"{start}{B}"] = up.reshape(up.shape[0], -1).contiguous()
        adapted[stack] = adapter.rank, adapter.alpha
    return result, adapted


def _no_magnitudes() -> torch.Tensor:
    raise AssertionError("experts have no DoRA")


def _starts(stacks: Iterable[Stack]) -> Iterator[str]:
    return (f"{path}.lora_" for stack in stacks for path in stack.paths())


def _taken(
    stack: Stack, expert: int, number: int, weights: Mapping[str, torch.Tensor], rank: int
) -> dict[str, torch.Tensor]:
    """The tensors of a layer; zeros if this expert has no adapter."""
    path = stack.layer(expert, number)
    if f"{path}.{A}" in weights:
        return {kind: weights[f"{path}.{kind}"] for kind in (A, B)}
    other = next(each for each in stack.paths() if each.endswith(stack.layers[number]) and f"{each}.{A}" in weights)
    return {kind: torch.zeros_like(weights[f"{other}.{kind}"]) for kind in (A, B)}


def _ranks(model: nn.Module, stack: Stack, name: str) -> dict[int, tuple[int, float]]:
    """Layer of an expert -> rank and alpha of its adapter."""
    result: dict[int, tuple[int, float]] = {}
    for number in range(len(stack.layers)):
        pairs = {}
        for expert in range(stack.count):
            path = stack.layer(expert, number)
            if (layer := lora_layer(model.get_submodule(path), name)) is not None:
                pairs[path] = layer.r[name], layer.lora_alpha[name]
        if len(set(pairs.values())) > 1:
            raise PatchedWeightsError(
                f"{', '.join(compress(pairs))} have adapters of different ranks or alphas, and {stack.parameter} of "
                "transformers has one for all experts."
            )
        if pairs:
            result[number] = next(iter(pairs.values()))
    return result


def check_new(config: Any, stacks: Sequence[Stack], targeted: Iterable[str]) -> None:
    """Refuse a new adapter of experts that would be none of transformers.

    Raises:
        InvalidPatcherError: it couldn't be saved for the stacks.
    """
    if asked := asked_parameters(config, stacks):
        names = sorted({name for stack in asked for name in stack.layers if name})
        raise InvalidPatcherError(
            f"A new adapter is asked for {', '.join(compress(stack.parameter for stack in asked))}, and the model has "
            f"a layer for each expert in its place. Write target_modules={names}."
        )
    wanted = set(targeted)
    for stack in stacks:
        own = [path for path in stack.paths() if path in wanted]
        for setting in ("use_dora", "lora_bias") if own else ():
            if getattr(config, setting, False):
                raise InvalidPatcherError(
                    f"{setting}=True for {', '.join(compress(own))}: peft has no such adapter of {stack.parameter}, "
                    "as which this one is saved. Leave it out, or leave the experts out of target_modules."
                )
        for number in range(len(stack.layers)):
            paths = [stack.layer(expert, number) for expert in range(stack.count)]
            if len({rank_and_alpha(config, path) for path in paths if path in wanted}) > 1:
                raise InvalidPatcherError(
                    f"rank_pattern and alpha_pattern give {', '.join(compress(paths))} different ranks or alphas, and "
                    f"{stack.parameter}, as whose adapter this one is saved, has one for all experts. Use expressions "
                    "that mean all of them."
                )
