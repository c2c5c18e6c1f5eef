import pytest

from twostroke.backends.native import backend as native
from twostroke.backends.native import library


@pytest.fixture(
    scope="module",
    params=[(variant, threads) for variant in library.VARIANTS for threads in (1, 3)],
    ids=lambda param: "-".join(map(str, param)),
)
def kernels(request: pytest.FixtureRequest) -> native.NativeBackend:
    variant, threads = request.param
    if variant not in library.variants():
        pytest.skip(f"the {variant} kernels cannot run here")
    return native.NativeBackend(threads, variant)
