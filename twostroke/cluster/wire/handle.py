"""What a request carries to say where a value can be fetched."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from twostroke.errors import InvalidRequest


@dataclass(frozen=True)
class ValueHandle:
    """Names a value that a sender holds. It is no secret: who claims the value has to know the secret.

    Attributes:
        host, port: where the sender listens.
        incarnation: the sender's random number, so that a process that is started again at the same address does not
            answer for the one before it.
        lease: the lease's random number.
    """

    host: str
    port: int
    incarnation: str
    lease: str

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON, such as Dynamo's `disaggregated_params`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The inverse of `to_json`. Raises InvalidRequest for anything else."""
        names = {field.name: int if field.name == "port" else str for field in fields(cls)}
        given: dict[str, Any] = value if isinstance(value, dict) else {}
        if set(given) != set(names) or any(type(given[name]) is not kind for name, kind in names.items()):
            raise InvalidRequest(f"this is no handle of a value: {value!r:.80}")
        return cls(**given)

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port
