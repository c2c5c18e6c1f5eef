"""Products of our ARM kernels and of llama.cpp's, predicted by counting instructions: no ARM processor is needed.

    python -m benchmarks.predicted_arm

A product of one panel (16 outputs) with one row, as in decode, and with 128, as in a prefill, runs under emulation.
Every instruction that it executes goes to llvm-mca, which says how many cycles a Neoverse core takes for them if all
data is in its L1 cache and every branch is foreseen. So it is a bound of the arithmetic, for both engines alike: it
knows nothing of memory, of attention, or of threads. llama.cpp's source is that of its Python package, which pip
fetches.

Wants g++-aarch64-linux-gnu (or a compiler in CXX), qemu-user, and LLVM 19 or newer (Debian: llvm-22).
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results_file import save
from benchmarks.terminal import command_line, head, row, say

DEFINITIONS = {
    "macs_per_cycle": "multiplications of a weight and an activation for each cycle of a core, by llvm-mca",
    "instructions_per_1000_macs": "as executed, counted under emulation",
    "decode": "one row; prefill: 128 rows, whose panel is unpacked once",
}
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks/native/arm_products.cpp"
OUTPUTS, COLUMNS = 16, 1024
STROKES = {"decode": 1, "prefill": 128}
FORMATS = ("q8_0", "q4_0", "q4_K")
TRACED = re.compile(r"^Trace \d+: \S+ \[[0-9a-f]+/([0-9a-f]+)/", re.MULTILINE)
# Its target need not be near: the text has no addresses.
JUMP = re.compile(r"^((?:b\.\w+|cbn?z|tbn?z)\s.*)0x[0-9a-f]+$")
LISTED = re.compile(r"^\s*([0-9a-f]+):\s+(.*?)(?:\s*<.*|\s*//.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Core:
    """A core that llvm-mca knows, and what llama.cpp's build for it has (its ggml/src/CMakeLists.txt)."""

    seen_in: str
    march: str
    i8mm: bool
    sve_bytes: int = 0

    def peer_product(self, kernel: str) -> str:
        """The name of llama.cpp's packing of a format, as `ggml_repack_get_optimal_repack_type` chooses it."""
        eights, wide = self.i8mm, kernel == "q4_K" or (kernel == "q4_0" and self.sve_bytes == 32)
        return f"{kernel}_{8 if wide else 4}x{8 if eights else 4}_q8_{'K' if kernel == 'q4_K' else '0'}"


CORES = {
    "neoverse-n1": Core("Graviton 2, Ampere Altra", "armv8.2-a+dotprod+fp16", i8mm=False),
    "neoverse-v1": Core("Graviton 3", "armv8.6-a+dotprod+fp16+i8mm+sve", i8mm=True, sve_bytes=32),
    "neoverse-v2": Core("Graviton 4, Grace", "armv8.6-a+dotprod+fp16+i8mm+sve2", i8mm=True, sve_bytes=16),
}


def ran(*command: str | Path) -> str:
    """What a program writes. Ends ours with its words if it fails."""
    try:
        return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        sys.exit(f"error: {command[0]} is missing: see the first lines of {__file__}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr or f"error: {shlex.join(map(str, command))} failed")


class Counter:
    """Compiles programs, and counts what they execute."""

    def __init__(self, llvm: str, folder: Path) -> None:
        self._llvm, self._folder, self._built = llvm, folder, dict[tuple[str, ...], Path]()
        self._compiler = shlex.split(os.environ.get("CXX", "aarch64-linux-gnu-g++"))
        self._peer = folder

    def fetch_peer(self, version: str) -> str:
        """llama.cpp's kernels, of a version of llama-cpp-python; returns it."""
        wanted = f"llama-cpp-python{version and '=='}{version}"
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:")
        ran(*pip, "--dest", self._folder, wanted)
        archive = next(self._folder.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(self._folder, filter="data")
        self._peer = next(self._folder.glob("llama_cpp_python-*/vendor/llama.cpp/ggml"))
        return archive.name.removesuffix(".tar.gz")

    def ours(self, variant: str) -> Path:
        """Our products in a variant of setup.py."""
        setup = runpy.run_path(str(ROOT / "setup.py"))
        return self._compiled(*setup["FLAGS"], *setup["ON_ARM"][variant], f"-I{ROOT / 'native'}")

    def peers(self, core: Core, kernel: str) -> Path:
        """llama.cpp's product of a format, as its build for a core has it."""
        name, places = core.peer_product(kernel), ("include", "src", "src/ggml-cpu")
        return self._compiled(
            "-O3", "-std=c++17", "-DNDEBUG", f"-march={core.march}", "-DLLAMA_CPP", f"-DSVE_BYTES={core.sve_bytes}",
            f"-DONE_ROW=ggml_gemv_{name}", f"-DMANY_ROWS=ggml_gemm_{name}", "-Wl,--unresolved-symbols=ignore-all",
            *(f"-I{self._peer / place}" for place in places), str(self._peer / "src/ggml-cpu/arch/arm/repack.cpp"),
        )  # fmt: skip

    def _compiled(self, *flags: str) -> Path:
        if flags not in self._built:
            made = self._built[flags] = self._folder / f"program-{len(self._built)}"
            ran(*self._compiler, *flags, "-w", "-static", SOURCE, "-o", made)
        return self._built[flags]

    def count(self, program: Path, core: str, kernel: str, stroke: str) -> dict[str, float]:
        """What a product takes on a core: the numbers of DEFINITIONS."""
        rows, model = STROKES[stroke], CORES[core]
        cpu = f"max,sve-max-vq={model.sve_bytes // 16}" if model.sve_bytes else "max,sve=off"
        log, code = self._folder / "trace", self._folder / "executed.s"
        emulator = ("qemu-aarch64", "-cpu", cpu, "-singlestep", "-d", "exec,nochain", "-D", log)
        ran(*emulator, program, kernel, str(rows), str(COLUMNS))
        code.write_text("\n".join(self._executed(program, log.read_text())) + "\n")
        views = ("-resource-pressure=false", "-instruction-info=false", "-iterations=1", "-call-latency=1")
        said = ran(self._tool("mca"), "-mtriple=aarch64", f"-mcpu={core}", "-mattr=+i8mm", *views, code)
        macs, found = OUTPUTS * COLUMNS * rows, dict(re.findall(r"^([A-Z][A-Za-z ]+):\s+([\d.]+)", said, re.MULTILINE))
        return {
            "macs_per_cycle": round(macs / float(found["Total Cycles"]), 2),
            "instructions_per_1000_macs": round(1000 * float(found["Instructions"]) / macs, 1),
        }

    def _tool(self, name: str) -> str:
        return f"llvm-{name}{self._llvm}"

    def _executed(self, program: Path, log: str) -> Iterator[str]:
        """The instructions between the calls of begin() and finish(), in order."""
        names = {name: int(at, 16) for at, _, name in map(str.split, ran(self._tool("nm"), program).splitlines())}
        begins, ends = names["_Z5beginv"], names["_Z6finishv"]
        listing = ran(self._tool("objdump"), "-d", "--no-show-raw-insn", "--mattr=+all", program)
        text = {int(at, 16): JUMP.sub(r"\g<1>0", instruction) for at, instruction in LISTED.findall(listing)}
        places = [int(at, 16) for at in TRACED.findall(log)]
        for place in places[places.index(begins) : places.index(ends)]:
            yield text[place]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--llvm", default="-22", help="what follows the names of LLVM's tools")
    parser.add_argument("--llama-cpp-python", default="", help="its version, instead of the newest")
    options = parser.parse_args()
    facts = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        counter = Counter(options.llvm, Path(folder))
        peer = counter.fetch_peer(options.llama_cpp_python)
        variants = list[str](runpy.run_path(str(ROOT / "setup.py"))["ON_ARM"])
        decoding = ("decode, MACs/cycle", "instructions/1,000 MACs")
        print(head(["core", "weights", "kernels", *decoding, "prefill", "instructions"], 3))
        for core, kernel in ((core, kernel) for core in CORES for kernel in FORMATS):
            programs = {f"native-{one}": counter.ours(one) for one in variants if CORES[core].i8mm or one == "neon"}
            programs[f"llama.cpp {CORES[core].peer_product(kernel)}"] = counter.peers(CORES[core], kernel)
            for name, program in programs.items():
                found = {stroke: counter.count(program, core, kernel, stroke) for stroke in STROKES}
                facts.append({"core": core, "weights": kernel, "kernels": name} | found)
                cells = [f"{value:.1f}" for one in found.values() for value in one.values()]
                print(row([core, kernel, name, *cells]), flush=True)
    say(save("predicted-arm", DEFINITIONS, peer, {"rows": facts}))


if __name__ == "__main__":
    main()
