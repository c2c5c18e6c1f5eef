"""Finds techniques by name: those of this package, of installed packages, and of a researcher's own files.

A class registers itself when its file is imported. A package from elsewhere names its modules in its pyproject.toml:

    [project.entry-points."twostroke.methods"]
    mine = "my_package.my_module"
"""

import dataclasses
import hashlib
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.methods.method import METHODS, Method

GROUP = "twostroke.methods"  # of entry points
loaded_sources: set[str] = set()  # sources that were imported


def method(name: str, **parameters: Any) -> Method:
    """A method by name. Raises InvalidRequest naming an unknown method or parameter."""
    return method_of(name, parameters)


def method_of(name: str, parameters: Mapping[str, Any]) -> Method:
    """The same of parameters that a user has written, among which `name` may be."""
    if name not in METHODS:
        load_installed()
    if name not in METHODS:
        raise InvalidRequest(f"there is no method {name!r:.60}; there are {', '.join(sorted(METHODS))}")
    known = {field.name: field for field in dataclasses.fields(METHODS[name])}
    if unknown := [one for one in parameters if one not in known]:
        there = ", ".join(known) or "none"
        raise InvalidRequest(f"method {name} has no parameter {unknown[0]!r:.60}; it has {there}")
    return METHODS[name](**parameters)


def load_installed() -> None:
    """Import the techniques of installed packages, once. Raises InvalidRequest for one that cannot be imported."""
    for point in entry_points(group=GROUP):
        _import_from(f"entry point {point.value}", point.load)


def load_module(name: str) -> None:
    """Import a file (`my/technique.py`) or a module (`my_package.technique`) that has techniques, once.

    Raises InvalidRequest, one line: it is not there, it fails to import, it has no technique, or a name is taken.
    """
    is_file = name.endswith(".py") or "/" in name
    path = Path(name).expanduser().resolve()
    if is_file and not path.is_file():
        raise InvalidRequest(f"there is no file {name} to take methods from")
    _import_from(str(path) if is_file else name, lambda: _import_file(path) if is_file else import_module(name))


def _import_from(source: str, load: Callable[[], Any]) -> None:
    """Import one source of techniques. If that fails, none of its techniques is registered."""
    if source in loaded_sources:
        return
    before = dict(METHODS)
    try:
        load()
        new = METHODS.keys() - before.keys()
        for name in new:
            METHODS[name]()  # a field without a default, or no program: it would fail in a request
    except InvalidRequest as error:
        _restore(before)
        raise InvalidRequest(f"{source}: {error}") from None
    except (Exception, SystemExit) as error:
        _restore(before)
        raise InvalidRequest(f"{source} cannot be used: {_reason(error)}") from None
    loaded_sources.add(source)
    if not new and not any(technique.__module__ == source for technique in METHODS.values()):
        raise InvalidRequest(f"{source} has no technique: write a class X(Method, name=...)")


def _restore(known: dict[str, type[Method]]) -> None:
    METHODS.clear()
    METHODS.update(known)


def _import_file(path: Path) -> None:
    # Two files may have the same name. A dataclass looks up its module by name, so the module must be registered.
    name = f"twostroke_method_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    loader = SourceFileLoader(name, str(path))  # whatever the file's name ends with
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _reason(error: BaseException) -> str:
    """The error and its line, in one line."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame.lineno for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f"line {inside[-1]}: " if inside else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"
