"""The Python API for prediction: timm's scores, order, bounded memory, all types of input."""

import contextlib
import io
import pickle
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from scipy.special import softmax

import vitcli
from checkpoints.golden_cases import TIMM_VIT
from conftest import wait_for
from vitcli import prediction as module
from vitcli.config import ModelConfig, Preprocess
from vitcli.data.decoder import Decoder
from vitcli.data.image_inputs import ImageInput
from vitcli.errors import ConfigError, ImageError, VitWarning
from vitcli.inference import CorePool
from vitcli.models.positions import build_rope
from vitcli.prediction import Predictor

FP32 = {"device": "cpu", "precision": "fp32"}


@pytest.fixture(scope="module")
def predictor(tiny_checkpoint) -> Predictor:
    return Predictor(tiny_checkpoint, **FP32)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def scores(result: module.Result) -> list[float]:
    """Scores in the order of the classes."""
    return [p.score for p in sorted(result.predictions, key=lambda p: p.index)]


def test_assumptions_about_a_model_are_warned_of(tmp_path):
    file = shutil.copy(TIMM_VIT / "model.safetensors", tmp_path)  # without its config.json
    with pytest.warns(VitWarning, match="model.safetensors: assuming .*num_heads=.* not specify"):
        Predictor(file, **FP32)


def test_all_image_types_match_timm(tiny_checkpoint, image_folder, timm_logits):
    expected = softmax(timm_logits.astype(float), axis=1)
    path = image_folder / "a.png"
    image = Image.open(image_folder / "b.png")
    images = [path, str(path), path.read_bytes(), image.copy(), image]
    results = list(vitcli.predict(tiny_checkpoint, images, top_k=99, **FP32))
    assert [r.file for r in results] == [
        str(path),
        str(path),
        "<bytes>",
        "<Image>",
        str(image_folder / "b.png"),
    ]
    for result, row in zip(results, [0, 0, 0, 1, 1], strict=True):
        assert scores(result) == pytest.approx(expected[row].tolist(), abs=1e-6)
    data = path.read_bytes()
    for one in (path, str(path), data, bytearray(data), memoryview(data)):
        (result,) = vitcli.predict(tiny_checkpoint, one, top_k=99, **FP32)
        assert scores(result) == pytest.approx(expected[0].tolist(), abs=1e-6)


def test_arrays_open_files_and_empty_images_are_unreadable(predictor, image_folder):
    with open(image_folder / "a.png", "rb") as stream:
        for one in (np.zeros((2, 2, 3), np.uint8), np.zeros(9, np.uint8), stream):
            (result,) = predictor.predict(one)
            assert "not an image" in result.error.what
    (result,) = predictor.predict(Image.new("RGB", (0, 4)))  # an empty crop
    assert result.error.what == "the image has no pixels"
    with Image.open(image_folder / "a.png") as closed:
        pass
    with open(image_folder / "a.png", "rb") as file:
        of_closed_file = Image.open(file)
    for one in (closed, of_closed_file):
        (result,) = predictor.predict(one)
        assert "closed" in result.error.what
    paths = np.array([str(image_folder / "a.png")] * 2)
    assert all(result.predictions for result in predictor.predict(paths))


def test_scores_are_independent_of_batch_size(predictor, image_folder):
    whole = list(predictor.predict(str(image_folder), top_k=10))
    assert [Path(r.file).name for r in whole] == ["a.png", "b.png", "cat.jpg"]
    for size in (1, 2, 50):
        parts = list(predictor.predict(str(image_folder), top_k=10, batch_size=size))
        for one, other in zip(whole, parts, strict=True):
            assert one.file == other.file
            assert scores(one) == pytest.approx(scores(other), abs=1e-6)


def test_bf16_predicts_same_class(tiny_checkpoint, image_folder, timm_logits):
    predictor = Predictor(tiny_checkpoint, device="cpu", precision="bf16")
    results = list(predictor.predict(image_folder, top_k=10))
    copied = pickle.loads(pickle.dumps(predictor))
    assert list(copied.predict(image_folder, top_k=10)) == results
    for result, row in zip(results, timm_logits, strict=False):
        assert result.predictions[0].index == row.argmax()
        assert scores(result) == pytest.approx(softmax(row).tolist(), abs=0.02)


def test_resolution_as_int_or_tuple(tiny_checkpoint, image_folder):
    image, sizes = image_folder / "a.png", (np.int64(32), (32, 32))
    cpu = torch.device("cpu")
    (one,), (both,) = (
        module.predict(tiny_checkpoint, image, device=cpu, resolution=size) for size in sizes
    )
    assert one.predictions and one == both


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "setting",
    [
        default_dtype(torch.bfloat16),
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode(),
    ],
    ids=["dtype", "device", "autocast", "inference_mode"],
)
def test_settings_of_the_program_have_no_effect(setting, predictor, image_folder):
    def compute() -> list[object]:
        files = [image_folder / "a.png", image_folder / "missing.png"]
        results = [*predictor.predict(files, top_k=10), *predictor.embed(files[1:])]
        return [[r.predictions for r in results], build_rope(rope, torch.device("cpu")).cos]

    def inspect(method: str) -> np.ndarray:
        return vitcli.inspect(predictor.file, image_folder / "a.png", method=method).array

    rope = ModelConfig(64, 1, 2, 64, (32, 32), posemb="none", rope="eva02")
    expected = compute(), inspect("rollout"), inspect("gradient")
    with setting:
        found = compute(), inspect("rollout"), inspect("gradient")
    assert found[0][0] == expected[0][0]
    assert torch.equal(found[0][1], expected[0][1])


# ---------------------------------------------------------------------------------------------
# Decoding ahead of the model


@pytest.fixture(scope="module")
def encoded() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    return buffer.getvalue()


def numbered_images(encoded: bytes, issued: list[int], count: int) -> Iterator[ImageInput]:
    """Images that record when they are requested; every fifth is slow, every seventh corrupt."""

    def read(i: int) -> bytes:
        time.sleep(0.005 if i % 5 == 0 else 0)
        return b"broken" if i % 7 == 0 else encoded

    for i in range(count):
        issued.append(i)
        yield ImageInput(str(i), partial(read, i))


def test_invalid_arguments_are_rejected(predictor, image_folder, tiny_checkpoint):
    for resolution in ("96", 96.0, (96,)):
        for call in (vitcli.load, Predictor):
            with pytest.raises(ConfigError, match="resolution: must be a positive whole number or"):
                call(tiny_checkpoint, resolution=resolution)
    for name, value in (("top_k", 0), ("top_k", 1.5), ("batch_size", -1), ("workers", "2")):
        expected = f"{name}: must be a positive whole number, not {value!r}"
        with pytest.raises(ConfigError, match=expected):
            predictor.predict(image_folder, **{name: value})  # before the first result
    for arguments in ({"posemb_method": "cubic"}, {"precision": "int8"}):
        with pytest.raises(ConfigError, match=f"{next(iter(arguments))}: '.*' is not one of "):
            vitcli.predict(tiny_checkpoint, image_folder, **arguments)
    for arguments in ({"view": "map"}, {"method": "mean"}):
        with pytest.raises(ConfigError, match="is not one of"):
            vitcli.inspect(tiny_checkpoint, image_folder, **arguments)
    for arguments in ({"view": "heads", "head": 0}, {"view": "pca", "layer": 0}):
        with pytest.raises(ConfigError, match="require view 'attention'"):
            vitcli.inspect(tiny_checkpoint, image_folder, **arguments)
    with pytest.raises(ConfigError, match="view 'distance' requires images"):
        vitcli.inspect(tiny_checkpoint, view="distance")


def test_decoder_keeps_order_and_bounds_its_queue(encoded):
    issued: list[int] = []
    max_ahead, seen, pixels = 0, [], []
    images = numbered_images(encoded, issued, 700)
    with Decoder(enumerate(images), Preprocess(size=(8, 8)), batch=8) as decoder:
        while (batch := decoder.take(8))[0]:
            seen, pixels = seen + batch[0], pixels + batch[1]
            max_ahead = max(max_ahead, len(issued) - len(seen))
    assert [(item.position, item.name) for item in seen] == [(i, str(i)) for i in range(700)]
    assert max_ahead <= 256
    unreadable = [i for i, item in enumerate(seen) if isinstance(item.error, ImageError)]
    assert unreadable == [*range(0, 700, 7)]
    assert [i for i, _ in pixels] == [i for i in range(700) if i % 7]
    assert all(got.shape == (8, 8, 3) and tuple(got[0, 0]) == (255, 0, 0) for _, got in pixels)


def test_closing_results_stops_reading_input(tiny_checkpoint):
    count = 0

    def images():
        nonlocal count
        while True:
            count += 1
            yield Image.new("RGB", (32, 32))

    results = vitcli.predict(tiny_checkpoint, images())
    next(results)
    results.close()
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "find"])
    assert count < 600


def test_large_images_use_bounded_memory(encoded):
    issued: list[int] = []
    size = (1200, 1200)
    images = numbered_images(encoded, issued, 10_000)
    with Decoder(enumerate(images), Preprocess(size=size), batch=1) as decoder:
        assert len(decoder.take(20)[0]) == 16
        wait_for(lambda: len(issued) >= 32)  # at most 16 x 4 MB ahead
        time.sleep(0.1)
        assert len(issued) == 32


def test_results_stream_as_inputs_arrive(predictor, image_folder):
    """A caller that writes one name and waits for its result gets it."""
    inputs, files = queue.Queue(), []
    names = [str(image_folder / name) for name in ("a.png", "b.png", "a.png")]
    results = predictor.predict(iter(inputs.get, None))
    for name in names:
        inputs.put(name)
        files.append(next(results).file)
    inputs.put(None)
    assert files == names and list(results) == []


def test_iterator_error_is_raised_after_its_images(predictor, image_folder):
    def images() -> Iterator[Path]:
        yield from [image_folder / "a.png"] * 5
        raise KeyError("the caller's")

    results = predictor.predict(images(), batch_size=4)
    assert [next(results).error for _ in range(5)] == [None] * 5
    with pytest.raises(KeyError, match="the caller's"):
        next(results)


def test_frames_are_predicted_separately(predictor, image_folder, tmp_path):
    frames = [Image.open(image_folder / f"{name}.png").convert("RGB") for name in "abab"]
    frames[0].save(tmp_path / "x.tiff", save_all=True, append_images=frames[1:])
    expected = [scores(r) for r in predictor.predict(frames, top_k=10)]
    frames_in_file = ImageSequence.Iterator(Image.open(tmp_path / "x.tiff"))
    assert [scores(r) for r in predictor.predict(frames_in_file, top_k=10)] == expected
    same = [Image.open(image_folder / "a.png")] * 16
    assert {tuple(scores(r)) for r in predictor.predict(same, top_k=10)} == {tuple(expected[0])}


def test_out_of_memory_halves_batch(tiny_checkpoint, image_folder):
    predictor = Predictor(tiny_checkpoint, **FP32)
    whole = [scores(r) for r in predictor.predict([image_folder / "a.png"] * 10, top_k=10)]
    sizes: list[int] = []

    def small(model: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        sizes.append(len(inputs[0]))
        if len(inputs[0]) > 2:
            raise torch.OutOfMemoryError("too much")

    predictor.model.register_forward_pre_hook(small)
    images = [image_folder / "a.png"] * 10
    with threads(1):
        halved = [scores(r) for r in predictor.predict(images, top_k=10, batch_size=8)]
    assert np.allclose(whole, halved, atol=1e-6)
    assert sizes == [8, 4, 2, 2, 2, 2, 2]  # the next batch starts at the size that fits


@pytest.mark.parametrize("count", [5, 6, 7, 8, 11])
def test_batch_is_split_across_cores_in_order(count):
    """A small batch uses all cores together; afterwards, torch's thread count is restored."""
    used: dict[int, int] = {}

    def compute(batch: list[np.ndarray]) -> torch.Tensor:
        used[threading.get_ident()] = torch.get_num_threads()
        return torch.from_numpy(np.stack(batch))

    with threads(3), contextlib.closing(CorePool(torch.device("cpu"))) as cores:
        batch = [np.full(2, i) for i in range(count)]
        assert cores.submit(compute, batch)()[:, 0].tolist() == list(range(count))
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    assert (threading.get_ident() in used) is (count < 6)
    assert set(used.values()) == ({3} if count < 6 else {1})
