"""Provenance: entries of other models or over other prefixes are never canonical."""

from tests.kv.values import contents, prefill
from twostroke.kv.pool import PagePool
from twostroke.kv.writer import KVWriter


def test_what_a_model_prefills_is_canonical_for_it_alone(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    assert kv.canonical_length("m") == 10
    assert kv.canonical_length("other") == 0
    assert prefill(prefill(kv, [3]), [4]).canonical_length("m") == 12


def test_a_prefix_stays_canonical_and_a_suffix_does_not(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    assert kv[:6].canonical_length("m") == 6
    assert kv[1:].canonical_length("m") == 0
    assert (kv[:4] + kv[6:]).canonical_length("m") == 4
    assert prefill(kv[6:6], [1]).canonical_length("m") == 0  # at position 6, with nothing before it
    assert prefill(kv[0:0], [1]).canonical_length("m") == 1


def test_what_follows_a_gap_is_not_canonical_even_where_the_gap_is_cut_out_again(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    longer = prefill(kv[:4] + kv[6:], [1, 2])
    assert longer.canonical_length("m") == 4
    assert (kv[:6] + kv[6:10] + longer[8:]).canonical_length("m") == 10


def test_a_value_put_together_again_is_whole(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    again = kv[:3] + kv[3:5] + (kv[2:] + kv[10:])[3:]
    assert again.canonical_length("m") == 10
    assert contents(again) == contents(kv)
    assert prefill(again, [7]).canonical_length("m") == 11


def test_a_suffix_is_only_whole_behind_the_tokens_it_was_computed_over(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    same, other = prefill(pool, range(10)), prefill(pool, [9, *range(1, 10)])
    assert (same[:5] + kv[5:]).canonical_length("m") == 10
    assert (other[:5] + kv[5:]).canonical_length("m") == 5


def test_what_follows_a_splice_belongs_to_neither_of_its_origins(pool: PagePool) -> None:
    one, other = prefill(pool, range(10)), prefill(pool, [9, *range(1, 10)])
    longer = prefill(one[:5] + other[5:], [7])
    for origin in (one, other):
        joined = origin + longer[10:]
        assert contents(joined) != contents(prefill(origin, [7]))
        assert joined.canonical_length("m") == 10


def test_a_splice_of_two_models_is_canonical_for_the_first_one_up_to_the_seam(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    teacher = prefill(pool, range(10), model="teacher")
    spliced = kv[:4] + teacher[4:]
    assert spliced.canonical_length("m") == 4
    assert spliced.canonical_length("teacher") == 0
    for model in ("m", "teacher"):
        continued = prefill(spliced, [1], model=model)
        assert (continued.canonical_length("m"), continued.canonical_length("teacher")) == (4, 0)
    # A student after a teacher's prefix: neither the teacher's entries nor its own are canonical for it.
    handed_over = prefill(teacher, [1, 2], model="m")
    assert (handed_over.canonical_length("m"), handed_over.canonical_length("teacher")) == (0, 10)
    assert (kv + handed_over[10:]).canonical_length("m") == 10


def test_entering_nothing_changes_nobodys_provenance(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    assert KVWriter(kv, "other").freeze().canonical_length("m") == 10
    assert KVWriter(kv[3:], "m").freeze().canonical_length("m") == 0
