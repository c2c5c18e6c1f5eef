"""Random fleets with faults, each made of one number: what fails, fails again with that number."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

from tests.chaos.fleet import Fleet, Plan
from tests.chaos.front import Client
from tests.chaos.kinds import KINDS, SHAPED, TAUGHT, ask
from tests.chaos.letters import VOCAB
from tests.chaos.matrix import Matrix
from tests.chaos.standin import BOTH, ONE_GROUP, Opened, Sizes
from tests.cluster.wire.pairs import SECRET
from twostroke.cluster.wire.secret import VARIABLE
from twostroke.engine.output import Token
from twostroke.study.simulate.fleet import ROUTERS
from twostroke.study.simulate.simulated_request import prompt_tokens
from twostroke.study.traffic.requests import PromptPiece, TrafficRequest

FAULTS = ("kill", "vanish", "drain", "stop", "silence", "front end")
HANG_S = 400.0  # seconds after the last fault in which every request has to be over, and after which nothing is held
MOST_EVENTS = 3_000_000  # of a run
STUCK_S = 600.0  # seconds of real time of a run, which takes less than one


@dataclass(frozen=True)
class Outcome:
    """A run that kept all rules.

    Attributes:
        trace: a digest of all that clients got, and of when it was over.
        happened: how often each thing did. matrix: which fault hit which kind of request.
    """

    steps: int
    events: int
    trace: str
    happened: Counter[str]
    matrix: Matrix


def draw(seed: int) -> tuple[Plan, list[Client]]:
    """A fleet, and its clients."""
    rng = random.Random(f"plan {seed}")
    page_size, longest = rng.choice((4, 8)), rng.choice((40, 100))
    least = -(-longest // page_size) + 2
    student = rng.random() < 0.3
    kind = "plain" if student else random.Random(f"kind {seed}").choice(("plain", "plain", "windowed", "recurrent"))
    if kind == "plain" and not student and random.Random(f"dtype {seed}").random() < 0.3:
        kind = "coded"
    sizes = {
        role: Sizes(
            # A teacher holds values for as long as answers last, and a student gets entries twice.
            # Other kinds have pages for each group of layers, and for snapshots.
            pages=(6 if student else 1 if kind in ONE_GROUP else 5) * rng.choice((least, 2 * least, 6 * least)),
            page_size=page_size,
            index=rng.choice(("radix", "radix", "off")),
            max_step_tokens=rng.choice((8, 32, 128)),
            max_running=rng.choice((2, 8, 64)),
            in_flight=rng.random() < 0.5,
            kind=kind,
        )
        for role in ("prefill", "decode")
    }
    until_s = rng.choice((2.0, 10.0, 60.0))
    some = [fault for fault in FAULTS if rng.random() < 0.7]
    plan = Plan(
        seed=seed,
        kinds=tuple(some),
        student=student,
        gap_s=until_s / rng.choice((10, 20, 40)),
        until_s=until_s,
        counts={role: rng.randint(1, 3) for role in ("prefill", "decode")},
        sizes=sizes,
        transports=rng.choice((("tcp",), ("nixl",), ("nixl", "tcp"))),
        router=rng.choice(ROUTERS[:2]),
        latency_s=rng.choice((1e-4, 2e-3)),
        room=rng.choice((1 << 10, 1 << 20)),
        notice_s=rng.choice((0.0, 0.1, 2.0)),
        down_s=rng.choice((0.0, 0.5, 5.0)),
        lost=rng.choice((0.0, 0.2)),
        damaged=rng.choice((0.0, 0.02)),
        page_s=rng.choice((2e-3, 0.05, 0.2)),  # a read may take 10 s
    )
    return plan, _clients(rng, plan, longest)


def _clients(rng: random.Random, plan: Plan, longest: int) -> list[Client]:
    now, clients = 0.0, list[Client]()
    gap, leaving = plan.until_s / rng.choice((15, 40)), rng.choice((0.0, 0.2))
    groups = rng.randint(1, 5)
    shaped, rng_of_shapes = (
        not plan.student and plan.sizes["prefill"].kind in ONE_GROUP,
        random.Random(f"shapes {plan.seed}"),
    )
    for number in range(rng.randint(10, 40)):
        now += rng.expovariate(1 / gap)
        output, shared = rng.randint(1, longest // 2), rng.choice((0, longest // 4))
        own = rng.randint(1, max(1, longest - output - shared))
        pieces = ((PromptPiece(rng.randrange(groups), shared),) if shared else ()) + (PromptPiece(1000 + number, own),)
        arrival = TrafficRequest(now, pieces, output)
        kind = rng.choice(TAUGHT if plan.student else KINDS)
        if shaped and rng_of_shapes.random() < 0.25:
            kind = SHAPED
        parsed = ask(kind, rng, prompt_tokens(pieces, VOCAB).tolist(), output)
        leaves_at = now + rng.expovariate(2.0) if rng.random() < leaving else None
        clients.append(Client(kind, parsed, arrival, max(now, plan.until_s) + HANG_S, leaves_at))
    return clients


def undisturbed(clients: list[Client], kind: str) -> list[list[list[Token]]]:
    """The tokens of each choice of each client: one engine does both strokes, and nothing goes wrong."""
    sizes = Sizes(4000, 8, "off", 512, 256, in_flight=False, kind=kind)
    opened = Opened(sizes, lambda: 0.0, lambda prompt, rows: None, roles=BOTH)
    requests = [opened.request(one.parsed.prompt, one.parsed.params, one.parsed.method) for one in clients]
    opened.engine.run(requests)
    found: list[list[list[Token]]] = [[[] for _ in request.choices] for request in requests]
    for request, choices in zip(requests, found, strict=True):
        for token in request.events:
            choices[token.choice].append(token)
    opened.engine.close()
    return found


def check(seed: int) -> Outcome:
    """Run one fleet to its end. Raises AssertionError if a token, a request, a page or a lease is wrong or lost."""
    found: list[Outcome] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(_run(seed))
        except BaseException as error:
            errors.append(error)

    # On a thread of its own: this one sees if it waits for what is no part of the simulation, which would be for ever.
    thread = threading.Thread(target=run, name=f"seed {seed}", daemon=True)
    thread.start()
    thread.join(STUCK_S)
    assert not thread.is_alive(), "a task waits for what is no part of the simulation"
    if errors:
        raise errors[0]
    return found[0]


def _run(seed: int) -> Outcome:
    plan, clients = draw(seed)
    kind = plan.sizes["prefill"].kind
    expected = undisturbed(clients, kind)
    gc.disable()  # finalizers run where a program lets go of something, and nowhere else
    gc.freeze()  # what was there before is not looked at
    try:
        with patch.dict(os.environ, {VARIABLE: SECRET}):
            fleet = Fleet(plan)
            try:
                fleet.happened[f"a fleet of a {kind} model"] += 1
                return _checked(fleet, clients, expected)
            finally:
                fleet.close()
    finally:
        gc.unfreeze()
        gc.enable()


def _checked(fleet: Fleet, clients: list[Client], expected: list[list[list[Token]]]) -> Outcome:
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
        for got, wanted in zip(client.tokens, answer, strict=True):
            assert got == wanted[: len(got)], f"{client.kind}: tokens differ from the {len(wanted)} expected: {got}"
            assert not whole or got == wanted, f"{client.kind}: an answer of {len(got)} of {len(wanted)} tokens"
        assert client.fate != "failed" or client.line
        fleet.happened[client.fate or ""] += 1
        fleet.happened["sent again"] += client.moves
    gc.collect()
    for worker in fleet.workers:
        worker.must_be_empty()
        worker.tell_ends()
    trace = repr([(client.fate, client.line, client.tokens) for client in clients]) + repr(fleet.events.now)
    digest = hashlib.blake2b(trace.encode(), digest_size=8).hexdigest()
    return Outcome(fleet.num_steps, fleet.events.count, digest, fleet.happened, fleet.matrix)
