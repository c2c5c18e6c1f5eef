"""What a store holds, for people: `twostroke cache` shows, checks and deletes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreUsage:
    """The pages of one model in a store that this user has written.

    Attributes:
        model: its checkpoint's name.
        pages: pages of prompts; private: pages of values that some process holds.
        bytes: what all of these take in the store.
        damaged: pages that were not what they said, and were deleted; only a check finds them.
        unchecked: pages that a check could not judge: they are under another key, or cannot be read.
        left: pages that were to be deleted, and could not be.
    """

    model: str
    pages: int
    private: int
    bytes: int
    damaged: int = 0
    unchecked: int = 0
    left: int = 0
