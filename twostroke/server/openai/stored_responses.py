"""Responses that a client may go on from or read again: kept in memory, the latest of them."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from twostroke.server.errors import ApiError
from twostroke.server.tenants.tenant import current_tenant


@dataclass(frozen=True)
class StoredResponse:
    """A response, and every item that led to it."""

    response: dict[str, Any]  # the whole response
    items: Sequence[dict[str, Any]]  # those of earlier responses and of its own input, in order
    size: int  # bytes of all of it as JSON. Items of an earlier response that is kept too are counted again.
    owner: str = ""  # the space of the tenant that made it; only calls of the same space find it

    @property
    def history(self) -> list[dict[str, Any]]:
        """The items that come before the input of a response that goes on from this one."""
        return [*self.items, *self.response["output"]]


class StoredResponses:
    """The latest responses. At most `most` are kept, and `most_bytes`; the oldest go first, whosever they are.

    Every method belongs to the event loop's thread.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._records: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0

    def put(self, response: dict[str, Any], before: "StoredResponse | None", items: Sequence[dict[str, Any]]) -> None:
        """Keep a response: `before` is the one it went on from, `items` are its own input."""
        size = len(to_json(response)) + len(to_json(items)) + (0 if before is None else before.size)
        history = [] if before is None else before.history
        self._records[response["id"]] = StoredResponse(response, [*history, *items], size, current_tenant().space)
        self._size += size
        while len(self._records) > self._most or self._size > self._most_bytes:
            self._size -= self._records.popitem(last=False)[1].size

    def get(self, id: str) -> StoredResponse:
        """Raises ApiError (404) for one that is not kept."""
        record = self._records.get(id)
        if record is None or record.owner != current_tenant().space:
            message = f"there is no response {id!r:.80}: it was not stored, was deleted, or is too old"
            raise ApiError(404, message, code="response_not_found")
        return record

    def previous(self, id: str) -> StoredResponse:
        """The same for a response to go on from: a wrong field (400)."""
        try:
            return self.get(id)
        except ApiError as error:
            param, code = "previous_response_id", "previous_response_not_found"
            raise ApiError(400, error.message, param=param, code=code) from None

    def delete(self, id: str) -> None:
        """Raises ApiError (404) for one that is not kept."""
        self._size -= self.get(id).size
        del self._records[id]

    def item(self, id: str) -> dict[str, Any]:
        """An item of any response that is kept, by its id. Raises ApiError (404)."""
        space = current_tenant().space
        for record in reversed([one for one in self._records.values() if one.owner == space]):
            for item in reversed(record.history):
                if item.get("id") == id:
                    return item
        raise ApiError(404, f"there is no item {id!r:.80} in the responses that are stored", param="input")
