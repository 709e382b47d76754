"""Training compared with timm, PEFT and scikit-learn."""

import dataclasses
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from train.runs import TINY, make_config
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import load
from vitcli.checkpoints.save import save_checkpoint
from vitcli.config import AugmentConfig, ClassLabel, DataConfig, Preprocess, model_config
from vitcli.models.lora import add_lora, merge_lora
from vitcli.models.vit import ViT
from vitcli.prediction import Predictor
from vitcli.train import optim
from vitcli.train.config import TrainConfig
from vitcli.train.distillation import Distillation, Teacher
from vitcli.train.loop import train
from vitcli.train.optim import build_optimizer

pytestmark = pytest.mark.peers

IMAGES = Path(__file__).parents[1] / "images"
SIZES = {**TINY, "depth": 3, "image_size": (16, 16)}
TIMM_SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
TIMM_SIZES |= {"mlp_ratio": 32 / 24, "num_classes": 3}


def test_layer_decay_matches_timm(timm: ModuleType) -> None:
    model = ViT(model_config("Ti/8", num_classes=3, **SIZES))
    model.init_weights(0)
    theirs = timm.models.VisionTransformer(**TIMM_SIZES)
    fields = {"optimizer": "adamw", "lr": 1.0, "weight_decay": 0.1, "layer_decay": 0.75}
    ours = build_optimizer(model, make_config(**fields))
    from timm.optim import param_groups_layer_decay

    groups = param_groups_layer_decay(theirs, weight_decay=0.1, layer_decay=0.75)

    def rates(module: torch.nn.Module, groups: list[dict]) -> dict[str, float]:
        names = {id(p): name for name, p in module.named_parameters()}
        return {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}

    found, expected = rates(model, ours.param_groups), rates(theirs, groups)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


def test_muon_matches_timm(timm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """To within the rounding of bfloat16, in which both orthogonalize."""
    from timm.optim import Muon

    monkeypatch.setattr(optim, "multiplies_bf16", lambda device: True)
    models = [ViT(model_config("Ti/8", num_classes=3, **SIZES)) for _ in range(2)]
    for model in models:
        model.init_weights(0)
    fields = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1}
    ours = build_optimizer(models[0], make_config(**fields))
    groups = build_optimizer(models[1], make_config(**fields)).param_groups
    for group in groups:  # with nesterov, timm's other parameters get NAdamW
        group |= {"use_muon": group["muon"], "nesterov": group["muon"]}
    paper = (3.4445, -4.775, 2.0315)
    theirs = Muon(groups, lr=0.01, betas=(0.9, 0.999), ns_coefficients=paper)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for ours_p, theirs_p in zip(*(m.parameters() for m in models), strict=True):
            ours_p.grad = torch.randn(ours_p.shape, generator=generator)
            theirs_p.grad = ours_p.grad.clone()
        ours.step()
        theirs.step()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4 if p.ndim == 2 else 1e-6, msg=name)


def test_lora_matches_peft(timm: ModuleType) -> None:
    """After three Adam steps from the same weights, in float64, the merged weights are equal."""
    peft = pytest.importorskip("peft")
    ours = ViT(model_config("Ti/8", num_classes=3, **SIZES))
    ours.init_weights(0)
    start = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    add_lora(ours, 4, seed=0)
    plain = timm.models.VisionTransformer(**TIMM_SIZES)
    plain.load_state_dict(start)
    matrices = r"blocks\.\d+\.(attn|mlp)\.(qkv|proj|fc1|fc2)"
    lora = peft.LoraConfig(r=4, target_modules=matrices, lora_alpha=4, modules_to_save=["head"])
    theirs = peft.get_peft_model(plain, lora)
    state = ours.state_dict()
    for name, parameter in theirs.named_parameters():
        if "lora_A" in name:
            own = name.removeprefix("base_model.model.").replace("lora_A.default", "lora.down")
            parameter.data.copy_(state[own])
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((4, 3, 16, 16), generator=generator, dtype=torch.double)
    labels = torch.tensor([0, 1, 2, 1])
    for model in (ours, theirs):
        trained = [p for p in model.double().parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.01)
        for _ in range(3):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    found, expected = merge_lora(ours.state_dict()), theirs.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9, msg=name)
    assert not torch.equal(
        found["blocks.0.attn.qkv.weight"].float(), start["blocks.0.attn.qkv.weight"]
    )


@pytest.mark.parametrize("token", [False, True])
def test_distillation_gradients_match_timm(timm: ModuleType, tmp_path: Path, token: bool) -> None:
    """With the same student, with or without a distillation token, and the same teacher, which has
    another class order and other normalization."""
    task = pytest.importorskip("timm.task")

    def theirs(seed: int, token: bool) -> torch.nn.Module:
        torch.manual_seed(seed)
        plain, deit = timm.models.VisionTransformer, timm.models.deit.VisionTransformerDistilled
        model = (deit if token else plain)(**TIMM_SIZES)
        model.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5 - 0.1 * seed,) * 3}
        return model

    teacher, student = theirs(1, False), theirs(0, token)
    order, names = [2, 0, 1], tuple(ClassLabel(name, name) for name in "abc")
    config = model_config("Ti/8", num_classes=3, **SIZES)
    state = {
        name: tensor[order] if name.startswith("head") else tensor
        for name, tensor in teacher.state_dict().items()
    }
    preprocess = Preprocess((16, 16), std=(0.4,) * 3)
    labels = tuple(names[i] for i in order)
    folder = save_checkpoint(
        tmp_path / "teacher", state, CheckpointInfo(config, preprocess, labels)
    )
    fields = {"teacher": str(folder), "teacher_weight": 0.3, "temperature": 2.0}
    run = make_config(precision="fp32", **fields)
    own = Teacher(Predictor(folder, "cpu", "fp32"), names, Preprocess((16, 16)), run)
    architecture = dataclasses.replace(config, distill_token=token)
    ours = Distillation(ViT(architecture), run, None, own)
    ours.model.load_state_dict(student.state_dict())

    images, classes = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])
    kinds = {"task_loss_weight": 0.7, "temperature": 2.0, "criterion": torch.nn.CrossEntropyLoss()}
    kind = task.TokenDistillationTask if token else task.LogitDistillationTask
    kind(student, teacher, **kinds)(images, classes)["loss"].backward()
    ours(*ours.prepare(images, classes, step=1))[0].mean().backward()
    expected = {name: p.grad for name, p in student.named_parameters()}
    found = {name: p.grad for name, p in ours.model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def collages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collages of four photograph crops; the photograph of the first crop determines the class. So
    many that the classes are not linearly separable: then an unregularized probe converges."""
    root, rng = tmp_path_factory.mktemp("collages"), np.random.default_rng(0)
    names = ("astronaut", "cat", "coffee", "rocket")
    photographs = [Image.open(IMAGES / f"{name}.jpg").convert("RGB") for name in names]
    for i in range(1500):
        collage, kinds = Image.new("RGB", (64, 64)), []
        for corner in ((0, 0), (32, 0), (0, 32), (32, 32)):
            kinds.append(int(rng.integers(4)))
            photograph, side = photographs[kinds[-1]], int(rng.integers(24, 200))
            left = int(rng.integers(photograph.width - side))
            top = int(rng.integers(photograph.height - side))
            crop = photograph.crop((left, top, left + side, top + side))
            collage.paste(crop.resize((32, 32)), corner)
        part = "train" if i % 10 < 7 else "test"
        folder = root / part / ("alive" if kinds[0] < 2 else "thing")
        folder.mkdir(parents=True, exist_ok=True)
        collage.save(folder / f"{i:04}.png")
    return root


def test_linear_probe_matches_logistic_regression(collages: Path, tmp_path: Path) -> None:
    LogisticRegression = pytest.importorskip("sklearn.linear_model").LogisticRegression
    log_loss = pytest.importorskip("sklearn.metrics").log_loss
    run = TrainConfig(
        data=DataConfig(str(collages), val_fraction=0.0),
        output=str(tmp_path / "probe"),
        model="default-pretrained",
        freeze="backbone",
        augment=AugmentConfig(crop_area=(1.0, 1.0), flip=False),
        optimizer="adam",
        lr=0.1,
        warmup=0,
        steps=5000,
        batch_size=1050,
        device="cpu",
        precision="fp32",
    )
    events: list = []
    metrics = train(run, on_event=events.append).metrics

    # The same features, computed separately: by the pre-trained model, with the run's
    # preprocessing.
    model, transform = load("default-pretrained"), load(run.output).transform
    features, labels = {}, {}
    for part in ("train", "test"):
        files = sorted((collages / part).rglob("*.png"))
        images = torch.stack([transform(file) for file in files])
        with torch.no_grad():
            found = [model.features(some) for some in images.split(64)]
        features[part] = torch.cat(found).numpy()
        labels[part] = np.array([file.parent.name == "thing" for file in files]).astype(int)
    peer = LogisticRegression(C=np.inf, max_iter=20_000, tol=1e-8)
    peer.fit(features["train"], labels["train"])
    assert 0.6 < peer.score(features["train"], labels["train"]) < 0.95  # not linearly separable
    expected = peer.score(features["test"], labels["test"])
    assert metrics["test_top1"] == pytest.approx(expected, abs=0.005)
    loss = next(event.loss for event in reversed(events) if event.kind == "train")
    best = log_loss(labels["train"], peer.predict_proba(features["train"]))
    assert loss == pytest.approx(best, abs=0.002)
