"""TorchScript modules of every make: what their archives hold beyond plain classes, and what they share."""

import enum
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
import torch

from objcomm.codec import archive, encode
from objcomm.errors import DecodeError, EncodeError
from tests import lowering
from tests.loopback import arrive, loopback, plan_of
from tests.lowering import called, loaded, saved, script
from tests.same import assert_same

X = torch.arange(6.0).view(3, 2)
TRICKY = "line\nclass Other(Module):\n  def __setstate__(self):\n\"' \\ é"


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Two(NamedTuple):
    tensor: torch.Tensor
    number: int


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value
        self.tensor = torch.ones(2)

    def get(self) -> int:
        return self.value


class Interface(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
        pass


class AddOne(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class AddTwo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2


class Zoo(torch.nn.Module):
    """One of everything that a class of TorchScript may have."""

    behind: Interface
    three: Final[int]

    def __init__(self) -> None:
        super().__init__()
        self.behind = AddOne()  # type: ignore[assignment]
        self.three = 3
        self.color = Color.RED
        self.by_name = {"a": torch.ones(2)}
        self.in_order = [torch.zeros(2), torch.ones(1)]
        self.numbers = [1, 2]
        self.text = TRICKY
        self.device = torch.device("cpu")
        self.dtype = torch.float16
        self.mixed = (1, "a", 2.5)
        self.nan = float("nan")
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), AddTwo()])
        self.named = torch.nn.ModuleDict({"one": AddOne(), "two": AddTwo()})
        self.lstm = torch.nn.LSTM(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    @property
    def prop(self) -> int:
        return 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counter = Counter(3)
        two = Two(x, 2)
        y = self.behind(x)
        for layer in self.layers:
            y = layer(y)
        for layer in self.named.values():
            y = layer(y)
        if self.color == Color.RED:
            y = y * 2
        text = "class Y:\n  def z(\n"
        total: torch.Tensor = y + counter.get() + two.number + self.three + len(self.text) + len(text)
        return total + self.by_name["a"] + self.in_order[0] + self.mixed[0]

    @torch.jit.export
    def pair(self, x: torch.Tensor) -> Two:
        return Two(x, self.numbers[0])


def zoo() -> Any:
    with lowering.quiet():
        torch.jit.interface(Interface)
        torch.jit.script(Counter)
        return torch.jit.script(Zoo().eval())


def quantized() -> Any:
    with lowering.quiet():
        model = torch.nn.Sequential(torch.nn.Linear(2, 4))
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def frozen() -> Any:
    with lowering.quiet():
        return torch.jit.freeze(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2)).eval()))


def optimized() -> Any:
    with lowering.quiet():
        return torch.jit.optimize_for_inference(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2)).eval()))


def traced() -> Any:
    with lowering.quiet():
        return torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), (X,))


def by_hand() -> Any:
    with lowering.quiet():

        class ByHand(torch.jit.ScriptModule):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(2))

            @torch.jit.script_method
            def forward(self, x):  # type: ignore[no-untyped-def]
                return x * self.weight

        return ByHand()


MAKES: list[Callable[[], Any]] = [
    zoo,
    quantized,
    lambda: script(quantized()),
    frozen,
    optimized,
    traced,
    by_hand,
    lambda: loaded(saved(zoo())),
    lambda: script(called("Same", "x + h")()),
]


@pytest.mark.parametrize("make", MAKES)
def test_a_module_of_any_make_computes_what_it_did(make: Callable[[], Any]) -> None:
    sent = make()
    inputs = (X, X) if getattr(sent, "original_name", "") == "Same" else (X,)
    for received in (loopback(sent), loopback(loopback([sent]))[0], arrive(encode({"m": [sent, sent]}))["m"][1]):
        with lowering.quiet():
            assert_same(received(*inputs).detach(), sent(*inputs).detach())
        if isinstance(sent, torch.jit.ScriptModule):
            assert_same(dict(received.state_dict()), dict(sent.state_dict()))


def test_one_of_everything() -> None:
    sent = zoo()
    received, its_lstm, mean, tensor, first = loopback(
        [sent, sent.lstm, sent.norm.running_mean, sent.by_name["a"], sent.in_order[0]]
    )
    assert received.text == TRICKY
    assert received.numbers == [1, 2]
    assert received.mixed == (1, "a", 2.5)
    assert received.lstm is its_lstm
    assert received.norm.running_mean is mean
    tensor.add_(3)
    first.add_(4)
    assert received.by_name["a"].tolist() == [4, 4]
    assert received.in_order[0].tolist() == [4, 4]
    assert_same(received.in_order[1], torch.ones(1))
    assert received.pair(X).number == 1


def test_an_archive_goes_where_the_tensors_of_the_message_go() -> None:
    module = script(torch.nn.Linear(2, 2))
    encoded = encode([module, module.weight, script(AddOne())])
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    built: Any = plan_of(encoded).build(inline, [], torch.device("meta"))
    assert built[0].weight is built[1]
    assert {tensor.device.type for tensor in built[0].parameters()} == {"meta"}


def test_nothing_warns() -> None:
    with lowering.quiet():
        sent = [zoo(), script(called("Same", "x + h")()), traced(), quantized()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loopback(sent)


def test_the_filters_of_the_program_stay() -> None:
    before = list(warnings.filters)
    loopback([zoo(), torch.nn.Linear(1, 1)])
    assert list(warnings.filters) == before


class Named(torch.nn.Module):
    """Has a submodule, or a parameter that its code uses, of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.named = torch.nn.ModuleDict({name: AddOne()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.named.values():
            x = layer(x)
        return x


class Letters(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.größe = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.größe


@pytest.mark.parametrize("name", ["class", "None", "with", 'a"b', "a\\b", "a\nb", "__parameters__"])
def test_names_that_torch_cannot_load_are_refused_on_send(name: str) -> None:
    with pytest.raises(EncodeError, match="which torch cannot load") as caught:
        encode({"good": script(AddOne()), "m": script(Named(name))})
    assert caught.value.path == "obj['m']"
    assert caught.value.hint is not None
    assert "rename it" in caught.value.hint


def test_letters_that_torch_cannot_load_are_refused_on_send() -> None:
    with pytest.raises(EncodeError, match="which torch cannot load"):
        encode(script(Letters()))


@pytest.mark.parametrize("name", ["lambda", "async", "a b-c", "a'b", "1", "self", "Tensor", "yield"])
def test_names_that_are_none_of_pythons_arrive(name: str) -> None:
    received = loopback(script(Named(name)))
    assert [path for path, _ in received.named.named_children()] == [name]
    assert received(torch.zeros(1)).item() == 1


class Choosy(torch.nn.Module):
    """Its state cannot be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[int, bool]:
        return self.size, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]) -> None:
        self.size = state[0]
        self.training = state[1]
        assert self.size > 5, "it is too small"


def test_what_torch_cannot_load_is_an_error() -> None:
    encoded = encode({"m": script(Choosy())})
    with pytest.raises(DecodeError, match=r"cannot be loaded here.*it is too small") as caught:
        arrive(encoded)
    assert caught.value.path == "obj['m']"


def test_modules_without_data() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(2, 3)
    received = loopback([script(module), module])
    for linear in received:
        assert linear.weight.is_meta
        assert linear.weight.shape == (3, 2)


def test_the_module_that_cannot_be_saved_is_named() -> None:
    class Fine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class CallsPython(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.ignored(x)

        @torch.jit.ignore
        def ignored(self, x):  # type: ignore[no-untyped-def]
            return x

    holder = torch.nn.Sequential(torch.nn.Linear(1, 1))
    holder.bad = script(CallsPython())
    with pytest.raises(EncodeError, match="Python function call 'ignored'") as caught:
        encode({"fine": script(Fine()), "holder": [holder]})
    assert caught.value.path == "obj['holder'][0]._modules['bad']"


def test_definitions_are_found_line_by_line() -> None:
    contents = archive.scan(saved(zoo()))
    (name,) = (name for name in contents.classes if name.endswith(".Zoo"))
    assert {"forward", "pair"} <= contents.classes[name].methods
    assert contents.classes[name].attributes["text"] == "str"
    assert not any(name.endswith(("Other", ".Y")) for name in contents.classes)
    assert contents.locations == {"cpu"}
    assert archive.backends(contents) == []


def test_threads_send_modules_at_once() -> None:
    modules = [script(called("Same", f"x + h * {number}")()) for number in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                assert_same(loopback(modules[number])(X, X), X + X * number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_target_to_fill_takes_what_is_beside_a_module() -> None:
    sent = {"module": script(called("Same", "x + h")()), "x": torch.arange(3.0)}
    encoded = encode(sent)
    plan = plan_of(encoded)
    target = {"module": sent["module"], "x": torch.zeros(3)}
    with pytest.raises(DecodeError):
        plan.targets({"module": 3, "x": torch.zeros(4)})
    plan = plan_of(encoded)
    plan.targets(target)
    inline = torch.empty(encoded.inline_bytes, dtype=torch.uint8)
    encoded.write_inline(inline)
    built: Any = plan.build(inline, [])
    assert built["x"] is target["x"]
    assert target["x"].tolist() == [0, 1, 2]
    assert_same(built["module"](X, X), X + X)
