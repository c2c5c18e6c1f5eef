"""Re-reading (RE2): the question, the words "Read the question again:", and the question once more.

Xu et al. 2024, "Re-Reading Improves Reasoning in Large Language Models" (arXiv:2309.06275), section 3.
"""

from dataclasses import dataclass

from twostroke.methods.repeat import Repeat


@dataclass(frozen=True)
class Reread(Repeat, name="reread"):
    """Repetition with the paper's words between the copies and everything kept.

    In a chat, scope="turn" asks as the paper does: the question twice within one user turn.
    """

    times: int | str | tuple[str, ...] = "\nRead the question again: "
    keep: str = "all"
