"""The signatures that Python declares for native functions are those of native/model.cpp, and so are its structs."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from twostroke.backends.native import library
from twostroke.errors import InvalidRequest

NATIVE = Path(__file__).parents[2] / "native"
FUNCTION = re.compile(r"^(?P<result>[\w ]+?\**) ?\btwostroke_(?P<name>\w+)\((?P<arguments>[^)]*)\)\s*\{", re.MULTILINE)
NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
CALLBACKS = {"Ranks::Exchange": library.EXCHANGE, "Ranks::Tell": library.TELL}


def without_comments(file: str) -> str:
    return re.sub(r"//.*", "", (NATIVE / file).read_text())


def exported() -> dict[str, tuple[str, list[str]]]:
    """The result and the arguments' types of every function in model.cpp, as C++ writes them."""
    found: dict[str, tuple[str, list[str]]] = {}
    for one in FUNCTION.finditer(without_comments("model.cpp")):
        arguments = [" ".join(part.split()) for part in one["arguments"].split(",") if part.strip()]
        types = [re.sub(r"\s*\w+$", "", part) for part in arguments]
        found[one["name"]] = " ".join(one["result"].split()), types
    return found


def fits(declared: Any, written: str) -> bool:
    """Whether a type of ctypes is that of C++; every pointer may be c_void_p, and one to bytes c_char_p."""
    if written == "void":
        return declared is None
    if written in CALLBACKS:
        return declared is CALLBACKS[written]
    if written.endswith("*"):
        return declared is ctypes.c_void_p or (declared is ctypes.c_char_p and "uint8_t" in written)
    return declared is NUMBERS[written]


def test_every_exported_function_is_declared_and_no_other() -> None:
    assert len(exported()) > 30
    assert set(exported()) == set(library.SIGNATURES)


@pytest.mark.parametrize("name", library.SIGNATURES)
def test_types_of_results_and_arguments(name: str) -> None:
    result, arguments = library.SIGNATURES[name]
    written, types = exported()[name]
    assert fits(result, written)
    assert len(arguments) == len(types)
    assert [fits(*pair) for pair in zip(arguments, types, strict=True)] == [True] * len(types)


def fields_of(file: str, struct: str) -> list[tuple[str, str]]:
    """The (type, name) of a struct's fields; a line with a method has parentheses."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", without_comments(file), re.DOTALL)
    assert body is not None
    found: list[tuple[str, str]] = []
    for kind, names in re.findall(r"^  ((?:const )?\w+)\b([^();]*);", body[1], re.MULTILINE):
        found += [(kind + "*" * name.count("*"), name.replace("*", " ").strip()) for name in names.split(",")]
    return found


@pytest.mark.parametrize(
    ("file", "struct", "declared"),
    [
        ("decoder.h", "Config", library.NativeConfig),
        ("decoder.h", "AttentionShape", library.NativeAttention),
        ("batch.h", "Batch", library.NativeBatch),
    ],
)
def test_structs_have_the_same_fields(file: str, struct: str, declared: type[ctypes.Structure]) -> None:
    written = fields_of(file, struct)
    assert [name for _, name in written] == [field[0] for field in declared._fields_]
    assert [fits(field[1], kind) for field, (kind, _) in zip(declared._fields_, written, strict=True)] == [True] * len(
        written
    )


def test_a_library_exports_these_functions_alone() -> None:
    for variant in library.VARIANTS:
        if (path := library.library_path(variant)) is not None:
            listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
            symbols = re.findall(r"\btwostroke_(\w+)$", listed.stdout, re.MULTILINE)
            assert set(symbols) == set(library.SIGNATURES), variant


def test_kernels_of_other_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of a checkout that compiled nothing: their structs may be others."""
    if not (variants := library.variants()):
        pytest.skip("no native backend")
    (tmp_path / "model.cpp").write_text("int other;")
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    library.load.cache_clear()
    try:
        with pytest.raises(InvalidRequest, match=r"was compiled from other sources than those in .*: run `make`"):
            library.load(variants[0])
        library.sources.digest.cache_clear()
        (tmp_path / "model.cpp").unlink()  # as where the package was installed from a wheel
        assert library.load(variants[0])
    finally:
        library.sources.digest.cache_clear()
        library.load.cache_clear()
