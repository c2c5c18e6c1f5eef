"""Chooses an ITL objective from what a decode step costs.

While anything decodes, a step is one token for every stream and a chunk of the waiting prompts. A small objective
means small chunks: each reads all weights again, so prompts take longer. A large one means that streams stand still.

A step of `STEPS` decode steps spends about a seventh of a chunk's time on reading weights once more, and in that step
every stream gets a token for it. Measured on two cores of a Xeon: with 100 ms, which is about ten steps of the 135M,
four streams beside a prompt of 4,000 tokens keep 96% of the throughput that they have without an objective, and their
mean ITL falls from 394 ms to 88. With 200 ms, about seven steps of the 0.5B, 16 clients keep 99%.

Nobody reads faster than a token in `MIN_MS`, so a quick model does not pay for less.
"""

STEPS, MIN_MS = 8, 100


def comfortable_itl_ms(decode_step_s: float) -> float:
    """The objective, in milliseconds to two digits, for a decode step of one stream that takes `decode_step_s` seconds.

    `STEPS` decode steps, but at least `MIN_MS`.
    """
    return float(f"{max(MIN_MS, STEPS * decode_step_s * 1e3):.2g}")
