"""Builds the container image, and can start it and ask it a question: python tools/image.py [--debian] [--ask].

Wheels of the package and of what it needs are collected into dist/image with this interpreter's pip, so the image
itself needs neither a compiler nor an index. The base is an image with the same minor version of Python; with
`--debian` it is made of Debian's packages by mmdebstrap, which needs no registry of images.

It uses buildah, which needs no daemon. With docker: run it with `--wheels-only`, then
`docker build --file deploy/Containerfile --tag twostroke .`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "dist" / "image"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
EXTRAS = "serve,redis,otel"
OLDER = "async-timeout"  # redis needs it before Python 3.11.3, which Debian's may be while ours is not
DEBIAN = "python3,python3-venv,ca-certificates,libstdc++6"
START_S = 120
QUESTION = "What is the capital of France?"
# chroot and vfs work without a daemon, without user namespaces and inside of another container.
BUILDAH = ["buildah", "--storage-driver", "vfs"]


def run(*command: str | Path, **options: object) -> str:
    """What a command prints; exit with its last lines if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}: {(done.stderr or done.stdout)[-3000:]}")
    return done.stdout.strip()


def collect_wheels() -> None:
    shutil.rmtree(WHEELS, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", WHEELS, f"{ROOT}[{EXTRAS}]", OLDER)


def debian_base(release: str) -> str:
    """The name of a base image made of Debian's packages."""
    with TemporaryDirectory() as scratch:
        archive = Path(scratch) / "base.tar"
        run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={DEBIAN}", release, archive)
        recipe = Path(scratch) / "Containerfile"
        recipe.write_text("FROM scratch\nADD base.tar /\n")
        run(*BUILDAH, "build", "--isolation", "chroot", "--tag", "twostroke-base", "--file", recipe, scratch)
    return "localhost/twostroke-base"


def build(base: str, tag: str) -> None:
    recipe = ROOT / "deploy" / "Containerfile"
    options = ["--format", "docker", "--isolation", "chroot", "--build-arg", f"BASE={base}", "--tag", tag]
    run(*BUILDAH, "build", *options, "--file", recipe, ROOT)


def ask(tag: str, model: str, home: Path) -> None:
    """Start the image's server as its own user, wait until it is ready, ask it, check its health, and end it."""
    container = run(*BUILDAH, "from", tag)
    try:
        place = "/var/lib/twostroke"
        command = ["twostroke", "serve", "--host", "127.0.0.1", "--port", "0", "--model", model, "--log-format", "json"]
        volume = f"{home}:{place}:ro"
        process = subprocess.Popen(
            [*BUILDAH, "run", "--isolation", "chroot", "--volume", volume, container, "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            print(answer(process))
        finally:
            process.terminate()
            process.wait(START_S)
    finally:
        run(*BUILDAH, "rm", container)


def answer(process: "subprocess.Popen[str]") -> str:
    """What the server in the process answers; exit if it does not become ready."""
    assert process.stdout is not None
    url, lines, end = None, [], time.monotonic() + START_S
    for line in process.stdout:
        lines.append(line)
        if "http://" in line:
            url = "http://" + line.split("http://")[1].split("/")[0].split('"')[0].split()[0]
            break
        if time.monotonic() > end:
            break
    if url is None:
        sys.exit(f"error: the server did not say where it listens:\n{''.join(lines[-20:])}")
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health/ready", timeout=5)
            break
        except OSError:
            time.sleep(0.2)
    else:
        sys.exit(f"error: {url} did not become ready")
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default=f"docker.io/library/python:{PYTHON}-slim", help="an image with Python")
    parser.add_argument("--debian", metavar="RELEASE", help="make the base of this release's packages instead")
    parser.add_argument("--tag", default="twostroke")
    parser.add_argument("--wheels-only", action="store_true", help="collect the wheels, and build nothing")
    parser.add_argument("--no-wheels", action="store_true", help="use the wheels that are in dist/image")
    parser.add_argument("--ask", metavar="MODEL", help="start the image and ask this model, which is fetched before")
    options = parser.parse_args()
    if not options.no_wheels:
        collect_wheels()
    if options.wheels_only:
        return
    build(debian_base(options.debian) if options.debian else options.base, options.tag)
    if options.ask:
        run(sys.executable, "-m", "twostroke", "models", "pull", options.ask)
        from twostroke.system.home import home

        ask(options.tag, options.ask, home())


if __name__ == "__main__":
    main()
