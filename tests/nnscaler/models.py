"""The models that the tests cut into stages."""

from __future__ import annotations

import weakref
from typing import Any

import nnscaler
import torch
from torch import Tensor, nn

WIDTH = 4


class ReportedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, context: Any) -> Any:
        return self.linear(x) + context["bias"]


class Reported(nn.Module):
    """The model of the report: its layers are no submodules, since they are in a plain list."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = [ReportedLayer() for _ in range(num_layers)]

    def forward(self, x: Tensor, content: Any) -> Tensor:
        context = content["content"]
        for layer in self.layers:
            x = layer(x, context)
        x = x.sum()
        return x  # noqa: RET504


class Registered(Reported):
    """The same, with its layers registered."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(ReportedLayer() for _ in range(num_layers))  # type: ignore[assignment]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, context: Any) -> Any:
        return self.linear(x) * context["scale"] + context["bias"]


class Chain(nn.Module):
    """Every layer uses the object that the front made. With ``use``, only those layers."""

    def __init__(self, num_layers: int = 2, use: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() if use is None or i in use else Plain() for i in range(num_layers))
        self.use = tuple(range(num_layers)) if use is None else use

    def forward(self, x: Tensor, content: Any) -> Tensor:
        context = content["content"]
        for layer in self.layers:
            x = layer(x, context)
        return x.sum()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        return torch.tanh(self.linear(x))


class Made:
    """What no tracer looks into. It keeps count of how many there are in this process, and of the most at a time."""

    alive: weakref.WeakSet[Made] = weakref.WeakSet()
    most = 0

    def __init__(self, pieces: list[Tensor]) -> None:
        self.pieces = pieces
        self.count = len(pieces)

    def seen(self) -> None:
        self.alive.add(self)
        Made.most = max(Made.most, len(self.alive))


@nnscaler.register_op("n^ d^, ? -> ?")
def make_pieces(x: Tensor, content: Any) -> Any:
    """An operator with an object as its output: pieces of a size that only the data tells."""
    made = Made([piece.clone() for piece in content["pieces"]])
    made.seen()
    return made


@nnscaler.register_op("n^ d^, ? -> n^ d^")
def add_pieces(x: Tensor, made: Any) -> Any:
    made.seen()
    assert made.count == len(made.pieces)
    return x + sum(piece.sum() for piece in made.pieces)


@nnscaler.register_op("n^ d^ -> n^ d^")
def add_pieces_by_name(x: Tensor, *, made: Any) -> Any:
    return add_pieces(x, made)


class Pieces(nn.Module):
    """Objects of another size with every sample, made by an operator that is no Python function of the tracer's."""

    def __init__(self, num_layers: int = 2, by_name: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        self.by_name = by_name

    def forward(self, x: Tensor, content: Any) -> Tensor:
        made = make_pieces(x, content)
        for layer in self.layers:
            x = layer(x)
            x = add_pieces_by_name(x, made=made) if self.by_name else add_pieces(x, made)
        return x.sum()


@nnscaler.register_op("n^ d^, ?, ?, ?, ? -> n^ d^")
def mix(x: Tensor, number: Any, text: Any, listed: Any, table: Any) -> Any:
    assert isinstance(number, int) and isinstance(text, str) and isinstance(listed, list) and isinstance(table, dict)
    return x * number + len(text) + listed[0] + table["bias"]


class Several(nn.Module):
    """Several objects at once, plain values among them."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor, content: Any) -> Tensor:
        number, text, listed, table = content["number"], content["text"], content["listed"], content["content"]
        for layer in self.layers:
            x = mix(layer(x), number, text, listed, table)
        return x.sum()


class Returning(Chain):
    """Returns an object beside the loss."""

    def forward(self, x: Tensor, content: Any) -> Any:
        context = content["content"]
        for layer in self.layers:
            x = layer(x, context)
        return x.sum(), context


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@nnscaler.register_op("n^ d^ -> ?")
def hold(x: Tensor) -> Any:
    return Holder(x * 2)


@nnscaler.register_op("n^ d^, ? -> n^ d^")
def unhold(x: Tensor, holder: Any) -> Any:
    return x + holder.value


class Hidden(nn.Module):
    """A tensor that requires grad crosses inside an opaque object: its gradient would be lost."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor, content: Any) -> Tensor:
        x = self.layers[0](x)
        holder = hold(x)
        for layer in self.layers[1:]:
            x = unhold(layer(x), holder)
        return x.sum()


class Far(nn.Module):
    """The same, but used in the last stage only."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor, content: Any) -> Tensor:
        x = self.layers[0](x)
        holder = hold(x)
        for layer in self.layers[1:]:
            x = layer(x)
        x = unhold(x, holder)
        return x.sum()


@nnscaler.register_op("n^ d^, ? -> n^ d^")
def add_bias(x: Tensor, content: Any) -> Any:
    return x + content["content"]["bias"]


class Direct(nn.Module):
    """Every stage uses what the dataloader gave, with nothing in between."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor, content: Any) -> Tensor:
        for layer in self.layers:
            x = add_bias(layer(x), content)
        return x.sum()


class ReturningMade(Pieces):
    """Returns an opaque object beside the loss."""

    def forward(self, x: Tensor, content: Any) -> Any:
        made = make_pieces(x, content)
        for layer in self.layers:
            x = add_pieces(layer(x), made)
        return x.sum(), made


class Scaled(nn.Module):
    """A number that only the data tells is a keyword argument of one of torch's own operators."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor, content: Any) -> Tensor:
        scale = content["content"]["scale"]
        for layer in self.layers:
            x = torch.add(layer(x), x, alpha=scale)
        return x.sum()


class ReturningData(Direct):
    """Returns the sample as the dataloader gave it beside the loss."""

    def forward(self, x: Tensor, content: Any) -> Any:
        for layer in self.layers:
            x = add_bias(layer(x), content)
        return x.sum(), content


@nnscaler.register_op("n^ d^, ? -> ?")
def make_function(x: Tensor, content: Any) -> Any:
    bias = content["content"]["bias"]
    return Holder(lambda y: y + bias)


@nnscaler.register_op("n^ d^, ? -> n^ d^")
def call_function(x: Tensor, holder: Any) -> Any:
    return holder.value(x)


class Unpicklable(nn.Module):
    """Its object holds a function that pickle refuses, also in the example value that the code generator sees."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor, content: Any) -> Tensor:
        holder = make_function(x, content)
        for layer in self.layers:
            x = call_function(layer(x), holder)
        return x.sum()
