"""Descriptions of contexts in files beside the disk tier, one file each: what they are outlives the server.

The KV is not in them: its pages are in the disk tier, as far as that has kept them, and the rest is computed again from
the description. Servers of one model that share a directory write files of their own contexts alone. A seal with the
user's key tells a file that was damaged or that somebody else has written.
"""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twostroke.api.llm import LLM
from twostroke.server.contexts.context import Context
from twostroke.server.contexts.schemas import MAX_TTL_S, ContextBody, ContextName
from twostroke.system.atomic_files import atomic_replace
from twostroke.system.user_key import seal, sealed

log = logging.getLogger(__name__)

FORMAT = "twostroke-context-2"
PURPOSE = b"twostroke-contxt"  # of its seal


class _Description(BaseModel):
    """What a file has. `expires` is None for a context that is pinned."""

    model_config = ConfigDict(strict=True, extra="forbid")
    format: str
    name: ContextName
    body: dict[str, Any]
    tokens: int
    created: float
    expires: float | None
    parent: str | None
    answer: list[int]
    owner: str = Field("", pattern=r"[\w.-]{0,64}")
    seal: str | None = None


class SavedContexts:
    """The files of one model's contexts; of none without a directory. Failures are logged, and cost the file alone."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def of(cls, llm: LLM) -> "SavedContexts":
        """Beside the disk tier, if there is one. Tokens and KV are those of one model and its arithmetic."""
        disk = llm.tiers.disk
        return cls(None if disk is None else Path(disk.where) / "contexts" / llm.model.id[:32])

    def save(self, context: Context) -> None:
        """Write a context's file, in place of an earlier one."""
        if self._directory is None:
            return
        body = context.body.model_dump(mode="json", exclude_defaults=True)
        described = _Description(
            format=FORMAT, name=context.name, body=body, tokens=context.tokens, created=context.created,
            expires=None if context.expires == math.inf else context.expires,
            parent=context.parent, answer=list(context.answer), owner=context.owner,
        )  # fmt: skip
        own = seal(self._content(described), PURPOSE)
        if own is None:
            log.warning("context %s will not outlive this server: there is no key to seal it", context.name)
            return
        described = described.model_copy(update={"seal": own})
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_replace(self._path(context.owner, context.name)) as out:
                out.write(described.model_dump_json().encode())
        except OSError as error:
            log.warning("context %s will not outlive this server: %s", context.name, error)

    def delete(self, owner: str, name: str) -> None:
        """Delete a context's file, if it has one."""
        if self._directory is not None:
            try:
                self._path(owner, name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("context %s will be there again after a restart: %s", name, error)

    def load(self) -> list[Context]:
        """All contexts that live, oldest first. Files of those that have expired are deleted."""
        found = [] if self._directory is None else [self._read(path) for path in self._directory.glob("*.json")]
        living = list[Context]()
        for context in sorted((one for one in found if one is not None), key=lambda one: one.created):
            if context.expired:
                self.delete(context.owner, context.name)
            else:
                living.append(context)
        return living

    def _read(self, path: Path) -> Context | None:
        try:
            one = _Description.model_validate_json(path.read_bytes())
            body = ContextBody.model_validate_json(json.dumps(one.body))
            if one.format != FORMAT or path != self._path(one.owner, one.name):
                raise ValueError("another form")
            if one.seal is None or not sealed(self._content(one), PURPOSE, one.seal):
                raise ValueError("it is damaged, or sealed by another key")
        except (OSError, ValueError, ValidationError) as error:
            log.warning("%s is no saved context, and is left alone: %s", path, str(error).splitlines()[0])
            return None
        expires = math.inf if one.expires is None else min(one.expires, time.time() + MAX_TTL_S)
        size = len(body.model_dump_json())
        return Context(
            one.name, body, one.tokens, None, size, one.created, expires, one.parent, tuple(one.answer), one.owner
        )  # fmt: skip

    def _content(self, one: _Description) -> bytes:
        """What is sealed: the model, and all that the file has but its seal."""
        assert self._directory is not None
        hidden = {"seal"} if one.owner else {"seal", "owner"}  # older versions do not know owners
        return self._directory.name.encode() + one.model_dump_json(exclude=hidden).encode()

    def _path(self, owner: str, name: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{owner}{'@' if owner else ''}{name}.json"
