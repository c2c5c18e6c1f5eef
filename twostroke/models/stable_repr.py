"""Records whose `repr` stays the same when fields are added: identities of values and caches contain it."""

from collections.abc import Mapping
from dataclasses import fields

# The metadata of a field that was added after identities had been computed: `field(default=..., repr=False,
# metadata=LATER)`. Its default is what models did before.
LATER: Mapping[str, bool] = {"later": True}


class StableRepr:
    """The `repr` of a dataclass, without those `LATER` fields that have their defaults.

    A field that had another name then has it in its metadata, as "shown". Subclasses are declared with
    `@dataclass(repr=False)`.
    """

    def __repr__(self) -> str:
        shown: list[str] = []
        for one in fields(self):  # pyright: ignore[reportArgumentType]  # subclasses are dataclasses
            value = getattr(self, one.name)
            if one.repr or ("later" in one.metadata and value != one.default):
                shown.append(f"{one.metadata.get('shown', one.name)}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"
