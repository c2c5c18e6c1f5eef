"""What this machine can do, measured with the engine's own kernels at the shapes of both strokes.

Two layers of a model that does not exist, with the sizes of a 1.5B's and random weights, are timed: 512 rows for the
rates of products, one row for the bytes of weights that a decode step reads in a second, and the difference that a
long context makes for attention. Nothing is taken off what is measured, so the fractions of a plan are 1.
"""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from twostroke.backends.interface import Backend
from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend
from twostroke.engine.calibration import StepBench
from twostroke.engine.model import Model
from twostroke.engine.model_loader import new_pool
from twostroke.errors import InvalidRequest
from twostroke.kv.geometry import Geometry
from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.cost import CostModel, SequenceRows
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.rope import Rope
from twostroke.models.tensor_shapes import is_weight_matrix, tensor_shapes
from twostroke.system.home import home
from twostroke.system.limits import available_memory, count_threads

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 1536, 8960, 12, 2, 128, 512
ROWS, CONTEXT = 512, 8192
FORMATS_BY_RATE = {"bf16": "BF16", "int8": "Q8_0"}
SECONDS = 12.0  # for each format
MIN_ROUNDS, MAX_ROUNDS = 3, 25
FILE_BYTES, PIECE = 256 << 20, 4 << 20


@dataclass(frozen=True)
class MachineMeasurement:
    """Rates per second."""

    backend: str
    threads: int
    flops: dict[str, float]  # of products in 512 rows, by dtype; "attention" is that of scores and weighted values
    decode: dict[str, float]  # bytes of weights that a step of one row reads, by dtype
    kv: float  # bytes of KV that it reads
    disk: float  # bytes/s read of one file, not from the system's cache
    loopback: float  # bytes/s over a TCP connection of this machine to itself
    memory: int  # bytes that this process can have

    @property
    def bandwidth(self) -> float:
        """Bytes/s that decode reads at best."""
        return max(*self.decode.values(), self.kv)


def measure_machine(threads: int | None = None, progress: Callable[[str], None] = lambda _: None) -> MachineMeasurement:
    """Measure this machine, in less than a minute if nothing else runs.

    Raises:
        InvalidRequest: the native kernels are not there.
        OSError: there is no room for a temporary file.
    """
    if (reason := library.unavailable()) is not None:
        raise InvalidRequest(f"this machine is measured with the native kernels, and {reason}")
    backend = NativeBackend(count_threads(threads))
    flops, decode, kv = dict[str, float](), dict[str, float](), 0.0
    for dtype, stored in FORMATS_BY_RATE.items():  # the last tells what attention does
        progress(f"products of {dtype}")
        flops[dtype], decode[dtype], flops["attention"], kv = _strokes(_model(backend, stored))
    progress("disk")
    disk = _disk()
    progress("loopback")
    return MachineMeasurement(backend.label, backend.threads, flops, decode, kv, disk, _loopback(), available_memory())


def _strokes(model: Model) -> tuple[float, float, float, float]:
    """Time both strokes; medians of interleaved rounds. FLOP/s of products, bytes/s of weights, FLOP/s of attention,
    bytes/s of KV."""
    bench, cost = StepBench(model, CONTEXT + ROWS), model.cost
    steps = [
        SequenceRows(ROWS),
        SequenceRows(1),
        SequenceRows(1, CONTEXT),
        SequenceRows(ROWS // 2),
        SequenceRows(ROWS // 2, CONTEXT),
    ]
    taken: list[list[float]] = [[] for _ in steps]
    began, number = time.perf_counter(), 0
    while number < MIN_ROUNDS + 1 or (number < MAX_ROUNDS and time.perf_counter() - began < SECONDS):
        for step, times in zip(steps, taken, strict=True):
            times.append(bench.seconds([step]))
        number += 1
    rows, one, one_long, half, half_long = (median(times[1:]) for times in taken)
    own = cost.work([steps[0]])
    attention = cost.work([steps[4]]).attention_flops - cost.work([steps[3]]).attention_flops
    kv = cost.work([steps[2]]).kv_bytes - cost.work([steps[1]]).kv_bytes
    rate = attention / max(half_long - half, 1e-9)
    # Rows of a prompt attend to each other: that part is taken off at attention's own rate.
    products = own.linear_flops / max(rows - own.attention_flops / rate, 0.1 * rows)
    return products, cost.work([steps[1]]).weight_bytes / one, rate, kv / max(one_long - one, 1e-9)


def _model(backend: Backend, stored: str) -> Model:
    """A model of random weights in one format."""
    attention = Attention(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, Rope(1e4))
    layer = Layer(attention, GatedMLP(INTERMEDIATE))
    config = ModelConfig("llama", VOCABULARY, HIDDEN, CONTEXT + ROWS, 1e-6, (layer,) * LAYERS)
    random = np.random.default_rng(0)
    shapes = tensor_shapes(config)

    def tensor(name: str) -> RawTensor:
        shape = shapes[name]
        if not is_weight_matrix(name, shape):
            return RawTensor.from_bytes(name, "F32", shape, np.ones(shape, np.float32).view(np.uint8).ravel(), name)
        data = random.integers(0, 256, (shape[0], FORMATS[stored].row_bytes(shape[1])), np.uint8)
        if stored == "Q8_0":  # a float16 scale before 32 weights
            blocks = data.reshape(-1, FORMATS[stored].block_bytes)
            blocks[:, :2] = np.array([1e-4], np.float16).view(np.uint8)
        else:  # the high byte has the sign and most of the exponent
            data[:, 1::2] = random.choice(np.array([0x3C, 0xBC], np.uint8), data[:, 1::2].shape)
        return RawTensor.from_bytes(name, stored, shape, data.ravel(), name)

    compiled = backend.compile(config, tensor)
    sizes = {name: tensor(name).nbytes for name, shape in shapes.items() if is_weight_matrix(name, shape)}
    geometry = Geometry.of(config, backend.kv_dtype, "")
    pool = new_pool(geometry, 1, 16, backend)
    tokenizer: object = None  # nothing is read or written as text
    return Model(stored, "", backend, compiled, tokenizer, pool, None, CostModel(config, sizes, geometry.entry_bytes))  # pyright: ignore[reportArgumentType]


def _disk() -> float:
    """Bytes/s read from a temporary file in the user's directory, past the system's cache."""
    home().mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(0).bytes(PIECE)
    with tempfile.NamedTemporaryFile(dir=home()) as file:
        for _ in range(FILE_BYTES // PIECE):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        buffer, began = bytearray(PIECE), time.perf_counter()
        with open(file.name, "rb", buffering=0) as again:
            while again.readinto(buffer):
                pass
        return FILE_BYTES / (time.perf_counter() - began)


def _loopback() -> float:
    """Bytes/s from one thread to another over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

        def send() -> None:
            with sender:
                data = bytes(PIECE)
                for _ in range(FILE_BYTES // PIECE):
                    sender.sendall(data)

        thread = threading.Thread(target=send, daemon=True)
        began, got, buffer = time.perf_counter(), 0, bytearray(PIECE)
        thread.start()
        with receiver:
            while count := receiver.recv_into(buffer):
                got += count
        thread.join()
        return got / (time.perf_counter() - began)
