"""OperationRegistry: names, lazy imports, plug-ins that are broken or collide, and what may be registered."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest
import toy_operations as toy

from attnops.errors import ConfigError, UnknownNameError
from attnops.operators import Operation
from attnops.operators.paged.step_operation import StepOperation
from attnops.operators.recurrent import RecurrentOperation
from attnops.operators.selection import Indexer
from attnops.operators.vanilla import Vanilla, VanillaConfig
from attnops.planning import ALL_FEATURES, implementation
from attnops.registry import OperationMetadata, OperationRegistry, registry


@pytest.fixture(autouse=True)
def _leave_no_trace(monkeypatch):
    monkeypatch.setattr(OperationRegistry, "_registered", dict(OperationRegistry._registered))


@pytest.fixture
def plugins(monkeypatch):
    """A function that adds entry points, as an installed distribution would."""
    installed = importlib.metadata.entry_points
    added = []

    def entry_points(**selection):
        found = [e for e in added if e.group == selection.get("group", e.group)]
        return importlib.metadata.EntryPoints((*installed(**selection), *found))

    def add(name, value, group="attnops.operations"):
        added.append(importlib.metadata.EntryPoint(name, value, group))
        registry._entry_points.cache_clear()

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry._entry_points.cache_clear()
    yield add
    monkeypatch.undo()
    registry._entry_points.cache_clear()


def module(monkeypatch, name, **members):
    """An importable module with these members."""
    made = types.ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


# -- the built-ins ---------------------------------------------------------------------------------------------------


def test_names_get_and_create():
    names = OperationRegistry.names()
    assert {"vanilla", "splash", "sdpa"} <= set(names)
    assert list(names) == sorted(names)
    for name in names:
        operation = OperationRegistry.get(name)
        assert issubclass(operation, Operation | StepOperation | Indexer | RecurrentOperation)
        assert operation.name == name
        assert OperationRegistry.get(name) is operation
    metadata = OperationMetadata(softmax_scale=0.5)
    attend = OperationRegistry.create("vanilla", metadata)
    assert type(attend) is Vanilla
    assert attend.metadata is metadata
    assert OperationRegistry.create("vanilla").metadata == OperationMetadata()
    with pytest.raises(ConfigError, match="wanted an OperationMetadata"):
        OperationRegistry.create("vanilla", {"softmax_scale": 0.5})


@pytest.mark.parametrize(("name", "close"), [("vanila", "'vanilla'"), ("splsh", "'splash'"), ("qqqqqqqq", None)])
def test_an_unknown_name_says_which_exist_and_the_closest(name, close):
    for ask in (OperationRegistry.get, OperationRegistry.create):
        with pytest.raises(UnknownNameError) as error:
            ask(name)
        text = str(error.value)
        assert repr(name) in text
        assert ", ".join(OperationRegistry.names()) in text
        assert (f"Did you mean {close}?" in text) if close else ("Did you mean" not in text)
        assert isinstance(error.value, LookupError)


def test_importing_attnops_imports_no_operation_and_no_pallas():
    code = """
import sys, attnops
def loaded(*modules):
    return sorted(m for m in sys.modules if any(m == w or m.startswith(w + ".") for w in modules))
assert attnops.OperationRegistry.names(), "no names"
names = attnops.OperationRegistry.names()
operations = [m for m in loaded("attnops.operators") if m.rsplit(".", 1)[1] in names]
# The small functions under all kernels are no kernels.
small = ("default_promotion", "primitives", "lse", "precision", "local_mask", "dequantise", "threefry", "varying")
under = ["attnops.operators.kernels", *(f"attnops.operators.kernels.{name}" for name in small)]
kernels = [m for m in loaded("attnops.operators.kernels") if m not in under]
print(operations, kernels + loaded("jax.experimental.pallas", "tensorflow", "torch", "flax"))
attnops.OperationRegistry.get("splash")
print([f"attnops.operators.{name}" in sys.modules for name in ("splash", "sdpa")], loaded("jax.experimental.pallas"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] []", "[True, False] []"]


# -- plug-ins --------------------------------------------------------------------------------------------------------


def test_a_plug_in_is_found_and_imported_only_when_asked_for(plugins, monkeypatch):
    plugins("third", "third_party_attention:Third")
    assert "third" in OperationRegistry.names()
    OperationRegistry.get("vanilla")
    with pytest.raises(ConfigError):  # nothing has imported it so far: there is nothing to import
        OperationRegistry.get("third")
    operation = toy.make(name="third")
    module(monkeypatch, "third_party_attention", Third=operation)
    assert OperationRegistry.get("third") is operation
    assert OperationMetadata(operation_configs={"third": {"label": "x"}}).get_operation_config("third").label == "x"


@pytest.mark.parametrize(
    ("value", "failure"),
    [
        ("no_such_module_anywhere:Op", "ModuleNotFoundError"),
        ("third_party_attention:Missing", "AttributeError"),
        ("third_party_raises:Op", "RuntimeError: needs a newer driver"),
    ],
)
def test_a_broken_plug_in_is_named_and_breaks_nothing_else(plugins, monkeypatch, tmp_path, value, failure):
    module(monkeypatch, "third_party_attention")
    (tmp_path / "third_party_raises.py").write_text("raise RuntimeError('needs a newer driver')")
    monkeypatch.syspath_prepend(tmp_path)
    plugins("broken", value)
    assert "broken" in OperationRegistry.names()
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            OperationRegistry.get("broken")
        text = str(error.value)
        assert "'broken'" in text
        assert value in text
        assert failure in text
        assert error.value.__cause__ is not None
    for name in ("vanilla", "splash", "sdpa"):
        assert OperationRegistry.get(name).name == name
    with pytest.raises(UnknownNameError, match=r"known: .*, broken, "):
        OperationRegistry.get("nothing like it")
    with pytest.raises(ConfigError, match="'broken'"):
        OperationMetadata(operation_configs={"broken": {}})


def test_a_plug_in_that_is_no_operation(plugins, monkeypatch):
    module(monkeypatch, "third_party_attention", Third=object, Other=toy.make(name="other"))
    plugins("third", "third_party_attention:Third")
    plugins("fourth", "third_party_attention:Other")
    with pytest.raises(ConfigError, match="is not an operation class"):
        OperationRegistry.get("third")
    with pytest.raises(ConfigError, match=r"entry point 'fourth'.*named 'other'; make them agree"):
        OperationRegistry.get("fourth")


def test_two_plug_ins_of_one_name(plugins, monkeypatch):
    first, second = toy.make(name="third"), toy.make(name="third")
    module(monkeypatch, "first_party", Op=first)
    module(monkeypatch, "second_party", Op=second)
    plugins("third", "first_party:Op")
    plugins("third", "first_party:Op")  # one distribution seen twice on the path is no conflict
    assert OperationRegistry.get("third") is first
    OperationRegistry.unregister("third")
    plugins("third", "second_party:Op")
    assert OperationRegistry.names().count("third") == 1
    with pytest.raises(ConfigError, match=r"first_party:Op and by second_party:Op.*override=True"):
        OperationRegistry.get("third")
    assert OperationRegistry.get("vanilla") is Vanilla
    OperationRegistry.register(second, override=True)
    assert OperationRegistry.get("third") is second


def test_a_plug_in_does_not_replace_a_built_in_silently(plugins, monkeypatch):
    module(monkeypatch, "third_party_attention", Mine=toy.make(name="sdpa"))
    plugins("sdpa", "third_party_attention:Mine")
    monkeypatch.delitem(OperationRegistry._registered, "sdpa", raising=False)
    with pytest.raises(ConfigError, match="is provided by"):
        OperationRegistry.get("sdpa")


def test_other_groups_of_entry_points_are_not_ours(plugins):
    plugins("elsewhere", "third_party_attention:Third", group="somebody.elses")
    assert "elsewhere" not in OperationRegistry.names()


def test_a_plug_in_that_registers_itself_while_imported(plugins, monkeypatch, tmp_path):
    (tmp_path / "registers_itself.py").write_text(
        "from attnops import OperationRegistry\n"
        "from attnops.operators.vanilla import Vanilla\n"
        "@OperationRegistry.register\n"
        "class Third(Vanilla):\n"
        "    name = 'third'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins("third", "registers_itself:Third")
    operation = OperationRegistry.get("third")
    assert operation.__name__ == "Third"
    assert OperationRegistry.get("third") is operation


# -- registering -----------------------------------------------------------------------------------------------------


def test_register_as_a_decorator():
    @OperationRegistry.register
    class Mine(Vanilla):
        name = "mine"

    assert OperationRegistry.get("mine") is Mine
    assert "mine" in OperationRegistry.names()
    assert OperationMetadata(operation_configs={"mine": {}}).get_operation_config("mine") == VanillaConfig()
    assert OperationRegistry.register(Mine) is Mine  # the same class again is no second one


def test_a_name_twice_is_an_error_unless_overridden():
    first, second = toy.make(), toy.make()
    assert first.__qualname__ == second.__qualname__  # told apart by what they are, not by what they are called
    OperationRegistry.register(first)
    with pytest.raises(ConfigError, match=r"'toy' already exists.*override=True"):
        OperationRegistry.register(second)
    assert OperationRegistry.get("toy") is first

    @OperationRegistry.register(override=True)
    class Third(Vanilla):
        name = "toy"

    assert OperationRegistry.get("toy") is Third


def test_the_name_of_an_entry_point_is_taken_before_it_is_imported(monkeypatch):
    monkeypatch.delitem(OperationRegistry._registered, "splash", raising=False)
    mine = toy.make(name="splash")
    with pytest.raises(ConfigError, match=r"attnops\.operators\.splash:Splash"):
        OperationRegistry.register(mine)
    OperationRegistry.register(mine, override=True)
    assert OperationRegistry.get("splash") is mine
    OperationRegistry.unregister("splash")
    assert OperationRegistry.get("splash").__module__ == "attnops.operators.splash"


def test_unregister():
    OperationRegistry.register(toy.make())
    OperationRegistry.unregister("toy")
    assert "toy" not in OperationRegistry.names()
    with pytest.raises(UnknownNameError):
        OperationRegistry.get("toy")
    with pytest.raises(UnknownNameError, match="'toy' was not registered in this process"):
        OperationRegistry.unregister("toy")


class NoNative(Operation):
    name = "no_native"
    config = toy.ToyConfig

    @implementation(consumes=ALL_FEATURES, tolerance={})
    def forward_cpu(self, call):
        return Vanilla.forward_native(call)


class Undeclared(Operation):
    name = "undeclared"
    config = toy.ToyConfig

    def forward_native(self, call):
        return Vanilla.forward_native(call)


class UndeclaredPlatform(Vanilla):
    name = "undeclared_platform"

    def forward_gpu(self, call):
        return Vanilla.forward_native(call)


class NoConfig(Operation):
    name = "no_config"
    forward_native = Vanilla.forward_native


class DictConfig(NoConfig):
    name = "dict_config"
    config = dict


class NotAnOperation:
    name = "not_an_operation"
    config = toy.ToyConfig
    forward_native = Vanilla.forward_native


class BadName(Vanilla):
    name = "two words"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (NoNative, "'no_native' has no `forward_native`"),
        (Undeclared, "undeclared.forward_native declares nothing; decorate it with @implementation"),
        (UndeclaredPlatform, "undeclared_platform.forward_gpu declares nothing"),
        (NoConfig, "'no_config' has no `config`"),
        (DictConfig, "wanted a subclass of OperationConfig"),
        (NotAnOperation, "wanted an Operation subclass"),
        (BadName, "letters, digits and _"),
        (object, "is not an operation class"),
        (Vanilla(), "is not an operation class"),
        (Operation, "is not an operation class"),
    ],
)
def test_what_is_no_complete_operation_is_refused_at_registration(wrong, message):
    before = OperationRegistry.names()
    with pytest.raises(ConfigError, match=message):
        OperationRegistry.register(wrong)
    assert OperationRegistry.names() == before


def test_an_unknown_feature_is_refused_when_it_is_declared():
    with pytest.raises(ValueError, match=r"unknown features \['causl'\]"):
        implementation(consumes={"causl"}, tolerance={})
