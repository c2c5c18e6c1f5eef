"""Schemas as libraries write them, for tests of what a server must accept.

Sources: pydantic 2 writes its own here. Those of zod 4 (`z.toJSONSchema`), zod-to-json-schema 3, LangChain's and the
OpenAI agents' tools are written down as these libraries emit them.
"""

import datetime
import enum
import uuid
from typing import Annotated, Any, Literal

import openai
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, RootModel, TypeAdapter


class Color(enum.Enum):
    RED, BLUE = "red", "blue"


class Size(enum.IntEnum):
    SMALL, LARGE = 1, 2


class Point(BaseModel):
    x: int
    y: float = 0.5


class Named(BaseModel):
    """A name with a nickname."""

    name: Annotated[str, Field(min_length=1, max_length=20, description="As written")]
    nickname: str | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool


class Pet(BaseModel):
    animal: Annotated[Cat | Dog, Field(discriminator="kind")]


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Chain(BaseModel):
    next: "Chain | None" = None


class Left(BaseModel):
    right: "Right | None" = None


class Right(BaseModel):
    left: Left | None = None


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    point: Point


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    point: Point


class Types(BaseModel):
    count: Annotated[int, Field(gt=0, lt=100)]
    share: Annotated[float, Field(ge=0, le=1)]
    half: Annotated[float, Field(multiple_of=0.5)]
    color: Color
    size: Size
    choice: Literal["a", "b", 3]
    fixed: Literal["only"]
    pair: tuple[int, str]
    many: tuple[bool, ...]
    few: Annotated[list[str], Field(min_length=1, max_length=3)]
    scores: dict[str, float]
    by_color: dict[Color, int]
    by_code: dict[Annotated[str, Field(pattern="^[a-z]+$")], int]
    anything: Any
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")]
    nothing: None


class Times(BaseModel):
    day: datetime.date
    moment: datetime.datetime
    clock: datetime.time
    length: datetime.timedelta
    id: uuid.UUID
    link: AnyUrl
    path: Annotated[bytes, Field()]


class Nested(BaseModel):
    """Models within models, optional ones, lists and maps of them."""

    named: Named
    maybe: Named | None = Field(default=None, title="Maybe", examples=[None])
    listed: list[Named]
    mapped: dict[str, Point]
    either: Point | Named | str
    deep: list[dict[str, list[Point | None]]]


class Union(RootModel[Cat | Dog | None]):
    pass


MODELS: list[type[BaseModel]] = [Point, Named, Cat, Pet, Tree, Chain, Left, Closed, Open, Types, Times, Nested, Union]
PYDANTIC: dict[str, dict[str, Any]] = {
    **{f"pydantic {model.__name__}": model.model_json_schema() for model in MODELS},
    "pydantic as serialized": Nested.model_json_schema(mode="serialization"),
    "pydantic list": TypeAdapter(list[Point]).json_schema(),
    "pydantic dict": TypeAdapter(dict[str, int | None]).json_schema(),
    "pydantic bounded dict": TypeAdapter(Annotated[dict[str, int], Field(min_length=1)]).json_schema(),
    "pydantic literal": TypeAdapter(Literal["yes", "no"]).json_schema(),
}
OPENAI: dict[str, dict[str, Any]] = {
    f"openai {model.__name__}": dict(openai.pydantic_function_tool(model)["function"].get("parameters", {}))
    for model in (Point, Named, Pet, Tree, Chain, Closed, Nested)
}

_2020 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
_INT = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
_TEXT = {"type": "string"}


def _zod(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **_2020,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


ZOD: dict[str, dict[str, Any]] = {
    "zod object": _zod({"name": _TEXT, "age": _INT, "rate": {"type": "number"}, "ok": {"type": "boolean"}}),
    "zod optional": _zod({"a": _TEXT, "b": _TEXT}, required=["a"]),
    "zod nullable": _zod({"a": {"anyOf": [_TEXT, {"type": "null"}]}}),
    "zod default": _zod({"a": {"default": "x", "type": "string"}, "b": {"default": 3, **_INT}}),
    "zod loose": _zod({"a": _TEXT}, additionalProperties={}),
    "zod catchall": _zod({"a": _TEXT}, additionalProperties={"type": "number"}),
    "zod enum": _zod({"a": {"type": "string", "enum": ["x", "y"]}}),
    "zod literal": _zod({"a": {"type": "string", "const": "x"}, "b": {"type": "number", "const": 3}}),
    "zod literals": _zod({"a": {"type": "number", "enum": [1, 2, 3]}, "b": {"type": "null"}}),
    "zod string checks": _zod({"a": {"type": "string", "minLength": 2, "maxLength": 5}}),
    "zod number checks": _zod(
        {
            "a": {"type": "number", "exclusiveMinimum": 0},
            "b": {"type": "number", "minimum": -1, "maximum": 1},
            "c": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991, "multipleOf": 5},
        }
    ),
    "zod email": _zod(
        {
            "a": {
                "type": "string",
                "format": "email",
                "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@"
                "([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
            }
        }
    ),
    "zod uuid": _zod(
        {
            "a": {
                "type": "string",
                "format": "uuid",
                "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
                "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
            }
        }
    ),
    "zod url": _zod({"a": {"type": "string", "format": "uri"}}),
    "zod iso date": _zod(
        {
            "a": {
                "type": "string",
                "format": "date",
                "pattern": "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|"
                "\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|"
                "(?:02)-(?:0[1-9]|1\\d|2[0-8])))$",
            }
        }
    ),
    "zod iso datetime": _zod(
        {
            "a": {
                "type": "string",
                "format": "date-time",
                "pattern": "^(?:(?:\\d\\d[2468][048]|\\d\\d[13579][26]|\\d\\d0[48]|[02468][048]00|[13579][26]00)-02-29|"
                "\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|"
                "(?:02)-(?:0[1-9]|1\\d|2[0-8])))T(?:(?:[01]\\d|2[0-3]):[0-5]\\d(?::[0-5]\\d(?:\\.\\d+)?)?(?:Z))$",
            }
        }
    ),
    "zod ipv4": _zod(
        {
            "a": {
                "type": "string",
                "format": "ipv4",
                "pattern": "^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\\.){3}"
                "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])$",
            }
        }
    ),
    "zod starts with": _zod(
        {"a": {"type": "string", "pattern": "^ab.*"}, "b": {"type": "string", "maxLength": 3, "pattern": ".*c$"}}
    ),
    "zod regexes": _zod({"a": {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "b"}]}}),
    "zod array": _zod({"a": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3}}),
    "zod tuple": _zod({"a": {"type": "array", "prefixItems": [_TEXT, {"type": "number"}]}}),
    "zod tuple rest": _zod({"a": {"type": "array", "prefixItems": [_TEXT], "items": {"type": "null"}}}),
    "zod record": _zod({"a": {"type": "object", "propertyNames": _TEXT, "additionalProperties": {"type": "number"}}}),
    "zod record of an enum": _zod(
        {
            "a": {
                "type": "object",
                "propertyNames": {"type": "string", "enum": ["x", "y"]},
                "additionalProperties": _INT,
                "required": ["x", "y"],
            }
        }
    ),
    "zod record by pattern": _zod(
        {
            "a": {
                "type": "object",
                "propertyNames": {"type": "string", "pattern": "^x-[a-z]+$"},
                "additionalProperties": {"type": "null"},
            }
        }
    ),
    "zod union": _zod({"a": {"anyOf": [_TEXT, {"type": "number"}, {"type": "array", "items": _TEXT}]}}),
    "zod discriminated union": {
        **_2020,
        "oneOf": [
            {
                "type": "object",
                "properties": {"type": {"type": "string", "const": kind}, "value": value},
                "required": ["type", "value"],
                "additionalProperties": False,
            }
            for kind, value in (("text", _TEXT), ("count", _INT), ("none", {"type": "null"}))
        ],
    },
    "zod intersection": {
        **_2020,
        "allOf": [
            {"type": "object", "properties": {"a": _TEXT}, "required": ["a"]},
            {"type": "object", "properties": {"b": _INT}, "required": ["b"]},
        ],
    },
    "zod lazy": {
        **_2020,
        "$ref": "#/$defs/Category",
        "$defs": {
            "Category": {
                "id": "Category",
                "type": "object",
                "properties": {"name": _TEXT, "sub": {"type": "array", "items": {"$ref": "#/$defs/Category"}}},
                "required": ["name", "sub"],
                "additionalProperties": False,
            }
        },
    },
    "zod self": _zod({"name": _TEXT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "zod never": _zod({"a": _TEXT, "b": {"not": {}}}, required=["a"]),
    "zod unknown": _zod({"a": {}}),
    "zod 3": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/Reply",
        "definitions": {
            "Reply": {
                "type": "object",
                "properties": {
                    "pair": {"type": "array", "minItems": 2, "maxItems": 2, "items": [_TEXT, {"type": "number"}]},
                    "maybe": {"type": ["string", "null"]},
                    "same": {"$ref": "#/definitions/Reply/properties/maybe"},
                    "union": {"type": ["string", "number"]},
                },
                "required": ["pair", "maybe"],
                "additionalProperties": False,
            }
        },
    },
}

AGENTS: dict[str, dict[str, Any]] = {
    "langchain tool": {
        "description": "Multiply two numbers.",
        "properties": {
            "a": {"title": "A", "type": "integer"},
            "b": {"default": 2, "title": "B", "type": "integer"},
        },
        "required": ["a"],
        "title": "multiply",
        "type": "object",
    },
    "langchain typed dict": {
        "title": "Joke",
        "description": "Joke to tell the user.",
        "type": "object",
        "properties": {
            "setup": {"type": "string", "description": "The setup"},
            "rating": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "required": ["setup"],
    },
    "langchain pydantic 1": {
        "title": "Search",
        "type": "object",
        "properties": {
            "kind": {"title": "Kind", "default": "web", "allOf": [{"$ref": "#/definitions/Kind"}]},
            "tags": {"title": "Tags", "type": "array", "items": {"type": "string"}},
        },
        "required": ["tags"],
        "definitions": {"Kind": {"title": "Kind", "enum": ["web", "news"], "type": "string"}},
    },
    "langgraph handoff": {
        "type": "object",
        "properties": {"state": {"additionalProperties": True, "type": "object"}, "reason": {"type": "string"}},
        "required": ["state"],
    },
    "agents function": {
        "properties": {
            "city": {"description": "The city.", "title": "City", "type": "string"},
            "unit": {"enum": ["c", "f"], "title": "Unit", "type": "string"},
        },
        "required": ["city", "unit"],
        "title": "get_weather_args",
        "type": "object",
        "additionalProperties": False,
    },
    "agents without arguments": {
        "properties": {},
        "title": "now_args",
        "type": "object",
        "additionalProperties": False,
    },
    "mcp tool": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"oldText": {"type": "string"}, "newText": {"type": "string"}},
                    "required": ["oldText", "newText"],
                    "additionalProperties": False,
                },
            },
            "dryRun": {"type": "boolean", "default": False},
            "head": {"type": "number", "description": "First lines"},
        },
        "required": ["path", "edits"],
        "additionalProperties": False,
    },
}

LIBRARIES = PYDANTIC | OPENAI | ZOD | AGENTS
