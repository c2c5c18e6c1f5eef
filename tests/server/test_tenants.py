"""Keys with names: what each may use, what it has used, and that nothing of one is another's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.chaos.letters import Letters
from tests.server.conftest import serving
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.params import SamplingParams
from twostroke.server.errors import ApiError
from twostroke.server.tenants.key_file import Limits, read_keys
from twostroke.server.tenants.tenant import RateLimited, Tenant, TenantCall, TokenBucket

PROMPT = "the quick brown fox jumps over the lazy dog and then the cat jumps over the lazy fox again and again"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def complete(http: httpx.Client, key: str, **body: Any) -> httpx.Response:
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
    return http.post("/v1/completions", json=asked, headers={"authorization": f"Bearer {key}"})


def cached(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_bucket_fills_steadily_and_no_further() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert (bucket.left, bucket.wait_s(1), bucket.wait_s(60)) == (0, 1.0, 60.0)
    clock.now = 0.5
    assert (bucket.left, bucket.wait_s(1)) == (0, 0.5)
    clock.now = 1.0
    assert (bucket.left, bucket.wait_s(1)) == (1, 0.0)
    clock.now = 1e6
    assert bucket.left == 60
    bucket.resize(10)
    assert (bucket.left, bucket.wait_s(11) > 0) == (10, True)


def test_requests_of_a_minute_and_at_once() -> None:
    clock = Clock()
    tenant = Tenant("anna", Limits(requests_per_minute=2, max_parallel_requests=1), clock)
    first, second = TenantCall(tenant), TenantCall(tenant)
    first.begin()
    with pytest.raises(RateLimited, match="1 requests in flight, of 1 at once"):
        second.begin()
    first.end([])
    first.end([])  # again, without effect
    second.begin()
    second.end([])
    with pytest.raises(RateLimited, match="has used its 2 requests a minute: try again in 30 s") as refused:
        TenantCall(tenant).begin()
    assert refused.value.headers == {"retry-after": "30"}
    clock.now = 30.0
    TenantCall(tenant).begin()
    assert (tenant.calls, tenant.in_flight, tenant.refused) == (3, 1, {"parallel": 1, "requests": 1})


def request(prompt: int, most: int | None, made: int, began: bool = True) -> Request:
    one = Request(iter, SamplingParams(max_tokens=most), cast(Tokenizer, Letters()), prompt)  # pyright: ignore[reportArgumentType]
    one.timings.scheduled = 1.0 if began else None
    one.timings.tokens.extend([2.0] * made)
    return one


def test_tokens_are_taken_before_and_given_back_after() -> None:
    clock = Clock()
    tenant = Tenant("anna", Limits(tokens_per_minute=600), clock)
    assert tenant.tokens is not None
    call, cancelled, unlimited = (TenantCall(tenant) for _ in range(3))
    for one in (call, cancelled, unlimited):
        one.begin()
    asked = [request(100, 50, 0)]
    call.reserve(asked, 1000)
    assert tenant.tokens.left == 450
    unlimited.reserve([request(300, None, 0)], 1000)  # all that is left, since its answer has no limit
    assert tenant.tokens.left == 0
    with pytest.raises(RateLimited, match="0 of its 600 tokens a minute left, and this call needs up to 10"):
        cancelled.reserve([request(5, 5, 0, began=False)], 1000)
    unlimited.end([request(300, None, 0, began=False)])  # its client left before it began
    assert tenant.tokens.left == 450
    with pytest.raises(ApiError, match="601 tokens, and the key anna has 600 a minute: shorten"):
        cancelled.reserve([request(600, 1, 0)], 10_000)
    with pytest.raises(ApiError):
        cancelled.reserve([request(10_000, None, 0)], 1000)


def test_a_key_of_limits_over_http(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[anna]\nkey = "a"\nrequests_per_minute = 2\ntokens_per_minute = 4000\nmethods = ["plain"]\n'
        '[bert]\nkey = ["b", "b2"]\nmodels = ["another"]\n'
        '[boss]\nkey = "c"\nadmin = true\n'
        '[composer]\nkey = "d"\nmethods = ["compose", "repeat", "snap"]\n'
    )
    with serving(open_tiny(), api_key_file=str(file)) as running, running.http() as http:
        first = complete(http, "a")
        assert first.status_code == 200
        used = first.json()["usage"]["total_tokens"]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "4000"
        assert complete(http, "a", method="repeat").status_code == 403
        assert complete(http, "d", method="compose").status_code == 200
        refused = complete(http, "d", method={"name": "compose", "then": "tova"})
        assert refused.status_code == 403
        assert "may not use the method tova" in refused.json()["error"]["message"]
        refused = complete(http, "a")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert complete(http, "b").status_code == complete(http, "b2").status_code == 403
        assert http.post("/reset_prefix_cache", headers={"x-api-key": "b"}).status_code == 403
        assert http.post("/reset_prefix_cache", headers={"x-api-key": "c"}).status_code == 200
        metrics = http.get("/metrics").text
        assert 'twostroke_key_calls_total{key="anna"} 2.0' in metrics
        assert 'twostroke_key_refused_calls_total{key="anna",reason="requests"} 1.0' in metrics
        counted = [line for line in metrics.splitlines() if line.startswith('twostroke_key_tokens_total{key="anna"')]
        by_kind = {line.split('kind="')[1].split('"')[0]: float(line.split()[-1]) for line in counted}
        assert by_kind["prompt"] + by_kind["output"] == used
        file.write_text(file.read_text().replace("requests_per_minute = 2", "requests_per_minute = 100"))
        assert complete(http, "a").status_code == 429, "what was used of a limit counts on"


def test_prefixes_contexts_and_responses_are_a_tenants_own(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    tenants = "".join(f'[{name}]\nkey = "{name}"\nprivate = {private}\n' for name, private in
                      (("anna", "true"), ("bert", "true"), ("c", "false"), ("d", "false")))  # fmt: skip
    file.write_text(tenants)
    with serving(open_tiny(), api_key_file=str(file)) as running, running.http() as http:
        answers = [complete(http, key) for key in ("anna", "bert", "c", "d", "anna", "bert")]
        assert [cached(one) > 0 for one in answers] == [False, False, False, True, True, True]
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1

        def ask(key: str, method: str, path: str, **body: Any) -> httpx.Response:
            return http.request(method, path, headers={"x-api-key": key}, json=body or None)

        for key in ("anna", "bert"):
            assert ask(key, "POST", "/v1/contexts", name="notes", prompt=f"{PROMPT} {key}").status_code == 200
        names = {key: [one["name"] for one in ask(key, "GET", "/v1/contexts").json()["data"]] for key in ("anna", "c")}
        assert names == {"anna": ["notes"], "c": []}
        assert ask("c", "GET", "/v1/contexts/notes").status_code == 404
        assert ask("anna", "DELETE", "/v1/contexts/notes").status_code == 200
        assert ask("bert", "GET", "/v1/contexts/notes").status_code == 200
        made = ask("anna", "POST", "/v1/responses", input="hello", max_output_tokens=16)
        assert made.status_code == 200
        assert ask("bert", "GET", f"/v1/responses/{made.json()['id']}").status_code == 404
        assert ask("anna", "GET", f"/v1/responses/{made.json()['id']}").status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[a]\nkey = 3", "key must be a text"),
        ("[a]\n", "needs key, or sha256"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "a and b have the same key"),
        ('[a]\nkey = "x"\nrequests_per_minute = 0', "requests_per_minute"),
        ('[a]\nkey = "x"\nlimit = 1', "has limit: there are key, sha256"),
        ('[a]\nsha256 = "12"', "64 hexadecimal digits"),
        ("[a", "not TOML"),
        ('["a b"]\nkey = "x"', "1 to 64 letters"),
        ("", "has no key"),
    ],
)
def test_files_that_are_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=message) as refused:
        read_keys(file)
    assert "\n" not in str(refused.value)


def test_a_digest_stands_for_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[a]\nsha256 = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"')  # of "key"
    (one,) = read_keys(file)
    assert one.digest.hex().startswith("2c70e12b")
    assert "2c70" not in repr(one)
