"""All that Dynamo's KV-aware router is told of one model: its prefix index, and the pages on disk below it."""

from twostroke.api.llm import LLM
from twostroke.cluster.events import Events
from twostroke.cluster.stored import OnDisk
from twostroke.kv.tiers.disk import DiskStore
from twostroke.system.extras import extra


class Told:
    """From now on, until `close`.

    Attributes:
        endpoint: where Dynamo reads it.
    """

    def __init__(self, llm: LLM) -> None:
        """The model needs a prefix index."""
        with extra("dynamo", "telling a router"):
            from twostroke.cluster.feed import Feed

        model = llm.model
        assert model.index is not None
        self._feed = Feed()
        self.endpoint = self._feed.endpoint
        self._following: list[Events | OnDisk] = [Events(model.index, self._feed)]
        if model.lower is not None and isinstance(store := model.lower.tiers.disk, DiskStore):
            on_disk = OnDisk(store.watch(model.lower.namespace), self._feed)
            on_disk.start()
            self._following.append(on_disk)

    def close(self) -> None:
        for one in self._following:
            one.close()
        self._feed.close()
