"""An exact, smaller form of a page in a store.

Of a bfloat16 number of K or V, the sign and the seven bits behind the leading one are as good as random, but of the
eight bits of its exponent only about three are news: neighbours are of like size. So exponents alone are compressed.
Lossless compression of bfloat16 weights by their exponents is older (Hershcovitch et al. 2024, ZipNN,
arXiv:2411.05239); pages in the pool stay as kernels read them.
"""

import numpy as np
import zstandard

LEVEL = 1  # levels 3 and 9 make it larger here, and are slower
MAX_SHARE = 0.95  # of a page; a larger form is not worth the work of reading it


def compress(page: memoryview) -> bytes | None:
    """The form of a page's bytes: signs and fractions, then compressed exponents. None if it is hardly smaller."""
    if len(page) % 2:
        return None
    words = np.frombuffer(page, np.uint16)
    exponents = (words >> 7).astype(np.uint8)
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(exponents.data)
    if len(words) + len(packed) > MAX_SHARE * len(page):
        return None
    fractions = (words & 0x7F | (words >> 8) & 0x80).astype(np.uint8)
    return fractions.tobytes() + packed


def decompress(form: memoryview, into: memoryview) -> bool:
    """Put a page's bytes where they belong. False if this is no form of a page of that size."""
    count = len(into) // 2
    try:
        exponents = zstandard.ZstdDecompressor().decompress(form[count:], max_output_size=count)
    except zstandard.ZstdError:
        return False
    if len(exponents) != count or len(into) % 2:
        return False
    words, fractions = np.frombuffer(into, np.uint16), np.frombuffer(form[:count], np.uint8)
    np.left_shift(np.frombuffer(exponents, np.uint8), 7, out=words, dtype=np.uint16)
    words |= fractions & 0x7F
    words |= (fractions & np.uint16(0x80)) << 8
    return True
