"""An environment with NVIDIA Dynamo and NIXL, which sees the packages of the one that runs this.

Dynamo's packages are not installed beside ours, as uvloop comes with them, which would change how our own server runs.
"""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

DYNAMO = "ai-dynamo==1.6.1"  # without its requirements, of which one downloads from elsewhere; NIXL's have torch


def main(directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--copies", str(directory)], check=True)
    python = directory / "bin" / "python"
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(paths)]
    own = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], stdout=-1, text=True)
    (Path(own.stdout.strip()) / "twostroke_packages.pth").write_text("\n".join(lines) + "\n")
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    wanted = [one for one in extras["dynamo"] if not one.startswith("twostroke")]
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *wanted], check=True)
    subprocess.run([*pip, "--no-deps", DYNAMO, *extras["nixl"]], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
