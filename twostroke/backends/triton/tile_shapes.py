"""The tiles of a matrix product, by its size and the device's processors."""

from dataclasses import dataclass

from twostroke.backends.triton.packed import ROWS

FEW_TOKENS = 64  # up to these, segments are programs of their own, and packed weights are unpacked in registers
WANTED_PROGRAMS = 192  # a matrix is cut along K until so many programs share it
SHORTEST = 224  # columns of a segment, at least
MAX_SEGMENTS = 8
PROCESSORS = 132
UNIT = 128  # columns of a segment are a multiple


@dataclass(frozen=True)
class TileShape:
    """A tile of `features` by `tokens`, `columns` at a time; `warps` and `stages` of a program."""

    features: int
    tokens: int
    columns: int
    warps: int
    stages: int


# Few tokens, by their number, up to and including it.
TILES = {16: TileShape(64, 16, 128, 4, 3), 32: TileShape(64, 32, 128, 4, 4), 64: TileShape(64, 64, 64, 4, 4)}
DEEP = 5  # stages where a multiprocessor has one program: all that hides its loads is its own loads


WIDE, SQUARE, LOW = TileShape(256, 128, 64, 8, 4), TileShape(128, 128, 64, 8, 4), TileShape(64, 128, 64, 4, 4)


GATED_WIDE, GATED_LOW = TileShape(128, 128, 64, 8, 4), TileShape(64, 128, 64, 8, 4)


def few(tokens: int) -> TileShape:
    """The tiles of a product with at most FEW_TOKENS tokens."""
    return next(chosen for most, chosen in TILES.items() if tokens <= most)


def stages(chosen: TileShape, programs: int, usual: int) -> int:
    """Stages of so many programs with few tokens."""
    return DEEP if programs <= PROCESSORS and chosen.tokens <= 32 else usual


def packed_stages(tokens: int) -> int:
    """Stages of a product with packed weights, whose tiles have so many tokens."""
    return 3 if tokens <= 16 else 2


def many(tokens: int, features: int, count: int) -> TileShape:
    """The tiles of a product with more tokens, of `count` segments: as wide as leaves no multiprocessor without one."""
    tall = -(-tokens // 128)
    if count == 1 and tall * (features // 256) >= PROCESSORS:
        return WIDE
    return SQUARE if tall * (features // 128) >= PROCESSORS else LOW


def segments(features: int, columns: int) -> int:
    """Number of pieces that a product is summed in, by the shape alone."""
    count, programs = 1, -(-features // ROWS)
    while count < MAX_SEGMENTS and programs * count < WANTED_PROGRAMS and columns // (2 * count) >= SHORTEST:
        count *= 2
    return count


def segment_columns(columns: int, count: int, unit: int = UNIT) -> int:
    return -(-columns // (count * unit)) * unit
