"""What generated forwards call, functions and modules that read or write. Each generated file begins with this."""

import operator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

KEPT: list[torch.Tensor] = []


def reads(t):
    u = t.transpose(0, 1)
    return (u * 0.5).transpose(0, 1)


def gives_back(t, other=None):
    return t if other is None else other


def writes(t):
    t.mul_(0.5)
    return t


def writes_deep(t):
    return writes(gives_back(t))


def sums(*tensors, **named):
    return sum(tensors) + sum(named.values())


def writes_first(*tensors, **named):
    tensors[0].add_(1)
    return tensors[0]


def turns_off_gradients():
    torch.set_grad_enabled(False)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LayerNorm(8)

    def forward(self, t):
        return self.inner(t) + 1


class Writes(nn.Module):
    def forward(self, t):
        t += 1
        return t


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.identity, self.drop = nn.LayerNorm(8), nn.Identity(), nn.Dropout(0.0)
        self.act, self.act_in = nn.SiLU(), nn.ReLU(inplace=True)
        self.reads, self.writes = Reads(), Writes()
        self.chain = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
        self.layers = nn.ModuleList([Reads(), Reads()])
        self.function, self.scale, self.flag, self.kind = reads, 0.5, True, "a"
        self.kept = None

    def read_method(self, t):
        return self.norm(t) * self.scale

    def write_method(self, t):
        return t.view(-1).add_(1).view(2, 3, 8)

    def write_kept(self):
        if self.kept is not None:
            self.kept.mul_(0.5)

    def change(self):
        self.flag = not self.flag
        self.kind = "b"

    def project(self, t):
        return self.norm(t)

    @property
    def peeked(self):
        return self.scale


def _used():
    return operator, F
