"""The same steps in PyTorch: modules of the same sizes, gradients accumulated by its loop, Adam."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from contenders import LEARNING_RATE, Contender
from torch import nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [64, 512, 512, 512, 512]
        hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
        self.layers = nn.Sequential(*hidden, nn.Linear(512, 10))

    def forward(self, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(self.layers(x), y)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(1, 16, 2), (16, 32, 2), (32, 32, 1)]
        convolutions = [
            layer
            for fan_in, fan_out, stride in sizes
            for layer in (nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False), nn.ReLU())
        ]
        self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(7 * 7 * 32, 10, bias=False))

    def forward(self, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(self.layers(x), y)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        rows, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(128, 128), nn.Parameter(torch.randn(64, 128))
        self.blocks = nn.Sequential(*(Block(128, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(128, eps=1e-6, elementwise_affine=False), nn.Linear(128, 128, bias=False)

    def forward(self, tokens: Any, mask: Any) -> Any:
        x = self.norm(self.blocks(self.embedding(tokens) + self.position))
        losses = nn.functional.cross_entropy(self.head(x[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
        return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(128, 128), nn.GRU(128, 128, batch_first=True, bias=False)
        self.head = nn.Linear(128, 128, bias=False)

    def forward(self, tokens: Any) -> Any:
        hidden, _ = self.cell(self.embedding(tokens[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), tokens[:, 1:])


MODULES = {"mlp": Mlp, "convolutional": Convolutional, "transformer": Transformer, "recurrent": Recurrent}


def _inputs(name: str, device: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    tokens = lambda length: torch.randint(0, 128, (64, length), generator=generator)
    made: dict[str, Callable[[], tuple[Any, ...]]] = {
        "mlp": lambda: (torch.randn(256, 64, generator=generator), torch.randint(0, 10, (256,), generator=generator)),
        "convolutional": lambda: (
            torch.randn(64, 1, 28, 28, generator=generator),
            torch.randint(0, 10, (64,), generator=generator),
        ),
        "transformer": lambda: (tokens(64), torch.ones(64, 64)),
        "recurrent": lambda: (tokens(65),),
    }
    return tuple(tensor.to(device) for tensor in made[name]())


def torch_contenders(name: str, num: int, device: str) -> dict[str, Callable[[], Contender]]:
    """PyTorch as it comes, and compiled."""
    return {
        "PyTorch": lambda: _loop(name, num, device, compiled=False),
        "PyTorch compiled": lambda: _loop(name, num, device, compiled=True),
    }


def _loop(name: str, num: int, device: str, *, compiled: bool) -> Contender:
    module: Any = MODULES[name]().to(device)
    optimizer = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    microbatches = [tuple(tensor[index::num] for tensor in _inputs(name, device)) for index in range(num)]
    loss_of = torch.compile(module) if compiled else module

    def run() -> Any:
        optimizer.zero_grad()
        for microbatch in microbatches:
            (loss_of(*microbatch) / num).backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        return ()

    return Contender(run)
