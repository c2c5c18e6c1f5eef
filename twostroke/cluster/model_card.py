"""The directory by which Dynamo's front end knows a model: its config, its tokenizer, its chat template.

It is written from what is open, so it is the same for GGUF files and directories, and for every worker of a model. A
worker shares the lock of its card as long as it lives, however it ends. So whoever gets that lock alone may delete the
card, and each worker does so at its start.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from twostroke.api.llm import LLM
from twostroke.engine.options import OWN_DRAFTS
from twostroke.errors import InvalidRequest
from twostroke.models.families import BY_NAME
from twostroke.system.home import home

LOCK = "lock"
_held: dict[Path, int] = {}  # open locks of this process, by card


def write_card(llm: LLM, folder: Path | None = None) -> Path:
    """The model's directory, written below `folder` (that of this user's data) unless it is there.

    It stays until this process ends. Cards of workers that have ended are deleted.

    Raises InvalidRequest for a model without a chat template, which the front end cannot serve.
    """
    if llm.tokenizer.chat_template is None:
        raise InvalidRequest(f"{llm.name} has no chat template, and Dynamo's front end serves no model without one")
    folder = folder or home() / "cluster" / "cards"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / "card"
        made.mkdir()
        llm.tokenizer.save(made)
        (made / "config.json").write_text(json.dumps(_config(llm), indent=2) + "\n")
        digest = hashlib.blake2b(digest_size=8)
        for file in sorted(made.iterdir()):
            digest.update(file.name.encode() + b"\n" + file.read_bytes())
        card = folder / digest.hexdigest()
        if not card.is_dir():
            try:
                os.rename(made, card)
            except OSError:  # another worker was sooner
                if not card.is_dir():
                    raise
    if not _hold(card):
        return write_card(llm, folder)
    _sweep(folder)
    return card


def _hold(card: Path) -> bool:
    """Share the lock of a card until this process ends. Returns False if another worker has just deleted the card."""
    if card in _held:
        return card.is_dir()
    try:
        lock = os.open(card / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return False
    fcntl.flock(lock, fcntl.LOCK_SH)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.stat(card / LOCK)):
            _held[card] = lock
            return True
    os.close(lock)
    return False


def _sweep(folder: Path) -> None:
    """Delete the cards that no process holds. One without a lock stays: a worker of an older version may use it."""
    for path in folder.glob(f"*/{LOCK}"):
        with suppress(OSError):  # a worker holds it, or another one deletes it
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(lock), os.stat(path)):
                    continue  # another worker has deleted that card, and a third has written it anew
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    os.rename(path.parent, Path(temporary) / "card")  # at once: nobody finds a part of it
            finally:
                os.close(lock)


def identity(llm: LLM) -> str:
    """Hex digest of all that an answer's tokens depend on: weights, kernels' variant, KV dtype, page size, companions.

    A draft is left out: it only guesses tokens.
    """
    parts = sorted((role, model.id) for role, model in llm.engine.models.items() if role not in ("draft", *OWN_DRAFTS))
    return hashlib.blake2b(repr((parts, llm.max_model_len)).encode(), digest_size=16).hexdigest()


def _config(llm: LLM) -> dict[str, object]:
    """What the front end reads of config.json, and the identity: it refuses workers with another card than the first.

    It compares prefill workers with each other, and decode workers with each other: a student has a card of its own.
    """
    config, family = llm.config, BY_NAME[llm.config.architecture]
    return {
        "architectures": [family.transformers],
        "model_type": family.model_types[0],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "bos_token_id": llm.tokenizer.bos_id,
        "eos_token_id": sorted(llm.tokenizer.eos_ids),
        "twostroke_identity": identity(llm),
    }
