"""Random fleets with faults, each made of one number: what fails, fails again with that number."""

from __future__ import annotations

import gc
import hashlib
import os
import random
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

from tests.chaos.fleet import Fleet, Plan
from tests.chaos.front import Client
from tests.chaos.standin import VOCAB, Opened, Sizes
from tests.wire.pairs import SECRET
from twostroke.cluster.asked import Asked
from twostroke.methods import Plain
from twostroke.sampling.params import SamplingParams
from twostroke.simulation.prompts import tokens_of
from twostroke.simulation.router import ROUTERS
from twostroke.traffic.requests import Arrival, Piece
from twostroke.wire.secret import VARIABLE

KINDS = ("kill", "vanish", "drain", "stop", "silence", "front end")
HANG_S = 400.0  # seconds after the last fault in which every request has to be over, and after which nothing is held
MOST_EVENTS = 3_000_000  # of a run


@dataclass(frozen=True)
class Outcome:
    """A run that kept all rules. `trace` is a digest of all that clients got, and of when it was over."""

    steps: int
    events: int
    trace: str
    happened: Counter[str]


def draw(seed: int) -> tuple[Plan, list[Client]]:
    """A fleet, and its clients."""
    rng = random.Random(f"plan {seed}")
    page_size, longest = rng.choice((4, 8)), rng.choice((40, 100))
    least = -(-longest // page_size) + 2
    sizes = {
        role: Sizes(
            pages=rng.choice((least, 2 * least, 6 * least)),
            page_size=page_size,
            index=rng.choice(("radix", "hash", "off")),
            max_step_tokens=rng.choice((8, 32, 128)),
            max_running=rng.choice((2, 8, 64)),
            in_flight=rng.random() < 0.5,
        )
        for role in ("prefill", "decode")
    }
    until_s = rng.choice((2.0, 10.0, 60.0))
    some = [kind for kind in KINDS if rng.random() < 0.5]
    plan = Plan(
        seed=seed,
        kinds=tuple(some),
        gap_s=rng.choice((0.2, 1.0, 5.0)),
        until_s=until_s,
        counts={role: rng.randint(1, 3) for role in ("prefill", "decode")},
        sizes=sizes,
        transports=rng.choice((("tcp",), ("nixl",), ("nixl", "tcp"))),
        router=rng.choice(ROUTERS[:2]),
        latency_s=rng.choice((1e-4, 2e-3)),
        room=rng.choice((1 << 10, 1 << 20)),
        notice_s=rng.choice((0.0, 0.1, 2.0)),
        down_s=rng.choice((0.0, 0.5, 5.0)),
        lost=rng.choice((0.0, 0.3)),
        late=rng.choice((0.0, 0.3)),
        damaged=rng.choice((0.0, 0.02)),
        page_s=rng.choice((2e-3, 0.05, 0.4)),
    )
    return plan, _clients(rng, plan, longest)


def _clients(rng: random.Random, plan: Plan, longest: int) -> list[Client]:
    now, clients = 0.0, list[Client]()
    gap, leaving = plan.until_s / rng.choice((15, 40)), rng.choice((0.0, 0.2))
    groups = rng.randint(1, 5)
    for number in range(rng.randint(10, 40)):
        now += rng.expovariate(1 / gap)
        output, shared = rng.randint(1, longest // 2), rng.choice((0, longest // 4))
        own = rng.randint(1, max(1, longest - output - shared))
        pieces = ((Piece(rng.randrange(groups), shared),) if shared else ()) + (Piece(1000 + number, own),)
        arrival = Arrival(now, pieces, output)
        params = SamplingParams(
            max_tokens=output,
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1 << 30),
            n=rng.choice((1, 1, 1, 2)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            ignore_eos=True,
        )
        prompt = tokens_of(pieces, VOCAB).tolist()
        leaves_at = now + rng.expovariate(2.0) if rng.random() < leaving else None
        clients.append(
            Client(Asked(prompt, (), params, Plain()), arrival, max(now, plan.until_s) + HANG_S, leaves_at,
                   [[] for _ in range(params.n)], [None] * params.n)
        )  # fmt: skip
    return clients


def undisturbed(clients: list[Client]) -> list[list[list[int]]]:
    """The tokens of each choice of each client: one engine does both strokes, and nothing goes wrong."""
    sizes = Sizes(2000, 8, "off", 512, 256, in_flight=False)
    opened = Opened(sizes, lambda: 0.0, lambda prompt, rows: None)
    requests = [opened.request(one.asked.prompt, one.asked.params, one.asked.method) for one in clients]
    opened.engine.run(requests)
    found = [[[] for _ in request.choices] for request in requests]
    for request, choices in zip(requests, found, strict=True):
        for token in request.events:
            choices[token.choice].append(token.id)
    opened.engine.close()
    return found


def check(seed: int) -> Outcome:
    """Run one fleet to its end. Raises AssertionError if a token, a request, a page or a lease is wrong or lost."""
    plan, clients = draw(seed)
    expected = undisturbed(clients)
    gc.collect()
    gc.disable()  # finalizers run where a program lets go of something, and nowhere else
    with patch.dict(os.environ, {VARIABLE: SECRET}):
        fleet = Fleet(plan)
        try:
            return _checked(fleet, clients, expected)
        finally:
            gc.enable()
            fleet.close()


def _checked(fleet: Fleet, clients: list[Client], expected: list[list[list[int]]]) -> Outcome:
    deadline = max(client.deadline for client in clients)

    def heard() -> None:
        assert fleet.events.count < MOST_EVENTS, "it does not come to an end"
        if fleet.events.now > deadline:
            hanging = [i for i, client in enumerate(clients) if client.fate is None]
            assert not hanging, f"requests {hanging} hang"
            held = [worker.process.name for worker in fleet.workers if not worker.idle]
            raise AssertionError(f"{', '.join(held)} still hold what nobody wants")

    fleet.run(clients, heard)
    for client, answer in zip(clients, expected, strict=True):
        whole = client.fate == "answered"
        for got, wanted, finish in zip(client.tokens, answer, client.finish, strict=True):
            assert got == wanted[: len(got)], f"tokens differ from the {min(len(got), len(wanted))} expected"
            assert not whole or got == wanted, f"an answer of {len(got)} of {len(wanted)} tokens ({finish})"
        assert client.fate != "failed" or client.line
        fleet.happened[client.fate or ""] += 1
        fleet.happened["sent again"] += client.moves
    gc.collect()
    for worker in fleet.workers:
        worker.must_be_empty()
        worker.tell_ends()
    trace = repr([(client.fate, client.line, client.tokens) for client in clients]) + repr(fleet.events.now)
    digest = hashlib.blake2b(trace.encode(), digest_size=8).hexdigest()
    return Outcome(fleet.num_steps, fleet.events.count, digest, fleet.happened)
