"""All that Dynamo's KV-aware router is told of one model: its prefix index, and the pages on disk below it."""

from twostroke.api.llm import LLM
from twostroke.cluster.disk_events import DiskEvents
from twostroke.cluster.index_events import IndexEvents
from twostroke.kv.tiers.disk import DiskStore
from twostroke.system.extras import requires_extra


class RouterEvents:
    """From now on, until `close`.

    Attributes:
        endpoint: where Dynamo reads it.
    """

    def __init__(self, llm: LLM) -> None:
        """The model needs a prefix index."""
        with requires_extra("dynamo", "telling a router"):
            from twostroke.cluster.event_socket import EventSocket

        model = llm.model
        assert model.index is not None
        self._feed = EventSocket()
        self.endpoint = self._feed.endpoint
        self._following: list[IndexEvents | DiskEvents] = [IndexEvents(model.index, self._feed)]
        if model.backing_stores is not None and isinstance(store := model.backing_stores.tiers.disk, DiskStore):
            on_disk = DiskEvents(store.watch(model.backing_stores.namespace), self._feed)
            on_disk.start()
            self._following.append(on_disk)

    def close(self) -> None:
        for one in self._following:
            one.close()
        self._feed.close()
