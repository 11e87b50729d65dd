"""Checkpoints: everything comes back to the bit, the newest is always whole, nothing in them can run code."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from minbert import atomic
from minbert.errors import MinbertError
from minbert.training import checkpoint
from minbert.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from minbert.training.optimizers import AdamW, RAdam


class Toy:
    """A net with dropout and an optimizer of two groups, of which one parameter never has a gradient."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = AdamW, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.unused = nn.Linear(2, 2)
        for parameter in [*self.net.parameters(), *self.unused.parameters()]:
            nn.init.normal_(parameter, generator=generator)
        top = [*self.net[3].parameters(), *self.unused.parameters()]
        groups = [{"params": list(self.net[:3].parameters()), "lr": 1e-2}, {"params": top, "lr": 3e-3}]
        self.optimizer = kind(groups, lr=1e-3, weight_decay=0.1)
        self.average = {name: value.detach().clone() for name, value in self.net.named_parameters()}

    def learn(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.net(torch.randn(6, 4)).square().mean().backward()
            self.optimizer.step()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
            for name, value in self.net.named_parameters():
                self.average[name].lerp_(value.detach(), 0.1)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"net": self.net, "unused": self.unused}

    def save(self, folder: Path, step: int, *, keep: int = 2, **state: Any) -> Path:
        return save_checkpoint(
            folder,
            step,
            modules=self.modules,
            optimizer=self.optimizer,
            tensors={"average": self.average},
            state=state,
            keep=keep,
        )

    def load(self, path: Path) -> dict[str, Any]:
        return load_checkpoint(path, modules=self.modules, optimizer=self.optimizer, tensors={"average": self.average})

    def numbers(self) -> dict[str, torch.Tensor]:
        """Everything that may change."""
        found = {
            f"{name}.{key}": value for name, net in self.modules.items() for key, value in net.state_dict().items()
        }
        found |= {f"average.{name}": value for name, value in self.average.items()}
        for index, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in entry.items()}
        found["rates"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64)
        return found | {"random": torch.get_rng_state()}


def assert_same(toy: Toy, expected: dict[str, torch.Tensor]) -> None:
    found = toy.numbers()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(autouse=True)
def _own_randomness() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


@pytest.mark.parametrize("kind", [AdamW, RAdam, torch.optim.AdamW, torch.optim.SGD])
def test_goes_on_to_the_bit(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    toy = Toy(kind)
    toy.learn(7)
    path = toy.save(tmp_path, 7, rows=42, best={"*": 0.1 + 0.2})
    toy.learn(5)
    expected = toy.numbers()
    torch.manual_seed(99)
    other = Toy(kind, seed=1)
    assert other.load(path) == {"rows": 42, "best": {"*": 0.1 + 0.2}}
    other.learn(5)
    assert_same(other, expected)


def test_settings_of_the_optimizer_come_back(tmp_path: Path) -> None:
    toy = Toy()
    toy.learn(3)
    path = toy.save(tmp_path, 3)
    other = Toy()
    other.load(path)
    for mine, theirs in zip(other.optimizer.param_groups, toy.optimizer.param_groups, strict=True):
        assert mine["lr"] == theirs["lr"]
        assert mine["weight_decay"] == theirs["weight_decay"]
        assert tuple(mine["betas"]) == tuple(theirs["betas"])


COUNTS: list[Any] = [
    pytest.param(AdamW, torch.Tensor, id="fused"),
    pytest.param(partial(AdamW, fused=False), int, id="not fused"),
    pytest.param(partial(AdamW, bias_correction="course"), int, id="course"),
    pytest.param(RAdam, int, id="RAdam"),
]


@pytest.mark.parametrize(("make", "kind"), COUNTS)
def test_step_counts_are_what_the_step_reads(tmp_path: Path, make: Any, kind: type) -> None:
    """A tensor for the fused kernel, which may be on a GPU; a number for formulas on the host."""
    toy, other = Toy(make), Toy(make, seed=1)
    toy.learn(3)
    other.load(toy.save(tmp_path, 3))
    for optimizer in (toy.optimizer, other.optimizer):
        assert all(isinstance(entry["step"], kind) for entry in optimizer.state.values())
        assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}
    if kind is torch.Tensor:
        assert {entry["step"].dtype for entry in other.optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize(("source", "target"), [(True, False), (False, True)])
def test_a_checkpoint_goes_across_to_the_other_kind_of_step(tmp_path: Path, source: bool, target: bool) -> None:
    """The fused step and the one by hand are the same formula, so either goes on where the other stopped."""
    toy, other = Toy(partial(AdamW, fused=source)), Toy(partial(AdamW, fused=target), seed=1)
    toy.learn(7)
    path = toy.save(tmp_path, 7)
    toy.learn(20)
    other.load(path)
    assert all(isinstance(entry["step"], torch.Tensor) is target for entry in other.optimizer.state.values())
    other.learn(20)
    expected, found = toy.numbers(), other.numbers()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, check_dtype=False)
    assert {float(entry["step"]) for entry in other.optimizer.state.values()} == {27.0}


def test_a_parameter_without_moments_has_none_afterwards(tmp_path: Path) -> None:
    toy = Toy()
    toy.learn(2)
    other = Toy(seed=1)
    other.load(toy.save(tmp_path, 2))
    assert all(parameter not in other.optimizer.state for parameter in other.unused.parameters())


def test_tables_are_filled_in_place_or_added_to(tmp_path: Path) -> None:
    toy = Toy()
    saved = {"old": torch.tensor([1.0, 2.0]), "new": torch.tensor([3.0], dtype=torch.bfloat16)}
    path = save_checkpoint(
        tmp_path, 1, modules={}, optimizer=toy.optimizer, tensors={"table": saved, "none": {}}, state={}, keep=1
    )
    kept = torch.zeros(2)
    into = {"old": kept}
    load_checkpoint(path, modules={}, optimizer=Toy().optimizer, tensors={"table": into})
    assert into["old"] is kept
    assert kept.tolist() == [1.0, 2.0]
    assert torch.equal(into["new"], saved["new"])
    assert into["new"].dtype == torch.bfloat16


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int) -> None:
    toy = Toy()
    for step in (3, 9, 10, 100, 99_999_999):
        toy.save(tmp_path, step, keep=keep)
    names = ["step-00000003", "step-00000009", "step-00000010", "step-00000100", "step-99999999"]
    assert [path.name for path in list_checkpoints(tmp_path)] == names[-keep:]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[-keep:]


def test_no_checkpoints_yet(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_only_tensors_and_json_inside(tmp_path: Path) -> None:
    """Read by hand: a header in JSON, then numbers, not a byte more; so nothing that could be unpickled."""
    toy = Toy()
    toy.learn(1)
    path = toy.save(tmp_path, 1)
    assert sorted(file.name for file in path.iterdir()) == ["state.json", "state.safetensors"]
    json.loads((path / "state.json").read_text())
    raw = (path / "state.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert len(raw) == 8 + size + max(ends)
    assert {name.split(".")[0] for name in header if name != "__metadata__"} == {
        "module",
        "optimizer",
        "random",
        "table",
    }


def test_equal_states_are_equal_bytes(tmp_path: Path) -> None:
    toy = Toy()
    toy.learn(2)
    one, other = toy.save(tmp_path / "one", 2), toy.save(tmp_path / "other", 2)
    for name in ("state.json", "state.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


# --- faults ---------------------------------------------------------------------------------------------------------


def truncate(name: str, size: int) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no bytes": truncate("state.safetensors", 0),
    "half a header": truncate("state.safetensors", 100),
    "a byte too few": truncate("state.safetensors", -1),
    "no tensors": lambda path: (path / "state.safetensors").unlink(),
    "half a JSON": truncate("state.json", 50),
    "an empty JSON": truncate("state.json", 0),
    "not UTF-8": lambda path: (path / "state.json").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    toy = Toy()
    toy.learn(1)
    toy.save(tmp_path, 1)
    path = toy.save(tmp_path, 2)
    DAMAGES[damage](path)
    with pytest.raises(
        MinbertError, match=r"step-00000002: damaged checkpoint \(.+\); remove it to resume from"
    ) as found:
        toy.load(path)
    assert "\n" not in str(found.value)
    shutil.rmtree(path)  # the advice works
    assert toy.load(list_checkpoints(tmp_path)[-1]) == {}


def test_a_checkpoint_of_another_format(tmp_path: Path) -> None:
    toy = Toy()
    path = toy.save(tmp_path, 1)
    content = json.loads((path / "state.json").read_text())
    for changed, found in (({**content, "format": 9}, "9"), ({}, "None")):
        (path / "state.json").write_text(json.dumps(changed))
        with pytest.raises(MinbertError, match=f"checkpoint format {found}; this minbert reads 1"):
            toy.load(path)


def fail_after(calls: int, error: BaseException) -> Callable[..., Any]:
    """A function that fails at its last call but `calls`."""
    left = iter(range(calls))

    def fail(*_: object, **__: object) -> None:
        if next(left, None) is None:
            raise error

    return fail


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["save_file", "half a file", "sync 0", "sync 2", "sync 3", "rename"])
def test_a_save_that_fails_leaves_the_others_whole(
    tmp_path: Path, where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy()
    toy.learn(1)
    good = toy.save(tmp_path, 1, keep=1, number=1)
    before = {file.name: file.read_bytes() for file in good.iterdir()}

    def half(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        path.write_bytes(path.read_bytes()[:50])
        raise error

    with monkeypatch.context() as patch:
        if where == "save_file":
            patch.setattr(checkpoint, "save_file", fail_after(0, error))
        elif where == "half a file":
            patch.setattr(checkpoint, "save_file", half)
        elif where == "rename":
            patch.setattr(Path, "rename", fail_after(0, error))
        else:
            patch.setattr(atomic.os, "fsync", fail_after(int(where[-1]), error))
        with pytest.raises(type(error)):
            toy.save(tmp_path, 2, keep=1, number=2)
    found = list_checkpoints(tmp_path)
    if where == "sync 3":  # all was there, only the folder's list of names not yet on the disk
        assert [path.name for path in found] == ["step-00000001", "step-00000002"]
    else:
        assert [path.name for path in tmp_path.iterdir()] == [good.name]
    assert {file.name: file.read_bytes() for file in good.iterdir()} == before
    assert Toy().load(good) == {"number": 1}
    toy.save(tmp_path, 3, keep=1, number=3)  # and with space again it goes on
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_what_a_crash_left_half_written_is_not_a_checkpoint(tmp_path: Path) -> None:
    toy = Toy()
    good = toy.save(tmp_path, 1)
    partial = tmp_path / ".step-00000002.part"
    shutil.copytree(good, partial)
    (tmp_path / "step-00000003").mkdir()  # without a state.json
    assert list_checkpoints(tmp_path) == [good]
    toy.save(tmp_path, 2)
    assert not partial.exists()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    toy = Toy()
    toy.save(tmp_path, 1, number=1)
    toy.learn(1)
    path = toy.save(tmp_path, 1, number=2)
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000001"]
    assert Toy().load(path) == {"number": 2}


def test_files_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files and their folder are synced before the rename, the folder above after it."""
    events: list[str] = []
    rename = Path.rename
    monkeypatch.setattr(atomic, "sync", lambda path: events.append(path.name))

    def note(self: Path, target: Path) -> Path:
        events.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", note)
    Toy().save(tmp_path / "checkpoints", 1)
    assert events == [
        "state.json",
        "state.safetensors",
        ".step-00000001.part",
        ".step-00000001.part -> step-00000001",
        "checkpoints",
    ]


def test_the_tensors_are_those_of_the_net(tmp_path: Path) -> None:
    toy = Toy()
    toy.learn(1)
    flat = load_file(toy.save(tmp_path, 1) / "state.safetensors")
    assert torch.equal(flat["module.net.0.weight"], toy.net[0].weight)
    assert torch.equal(flat["table.average.0.weight"], toy.average["0.weight"])
    assert torch.equal(flat["optimizer.0.exp_avg"], toy.optimizer.state[toy.net[0].weight]["exp_avg"])
