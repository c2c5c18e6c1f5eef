"""A tenant, which is the name of API keys: its limits, what it has used, and one call that it makes.

A call (POST) takes one of the requests of a minute and one of the places at once. When its prompt is known it takes the
tokens of the prompt and the most that its answer may have, and at its end it gives back those that were not made. An
answer without a limit may exceed what is left, which is then owed; a client that leaves pays for what was computed.

The call in progress is in a context variable: a route cannot forget whose it is. Every method belongs to the event
loop's thread, where nothing else is said.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from twostroke.engine.request import Request
from twostroke.server.errors import ApiError
from twostroke.server.observability.outcome import output_tokens
from twostroke.server.tenants.key_file import UNLIMITED, Limits

REASONS = ("requests", "tokens", "parallel")  # of calls that are refused
KINDS = ("prompt", "cached", "output")  # of tokens
FULL_MINUTE_S = 60.0
TOLERANCE = 1e-6  # of an amount: sums of floating-point numbers
LIMIT_HEADERS = [
    f"x-ratelimit-{name}-{of}" for of in ("requests", "tokens") for name in ("limit", "remaining", "reset")
]


class TokenBucket:
    """So much a minute, which fills steadily, and holds a minute's worth.

    It is full at the beginning, and may owe: what is charged later than it was taken may be more than is left.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """`clock` is in seconds."""
        self.per_minute, self._clock = per_minute, clock
        self._level, self._at = float(per_minute), clock()

    def resize(self, per_minute: int) -> None:
        """Another amount a minute from now on. What is left stays, as far as there is room for it."""
        self._fill()
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there; 0 if it is. An amount above that of a minute never is."""
        self._fill()
        missing = amount - self._level
        return 0.0 if missing <= TOLERANCE else missing * FULL_MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """Take an amount, also one that is not there; a negative one is given back."""
        self._fill()
        self._level = min(self._level - amount, float(self.per_minute))

    @property
    def left(self) -> int:
        """What is there, in whole tokens, at least 0."""
        self._fill()
        return max(0, int(self._level + TOLERANCE))

    @property
    def full_in_s(self) -> float:
        """Seconds until it is full."""
        return self.wait_s(self.per_minute)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / FULL_MINUTE_S)
        self._at = now


class RateLimited(ApiError):
    """A tenant has used what it may use for now."""

    def __init__(self, message: str, wait_s: float) -> None:
        wait = max(1, math.ceil(round(wait_s, 6)))
        message = f"{message}: try again in {wait} s"
        super().__init__(429, message, code="rate_limit_exceeded", headers={"retry-after": str(wait)})


class Tenant:
    """One name. Calls without a key, and with keys without a name, are those of tenants with the name ""."""

    def __init__(self, name: str = "", limits: Limits = UNLIMITED, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.limits = name, limits
        self.calls = self.in_flight = 0
        # calls by reason. tokens_used: tokens by kind. calls, in_flight: calls that were let in.
        self.refused: Counter[str] = Counter()
        self.tokens_used: Counter[str] = Counter()
        self._clock = clock
        self.requests, self.tokens = self._buckets(None, None)

    def limit(self, limits: Limits) -> None:
        """Other limits from now on. What was used of a limit that both have counts on."""
        self.limits = limits
        self.requests, self.tokens = self._buckets(self.requests, self.tokens)

    @property
    def space(self) -> str:
        """Whose prefixes, contexts and stored responses it shares: the tenant's own, or "", which is everybody's."""
        return self.name if self.limits.private else ""

    def salt(self, own: str | None) -> bytes:
        """The salt of a prompt, of which `own` is the part that the call names.

        No two spaces have a salt in common: the byte 0xff is in no text in UTF-8. Any thread may call it.
        """
        salt = (own or "").encode()
        return b"\xff%b\xff%b" % (self.space.encode(), salt) if self.space else salt

    def may_use(self, model: str) -> bool:
        return self.limits.models is None or model in self.limits.models

    def require(self, model: str, method: str) -> None:
        """Raise ApiError (403) for a model or a technique that it may not use. Any thread may call it."""
        for kind, one, allowed in (("model", model, self.limits.models), ("method", method, self.limits.methods)):
            if allowed is not None and one not in allowed:
                message = f"the key {self.name} may not use the {kind} {one}; it may use {', '.join(allowed) or 'none'}"
                raise ApiError(403, message, param=kind, code=f"{kind}_not_allowed")

    def require_admin(self) -> None:
        """Raise ApiError (403) unless it may see and change what belongs to all."""
        if not self.limits.admin:
            message = f"the key {self.name} may not do this: it concerns everybody (admin = true allows it)"
            raise ApiError(403, message, code="not_allowed")

    def refusal(self, reason: str, message: str, wait_s: float) -> RateLimited:
        """The error for a call that comes too soon, which is counted."""
        self.refused[reason] += 1
        return RateLimited(f"the key {self.name} {message}", wait_s)

    def _buckets(self, *before: TokenBucket | None) -> Iterator[TokenBucket | None]:
        amounts = (self.limits.requests_per_minute, self.limits.tokens_per_minute)
        for amount, bucket in zip(amounts, before, strict=True):
            if amount is not None and bucket is not None:
                bucket.resize(amount)
            yield None if amount is None else bucket or TokenBucket(amount, self._clock)


class TenantCall:
    """One call of a tenant, from its arrival to its end."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._begun = False
        self._reserved = self._spent = 0

    def begin(self) -> None:
        """Let a call in that may compute. Raises RateLimited."""
        tenant, most = self.tenant, self.tenant.limits.max_parallel_requests
        if most is not None and tenant.in_flight >= most:
            raise tenant.refusal("parallel", f"has {tenant.in_flight} requests in flight, of {most} at once", 1)
        if (bucket := tenant.requests) is not None:
            if (wait := bucket.wait_s(1)) > 0:
                raise tenant.refusal("requests", f"has used its {bucket.per_minute:,} requests a minute", wait)
            bucket.take(1)
        self._begun = True
        tenant.calls += 1
        tenant.in_flight += 1

    def reserve(self, requests: Sequence[Request], room: int) -> None:
        """Take the tokens that requests may need, before they are submitted. Raises ApiError or RateLimited.

        `room`: the model's context in tokens. An answer without a limit of its own takes what is left, at most; what it
        makes beyond that is owed.
        """
        if (bucket := self.tenant.tokens) is None:
            return
        least = most = 0
        for request in requests:
            left, asked = max(0, room - request.prompt_tokens), request.params.max_tokens
            least += request.prompt_tokens + request.params.n * min(left, asked or 0)
            most += 0 if asked is not None else request.params.n * left
        self._take(bucket, least + min(most, max(0, bucket.left - least)))

    def spend(self, amount: int) -> None:
        """Take tokens of which no request will tell, and which are used. Raises ApiError or RateLimited."""
        if self.tenant.tokens is not None:
            self._take(self.tenant.tokens, amount)
        self.tenant.tokens_used["prompt"] += amount
        self._spent += amount

    def _take(self, bucket: TokenBucket, amount: int) -> None:
        """Take tokens, which are given back at the end as far as no request has used them."""
        if amount > bucket.per_minute:
            self.tenant.refused["tokens"] += 1
            message = (
                f"the prompt and max_tokens are {amount:,} tokens, and the key {self.tenant.name} has "
                f"{bucket.per_minute:,} a minute: shorten the prompt, or lower max_tokens"
            )
            raise ApiError(400, message, param="max_tokens", code="rate_limit_too_small")
        if (wait := bucket.wait_s(amount)) > 0:
            told = f"has {bucket.left:,} of its {bucket.per_minute:,} tokens a minute left, and this call needs up to"
            raise self.tenant.refusal("tokens", f"{told} {amount:,}", wait)
        bucket.take(amount)
        self._reserved += amount

    def end(self, requests: Sequence[Request]) -> None:
        """Give back the place, and the tokens that its requests have not used. A request that never began used none."""
        if not self._begun:
            return
        self._begun = False
        self.tenant.in_flight -= 1
        for request in requests:
            if request.timings.scheduled is not None:
                prompt, made = request.prompt_tokens, output_tokens(request)
                self.tenant.tokens_used["prompt"] += prompt
                self.tenant.tokens_used["cached"] += min(prompt, request.cached_tokens)
                self.tenant.tokens_used["output"] += made
                self._spent += prompt + made
        if self.tenant.tokens is not None:
            self.tenant.tokens.take(self._spent - self._reserved)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers about limits, of those that there are."""
        made: list[tuple[str, str]] = []
        for kind, bucket in (("requests", self.tenant.requests), ("tokens", self.tenant.tokens)):
            if bucket is not None:
                values = {"limit": bucket.per_minute, "remaining": bucket.left, "reset": _duration(bucket.full_in_s)}
                made += [(f"x-ratelimit-{name}-{kind}", str(value)) for name, value in values.items()]
        return [(name.encode(), value.encode()) for name, value in made]


def _duration(seconds: float) -> str:
    """A duration as OpenAI writes it: 1m2.5s, 300ms."""
    ms = math.ceil(round(seconds * 1e3, 3))
    if ms < 1000:
        return f"{ms}ms"
    minutes, left = divmod(ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{left / 1e3:g}s"


EVERYBODY = Tenant()
tenant_call: ContextVar[TenantCall] = ContextVar("tenant_call", default=TenantCall(EVERYBODY))  # noqa: B039 (unlimited)


def current_tenant() -> Tenant:
    """Whose call is served here: that of everybody where there are no keys."""
    return tenant_call.get().tenant
