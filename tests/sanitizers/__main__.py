"""Compile the AVX2 kernels with sanitizers, and run tests of the native backend with them: make test-sanitizers.

AddressSanitizer and UndefinedBehaviorSanitizer watch the kernels, ThreadSanitizer the team of threads and a rank's own
threads (not what another process writes to shared memory). Python itself is not instrumented: the sanitizer's library
is loaded before it, and `plugin.py` lets the tests find the kernels. An error ends the process, so a test fails.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIANT = "avx2"  # every processor has it
TESTS = ROOT / "tests" / "backends"
# sanitizer: (flags, environment, tests)
SANITIZERS: dict[str, tuple[list[str], dict[str, str], list[str]]] = {
    "asan": (
        # Blocks of GGUF files have float16 at odd addresses, which x86 reads.
        ["-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined"],
        # Python leaks on purpose at its end.
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        [
            "test_native.py",
            "test_native_attention.py",
            "test_native_experts.py",
            "test_sketch.py",
            "../engine/test_states.py",
        ],
    ),
    "tsan": (
        ["-fsanitize=thread", "-Wno-tsan"],  # the warning: it does not model fences
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},
        ["test_team.py", "ranks/test_native.py"],
    ),
}


def compiled(sanitizer: str) -> Path:
    """Compile the kernels with a sanitizer."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    built = ROOT / "build" / "sanitizers" / f"{sanitizer}.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    flags = [*setup["FLAGS"], "-O1", "-g1", *setup["VARIANTS"][VARIANT], *SANITIZERS[sanitizer][0]]
    source = ROOT / "native" / f"{VARIANT}.cpp"
    subprocess.run(["g++", *flags, "-fPIC", "-shared", source, "-o", built], check=True)
    return built


def loaded_first(sanitizer: str) -> str:
    """The libraries that must be in a process before Python is: the sanitizer's, and that of C++ which it wraps."""
    names = (f"lib{sanitizer}.so", "libstdc++.so.6")
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in names
    ]
    return " ".join(one.stdout.strip() for one in found)


def run(sanitizer: str, arguments: list[str]) -> int:
    """Run the tests of a sanitizer; the exit status of pytest."""
    _, environment, tests = SANITIZERS[sanitizer]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "tests.sanitizers.plugin"]
    command += ["-k", f"({VARIANT} or ranks) and not uneven", *(str(TESTS / test) for test in tests), *arguments]
    environment = os.environ | environment | {"SANITIZED_KERNELS": f"{VARIANT}={compiled(sanitizer)}"}
    environment["LD_PRELOAD"] = loaded_first(sanitizer)
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if name in SANITIZERS] or list(SANITIZERS)
    rest = [argument for argument in sys.argv[1:] if argument not in SANITIZERS]
    sys.exit(max(run(sanitizer, rest) for sanitizer in chosen))
