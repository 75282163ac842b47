"""Modules of Python, of torch.fx and torch.export, and TorchScript functions."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import objcomm
from objcomm.codec import encode
from objcomm.errors import DecodeError, EncodeError
from tests import lowering
from tests.loopback import arrive, loopback, plan_of
from tests.lowering import Basic, Pair, Sum, script
from tests.ranks import run_ranks
from tests.same import assert_arrived, assert_same

X = torch.arange(6.0).view(3, 2)


def double(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


def shift(module: Any, inputs: Any) -> Any:
    return (inputs[0] + 1,)


class Tied(torch.nn.Module):
    """All that a module may have: tied weights, buffers of both kinds, hooks, a submodule twice, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.again = self.first
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("lost", torch.full((2,), 2.0), persistent=False)
        self.plain = torch.arange(2.0)
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.kept_view = self.get_buffer("kept")[:1]
        self.register_forward_hook(double)
        self.first.register_forward_pre_hook(shift)
        self.settings = {"names": ("a", "b"), "n": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.again(self.second(self.first(x)))
        return total + self.get_buffer("kept") + self.get_buffer("lost") + self.plain


def check_tied(received: Any, sent: Any) -> None:
    assert type(received) is type(sent)
    assert received.second.weight is received.first.weight
    assert received.again is received.first
    assert list(received.state_dict()) == list(sent.state_dict())
    assert "lost" not in received.state_dict()
    assert [name for name, _ in received.named_buffers()] == [name for name, _ in sent.named_buffers()]
    assert not received.frozen.requires_grad
    assert received.first.weight.requires_grad
    assert received.settings == sent.settings
    received.kept.add_(5)
    assert received.kept_view.item() == 6
    received.kept.sub_(5)
    assert_same(received(X).detach(), sent(X).detach())
    received(X).sum().backward()
    assert received.first.weight.grad is not None


@pytest.mark.parametrize("backend", ["gloo", "strict"])
def test_modules_of_python_and_torch_between_ranks(backend: str) -> None:
    def ranks(rank: int) -> None:
        torch.manual_seed(3)
        tied: Any = Tied().eval()
        graph = fx.symbolic_trace(tied.second)
        with lowering.quiet():
            exported = torch.export.export(tied, (X,))
        function = script(scaled)
        if rank == 0:
            objcomm.send_object([tied, graph, exported, function, torch.compile(tied), tied.first.weight], 1)
        else:
            received, its_graph, its_export, its_function, its_compiled, weight = objcomm.recv_object(0)
            check_tied(received, tied)
            assert weight is received.first.weight
            assert its_compiled is received
            assert_same(its_graph(X).detach(), graph(X).detach())
            assert_same(its_export.module()(X).detach(), exported.module()(X).detach())
            assert its_export.state_dict["first.weight"] is its_export.state_dict["second.weight"] is weight
            assert_same(its_function(X), X * 3)

    run_ranks(ranks, backend=backend, timeout=120)


def test_no_tensor_of_a_module_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Any:
        raise AssertionError("pickled")

    tied = Tied().eval()
    with lowering.quiet():
        exported = torch.export.export(tied, (X,))
    sent = [tied, fx.symbolic_trace(tied.second), exported]
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__reduce_ex__", refuse)
        encoded = encode(sent)
        received = arrive(encoded)
    check_tied(received[0], tied)
    large = torch.nn.Linear(1000, 1000)
    with lowering.quiet():
        exported = torch.export.export(large, (torch.ones(1, 1000),))
    encoded = encode([large, exported, fx.symbolic_trace(large)])
    assert [segment.numel() for segment in encoded.segments] == [4_000_000]


# -- torch.fx ----------------------------------------------------------------------------------------------------------


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + len(x)


fx.wrap("helper")


class Traced(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("lost", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor, factor: Any = 2, *, more: Any = None) -> Any:
        y = helper(self.linear(x) * factor + self.lost) + torch.tensor([1.0, 2.0])
        left, right = torch.split(y, 1, dim=1)
        return {"left": left[..., :1], "both": (left, [right])}


class Mine(fx.GraphModule):
    """A graph module of a class of the program."""


def _dead() -> Any:
    """A graph with a node that no trace would find again."""
    graph = fx.Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    result = graph.call_function(torch.add, (x, 1))
    graph.call_function(torch.mul, (x, 7))
    graph.output(result)
    return fx.GraphModule(torch.nn.Module(), graph, "Dead")


def _noted() -> Any:
    module = fx.symbolic_trace(Traced())
    for node in module.graph.nodes:
        node.meta["note"] = {"of": [node.name, 1]}
    return module


def _of_export() -> Any:
    with lowering.quiet():
        return torch.export.export(Sum(), (X, X)).graph_module


def _nested() -> Any:
    outer = torch.nn.Sequential(fx.symbolic_trace(torch.nn.Linear(2, 2)), torch.nn.ReLU())
    return fx.GraphModule(outer, _call_all(outer))


def _call_all(outer: Any) -> Any:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name, _ in outer.named_children():
        value = graph.call_module(name, (value,))
    graph.output(value)
    return graph


GRAPHS: list[Callable[[], Any]] = [
    lambda: fx.symbolic_trace(Traced()),
    lambda: fx.symbolic_trace(Traced(), concrete_args={"factor": 5}),
    lambda: Mine(torch.nn.Module(), _dead().graph),
    _dead,
    _noted,
    _of_export,
    _nested,
]


@pytest.mark.parametrize("make", GRAPHS)
def test_a_graph_arrives_node_by_node(make: Callable[[], Any]) -> None:
    sent = make()
    received = loopback({"graph": sent, "again": [sent]})
    assert received["again"][0] is received["graph"]
    received = received["graph"]
    assert type(received).__mro__[1:] == type(sent).__mro__[1:]
    assert type(received).__name__ == type(sent).__name__
    assert received.code == sent.code
    for mine, its in zip(sent.graph.nodes, received.graph.nodes, strict=True):
        assert (mine.op, mine.name, mine.target, mine.type) == (its.op, its.name, its.target, its.type)
        assert str((mine.args, mine.kwargs)) == str((its.args, its.kwargs))
        assert mine.meta.get("note") == its.meta.get("note")
    received.graph.lint()
    assert list(received.state_dict()) == list(sent.state_dict())
    inputs = (X, X) if make is _of_export else (X,)
    if not (isinstance(received, Mine) or "specialized" in received.code):
        assert_same(_detached(received(*inputs)), _detached(sent(*inputs)))
    received.graph.eliminate_dead_code()
    received.recompile()


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)


def test_sending_a_graph_leaves_it_as_it_is() -> None:
    sent = _dead()
    next(iter(node for node in sent.graph.nodes if node.target is torch.add)).target = torch.sub
    before = sent.code
    received = loopback(sent)
    assert sent.code == before
    assert_same(sent(X), X + 1)
    assert_same(received(X), X - 1)


def test_operators_travel_by_name() -> None:
    operators = [torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.ops.higher_order.cond]
    assert all(mine is its for mine, its in zip(operators, loopback(operators), strict=True))
    encoded = encode([torch.ops.aten.add.Tensor])
    encoded_bytes = bytearray(encoded.skeleton)
    assert arrive(encoded, skeleton=bytes(encoded_bytes)) == [torch.ops.aten.add.Tensor]


# -- torch.export ------------------------------------------------------------------------------------------------------


def test_an_exported_program_keeps_its_parts() -> None:
    tied = Tied().eval()
    with lowering.quiet():
        sent = torch.export.export(tied, (X,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    received = loopback({"program": sent, "weight": tied.first.weight, "inputs": X})
    program = received["program"]
    assert type(program) is torch.export.ExportedProgram
    assert program.state_dict["second.weight"] is received["weight"]
    assert program.example_inputs[0][0] is received["inputs"]
    assert list(program.state_dict) == list(sent.state_dict)
    assert program.graph_signature.input_specs == sent.graph_signature.input_specs
    assert str(program.range_constraints) == str(sent.range_constraints)
    assert program.module_call_graph == sent.module_call_graph
    for rows in (3, 4):
        x = torch.randn(rows, 2)
        assert_same(program.module()(x).detach(), sent.module()(x).detach())
    assert_same(loopback(program).module()(X).detach(), sent.module()(X).detach())


# -- TorchScript: functions, sharing, hooks ----------------------------------------------------------------------------


def scaled(x: torch.Tensor, factor: int = 3) -> torch.Tensor:
    """Documented."""
    return x * factor


def with_many_types(
    x: torch.Tensor, sizes: list[int], names: dict[str, float], more: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, int]]:
    return x.view(sizes), {name: int(value) for name, value in names.items()}


def _same_name(body: str) -> Any:
    file = f"<scaled {body}>"
    text = f"def scaled(x, factor: int = 2):\n    return {body}\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, file, "exec"), namespace)
    return script(namespace["scaled"])


def test_functions_stay_functions() -> None:
    sent = [script(scaled), script(with_many_types), _same_name("x + factor"), _same_name("x - factor")]
    with lowering.quiet():
        sent.append(torch.jit.trace(lambda x: x * 2, (X,)))
    received = loopback([sent, sent[0], Pair(Sum(), script(scaled))])
    functions, again, _ = received
    assert again is functions[0]
    for mine, its in zip(sent, functions, strict=True):
        assert type(its) is type(mine)
        assert str(its.schema).partition("(")[2] == str(mine.schema).partition("(")[2]
    assert functions[0].__doc__ == "Documented."
    assert functions[0].__name__ == sent[0].__name__
    assert_same(functions[0](X), X * 3)
    assert_same(functions[0](X, factor=4), X * 4)
    assert_same(functions[1](X, [2, 3], {"a": 2.5}), (X.view(2, 3), {"a": 2}))
    assert_same([functions[2](X), functions[3](X), functions[4](X)], [X + 2, X - 2, X * 2])
    assert_same(loopback(functions)[3](X), X - 2)


class Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.plain = torch.ones(2)
        self.register_buffer("buffer", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.inner(x) + self.plain
        return total


def test_what_a_script_module_shares_with_the_rest_stays_shared() -> None:
    module = script(Shared())
    eager = torch.nn.Linear(2, 2)
    eager.weight = module.inner.weight
    rest = {"weight": module.inner.weight, "part": module.buffer[1:3], "plain": module.plain, "eager": eager}
    received = loopback({"module": module, "inner": module.inner, "also": [module], **rest})
    mine = received["module"]
    assert received["also"][0] is mine
    assert received["inner"] is mine.inner
    assert mine.inner.weight is received["weight"] is received["eager"].weight is received["inner"].weight
    assert mine.plain is received["plain"]
    received["part"].add_(7)
    assert mine.buffer.tolist() == [0, 7, 7, 0]
    assert_same(mine(X).detach(), module(X).detach())
    received["weight"].data.zero_()
    assert_same(mine(X).detach(), torch.ones(3, 1) * (mine.inner.bias + mine.plain).detach())
    apart = loopback({"module": module, "other": torch.ones(2)})
    assert_same(dict(apart["module"].state_dict()), dict(module.state_dict()))


def test_attributes_and_hooks_of_the_wrapper_arrive() -> None:
    module = script(Shared())
    module.inner.note = {"by": "hand", "tensor": module.plain}
    received = loopback({"deep": [module]})["deep"][0]
    assert received.inner.note["by"] == "hand"
    assert received.inner.note["tensor"] is received.plain
    assert_same(received(X).detach(), module(X).detach())
    compiled_hook = Shared()
    compiled_hook.register_forward_hook(scripted_hook)
    module = script(compiled_hook)
    assert_same(loopback(module)(X).detach(), module(X).detach())


def scripted_hook(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_modules_are_in_the_mode_that_they_were_in() -> None:
    module = script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())).eval()
    received = loopback([module, module.train(True) and module])
    assert [part.training for part in received[0].modules()] == [True] * 3
    assert [part.training for part in loopback(module.eval()).modules()] == [False] * 3


@pytest.mark.parametrize("mode", ["no_grad", "inference", "device", "deterministic"])
def test_the_modes_of_the_caller_do_not_matter(mode: str) -> None:
    modes: dict[str, Any] = {
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "device": torch.device("meta"),
        "deterministic": torch.autocast("cpu"),
    }
    module = script(Shared())
    with lowering.quiet():
        exported = torch.export.export(Shared(), (X,))
    sent = [module, exported, fx.symbolic_trace(torch.nn.ReLU())]
    with modes[mode]:
        encoded = encode(sent)
    plan = plan_of(encoded)
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    with modes[mode]:
        built: Any = plan.build(inline, [])
    received, program, graph = built
    assert received.inner.weight.requires_grad
    assert not received.inner.weight.is_inference()
    assert_same(received(X).detach(), module(X).detach())
    received(X).sum().backward()
    assert_same(program.module()(X).detach(), exported.module()(X).detach())
    assert_same(graph(X), torch.relu(X))


def test_the_gradients_of_a_module_are_not_lost_unsaid() -> None:
    with pytest.raises(EncodeError, match="gradients of its parameters"):
        encode([script(Shared())], forbid_grad=True)
    encode([script(Shared().requires_grad_(False))], forbid_grad=True)


def test_modules_on_several_devices_go_apart() -> None:
    here, nowhere = script(torch.nn.Linear(2, 2)), script(torch.nn.Linear(2, 2, device="meta"))
    assert_arrived(dict(loopback([here])[0].state_dict()), dict(here.state_dict()))
    with pytest.raises(EncodeError, match="several devices"):
        encode([here, nowhere])


def test_a_graph_that_becomes_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(fx.symbolic_trace(Traced()))
    plain = fx.Graph.create_node

    def changed(self: Any, op: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(
            self, op, "cos" if target == "helper" else target, *args, **{**kwargs, "name": kwargs["name"] + "_"}
        )

    with monkeypatch.context() as patched:
        patched.setattr(fx.Graph, "create_node", changed)
        with pytest.raises(DecodeError, match="fx graph is not what was sent"):
            arrive(encoded)


def test_basic_modules_beside_scripted_ones() -> None:
    pair = Pair(script(Basic(1)), Basic(2))
    received = loopback([pair, pair.left])
    assert received[0].left is received[1]
    assert_same(received[0](X, X).detach(), pair(X, X).detach())


def test_compiled_modules_arrive_as_their_originals() -> None:
    module = torch.nn.Linear(2, 2)
    compiled_too: Any = torch.compile(module)
    module.compiled = compiled_too
    received = loopback({"compiled": torch.compile(module), "module": module})
    assert type(received["module"]) is torch.nn.Linear
    assert received["compiled"] is received["module"]
    assert received["module"].compiled is received["module"]
    compiled: Any = torch.compile(torch.nn.Linear(2, 2))
    inside = torch.nn.Sequential(compiled)
    assert type(loopback(inside)[0]) is torch.nn.Linear
    in_place = torch.nn.Linear(2, 2)
    in_place.compile()
    assert_same(loopback(in_place)(X).detach(), torch.nn.functional.linear(X, in_place.weight, in_place.bias).detach())


def _quantized() -> Any:
    from torch.ao import quantization

    torch.manual_seed(0)
    module: Any = torch.nn.Sequential(quantization.QuantStub(), torch.nn.Conv2d(1, 2, 1), quantization.DeQuantStub())
    module.eval().qconfig = quantization.get_default_qconfig("fbgemm")
    quantization.prepare(module, inplace=True)
    module(torch.ones(1, 1, 2, 2))
    return quantization.convert(module)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_whose_state_is_their_own_idea_work() -> None:
    """``__setstate__`` of torch's quantized convolutions leaves out what every module has."""
    module = _quantized()
    received = loopback({"m": module, "same": module})
    assert received["m"] is received["same"]
    x = torch.full((1, 1, 2, 2), 0.5)
    assert_arrived(received["m"](x), module(x))
    assert_arrived(loopback(received["m"])(x), module(x))


class _Holder:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.calls = 0

    def count(self, module: Any, inputs: Any, output: Any) -> None:
        self.calls += 1


class _OwnState(torch.nn.Linear):
    """Takes part in a cycle, with an own ``__setstate__``."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.restored = True


def test_a_module_with_its_own_state_may_contain_itself() -> None:
    module: Any = _OwnState(1, 1)
    module.holder = _Holder(module)
    module.register_forward_hook(module.holder.count)
    received = loopback(module)
    assert received.restored
    assert received.holder.module is received
    received(torch.ones(1))
    assert received.holder.calls == 1


def test_classes_by_value_may_keep_what_they_computed() -> None:
    class Local:
        @functools.cached_property
        def value(self) -> int:
            return 5

        @functools.lru_cache(maxsize=7)  # noqa: B019
        def doubled(self, x: int) -> int:
            return 2 * x

    local = Local()
    assert local.doubled(3) == 6
    received = loopback(local)
    assert received.value == 5
    assert vars(received) == {"value": 5}
    assert received.doubled(4) == 8
    cached: Any = type(received).doubled
    assert cached.cache_parameters() == {"maxsize": 7, "typed": False}
    assert cached.cache_info().currsize == 1
