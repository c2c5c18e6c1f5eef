"""Warnings about fields without effect: in the answer, in a header, and in the log."""

from fastapi import Request as HttpRequest

from twostroke.server.errors import ApiError
from twostroke.server.http.call_log import call_log
from twostroke.server.openai.schemas.base_model import LenientModel, undeclared_warnings


def warn_of_fields(http: HttpRequest, body: LenientModel, *more: str) -> None:
    """Tell the caller of each field of the body that has no effect, and `more`. Call it before the work begins.

    Raises ApiError for a field that must not be passed over: one that this server lacks and that would change the
    answer, an unknown one that looks like a constraint, and with --strict-fields every field without effect.
    """
    strict = http.app.state.engine.settings.strict_fields
    told = [*undeclared_warnings(body, strict), *more]
    if strict and more:
        raise ApiError(400, more[0], param=more[0].split()[0])
    call_log(http.scope).warn(told)
