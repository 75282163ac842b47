"""Objects whose tensors have a history, each with what makes it and what uses it."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

Parameters = dict[str, torch.Tensor]


class Case(NamedTuple):
    """``consume(produce(first), second)`` is a loss.

    ``leaves`` is how many tensors of the object require grad, ``back`` how many of them the loss depends on.
    """

    name: str
    produce: Callable[[Parameters], Any]
    consume: Callable[[Any, Parameters], torch.Tensor]
    leaves: int
    back: int


def parameters(seed: int) -> Parameters:
    """The parameters of one of the two sides."""
    generator = torch.Generator().manual_seed(seed)
    made = {"w": torch.randn(4, 4, generator=generator), "b": torch.randn(4, generator=generator)}
    return {name: torch.nn.Parameter(value) for name, value in made.items()}


_INPUT = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def _hidden(p: Parameters) -> torch.Tensor:
    return torch.tanh(_INPUT @ p["w"] + p["b"])


def _loss(hidden: torch.Tensor, p: Parameters) -> torch.Tensor:
    return ((hidden @ p["w"] + p["b"]) ** 2).mean()


@dataclasses.dataclass
class Activations:
    hidden: torch.Tensor
    mask: torch.Tensor
    name: str = "x"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenActivations:
    hidden: torch.Tensor


class Named(NamedTuple):
    hidden: torch.Tensor
    length: int


class Opaque:
    """A class that nobody knows: it is pickled, its tensors are not."""

    def __init__(self, hidden: torch.Tensor, **more: Any) -> None:
        self.hidden = hidden
        self.inner = {"list": [hidden * 2], "n": 3}
        self.__dict__.update(more)


class Halved:
    """It sends something else than what it holds."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    def __getstate__(self) -> dict[str, Any]:
        return {"half": self.hidden / 2}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.hidden = state["half"] * 2


class Scaled(torch.Tensor):
    """A subclass that only has another name."""


class Owner:
    """What a tensor may carry along."""

    def __init__(self, name: str) -> None:
        self.name = name


def _shared(p: Parameters, make: Callable[[torch.Tensor], Any]) -> Any:
    return make(_hidden(p))


def _views(p: Parameters) -> list[torch.Tensor]:
    flat = _hidden(p).flatten()
    return [flat[:16], flat[8:24], flat[4:12]]


def _with_owner(p: Parameters, owner: Any) -> dict[str, Any]:
    hidden: Any = _hidden(p)
    hidden.owner = owner
    return {"h": hidden}


def _mixed(p: Parameters) -> dict[str, Any]:
    hidden = _hidden(p)
    return {
        "hidden": hidden,
        "tokens": hidden.argmax(1),
        "mask": hidden > 0,
        "detached": hidden.detach(),
        "constant": torch.ones(4),
        "sizes": [6, 4],
        "array": hidden.detach().numpy().copy(),
    }


def _use_mixed(obj: dict[str, Any], p: Parameters) -> torch.Tensor:
    picked = obj["hidden"].gather(1, obj["tokens"][:, None]) * obj["constant"] + obj["detached"] * obj["mask"]
    return _loss(picked + torch.from_numpy(obj["array"]), p)


def _sparse(p: Parameters) -> torch.Tensor:
    indices = torch.tensor([[0, 2, 5], [1, 3, 0]])
    return torch.sparse_coo_tensor(indices, _hidden(p)[0, :3], (6, 4), is_coalesced=True, check_invariants=True)


def _jagged(p: Parameters) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(_hidden(p), torch.tensor([0, 1, 4, 6]))
    return nested


def _embed(obj: dict[str, Any], p: Parameters) -> torch.Tensor:
    rows = functional.embedding(torch.tensor([0, 2, 2]), obj["table"], sparse=True)
    return _loss(rows, p)


def _modules(p: Parameters) -> dict[str, Any]:
    linear = torch.nn.Linear(4, 4)
    linear.weight, linear.bias = p["w"], p["b"]  # type: ignore[assignment]
    return {"module": linear, "x": _INPUT}


def _twice(obj: dict[str, Any], p: Parameters) -> torch.Tensor:
    assert obj["a"] is obj["b"][0]
    return _loss(obj["a"] * 2 + obj["b"][0] ** 2, p)


def _complex(p: Parameters) -> torch.Tensor:
    return torch.complex(_hidden(p), _hidden(p) * 0.5)


def _autocast(obj: Any, p: Parameters) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(obj["h"], p["w"], p["b"]).float().pow(2).mean()


def _produce_autocast(p: Parameters) -> dict[str, Any]:
    with torch.autocast("cpu", torch.bfloat16):
        return {"h": functional.linear(_INPUT, p["w"], p["b"])}


class Twofold(torch.Tensor):
    """A subclass without memory of its own: two tensors that go through everything together."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, first.shape, dtype=first.dtype, requires_grad=first.requires_grad)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Twofold:
        return Twofold(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def half(name: str) -> Any:
            picked = tree_map(lambda each: getattr(each, name) if isinstance(each, Twofold) else each, args)
            return func(*picked, **(kwargs or {}))

        first = half("first")
        return Twofold(first, half("second")) if isinstance(first, torch.Tensor) else first


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return Twofold(tensor.detach().clone(), tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.first


class _Single(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, twofold: Any) -> Any:
        return twofold.first.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Twofold(gradient, gradient)


_pair: Any = _Pair.apply
_single: Any = _Single.apply


CASES: list[Case] = [
    Case("tensor", _hidden, _loss, 1, 1),
    Case("dict", lambda p: {"h": _hidden(p), "n": 3}, lambda o, p: _loss(o["h"], p) * o["n"], 1, 1),
    Case(
        "nested",
        lambda p: [{"a": (_hidden(p), [p["b"] * 2])}, "text", None],
        lambda o, p: _loss(o[0]["a"][0] + o[0]["a"][1][0], p),
        2,
        2,
    ),
    Case(
        "deque and keys",
        lambda p: {(1, "k"): collections.deque([_hidden(p)]), _hidden(p) * 3: 2},
        lambda o, p: _loss(o[(1, "k")][0] + next(k for k, v in o.items() if v == 2), p),
        2,
        2,
    ),
    Case("at two paths", lambda p: _shared(p, lambda h: {"a": h, "b": [h]}), _twice, 1, 1),
    Case("overlapping views", _views, lambda o, p: _loss((o[0] + o[1] ** 2).view(4, 4) * o[2].sum(), p), 3, 3),
    Case(
        "a view and its base",
        lambda p: _shared(p, lambda h: [h, h[1:3].t(), h.view(-1)[::5]]),
        lambda o, p: _loss(o[0], p) + _loss(o[1].t(), p) * o[2].sum(),
        3,
        3,
    ),
    Case("one of three unused", lambda p: [_hidden(p), p["b"] * 2, p["w"] * 3], lambda o, p: _loss(o[0], p), 3, 1),
    Case("all unused", lambda p: [_hidden(p)], lambda o, p: _loss(_INPUT, p), 1, 0),
    Case(
        "one of several outputs unused",
        lambda p: list(_hidden(p).unbind(0)),
        lambda o, p: _loss(o[0] * o[3], p),
        6,
        2,
    ),
    Case("without history beside it", _mixed, _use_mixed, 1, 1),
    Case("dataclass", lambda p: Activations(_hidden(p), _INPUT > 0), lambda o, p: _loss(o.hidden * o.mask, p), 1, 1),
    Case("frozen dataclass", lambda p: FrozenActivations(_hidden(p)), lambda o, p: _loss(o.hidden, p), 1, 1),
    Case("named tuple", lambda p: Named(_hidden(p), 6), lambda o, p: _loss(o.hidden, p) / o.length, 1, 1),
    Case("opaque", lambda p: Opaque(_hidden(p)), lambda o, p: _loss(o.hidden + o.inner["list"][0], p), 2, 2),
    Case(
        "opaque that shares with a dict",
        lambda p: _shared(p, lambda h: {"h": h, "o": Opaque(h)}),
        lambda o, p: _loss(o["h"] * o["o"].hidden, p),
        2,
        1,
    ),
    Case("opaque that sends something else", lambda p: Halved(_hidden(p)), lambda o, p: _loss(o.hidden, p), 1, 1),
    Case("closure", lambda p: functools.partial(torch.mul, _hidden(p)), lambda o, p: _loss(o(_INPUT), p), 1, 1),
    Case("parameters", lambda p: [p["w"], (p["b"],)], lambda o, p: _loss(_INPUT @ o[0] + o[1][0], p), 2, 2),
    Case("a module", _modules, lambda o, p: _loss(o["module"](o["x"]), p), 2, 2),
    Case(
        "a parameter and what it made",
        lambda p: {"w": p["w"], "h": _hidden(p)},
        lambda o, p: _loss(o["h"] @ o["w"], p),
        2,
        2,
    ),
    Case("transposed", lambda p: _hidden(p).t(), lambda o, p: _loss(o.t(), p), 1, 1),
    Case("expanded", lambda p: _hidden(p)[:1].expand(6, 4), lambda o, p: _loss(o * _INPUT, p), 1, 1),
    Case(
        "channels last",
        lambda p: _hidden(p).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda o, p: _loss(o.reshape(6, 4), p),
        1,
        1,
    ),
    Case("float64", lambda p: [_hidden(p).double()], lambda o, p: _loss(o[0].float() ** 3, p), 1, 1),
    Case("complex", _complex, lambda o, p: _loss((o * o.conj() * 1j).imag + o.real, p), 1, 1),
    Case("conjugate", lambda p: [_complex(p).conj()], lambda o, p: _loss(o[0].imag + (o[0] ** 2).real, p), 1, 1),
    Case("autocast here", _produce_autocast, _autocast, 1, 1),
    Case("autocast there only", lambda p: {"h": _hidden(p)}, _autocast, 1, 1),
    Case("sparse", _sparse, lambda o, p: _loss(torch.sparse.mm(o, p["w"]), p), 1, 1),
    Case("sparse gradient", lambda p: {"table": p["w"]}, _embed, 1, 1),
    Case("sparse gradient of a result", lambda p: {"table": p["w"] * 2}, _embed, 1, 1),
    Case("jagged", _jagged, lambda o, p: _loss((o * 2).values(), p), 1, 1),
    Case(
        "jagged, transposed",
        lambda p: _jagged(p).transpose(1, 2),
        lambda o, p: _loss(o.transpose(1, 2).values(), p),
        1,
        1,
    ),
    Case(
        "nested",
        lambda p: torch.nested.as_nested_tensor([_hidden(p)[:2], _hidden(p)[2:]]),
        lambda o, p: _loss(torch.nested.to_padded_tensor(o * 2, 0.0).view(-1, 4), p),
        1,
        1,
    ),
    Case("csr", lambda p: p["w"].to_sparse_csr(), lambda o, p: _loss(torch.sparse.mm(o, torch.ones(4, 4)), p), 1, 1),
    Case("mkldnn", lambda p: _hidden(p).to_mkldnn(), lambda o, p: _loss(o.to_dense(), p), 1, 1),
    Case("wrapper", lambda p: _pair(_hidden(p)), lambda o, p: _loss(_single(o) * _single(o), p), 1, 1),
    Case("negative", lambda p: torch._neg_view(_hidden(p)), _loss, 1, 1),
    Case("lazy", lambda p: [torch.nn.LazyLinear(3), _hidden(p)], lambda o, p: _loss(o[1], p), 3, 1),
    Case("scalar", lambda p: _hidden(p).sum(), lambda o, p: _loss(o * _INPUT, p), 1, 1),
    Case("empty", lambda p: [_hidden(p)[:0], _hidden(p)], lambda o, p: _loss(torch.cat(o), p), 2, 2),
    Case("large", lambda p: [_hidden(p).repeat(20_000, 1)], lambda o, p: _loss(o[0], p), 1, 1),
    Case(
        "many",
        lambda p: [_hidden(p) * i for i in range(200)],
        lambda o, p: _loss(torch.stack(o[::2]).sum(0) / 200, p),
        200,
        100,
    ),
    Case("subclass", lambda p: [_hidden(p).as_subclass(Scaled)], lambda o, p: _loss(o[0], p), 1, 1),
    Case("attributes", lambda p: _with_owner(p, "me"), lambda o, p: _loss(o["h"], p), 1, 1),
    Case("opaque attributes", lambda p: _with_owner(p, Owner("me")), lambda o, p: _loss(o["h"], p), 1, 1),
    Case(
        "attributes with history",
        lambda p: _with_owner(p, Opaque(p["b"] * 2)),
        lambda o, p: _loss(o["h"] * o["h"].owner.hidden, p),
        3,
        2,
    ),
    Case("nothing with history", lambda p: {"n": 1, "x": _INPUT}, lambda o, p: _loss(o["x"], p), 0, 0),
    Case("no tensor", lambda p: "text", lambda o, p: _loss(_INPUT, p) * len(o), 0, 0),
]
