"""The typed stubs say what the module has."""

import ast
import importlib.resources
import inspect

import pinpool


def test_the_stubs_have_every_method_and_every_setting():
    stubs = importlib.resources.files(pinpool) / "_pinpool.pyi"
    assert (importlib.resources.files(pinpool) / "py.typed").is_file()
    classes = {node.name: node for node in ast.parse(stubs.read_text()).body if isinstance(node, ast.ClassDef)}
    for kind in (pinpool.Pool, pinpool.Buffer):
        declared = {node.name for node in classes[kind.__name__].body if isinstance(node, ast.FunctionDef)}
        has = {name for name in vars(kind) if not name.startswith("_")}
        assert declared - {name for name in declared if name.startswith("_")} == has
        assert all(inspect.getdoc(getattr(kind, name)) for name in has), "each has a docstring"
    new = next(node for node in classes["Pool"].body if getattr(node, "name", None) == "__new__")
    assert [arg.arg for arg in new.args.kwonlyargs] == ["name", "env", *pinpool.Pool.setting_names()]
