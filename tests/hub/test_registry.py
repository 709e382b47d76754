"""Resolving model names, and the models that ship with vit."""

from pathlib import Path

import pytest

from vitcli.config import ModelConfig
from vitcli.errors import ModelNotFoundError
from vitcli.hub import registry
from vitcli.hub.registry import HubRepo, RegistryEntry, resolve


def is_plain(entry: RegistryEntry) -> bool:
    """Neither a hybrid nor a ResNet."""
    return isinstance(entry.model, ModelConfig) and entry.model.stem is None


ENTRY = registry.entries()["vit-b16-i21k"]


GMACS = {
    "vit-ti16-i21k-i1k": 1.26, "vit-b8-dino": 78.22, "vit-g14-dinov2-reg4": 1790.08,
    "vit-so400m14-siglip-378": 335.4, "eva02-l14-i21k-i1k-448": 362.3,
    "r26-vit-s32-i21k-i1k": 3.56, "r50-vit-b16-i21k-orig": 21.66, "bit-r50x1-i21k-i1k": 16.62,
}  # fmt: skip
"""Billions of multiply-accumulates per image, as computed by timm."""


def test_has_all_released_models():
    entries = registry.entries()
    assert len({entry.repo for entry in entries.values()}) == len(entries) >= 174


@pytest.mark.parametrize("entry", registry.entries().values(), ids=registry.entries())
def test_entry_is_consistent(entry):
    """`params` and GMACS were computed by timm, `num_params` and `macs` by vit."""
    assert entry.repo.startswith("timm/")
    assert entry.preprocess.size == (entry.size, entry.size)
    assert entry.license in ("apache-2.0", "cc-by-nc-4.0", "dinov3-license", "mit", "apple-ascl")
    if entry.labels is not None:
        assert len(registry.labels(entry.labels)) == entry.classes
    assert entry.labels or entry.classes in (0, 11221)
    assert entry.source is None or entry.source.startswith("https://")
    model = entry.model
    assert model.num_params() == entry.params
    if (gmacs := GMACS.get(entry.name)) is not None:
        macs = (model.macs() + model.feature_dim * model.num_classes) / 1e9
        if is_plain(entry):
            assert macs == pytest.approx(gmacs, rel=0.01, abs=0.006)
        else:  # timm also counts the weight standardization of a ResNet
            assert 1 <= gmacs / macs < 1.035


def test_aliases_resolve_to_shipped_models():
    assert set(registry.aliases()) == {"default", "default-pretrained"}
    for alias, name in registry.aliases().items():
        if name in registry.shipped():
            assert resolve(alias) == registry.shipped()[name]
    assert set(registry.names()) >= {"default", "vit-b16-i21k", *registry.shipped()}


@pytest.fixture
def empty_cwd(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_existing_path_takes_precedence(empty_cwd):
    (empty_cwd / "vit-b16-i21k").mkdir()
    assert resolve("vit-b16-i21k") == Path("vit-b16-i21k")
    (empty_cwd / "me").mkdir()
    (empty_cwd / "me" / "flowers").write_text("")
    assert resolve("me/flowers") == Path("me/flowers")
    assert resolve(empty_cwd / "me") == empty_cwd / "me"
    (empty_cwd / "me ").mkdir()
    assert resolve("me ") == Path("me ")


@pytest.mark.parametrize("spec", ["./vit-b16-i21k", "/vit-b16-i21k", "~/vit-b16-i21k", "../x"])
def test_explicit_path_must_exist(empty_cwd, spec):
    with pytest.raises(ModelNotFoundError):
        resolve(spec)
    with pytest.raises(ModelNotFoundError):
        resolve(Path("vit-b16-i21k"))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("vit-b16-i21k", ENTRY),
        ("ViT-B16-i21k", ENTRY),
        (ENTRY.repo, ENTRY),
        (ENTRY.repo.removeprefix("timm/"), ENTRY),
        ("me/flowers", HubRepo("me/flowers")),
        ("me/flowers@main", HubRepo("me/flowers", "main")),
        ("me/flowers@refs/pr/1", HubRepo("me/flowers", "refs/pr/1")),
        ("hf-hub:me/flowers-1.5_x", HubRepo("me/flowers-1.5_x")),
        ("https://huggingface.co/me/flowers", HubRepo("me/flowers")),
        ("https://huggingface.co/me/flowers/commit/abc#d2h", HubRepo("me/flowers", "abc")),
        (
            "https://huggingface.co/me/flowers/tree/refs%2Fpr%2F1",
            HubRepo("me/flowers", "refs/pr/1"),
        ),
        ("https://hf.co/me/flowers/blob/main/config.json", HubRepo("me/flowers", "main")),
        ("apple/7", HubRepo("apple/7")),
        (f"{ENTRY.repo}@abc", HubRepo(ENTRY.repo, "abc")),
    ],
)
def test_resolve(empty_cwd, spec, expected):
    assert resolve(spec) == expected


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("vit-b16-i22k", "did you mean vit-b16-i21k"),
        ("deit", "did you mean deit-s16-i1k, deit-b16-i1k or deit-ti16-i1k"),
        ("ViT_B_16", "did you mean vit-b16-i1k, vit-b16-mae or"),
        ("vit_base_patch16_224", "list its models with `vit models list vit_base_patch16_224`"),
        ("Ti/4", "list models with `vit models`, or train one with `vit pretrain --variant Ti/4`"),
        ("", "list models with `vit models`"),
        ("runs/flowers/model.safetensors", "list models with `vit models`"),
    ],
)
def test_unknown_name_gets_a_hint(empty_cwd, spec, hint):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(spec)
    assert hint in str(caught.value.hint) and caught.value.where
    assert str(caught.value).count("\n") == 1
