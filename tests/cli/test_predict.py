"""The `vit predict` command: output formats and inputs that are not images."""

import csv
import gzip
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from safetensors import safe_open
from scipy.special import expit, softmax

from checkpoints.golden_cases import GOLDEN
from cli.conftest import strip_ansi
from cli.training_runs import FP32
from data.conftest import tar_bytes
from data.test_images import decompression_bomb
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import rewrite_info
from vitcli.cli.predict import ImageRow
from vitcli.cli.rows import Parquet
from vitcli.prediction import Prediction, Result


@pytest.fixture
def predict(vit, tiny_checkpoint):
    """`vit predict` with the tiny model in float32."""
    return lambda *args, **settings: vit(
        "predict", *args, "--model", tiny_checkpoint, *FP32, **settings
    )


@pytest.fixture(scope="module")
def expected(timm_logits):
    """For a.png and b.png: [(index, score), ...], best first, from timm's logits."""
    scores = softmax(timm_logits.astype(float), axis=1)
    return [[(int(i), row[i]) for i in np.argsort(-row)] for row in scores]


def test_text_output(predict, image_folder, expected, tmp_path, terminal):
    """One line per image, whatever its name; on a terminal, one line per class."""
    shutil.copy(image_folder / "a.png", tmp_path / "a\nb.png")
    (line,) = predict(tmp_path, "-k", 2).stdout.splitlines()
    assert line.startswith(f"{tmp_path}/a\\x0ab.png: ")
    scores = [float(score) for score in re.findall(r"(\d+\.\d)%", line)]
    assert scores == pytest.approx([100 * score for _, score in expected[0][:2]], abs=0.06)
    predictions = (Prediction(0, "0", "one\ntwo", 0.75), Prediction(1, "1", "three", 0.25))
    row = ImageRow(Result("a\nb.png", "m", predictions), "softmax")
    terminal("stdout")
    lines = strip_ansi(row.text(terminal=True)).splitlines()
    assert [line.rstrip(" █") for line in lines] == [
        "a\\x0ab.png",
        "  one\\x0atwo   75.0%",
        "  three        25.0%",
    ]


def test_threshold(predict, image_folder, expected):
    threshold = (expected[0][1][1] + expected[0][2][1]) / 2
    image = image_folder / "a.png"
    result = predict(image, "--json", "--threshold", threshold)
    assert len(json.loads(result.stdout)["predictions"]) == 2
    assert predict(image, "--threshold", 1).stdout.endswith(": no class above the threshold\n")
    result = predict(image, "--csv", "--threshold", 1)
    assert result.stdout.splitlines()[1:] == [f"{image},,,,,,"]


@pytest.mark.parametrize("group", [3, 5])  # the last group has 2 of the 5 rows; all
def test_parquet_has_typed_csv_rows(predict, image_folder, tmp_path, monkeypatch, group):
    monkeypatch.setattr(Parquet, "GROUP", group)
    latin1 = shutil.copy(image_folder / "a.png", tmp_path / os.fsdecode(b"caf\xe9\r.png"))
    images = (image_folder / "a.png", tmp_path / "missing.jpg", latin1)
    file = tmp_path / "o.parquet"
    result = predict(*images, "-o", file, "--top-k", 2)
    assert result.exit_code == 1 and result.stdout == ""
    table = pyarrow.parquet.read_table(file)
    types = dict(zip(table.column_names, map(str, table.schema.types), strict=True))
    assert types.pop("rank") == types.pop("index") == "int32" and types.pop("score") == "double"
    assert set(types.values()) == {"string"}
    rows = [{k: "" if v is None else str(v) for k, v in row.items()} for row in table.to_pylist()]
    assert [row["file"] for row in rows[3:]] == [str(tmp_path / "caf\\udce9\r.png")] * 2
    result = predict(*images, "-o", tmp_path / "o.csv", "--top-k", 2)
    assert result.exit_code == 1
    with (tmp_path / "o.csv").open(encoding="utf-8", newline="") as text:
        csv_rows = list(csv.DictReader(text))
    assert rows == csv_rows
    assert [row["rank"] for row in csv_rows] == ["1", "2", "", "1", "2"]
    assert [row["error"] for row in csv_rows] == ["", "", "no such file or directory", "", ""]


@pytest.mark.parametrize(
    ("score", "function"), [("softmax", softmax), ("sigmoid", expit), ("none", lambda x: x)]
)
def test_scores(vit, tiny_checkpoint, image_folder, timm_logits, tmp_path, score, function):
    """From timm's logits; sigmoid and none as in transformers' pipeline, for multi-label models
    and regression."""
    folder = tmp_path / score
    folder.mkdir()
    shutil.copy(tiny_checkpoint / "model.safetensors", folder)
    info = read_info(folder)[0]
    rewrite_info(folder, CheckpointInfo(info.model, info.preprocess, info.classes, score))
    result = vit("predict", image_folder / "a.png", "--json", "-m", folder, "-k", 10, *FP32)
    scores = {p["index"]: p["score"] for p in json.loads(result.stdout)["predictions"]}
    expected = function(timm_logits[0]).tolist()
    assert [scores[i] for i in range(10)] == pytest.approx(expected, abs=1e-5)
    best, best_score = max(scores.items(), key=lambda item: item[1])
    number = f"{best_score:.4g}" if score == "none" else f"{best_score:.1%}"
    text = vit("predict", image_folder / "a.png", "-m", folder, "-k", 1, *FP32).stdout
    assert text.endswith(f"{info.classes[best].name} {number}\n")


@pytest.fixture(scope="module")
def timm_features():
    return np.load(GOLDEN / "timm_vit_default" / "io.npz")["pre_logits"]


def test_safetensors_features_have_a_row_for_unreadable_input(
    predict, image_folder, timm_features, tiny_checkpoint, tmp_path
):
    file = tmp_path / "features.safetensors"
    a, b = (image_folder / name for name in ("a.png", "b.png"))
    result = predict(a, tmp_path / "missing.jpg", b, "--features", file, "--json")
    assert result.exit_code == 1
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"file": str(a), "model": str(tiny_checkpoint), "row": 0},
        {"file": str(tmp_path / "missing.jpg"), "error": "no such file or directory"},
        {"file": str(b), "model": str(tiny_checkpoint), "row": 2},
    ]
    with safe_open(file, "np") as opened:
        saved = opened.get_tensor("features")
        assert opened.metadata() == {"model": str(tiny_checkpoint)}
    np.testing.assert_allclose(saved[[0, 2]], timm_features, atol=2e-5)
    assert np.isnan(saved[1]).all()


@pytest.fixture
def shards(image_folder, tmp_path):
    """Two tar files, the second truncated, and the complete content of the second."""
    a, b = ((image_folder / name).read_bytes() for name in ("a.png", "b.png"))
    second = gzip.compress(tar_bytes({"b.png": b, "bad.png": b"no image", "c.png": a}))
    (tmp_path / "one.tar").write_bytes(tar_bytes({"a.png": a}))
    (tmp_path / "two.tar.gz").write_bytes(second[:-900])
    return tmp_path, second


def test_rerun_completes_results_directory(predict, shards, expected):
    """One file per input, except for inputs not read to the end; existing files are kept."""
    directory, second = shards
    args = (f"{directory}/*.tar*", "-o", f"{directory}/out/", "--features", f"{directory}/f/")
    result = predict(*args)
    assert result.exit_code == 1 and "two.tar.gz: the tar file is damaged" in result.stderr
    assert sorted(path.name for path in (directory / "out").iterdir()) == ["one.parquet"]
    assert sorted(path.name for path in (directory / "f").iterdir()) == ["one.parquet"]
    before = (directory / "out" / "one.parquet").stat().st_mtime_ns
    (directory / "two.tar.gz").write_bytes(second)
    result = predict(*args)
    assert result.exit_code == 1  # one image cannot be read
    assert "1 of 3 images" in result.stderr and "results of 1 input (3 images)" in result.stderr
    assert (directory / "out" / "one.parquet").stat().st_mtime_ns == before
    table = pyarrow.parquet.read_table(directory / "f" / "two.parquet")
    assert [name.rpartition("/")[2] for name in table["file"].to_pylist()] == [
        *("b.png", "bad.png", "c.png")
    ]
    assert [row is None for row in table["features"].to_pylist()] == [False, True, False]
    result = predict(*args)
    assert (result.exit_code, result.stderr) == (0, "all results exist: nothing to do\n")


def test_formats_of_results_directory(predict, shards, image_folder, monkeypatch):
    directory, _ = shards
    monkeypatch.setenv("HOME", str(directory))
    for name in ("few.txt", "part.00"):
        (directory / name).write_text(f"{image_folder}/a.png\n")
    lists = ("@~/few*.txt", f"@{directory}/part.00")
    args = (directory / "one.tar", *lists, image_folder, "@-", "-k", 1)
    for option, suffix in ((), ".parquet"), (("--csv",), ".csv"), (("--json",), ".jsonl"):
        result = predict(*args, *option, "-o", directory, input=f"{image_folder}/a.png\n")
        assert result.exit_code == 0
        names = {path.stem for path in directory.glob(f"*{suffix}")}
        assert names == {"one", "few", "part.00", image_folder.name, "stdin"}
    # Standard input may be another list each time, so its results are replaced.
    assert predict("@-", "--csv", "-o", directory, input=f"{image_folder}/b.png\n").exit_code == 0
    assert "b.png" in (directory / "stdin.csv").read_text()


@pytest.mark.parametrize(
    "args",
    [("x/one.tar", "y/one.tar", "-o", "out/"), ("one.tar", "-o", "out/", "--features", "f.npy")],
)
def test_conflicting_output_paths_are_rejected(predict, tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    assert predict(*args).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_bad_images_among_good_ones(predict, image_folder, tmp_path):
    cat = (image_folder / "deep" / "cat.jpg").read_bytes()
    (tmp_path / "1-text.jpg").write_text("this is not an image, whatever its name says\n")
    (tmp_path / "2-short.jpg").write_bytes(cat[: len(cat) // 2])
    (tmp_path / "3-good.png").write_bytes((image_folder / "a.png").read_bytes())
    (tmp_path / "4-bomb.png").write_bytes(decompression_bomb())
    result = predict(tmp_path, "no\nimage.jpg", "--json")
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert ["error" in line for line in lines] == [True, True, False, True, True]
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for line, error in zip((line for line in lines if "error" in line), errors, strict=True):
        file = line["file"].replace("\n", "\\x0a")
        assert error == f"error: {file}: {line['error']}"
    assert result.stderr.endswith("could not read 4 of 5 images\n")


def test_resolution_too_large_for_memory_fails_early(predict, image_folder):
    result = predict(image_folder / "a.png", "--resolution", "64000")
    assert result.exit_code == 2 and "GB of memory" in result.stderr


@pytest.mark.parametrize("name", ["x.csv", "x.json", "x.jsonl", "x.txt", "x"])
def test_output_suffix_sets_format(predict, image_folder, tmp_path, name):
    option = {".csv": ["--csv"], ".txt": [], "": []}.get(Path(name).suffix, ["--json"])
    assert predict(image_folder, "-o", tmp_path / name).exit_code == 0
    output = predict(image_folder, *option).stdout
    assert (tmp_path / name).read_text() == output
    assert predict(image_folder, *option, "-o", "-").stdout == output


@pytest.mark.parametrize("name", ["x.npy", "x.parquet"])
def test_text_is_not_written_to_binary_file(predict, image_folder, tmp_path, name):
    result = predict(image_folder, "--csv", "-o", tmp_path / name)
    assert result.exit_code == 2 and "not end in .csv, .json, .jsonl or .txt\n" in result.stderr
    assert ("hint: --features" in result.stderr) == (name == "x.npy")
    assert not (tmp_path / name).exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_disk(predict, image_folder):
    result = predict(image_folder, "--output", "/dev/full")
    assert result.exit_code == 1
    assert result.stderr == "error: /dev/full: cannot be written: No space left on device\n"


def test_output_does_not_overwrite_model(vit, tiny_checkpoint, image_folder, tmp_path):
    model = Path(shutil.copy(tiny_checkpoint / "model.safetensors", tmp_path))
    config = Path(shutil.copy(tiny_checkpoint / "config.json", tmp_path))
    weights = tmp_path / "weights.npz"
    weights.write_bytes(b"weights")
    before = model.read_bytes(), config.read_bytes()
    for args in (
        ("-m", model, "--features", model),
        ("-m", tmp_path, "-o", config),
        ("-m", "default", "--csv", "-o", weights),
    ):
        assert vit("predict", image_folder, *args).exit_code == 2, args
    assert (model.read_bytes(), config.read_bytes()) == before
    assert weights.read_bytes() == b"weights"


def test_preprocess_option(vit, tiny_checkpoint, tmp_path):
    """A single-color image whose color is also the mean has the same scores, whatever the color."""
    scores = []
    for level in (51, 204):
        Image.new("RGB", (64, 64), (level,) * 3).save(tmp_path / "x.png")
        args = ("--preprocess", f"mean={level / 255}", "--workers", 1, "--json")
        result = vit("predict", tmp_path / "x.png", "--model", tiny_checkpoint, *args)
        assert result.exit_code == 0, result.stderr
        scores.append({p["index"]: p["score"] for p in json.loads(result.stdout)["predictions"]})
    assert list(scores[0]) == list(scores[1])
    assert scores[0] == pytest.approx(scores[1], abs=1e-2)


def test_warns_about_nonfinite_outputs(vit, nan_checkpoint, image_folder, tmp_path):
    """Without the warning, they would look like ordinary results."""
    image = image_folder / "a.png"
    features = ("--features", tmp_path / "x.npy")
    for args in (("predict",), ("predict", *features), ("inspect", "-o", tmp_path / "out")):
        result = vit(*args, image, "--model", nan_checkpoint, "--device", "cpu")
        assert result.exit_code == 0 and "warning: " in result.stderr, args
        assert result.stderr.count("--precision fp32") == 1
    assert vit("predict", image, *features, "--top-k", 1).exit_code == 2
