"""What a request carries to say where a value can be fetched."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from twostroke.cluster.wire import secret
from twostroke.cluster.wire.channel import WireError
from twostroke.errors import InvalidRequest

FIRST_VERSION = 3  # of handles that do not say their version


@dataclass(frozen=True)
class ValueHandle:
    """Names a value that a sender holds. It is no secret: who claims the value has to know the secret."""

    # host, port: where the sender listens
    host: str
    port: int
    # the sender's random number, so that a process that is started again at the same address does not answer for the
    # one before it
    incarnation: str
    lease: str  # the lease's random number

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON, such as Dynamo's `disaggregated_params`."""
        return asdict(self) | {"version": secret.VERSION}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The inverse of `to_json`.

        Raises:
            WireError: the handle is of another version, so its sender cannot be understood.
            InvalidRequest: anything else that is no handle.
        """
        names = {field.name: int if field.name == "port" else str for field in fields(cls)}
        given: dict[str, Any] = dict(value) if isinstance(value, dict) else {}
        version = given.pop("version", FIRST_VERSION if given else None)
        if type(version) is int and version != secret.VERSION:
            raise WireError(f"the value's handle has version {version} of the wire, and this side {secret.VERSION}")
        if set(given) != set(names) or any(type(given[name]) is not kind for name, kind in names.items()):
            raise InvalidRequest(f"this is no handle of a value: {value!r:.80}")
        return cls(**given)

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port
