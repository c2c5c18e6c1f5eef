"""The places of a schema, the shapes that a value may have there, and which of them have an instance."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Node:
    """What holds in one place: one of some shapes."""

    path: str
    keywords: tuple[str, ...] = ()
    shapes: list["Shape"] = field(default_factory=list)
    uses: int = 0
    finite: bool = False  # it has an instance


@dataclass
class ArrayShape:
    """Items of an array."""

    first: list[Node]
    rest: Node
    least: int
    most: int | None


@dataclass
class ObjectShape:
    """Properties of an object."""

    named: dict[str, Node]
    required: set[str]
    patterns: list[tuple[str, Node]]
    others: Node | None
    least: int
    most: int | None
    path: str


@dataclass
class Shape:
    """One alternative of a place."""

    anything: bool = False
    plain: list[dict[str, Any]] = field(default_factory=list)
    array: ArrayShape | None = None
    object: ObjectShape | None = None


def array_has_instance(shape: ArrayShape) -> bool:
    """The same for the shape of an array."""
    if shape.most is not None and shape.most < shape.least:
        return False
    needed = shape.first[: shape.least]
    return all(node.finite for node in needed) and (shape.least <= len(shape.first) or shape.rest.finite)


def object_has_instance(shape: ObjectShape) -> bool:
    """The same for the shape of an object."""
    if not all(shape.named[name].finite for name in shape.required):
        return False
    if shape.most is not None and shape.most < max(shape.least, len(shape.required)):
        return False
    endless = any(node.finite for _, node in shape.patterns) or (shape.others is not None and shape.others.finite)
    return endless or shape.least <= sum(node.finite for node in shape.named.values())


def why_empty(node: Node) -> str:
    """Why a node has no instance: the innermost node that is needed and has none."""
    seen = [node]
    while True:
        needed = [
            child
            for shape in seen[-1].shapes
            for child in [
                *([shape.object.named[name] for name in shape.object.required] if shape.object else []),
                *([*shape.array.first, shape.array.rest][: shape.array.least] if shape.array else []),
            ]
            if not child.finite
        ]
        if not needed:
            break
        if needed[0] in seen:
            return f"#{needed[0].path}: '$ref' leads back to itself in every instance, so none would end"
        seen.append(needed[0])
    keywords = ", ".join(repr(word) for word in seen[-1].keywords[:8]) or "false"
    return f"#{seen[-1].path[-200:]}: nothing satisfies {keywords[:300]}"


def has_instance(shape: Shape) -> bool:
    """Whether a value has this shape, as far as the nodes within it are known to have instances."""
    return (
        shape.anything
        or bool(shape.plain)
        or (shape.array is not None and array_has_instance(shape.array))
        or (shape.object is not None and object_has_instance(shape.object))
    )
