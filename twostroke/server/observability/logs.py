"""Structured logs: one line per record, as JSON or for people, with the request's id."""

import io
import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

stderr_log = logging.getLogger("twostroke.stderr")
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the request's id, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = {"id": request_id.get(), **getattr(record, "fields", {})}
        return " ".join([super().format(record), *(f"{key}={value}" for key, value in fields.items() if value)])


class JsonStderr(io.TextIOBase):
    """In place of `sys.stderr`: each line that is written, by whomever, becomes a record of the log."""

    def __init__(self) -> None:
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in filter(None, map(str.strip, lines)):
            error = line.startswith("error: ")
            stderr_log.log(logging.ERROR if error else logging.INFO, "%s", line.removeprefix("error: "))
        return len(text)


def configure(style: str) -> None:
    """Send everything to stderr; `style` is "json" or "text". As JSON, other lines on stderr are records as well."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(style == "json")
    logging.getLogger("uvicorn.access").disabled = True  # the middleware logs a line for each request
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request of a download
    if style == "json":
        sys.stderr = JsonStderr()
