"""A worker that looks for others ends for what is there, and not for a look that failed."""

import asyncio

import pytest

pytest.importorskip("dynamo.runtime", reason="needs NVIDIA Dynamo: make test-cluster")
from twostroke.cluster import registration
from twostroke.cluster.registration import CARD, NAME, Registration

ME, TWIN, STRANGER = 1, 2, 3


class Discovery:
    """Dynamo's runtime, endpoint and client, with what each look finds."""

    def __init__(self, looks: list[dict[str, set[int]]]) -> None:
        self.looks = looks  # the workers by what they have registered; the last look is repeated

    def endpoint(self, name: str) -> "Discovery":
        return self

    async def client(self) -> "Discovery":
        return self

    def instance_ids(self) -> list[int]:
        return [ME, TWIN, STRANGER]

    async def wait_for_instances_by_runtime_data(self, key: str, value: str, least: int, timeout_s: float) -> list[int]:
        found = self.looks[0][key]
        if (key == CARD or not found) and len(self.looks) > 1:
            del self.looks[0]
        if not found:
            raise TimeoutError
        return sorted(found)


ALONE: dict[str, set[int]] = {NAME: {ME}, CARD: {ME}}


@pytest.mark.parametrize(
    ("looks", "ends"),
    [
        ([ALONE], False),
        ([{NAME: {ME, TWIN}, CARD: {ME}}, ALONE], False),  # a worker like this one has gone between two readings
        ([{NAME: {ME, TWIN}, CARD: set[int]()}, {NAME: {ME, TWIN}, CARD: {ME, TWIN}}], False),
        ([{NAME: {ME, TWIN}, CARD: set[int]()}], False),  # cards cannot be read
        ([{NAME: {ME, STRANGER}, CARD: {ME}}], True),
    ],
)
def test_who_ends_a_young_worker(looks: list[dict[str, set[int]]], ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "LOOK_S", 0.001)
    monkeypatch.setattr(registration, "DistributedRuntime", lambda *_: Discovery([{NAME: set(), CARD: set()}, *looks]))

    async def run() -> bool:
        ended, one = asyncio.Event(), Registration("a.b.generate", "file", "m", "card")
        await one.open()
        one.watch(ME, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), 0.3)
        except TimeoutError:
            return False
        finally:
            await one.close()
        return True

    assert asyncio.run(run()) == ends
