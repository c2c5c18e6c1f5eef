"""Tries built wheels as a stranger: a bare environment, no compiler on the path, the first question.

The manylinux wheel must answer with its kernels. The wheel without kernels must say in one line what it lacks, since
PyTorch is not installed either. The one for ARM answers under emulation, where qemu-user is installed: on a
processor with i8mm, and on one without.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ON_ARM = {"neoverse-n1": "native-neon", "max": "native-i8mm"}  # processors of qemu, and the kernels that they choose
ASK = ["generate", "--model", "smollm2-135m", "What is the capital of Japan?"]


def answer(wheel: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Install a wheel and ask. Only the environment's own programs are on the path."""
    place = scratch / wheel.stem
    venv.create(place, with_pip=True)
    home = {"TWOSTROKE_HOME": value} if (value := os.environ.get("TWOSTROKE_HOME")) else {}
    alone = {"PATH": str(place / "bin"), "HOME": os.environ["HOME"], **home}
    alone |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", str(wheel)]
    subprocess.run(pip, env=alone, cwd=scratch, check=True)
    command = [str(place / "bin" / "twostroke"), *ASK]
    return subprocess.run(command, env=alone, cwd=scratch, capture_output=True, text=True, check=False)


def install_for_arm(wheel: Path, root: Path) -> None:
    """Make a folder with Python for arm64 and the wheel."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # its pip
    script = [Path(__file__).with_name("arm_root.sh"), root, wheel]
    subprocess.run(script, env=os.environ | {"PATH": path}, check=True, stdout=subprocess.DEVNULL)


def emulated_answer(root: Path, processor: str) -> subprocess.CompletedProcess[str]:
    """The same in that folder, under emulation."""
    python = ["qemu-aarch64", "-cpu", processor, "-L", str(root), str(root / "usr/bin/python3.11")]
    environment = os.environ | {"PYTHONPATH": str(root / "site")}
    command = [*python, "-m", "twostroke", *ASK]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)


def main(folder: Path) -> None:
    with TemporaryDirectory() as name:
        scratch = Path(name)
        (linux,), (pure,) = (list(folder.resolve().glob(f"*-{tag}.whl")) for tag in ("manylinux*x86_64", "any"))
        whole = answer(linux, scratch)
        print(linux.name, whole.stdout, whole.stderr, sep="\n")
        if whole.returncode or "Tokyo" not in whole.stdout or "native-" not in whole.stderr:
            sys.exit(f"error: {linux.name} does not answer with its kernels")
        bare = answer(pure, scratch)
        print(pure.name, bare.stdout, bare.stderr, sep="\n")
        if bare.returncode != 1 or "twostroke[torch]" not in bare.stderr or bare.stderr.count("\n") != 1:
            sys.exit(f"error: {pure.name} does not say in one line what it lacks")
        for arm in folder.resolve().glob("*-manylinux*aarch64.whl") if shutil.which("qemu-aarch64") else ():
            install_for_arm(arm, scratch / "arm")
            for processor, kernels in ON_ARM.items():
                emulated = emulated_answer(scratch / "arm", processor)
                print(arm.name, emulated.stdout, emulated.stderr, sep="\n")
                if emulated.returncode or "Tokyo" not in emulated.stdout or kernels not in emulated.stderr:
                    sys.exit(f"error: {arm.name} does not answer with {kernels}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
