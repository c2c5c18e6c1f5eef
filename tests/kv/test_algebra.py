"""Random sequences of every operation on KV values, against plain lists of entries."""

import contextlib
import copy
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kv.counts import check_counts
from tests.kv.tiers.faults import Faults
from tests.kv.values import (
    APART,
    GEOMETRY,
    RECURRENT,
    WINDOWED,
    array,
    computed,
    make_pool,
    recurrent,
    same_tail,
    write_recurrent,
)
from tests.thinning import examples
from twostroke.backends.interface import PAGE
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.errors import KVError, OutOfPages, PageLost
from twostroke.kv import spans
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.entries_by_head import NO_ENTRY
from twostroke.kv.geometry import Geometry
from twostroke.kv.pages import HOST, POOL, TIERS
from twostroke.kv.pool import PagePool
from twostroke.kv.slot_mapping import SlotMapping
from twostroke.kv.tier_moves import spill
from twostroke.kv.writer import KVWriter
from twostroke.models.rope import NO_ROPE, Rope, turned_on

MODELS = ("student", "teacher")
MAX_VALUES = 8
MAX_POSITION = 60  # to which values may be moved

indices = st.integers(0, MAX_VALUES - 1)
bounds = st.none() | st.integers(-20, 20) | st.integers(-3, 3).map(np.int64)
token_lists = st.lists(st.integers(0, 2), max_size=9)
tails = st.none() | st.builds(Tail, st.just("m"), pending=st.integers(0, 9))
rows = st.floats(width=32, allow_nan=False).map(lambda x: StoredLogits(np.array([[x, -0.0]], np.float32)))
tails = tails | st.builds(Tail, st.just("m"), rows)
faults = st.none() | st.integers(0, 4)  # how many calls of stores succeed before one fails


class Entry:
    """One entry, and the entries that it attended to when it was computed, without stretches."""

    def __init__(self, model: str, context: "list[Entry]", token: int, position: int) -> None:
        self.token, self.position = token, position
        self.data = computed(model, [entry.data for entry in context], token, position)
        self.before = [entry.token for entry in context]
        whole = all(entry.model == model and entry.position == i for i, entry in enumerate(context))
        self.model = model if whole and position == len(context) else None
        self.k, self.u, _ = recurrent(self.data)
        before = context[-1].state if context else np.zeros((1, 16, 8), np.float32)
        self.state = before + np.outer(self.k, self.u)  # integers, whose sums are exact
        self.moves: tuple[tuple[int, int], ...] = ()  # (position, distance), in order
        self.heads: list[list[Entry]] | None = None  # by layer and head, if they hold different ones
        self.bias = np.zeros((2, 2), np.float32)  # by layer and head

    def of(self, layer: int, head: int) -> "Entry":
        return self if self.heads is None else self.heads[layer][head]

    def moved(self, distance: int) -> "Entry":
        other = copy.copy(self)
        other.position, other.model = self.position + distance, None
        other.moves = (*self.moves, (self.position, distance))
        if self.heads is not None:
            other.heads = [[one.moved(distance) for one in row] for row in self.heads]
        return other

    def by_head(self, heads: "list[list[Entry]]", position: int, bias: np.ndarray) -> "Entry":
        other = copy.copy(self)
        other.position, other.model, other.moves, other.heads, other.bias = position, None, (), heads, bias
        return other

    def biased(self, bias: np.ndarray) -> "Entry":
        other = copy.copy(self)
        other.model, other.bias = None, bias
        return other


@cache
def stored(geometry: Geometry, group: int, data: bytes, moves: tuple[tuple[int, int], ...]) -> np.ndarray:
    """An entry in the pages of a group: [layers, parts, 1, heads, width]."""
    if not moves:
        return geometry.stored.encode(array([data]))
    numbers = geometry.stored.decode(before := stored(geometry, group, data, moves[:-1])).copy()
    position, distance = moves[-1]
    for i, layer in enumerate(geometry.groups[group].layers):
        numbers[i, 0] = turned_on(geometry.ropes[layer], numbers[i, 0], np.array([[position]]), distance)
    made = geometry.stored.encode(numbers).copy()
    geometry.stored.sides(made)[1][:] = geometry.stored.sides(before)[1]  # V is what it was
    return made


def stored_by_head(geometry: Geometry, group: int, entry: Entry) -> np.ndarray:
    """The same of an entry whose heads may hold others."""
    if entry.heads is None:
        return stored(geometry, group, entry.data, entry.moves)
    found = stored(geometry, group, entry.data, ()).copy()
    for i, head in np.ndindex(2, 2):
        one = entry.of(geometry.groups[group].layers[i], head)
        found[i, :, :, head] = stored(geometry, group, one.data, one.moves)[i, :, :, head]
    return found


NOTHING = Entry("m", [], 0, 0)


@dataclass
class Expected:
    """The expected contents of a value."""

    entries: list[Entry]
    next_position: int
    tail: Tail | None = None

    def canonical_length(self, model: str) -> int:
        tokens = [entry.token for entry in self.entries]
        for i, entry in enumerate(self.entries):
            if entry.model != model or entry.before != tokens[:i]:
                return i
        return len(tokens)

    def __getitem__(self, which: slice) -> "Expected":
        entries, (start, stop, _) = self.entries[which], which.indices(len(self.entries))
        positions = [*(entry.position for entry in self.entries), self.next_position]
        if not entries:
            return Expected([], positions[start])
        at_end = stop == len(self.entries)
        return Expected(
            entries, self.next_position if at_end else entries[-1].position + 1, self.tail if at_end else None
        )

    def __add__(self, other: "Expected") -> "Expected":
        if not self.entries or not other.entries:
            return self if self.entries or not other.entries else other
        return Expected(self.entries + other.entries, other.next_position, other.tail)

    def at(self, distance: int) -> "Expected":
        tail = self.tail if self.tail is not None and self.tail.pending is not None else None
        return Expected([entry.moved(distance) for entry in self.entries], self.next_position + distance, tail)

    def gather(self, indices: np.ndarray) -> "Expected":
        layers, heads, count = indices.shape
        num_empty = (indices == NO_ENTRY).sum(-1)

        def held(i: int, h: int, j: int) -> tuple[Entry, float]:
            """What a slot of a head holds, and its bias."""
            one = self.entries[indices[i, h, max(j, num_empty[i, h])]]
            entry, before = one.of(i, h), max(0, num_empty[i, h] - j)
            if not before:
                return entry, one.bias[i, h]
            entry = copy.copy(entry)
            entry.position = max(0, entry.position - before)
            return entry, -np.inf

        slots = [[[held(i, h, j)[0] for h in range(heads)] for i in range(layers)] for j in range(count)]
        last = max(one.position for slot in slots for row in slot for one in row)
        first = max(0, last - count + 1)
        biases = [np.array([[held(i, h, j)[1] for h in range(heads)] for i in range(layers)]) for j in range(count)]
        whose = [indices[0, 0, max(j, num_empty[0, 0])] for j in range(count)]
        entries = [self.entries[whose[j]].by_head(slot, first + j, biases[j]) for j, slot in enumerate(slots)]
        ends = indices[:, :, -1] == len(self.entries) - 1
        next_position = self.next_position if last == self.entries[-1].position else entries[-1].position + 1
        return Expected(entries, next_position, self.tail if ends.all() else None)

    def with_bias(self, bias: np.ndarray) -> "Expected":
        tail = self.tail if self.tail is not None and self.tail.pending is not None else None
        each = zip(self.entries, np.moveaxis(bias, 2, 0), strict=True)
        return Expected([entry.biased(own) for entry, own in each], self.next_position, tail)

    def joins(self, other: "Expected") -> bool:
        return not self.entries or not other.entries or self.entries[-1].position < other.entries[0].position


class Values(RuleBasedStateMachine):
    geometry = replace(GEOMETRY, ropes=(Rope(1e4), Rope(1e6, rotated=2)))
    more_pages = 0  # that a step may take besides those of entries

    def __init__(self) -> None:
        super().__init__()
        gc.disable()  # pages must be freed by reference counts alone
        self.groups = len(self.geometry.groups)
        # The second one sometimes runs out of pages.
        self.pools = [make_pool(count * self.groups, geometry=self.geometry) for count in (40, 14)]
        self.faults = Faults()
        for pool in self.pools:
            pool.max_position = MAX_POSITION
            pool.stores = {tier: self.faults.store(tier) for tier in TIERS[2:]}
        self.values: list[tuple[KVCache, Expected]] = []
        self.writers: list[tuple[KVWriter, Expected]] = []

    def pick(self, i: int) -> tuple[KVCache, Expected]:
        return self.values[i % len(self.values)]

    def keep(self, kv: KVCache, expected: Expected) -> None:
        self.values.append((kv, expected))
        del self.values[:-MAX_VALUES]

    @rule(i=st.integers(0, 1))
    def empty(self, i: int) -> None:
        self.keep(KVCache.empty(self.pools[i]), Expected([], 0))

    @precondition(lambda self: self.values)
    @rule(i=indices, model=st.sampled_from(MODELS), fault=faults)
    def open(self, i: int, model: str, fault: int | None = None) -> None:
        kv, expected = self.pick(i)
        if not kv.complete:
            with pytest.raises(KVError, match="lacks entries or states"):
                KVWriter(kv, model)
            return
        used, copies = kv.pool.num_used, kv.pool.num_copies
        try:
            with self.faults.after(fault):
                writer = KVWriter(kv, model)
        except (OutOfPages, PageLost):
            assert (kv.pool.num_used, kv.pool.num_copies) == (used, copies)
            return
        self.writers.append((writer, Expected(list(expected.entries), expected.next_position)))
        del self.writers[:-3]  # abandoned, whatever was entered

    @precondition(lambda self: self.writers)
    @rule(i=indices, tokens=token_lists)
    def append(self, i: int, tokens: list[int]) -> None:
        writer, expected = self.writers[i % len(self.writers)]
        pool, table, position = writer.base.pool, writer.table.copy(), writer.next_position
        used = pool.num_used
        try:
            places = writer.append(tokens)
        except OutOfPages:
            assert pool.num_used <= used
            assert (writer.table[:, : PAGE + 1] == table[:, : PAGE + 1]).all()
            assert writer.next_position == position
            return
        assert pool.num_used <= used + self.groups * (-(-len(tokens) // pool.page_size) + 1) + self.more_pages
        assert places.positions.tolist() == list(range(position, position + len(tokens)))
        for token in tokens:
            expected.entries.append(Entry(writer.model, expected.entries, token, expected.next_position))
            expected.next_position += 1
        self.write(pool, places, expected.entries[len(expected.entries) - len(tokens) :])

    def write(self, pool: PagePool, places: SlotMapping, new: list[Entry]) -> None:
        for group, frames in enumerate(places.frames):
            pool.memory.write(group, frames, places.slots, self.stored(group, new))

    def stored(self, group: int, entries: list[Entry]) -> np.ndarray:
        """Entries in the pages of a group: [layers, parts, n, heads, width]."""
        parts = [self.stored_one(group, one) for one in entries or [NOTHING]]
        return np.concatenate(parts, 2)[:, :, : len(entries)]

    def stored_one(self, group: int, entry: Entry) -> np.ndarray:
        return stored_by_head(self.geometry, group, entry)

    @precondition(lambda self: self.writers)
    @rule(i=indices, tail=tails, close=st.booleans())
    def freeze(self, i: int, tail: Tail | None, close: bool) -> None:
        writer, expected = self.writers[i % len(self.writers)]
        kv = writer.freeze(tail)
        assert kv.complete
        self.keep(kv, Expected(list(expected.entries), expected.next_position, tail))
        if close:
            del self.writers[i % len(self.writers)]

    @precondition(lambda self: self.values)
    @rule(i=indices, tokens=token_lists, model=st.sampled_from(MODELS), tail=tails)
    def extend(self, i: int, tokens: list[int], model: str, tail: Tail | None) -> None:
        kv, _ = self.pick(i)
        self.open(i, model)
        if not self.writers or self.writers[-1][0].base.tokens != kv.tokens:
            return  # there was no room for its pages
        self.append(-1, tokens)
        self.freeze(-1, tail, close=True)

    @precondition(lambda self: self.values)
    @rule(i=indices, start=bounds, stop=bounds)
    def cut(self, i: int, start: Any, stop: Any) -> None:
        kv, expected = self.pick(i)
        used = kv.pool.num_used
        try:
            self.keep(kv[start:stop], expected[start:stop])
        except OutOfPages:  # for the state at the end
            assert self.more_pages
        assert kv.tier != POOL or kv.pool.num_used <= used + self.more_pages

    @precondition(lambda self: self.values)
    @rule(i=indices, position=st.integers(-2, MAX_POSITION), fault=faults)
    def move_on(self, i: int, position: int, fault: int | None) -> None:
        kv, expected = self.pick(i)
        positions = [entry.position for entry in expected.entries] or [expected.next_position]
        distance = position - positions[0]
        positions += [one.position for slot in expected.entries for row in slot.heads or [] for one in row]
        ends = [expected.next_position + distance, *(one + distance for one in positions)]
        if not expected.entries and position >= 0:
            assert kv.at(position).next_position == position
        elif distance and (min(ends) < 0 or max(ends[1:]) >= MAX_POSITION):
            with pytest.raises(KVError, match=r"positions (begin|end) at"):
                kv.at(position)
        else:
            if (moved := self.made(kv.pool, lambda: kv.at(position), fault)) is not None:
                self.keep(moved, expected.at(distance) if distance else expected)

    @precondition(lambda self: self.values)
    @rule(i=indices, count=st.integers(0, 12), seed=st.integers(0, 99), to_the_end=st.booleans(), fault=faults)
    def gather(self, i: int, count: int, seed: int, to_the_end: bool, fault: int | None) -> None:
        kv, expected = self.pick(i)
        random, length, chosen = np.random.default_rng(seed), len(kv), np.empty((2, 2, 0), int)
        if count := min(count, length):
            rows = [np.sort(random.permutation(length)[:count]) for _ in range(4)]
            chosen = np.reshape(rows, (2, 2, count))
            if to_the_end:
                chosen[:, :, -1] = length - 1
            if seed % 2:
                heads = random.integers(2) if seed % 4 == 1 else slice(None)  # of a layer
                chosen[random.integers(2), heads, : random.integers(count)] = NO_ENTRY
        if self.geometry.windowed:
            with pytest.raises(KVError, match="a model whose layers attend to all entries"):
                kv.gather(chosen)
            return
        if (made := self.made(kv.pool, lambda: kv.gather(chosen), fault)) is not None:
            self.keep(made, expected.gather(chosen) if count else expected[length:])

    def made(self, pool: PagePool, make: Callable[[], KVCache], fault: int | None) -> KVCache | None:
        """A value; None if the fault prevented it, of which then nothing is left in the pool."""
        used, found = pool.num_used, None
        with contextlib.suppress(OutOfPages, PageLost), self.faults.after(fault):
            found = make()
        assert found is not None or pool.num_used == used  # what the error's frames held is gone with it
        return found

    @precondition(lambda self: self.values)
    @rule(i=indices, seed=st.integers(0, 99))
    def with_bias(self, i: int, seed: int) -> None:
        kv, expected = self.pick(i)
        bias = np.random.default_rng(seed).choice(np.array([-np.inf, 0, 1.5], np.float32), (2, 2, len(kv)))
        if self.geometry.windowed:
            with pytest.raises(KVError, match="a model whose layers attend to all entries"):
                kv.with_bias(bias)
            return
        if not self.may_have(kv, bias):
            with pytest.raises(KVError, match="shows entries that heads did not see"):
                kv.with_bias(bias)
            return
        self.keep(kv.with_bias(bias), expected.with_bias(bias))

    def may_have(self, kv: KVCache, bias: np.ndarray) -> bool:
        """Whether it has all entries that heads see with such a bias."""
        return True

    @precondition(lambda self: self.values)
    @rule(i=indices, j=indices, fault=faults)
    def add(self, i: int, j: int, fault: int | None) -> None:
        self._join(*self.pick(i), *self.pick(j), fault)

    @precondition(lambda self: self.values)
    @rule(i=indices, j=indices, at=st.integers(0, 12), skip=st.integers(0, 3))
    def splice(self, i: int, j: int, at: int, skip: int) -> None:
        (left, left_expected), (right, right_expected) = self.pick(i), self.pick(j)
        try:
            cut = right[at + skip :]
        except OutOfPages:
            assert self.more_pages
            return
        self._join(left[:at], left_expected[:at], cut, right_expected[at + skip :])

    def _join(
        self, left: KVCache, left_expected: Expected, right: KVCache, right_expected: Expected, fault: int | None = None
    ) -> None:
        used, moves = left.pool.num_used, left.pool is not right.pool or left.tier != right.tier
        if not left_expected.joins(right_expected):
            with pytest.raises(KVError, match="positions must increase"):
                _ = left + right
        else:
            try:
                with self.faults.after(fault):
                    self.keep(left + right, left_expected + right_expected)
            except (OutOfPages, PageLost):
                assert moves or left.pool.num_free < self.groups or self.faults.raised
        # Adjacent parts of two pages may share one page.
        assert moves or left.pool.num_used <= used + self.groups

    @precondition(lambda self: self.values)
    @rule(i=indices, j=st.integers(0, 1), fault=faults)
    def copy(self, i: int, j: int, fault: int | None) -> None:
        kv, expected = self.pick(i)
        try:
            with self.faults.after(fault):
                self.keep(kv.copy_to(self.pools[j]), expected)
        except (OutOfPages, PageLost):
            assert self.faults.raised or self.pools[j].num_free < kv.num_pages

    @precondition(lambda self: self.values)
    @rule(i=indices, j=st.integers(0, 1))
    def save_and_load(self, i: int, j: int) -> None:
        kv, expected = self.pick(i)
        with tempfile.TemporaryDirectory() as directory:
            kv.save(Path(directory) / "value")
            try:
                self.keep(KVCache.load(Path(directory) / "value", self.Holder(self.pools[j])), expected)
            except OutOfPages:
                assert self.pools[j].num_free < kv.num_pages

    @precondition(lambda self: self.values)
    @rule(i=indices, tier=st.sampled_from(TIERS), fault=faults)
    def move(self, i: int, tier: str, fault: int | None) -> None:
        kv, expected = self.pick(i)
        before = [kv.pool.num_used, *(kv.pool.num_in(one) for one in TIERS[1:])]
        try:
            with self.faults.after(fault):
                moved = kv.to(tier)
        except (OutOfPages, PageLost):
            assert self.faults.raised or tier in (POOL, HOST)
            assert [kv.pool.num_used, *(kv.pool.num_in(one) for one in TIERS[1:])] == before
            return
        assert moved.tier == tier
        self.keep(moved, expected)

    @precondition(lambda self: self.values)
    @rule(i=indices, j=indices, fault=faults, order=st.permutations(["load", "load", "publish", "close"]))
    def arrive(self, i: int, j: int, fault: int | None, order: list[str]) -> None:
        """Two values come at once, in any order of phases, and one of them may fail or be given up."""
        (kv, expected), (other, _) = self.pick(i), self.pick(j)
        try:
            with kv.swap_in() as one, other.swap_in() as two, self.faults.after(fault):
                two.load()
                for phase in order:
                    getattr(one, phase)()
                two.publish()
        except (OutOfPages, PageLost, KVError):
            return
        with kv.swap_in() as one:
            one.load()
            one.publish()
            assert kv.swap_in().missing == {}
            self.check_frames(kv.pool, kv.table, expected)

    @rule(j=st.integers(0, 1), which=st.integers(0, 7))
    def spill(self, j: int, which: int) -> None:
        """Pages are spilled without notice."""
        pool = self.pools[j]
        held = [kv.entry_table.pages for kv, _ in self.values if kv.pool is pool]
        if held:
            used = pool.num_used
            assert spill(pool, np.concatenate(held)[which:]) == used - pool.num_used

    @dataclass
    class Holder:
        pool: PagePool

    @precondition(lambda self: self.values)
    @rule(i=indices)
    def drop(self, i: int) -> None:
        del self.values[i % len(self.values)]

    @precondition(lambda self: self.writers)
    @rule(i=indices)
    def abandon(self, i: int) -> None:
        del self.writers[i % len(self.writers)]

    @invariant()
    def values_are_as_expected(self) -> None:
        for kv, expected in self.values:
            entries = expected.entries
            assert len(kv) == len(entries)
            assert kv.tokens == [entry.token for entry in entries]
            assert kv.positions == [entry.position for entry in entries]
            assert kv.next_position == expected.next_position
            if (heads := kv.head_positions) is not None:
                for i, head, j in np.ndindex(*heads.shape):
                    assert heads[i, head, j] == entries[j].of(i, head).position
            else:
                assert all(entry.heads is None for entry in entries)
            biases = np.zeros((2, 2, len(kv))) if kv.bias is None else kv.bias
            assert all(np.array_equal(biases[..., j], entry.bias) for j, entry in enumerate(entries))
            self.check_contents(kv, expected)
            assert same_tail(kv.tail, expected.tail)
            for model in MODELS:
                assert kv.canonical_length(model) == expected.canonical_length(model)

    def check_contents(self, kv: KVCache, expected: Expected) -> None:
        as_stored, found = self.geometry.stored, kv.entries()
        held = [places_held(kv.table, group) for group in range(self.groups)]
        assert held[0].all()
        assert kv.nbytes == sum(map(np.count_nonzero, held)) * 2 * 2 * as_stored.head_bytes(4)
        assert found.dtype == np.float32
        for group, (numbers, there) in enumerate(zip(np.split(found, self.groups), held, strict=True)):
            bits = as_stored.decode(self.stored(group, expected.entries))
            assert np.array_equal(numbers[:, :, there], bits[:, :, there])
            assert np.isnan(numbers[:, :, ~there]).all()

    @invariant()
    def counts_are_exact(self) -> None:
        holders = {id(kv): kv for kv, _ in self.values} | {id(w.base): w.base for w, _ in self.writers}
        for pool in self.pools:
            mine = [kv for kv in holders.values() if kv.pool is pool]
            tables = {tier: [kv.entry_table.pages for kv in mine if kv.tier == tier] for tier in TIERS}
            own = [np.array(list(w.own_pages), np.int64) for w, _ in self.writers if w.base.pool is pool]
            check_counts(pool, tables.pop(POOL) + own, tables)
            assert self.faults.kept(pool) == {tier: pool.num_in(tier) for tier in pool.stores}

    @invariant()
    def what_writers_hold_is_in_the_pool(self) -> None:
        for writer, expected in self.writers:
            self.check_frames(writer.base.pool, writer.table, expected)
            assert self.geometry.complete(writer.freeze().entry_table)
            assert (writer.base.pool.frames_of(writer.pages) >= 0).all()

    def check_frames(self, pool: PagePool, table: np.ndarray, expected: Expected) -> None:
        """Raise AssertionError unless the frames that a step would read have the expected entries."""
        (frames,) = pool.step_tables([table])
        assert (frames[:, :PAGE] == table[:, :PAGE]).all()
        for group in range(pool.num_groups):
            bits, there = self.stored(group, expected.entries), places_held(table, group)
            found = pool.memory.read(group, *spans.places(frames, group))
            assert np.array_equal(found[:, :, there], bits[:, :, there])

    def teardown(self) -> None:
        self.values.clear()
        self.writers.clear()
        used = [(pool.num_used, pool.num_held, pool.num_copies) for pool in self.pools]
        kept = [self.faults.kept(pool) for pool in self.pools]
        gc.enable()
        assert used == [(0, 0, 0)] * 2
        assert kept == [{"disk": 0, "remote": 0}] * 2


def places_held(table: np.ndarray, group: int) -> np.ndarray:
    """For each entry, whether the group has it."""
    return spans.places(table, group)[0] != spans.NO_PAGE


class ApartValues(Values):
    """Each layer has pages of its own, and none where its heads see nothing."""

    geometry = replace(Values.geometry, groups=APART.groups)

    def stored_one(self, group: int, entry: Entry) -> np.ndarray:
        return stored_by_head(replace(self.geometry, groups=GEOMETRY.groups), 0, entry)[group : group + 1]

    def lacking(self, table: np.ndarray) -> np.ndarray:
        """Which entries the heads of each layer have not, [2, 1, n]."""
        return np.stack([~places_held(table, group) for group in range(2)])[:, None]

    def may_have(self, kv: KVCache, bias: np.ndarray) -> bool:
        return bool((np.isneginf(bias) | ~self.lacking(kv.table)).all())

    def check_contents(self, kv: KVCache, expected: Expected) -> None:
        self.check(kv.entries(), kv.table, expected)
        assert kv.nbytes == (~self.lacking(kv.table)).sum() * 2 * self.geometry.stored.head_bytes(4)

    def check_frames(self, pool: PagePool, table: np.ndarray, expected: Expected) -> None:
        (frames,) = pool.step_tables([table])
        for there, read in zip(spans.held(table).T, frames[:, PAGE:].T, strict=True):
            assert not there[-1:].any() or (read[~there] == read[-1]).all()
        found = [pool.memory.read(group, *spans.places(frames, group)) for group in range(2)]
        self.check(self.geometry.stored.decode(np.concatenate(found)), table, expected)

    def check(self, found: np.ndarray, table: np.ndarray, expected: Expected) -> None:
        """Each head has the entries that it sees, [layers, 2, n, heads, width]."""
        bits = np.concatenate([self.stored(group, expected.entries) for group in range(2)])
        seen = np.stack([~np.isneginf(one.bias) for one in expected.entries], -1) if expected.entries else None
        if seen is not None:
            assert not (seen & self.lacking(table)).any()
            assert np.isfinite(found[np.broadcast_to(~self.lacking(table)[..., None, None], found.shape)]).all()
            seen = np.broadcast_to(seen.swapaxes(1, 2)[:, None, ..., None], found.shape)
            assert np.array_equal(found[seen], self.geometry.stored.decode(bits)[seen])


class ApartCodes(ApartValues):
    """The same with codes."""

    geometry = replace(ApartValues.geometry, kv_dtype="int8")


class WindowedValues(Values):
    geometry = replace(WINDOWED, ropes=(Rope(1e4), NO_ROPE, Rope(1e6, rotated=2), Rope(1e2, (1.0, 2.0), 1.5)))


class ScaledValues(Values):
    """Codes of 8 bits, with a scale for each entry and head, in windowed layers too."""

    geometry = replace(WindowedValues.geometry, kv_dtype="int8")


class ScaledPlainValues(Values):
    """The same where layers attend to all entries, so that heads may hold different ones."""

    geometry = replace(Values.geometry, kv_dtype="int8")


class HalvedValues(Values):
    """The same with values of 4 bits."""

    geometry = replace(Values.geometry, kv_dtype="k8v4")


class RecurrentValues(Values):
    """One group of attention, and a layer with a state: a sum of products, of integers."""

    geometry = RECURRENT
    more_pages = 6

    def write(self, pool: PagePool, places: SlotMapping, new: list[Entry]) -> None:
        before = new[0].state - np.outer(new[0].k, new[0].u) if new else np.zeros((1, 16, 8), np.float32)
        write_recurrent(pool, places, [entry.data for entry in new], before)

    def check_contents(self, kv: KVCache, expected: Expected) -> None:
        there = places_held(kv.table, 0)
        assert there.all()
        assert np.array_equal(kv.entries(), self.stored(0, expected.entries))
        if kv.complete:
            zeros = np.zeros((1, 16, 8), np.float32)
            states = kv.states()
            assert states is not None
            assert np.array_equal(states[2], expected.entries[-1].state if expected.entries else zeros)

    def check_frames(self, pool: PagePool, table: np.ndarray, expected: Expected) -> None:
        (frames,) = pool.step_tables([table])
        found = pool.memory.read(0, *spans.places(frames, 0))
        assert np.array_equal(found, self.stored(0, expected.entries))


TestValues, TestWindowedValues = Values.TestCase, WindowedValues.TestCase
TestScaledValues, TestRecurrentValues = ScaledValues.TestCase, RecurrentValues.TestCase
TestScaledPlainValues, TestHalvedValues = ScaledPlainValues.TestCase, HalvedValues.TestCase
TestApartValues, TestApartCodes = ApartValues.TestCase, ApartCodes.TestCase
for case in (
    TestValues, TestWindowedValues, TestScaledValues, TestScaledPlainValues, TestHalvedValues, TestRecurrentValues,
    TestApartValues, TestApartCodes,
):  # fmt: skip
    case.settings = settings(
        max_examples=examples(20), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
del case  # else it is collected as a test
