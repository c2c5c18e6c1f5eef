"""The model hub: a check whether it answers, single files, and whole models."""

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from twostroke.errors import CheckpointError, FetchError, UnknownModel
from twostroke.models.checkpoints.gguf.split_files import sets
from twostroke.models.checkpoints.progress import Progress, one_line, watched

HUB_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "README.md",
             "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
             "chat_template*", "additional_chat_templates/*.jinja", "modules.json", "*_Pooling/config.json",
             "*_Dense/config.json", "*_Dense/model.safetensors",
             "config_sentence_transformers.json")  # fmt: skip
HUB_TIMEOUT_S = 2.0  # for models that packages have as well
LONG_HUB_TIMEOUT_S = 10.0  # for models that only the hub has


def hub_trouble(patience_s: float) -> str | None:
    """Say why the hub cannot be reached; None if it answers in time.

    This sends one request. The hub client would retry for half a minute.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    found = [f"the hub does not answer within {patience_s:g} s"]

    def ask() -> None:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=patience_s).status_code
            answer = None if status < 500 else f"the hub answers with status {status}"  # a mirror may lack this page
        except Exception as error:  # any error of the client's HTTP library, or offline mode
            answer = f"the hub cannot be reached: {one_line(str(error)) or type(error).__name__}"
        found.append(answer or "")

    # In a thread, as a name lookup is not covered by the request's time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience_s)
    return found[-1] or None


def hub_file(repository: str, file: str, into: Path, size: int, report: Progress) -> Path:
    """Download one file into a folder. Raises FetchError if the hub does not answer in time or refuses."""
    if (reason := hub_trouble(HUB_TIMEOUT_S)) is not None:
        raise FetchError(reason)
    from huggingface_hub import hf_hub_download  # slow to import

    try:
        with watched(into, lambda done: report("downloading from the hub", done, size)), _no_bars():
            return Path(hf_hub_download(repository, file, local_dir=into))
    except Exception as error:  # any error of the hub client's HTTP library
        raise FetchError(one_line(str(error)) or type(error).__name__) from None


def hub_snapshot(repository: str, file: str | None = None, progress: Progress | None = None) -> Path:
    """A model of the hub, in the hub client's cache: a directory with config.json and safetensors, or a GGUF file.

    Safetensors are preferred; `file` must name one of several GGUF models: a file, or a word of its name ("Q4_K_M").
    Of a model in several files all are fetched, and the first is returned. Cached models are available offline.
    Raises UnknownModel if there is no such repository, FetchError if the download fails, CheckpointError if the
    repository has no supported format.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    report = progress or (lambda stage, done, total: None)
    reason = hub_trouble(LONG_HUB_TIMEOUT_S)
    try:
        if reason is not None:
            if file is not None and file.endswith(".gguf"):
                return Path(hf_hub_download(repository, file, local_files_only=True))
            folder = Path(snapshot_download(repository, local_files_only=True))
            if file is None:
                return folder
            cached = {str(one.relative_to(folder)) for one in folder.rglob("*.gguf")}
            return folder / _wanted(repository, file, cached)[0]
        siblings = HfApi().model_info(repository, files_metadata=True).siblings or []
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in siblings}
        wanted = _wanted(repository, file, set(sizes))
        total = sum(sizes.get(name, 0) for name in wanted)
        cache = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
        with watched(cache, lambda size: report("downloading from the hub", min(size, total), total)), _no_bars():
            if wanted == [file] or wanted[0].endswith(".gguf"):
                paths = [Path(hf_hub_download(repository, name)) for name in wanted]
                return paths[0]
            return Path(snapshot_download(repository, allow_patterns=wanted))
    except CheckpointError:
        raise
    except GatedRepoError:
        raise FetchError(f"{repository}: gated; accept its terms on the hub, then set HF_TOKEN") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UnknownModel(f"{repository}: neither a local path nor a public model on the hub") from None
    except EntryNotFoundError:
        what = f"{repository}:{file}" if file else repository
        if reason is None:
            raise UnknownModel(f"{what}: there is no such file in that repository") from None
        raise FetchError(f"{what}: not a local path, not cached, and not available: {reason}") from None
    except Exception as error:  # any error of the hub client's HTTP library
        raise FetchError(f"{repository}: not fetched from the hub: {one_line(str(error))}; try again") from None


def _wanted(repository: str, file: str | None, files: set[str]) -> list[str]:
    """The files to fetch: all parts of one GGUF model, or a directory's."""
    found = sets(files)
    if file is not None:
        for parts in found.values():
            if file in parts:
                return parts
        if file.endswith(".gguf"):
            return [file]  # the hub's client says that it is missing
        found = {first: parts for first, parts in found.items() if _has_word(first, file)}
        if not found:
            raise UnknownModel(f"{repository}: no GGUF file there has {file} in its name")
    elif "config.json" in files and any(re.fullmatch(r"model.*\.safetensors", name) for name in files):
        return sorted(name for name in files if any(_matches(name, one) for one in HUB_FILES))
    if len(found) == 1:
        (parts,) = found.values()
        return parts
    if found:
        shown = ", ".join(list(found)[:12]) + (", ..." if len(found) > 12 else "")
        raise CheckpointError(f"{repository}: several GGUF models; name one as {repository}:FILE of {shown}")
    raise CheckpointError(f"{repository}: holds neither safetensors with a config.json nor a GGUF file")


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


@contextmanager
def _no_bars() -> Generator[None]:
    """Turns the hub client's progress bars off: ours are drawn from `Progress`."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
