"""What the machine can do: cores under quotas, and formats that are tried by a child so that only the child dies."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from minbert import doctor, machine
from minbert.cli import app
from minbert.errors import MinbertError
from minbert.machine import (
    CHILD,
    Probe,
    available_cores,
    choose_precision,
    cpu_model,
    probe,
    set_threads,
    share_gpu,
    supports,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda")
WORKS = "print('works')"
DIES = "import os, signal; os.kill(os.getpid(), signal.{})"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "home"))
    for name in ("MINBERT_PROBE", *machine.KERNEL_SETTINGS, *machine.THREAD_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


# --- cores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def fake_root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 16, id="no-cgroups"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16, id="v2-no-limit"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4, id="v2"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2, id="v2-one-half"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1, id="v2-a-sliver"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 16, id="v2-plenty"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/jobs/mine\n",
                "sys/fs/cgroup/jobs/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
            },
            3,
            id="v2-the-group-above",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/not/in/this/container\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2,
            id="v2-container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:memory:/a\n2:cpu,cpuacct:/a\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "50000\n",
            },
            5,
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:cpu:/docker/0123\n",
                f"{V1}/cpu.cfs_quota_us": "700000\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            7,
            id="v1-container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:cpu:/\n",
                f"{V1}/cpu.cfs_quota_us": "-1\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            16,
            id="v1-no-limit",
        ),
        pytest.param({"proc/self/cgroup": "no colons\n\n::\n", "sys/fs/cgroup/cpu.max": "a b c\n"}, 16, id="nonsense"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"}, 16, id="no-period"),
    ],
)
@pytest.mark.usefixtures("sixteen")
def test_cores_are_those_of_the_quota(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert available_cores(fake_root(tmp_path, files)) == cores


@given(quota=st.integers(1, 10**9), period=st.integers(1000, 10**6), cores=st.integers(1, 512))
def test_a_quota_is_rounded_up_and_never_adds_cores(
    quota: int, period: int, cores: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} {period}\n"}
    root = fake_root(tmp_path_factory.mktemp("root"), files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        assert available_cores(root) == min(cores, math.ceil(quota / period))


def test_a_system_without_affinity_counts_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores(tmp_path) == 1


def test_this_machine_has_cores() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("torch_has", "cores", "setting", "expected"),
    [(16, 4, "", 4), (2, 4, "", 2), (4, 4, "", 4), (16, 4, "OMP_NUM_THREADS", 16), (16, 4, "MKL_NUM_THREADS", 16)],
)
def test_threads_are_lowered_to_the_cores_unless_someone_said_otherwise(
    torch_has: int, cores: int, setting: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [torch_has]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    if setting:
        monkeypatch.setenv(setting, "16")
    assert set_threads() == now[0] == expected


@pytest.mark.parametrize("said", ["0", "-0.5", "1.5", "nan", "half"])
def test_a_share_of_a_gpu_that_is_none_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINBERT_GPU_SHARE", said)
    with (
        pytest.raises(MinbertError, match=rf'MINBERT_GPU_SHARE is "{said}"; expected a part of the GPU'),
        share_gpu(CPU),
    ):
        pass


@pytest.mark.parametrize("said", [None, "", "1", "0.25"])
def test_a_share_of_a_gpu_is_nothing_to_a_cpu(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINBERT_GPU_SHARE", raising=False)
    if said is not None:
        monkeypatch.setenv("MINBERT_GPU_SHARE", said)
    with share_gpu(CPU):
        assert torch._C._get_sm_carveout_experimental() is None


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.05, 0.125, 0.25, 0.5])
def test_products_on_a_share_of_the_gpu_are_right(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINBERT_GPU_SHARE", str(share))
    before = torch.backends.cuda.preferred_blas_library()
    generator = torch.Generator(GPU).manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=GPU, generator=generator).bfloat16()

    with share_gpu(GPU):
        processors = torch.cuda.get_device_properties(GPU).multi_processor_count
        assert torch._C._get_sm_carveout_experimental() == processors - max(1, round(share * processors))
        for tokens in (8, 40, 136, 500, 1031, 4096):
            for width, out in ((384, 1152), (384, 1536), (1536, 384), (768, 3072)):
                x, weight, bias, grad = drawn(tokens, width), drawn(out, width), drawn(out), drawn(tokens, out)
                for found, left, right, plus in (
                    (torch.nn.functional.linear(x, weight, bias), x, weight.T, bias),  # the way forward
                    (grad @ weight, grad, weight, None),  # the way back
                    (grad.T @ x, grad.T, x, None),  # a weight's gradient
                ):
                    expected = left.double() @ right.double() + (0 if plus is None else plus.double())
                    assert (found.double() - expected).abs().max() < 0.02 * expected.abs().max()
    assert torch._C._get_sm_carveout_experimental() is None
    assert torch.backends.cuda.preferred_blas_library() == before


def test_the_processor_is_known_by_what_it_can_do(tmp_path: Path) -> None:
    text = "processor\t: {}\nmodel name\t: Some CPU\ncpu MHz\t\t: {}\ncore id\t\t: {}\nflags\t\t: fpu {}\n\nprocessor\t: 1\n"

    def model(*values: object) -> tuple[str, str]:
        return cpu_model(fake_root(tmp_path, {"proc/cpuinfo": text.format(*values)}))

    assert model(0, 2400.1, 0, "avx2")[0] == "Some CPU"
    assert model(0, 2400.1, 0, "avx2") == model(3, 1800.7, 2, "avx2")
    assert model(0, 2400.1, 0, "avx2") != model(0, 2400.1, 0, "avx2 amx_bf16")
    name, code = cpu_model(tmp_path / "nowhere")
    assert isinstance(name, str)
    assert len(code) == 16


# --- the probe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        (WORKS, Probe(True, "works")),
        (DIES.format("SIGILL"), Probe(False, "a product dies: Illegal instruction")),
        (DIES.format("SIGSEGV"), Probe(False, "a product dies: Segmentation fault")),
        (DIES.format("SIGKILL"), Probe(False, "a product dies: Killed")),
        ("print('products are wrong by 99%'); raise SystemExit(3)", Probe(False, "products are wrong by 99%")),
        ("raise RuntimeError('no such kernel')", Probe(False, "exit code 1: RuntimeError: no such kernel")),
        ("raise SystemExit(7)", Probe(False, "a product fails with exit code 7: no message")),
    ],
    ids=["works", "SIGILL", "SIGSEGV", "SIGKILL", "wrong", "error", "silent"],
)
def test_what_became_of_the_child(child: str, expected: Probe) -> None:
    found = probe("bf16", "cpu", child=child)
    assert found.works == expected.works
    assert found.reason.endswith(expected.reason)


def test_a_child_that_hangs_is_given_up() -> None:
    found = probe("bf16", "cpu", child="import time; time.sleep(60)", timeout=0.5)
    assert found == Probe(False, "a product did not end within 0.5 seconds")


def test_a_child_that_cannot_be_started_is_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "could not be tried" in probe("bf16", "cpu", child=WORKS).reason


def test_the_child_sees_our_environment_and_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    child = "import os, sys; print(*sys.argv[1:], os.environ['ONEDNN_MAX_CPU_ISA'])"
    assert probe("fp16", "cpu", child=child).reason == "fp16 cpu AVX2"


def test_the_child_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert probe("bf16", "cpu", child="import torch; print(torch.__version__)").reason == torch.__version__


def counting(folder: Path, rest: str = WORKS) -> tuple[str, Callable[[], int]]:
    """A child that leaves a mark each time it runs."""
    marks = folder / "marks"
    return f"open({str(marks)!r}, 'a').write('x')\n{rest}", lambda: len(marks.read_text()) if marks.exists() else 0


@pytest.mark.parametrize(
    ("rest", "runs"),
    [(WORKS, 1), (DIES.format("SIGILL"), 1), ("raise SystemExit(3)", 1), (DIES.format("SIGKILL"), 2), ("1 / 0", 2)],
    ids=["works", "SIGILL", "wrong", "SIGKILL", "error"],
)
def test_an_answer_is_remembered_when_it_will_stay_the_same(tmp_path: Path, rest: str, runs: int) -> None:
    child, count = counting(tmp_path, rest)
    assert probe("bf16", "cpu", child=child) == probe("bf16", "cpu", child=child)
    assert count() == runs


def test_it_is_tried_again_when_asked_or_when_the_kernels_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, count = counting(tmp_path)
    probe("bf16", "cpu", child=child)
    probe("bf16", "cpu", child=child, again=True)
    assert count() == 2
    probe("fp16", "cpu", child=child)
    assert count() == 3
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    probe("bf16", "cpu", child=child)
    assert count() == 4
    monkeypatch.setattr(torch, "__version__", "99.0")
    probe("bf16", "cpu", child=child)
    assert count() == 5
    monkeypatch.undo()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"a": 1}', '{"a": {"works": true}}', "[" * 10**5, "\x00\xff"], ids=range(8)
)
def test_a_damaged_memory_is_ignored_and_replaced(tmp_path: Path, own_home: Path, content: str) -> None:
    own_home.mkdir()
    (own_home / "probes.json").write_text(content, encoding="latin-1")
    child, count = counting(tmp_path)
    assert probe("bf16", "cpu", child=child).works
    assert probe("bf16", "cpu", child=child).works
    assert count() == 1
    assert len(json.loads((own_home / "probes.json").read_text())) == 1


def test_a_home_that_cannot_be_written_costs_only_time(tmp_path: Path, own_home: Path) -> None:
    own_home.write_text("a file")
    child, count = counting(tmp_path)
    assert probe("bf16", "cpu", child=child).works
    assert probe("bf16", "cpu", child=child).works
    assert count() == 2


def test_off_tries_nothing_and_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINBERT_PROBE", "off")
    child, count = counting(tmp_path)
    assert probe("bf16", "cpu", child=child) == Probe(False, "it was not tried, because MINBERT_PROBE is off")
    assert not supports("bf16", "cpu")
    assert count() == 0


def test_the_real_child_compares_with_fp32() -> None:
    found = probe("fp32", "cpu")
    assert found.works, found.reason
    assert found.reason.startswith("works, ")
    assert found.reason.endswith("times the speed of fp32, off by 0.0%")
    strict = CHILD.replace("error < 0.05", "error < 0")
    assert strict != CHILD
    assert probe("fp32", "cpu", child=strict) == Probe(False, "products are wrong by 0%")


@pytest.mark.slow
def test_bf16_on_this_cpu_works_or_says_why_not() -> None:
    found = probe("bf16", "cpu")
    assert found.reason.startswith("works, " if found.works else "a product ")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_what_is_chosen_on_this_gpu_works(precision: machine.Precision) -> None:
    if precision != "fp16" and torch.cuda.get_device_capability() < (8, 0):
        with pytest.raises(MinbertError, match="does not have"):
            choose_precision(precision, GPU)
        return
    assert choose_precision(precision, GPU) == precision
    found = probe(precision, "cuda")
    assert found.works, found.reason


# --- the choice -----------------------------------------------------------------------------------------------------


def test_on_a_cpu_auto_is_fp32_and_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "probe", lambda *_: pytest.fail("tried"))
    assert choose_precision("auto", CPU) == choose_precision("fp32", CPU) == "fp32"


def test_bf16_on_a_cpu_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "probe", lambda *_: Probe(True, "works"))
    assert choose_precision("bf16", CPU) == "bf16"


def test_bf16_on_a_cpu_that_dies_of_it_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe("bf16", "cpu", child=DIES.format("SIGILL"))
    monkeypatch.setattr(machine, "probe", lambda *_: found)
    expected = "dies: Illegal instruction; expected fp32, or ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    with pytest.raises(MinbertError, match=expected):
        choose_precision("bf16", CPU)


@pytest.mark.parametrize("wanted", ["tf32", "fp16"])
def test_what_is_only_for_gpus(wanted: machine.WantedPrecision) -> None:
    with pytest.raises(MinbertError, match=f'precision is "{wanted}", which is for GPUs; expected auto, fp32 or bf16'):
        choose_precision(wanted, CPU)


OLD, VOLTA, AMPERE = (6, 1), (7, 0), (8, 0)


@pytest.mark.parametrize(
    ("generation", "wanted", "chosen"),
    [
        (AMPERE, "auto", "bf16"),
        (AMPERE, "tf32", "tf32"),
        (AMPERE, "bf16", "bf16"),
        (AMPERE, "fp16", "fp16"),
        (AMPERE, "fp32", "fp32"),
        (VOLTA, "auto", "fp16"),
        (VOLTA, "bf16", None),
        (VOLTA, "tf32", None),
        (VOLTA, "fp16", "fp16"),
        (OLD, "auto", "fp32"),
        (OLD, "fp32", "fp32"),
    ],
)
def test_the_choice_on_a_gpu(
    generation: tuple[int, int],
    wanted: machine.WantedPrecision,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Current:
        def __init__(self, device: torch.device) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: generation >= AMPERE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: generation)
    if chosen:
        assert choose_precision(wanted, GPU) == chosen
    else:
        with pytest.raises(MinbertError, match=f'"{wanted}", which Some GPU does not have; expected auto, fp32, fp16'):
            choose_precision(wanted, GPU)


# --- the command, and what is imported ------------------------------------------------------------------------------


def test_doctor_says_what_there_is(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda *_, **__: Probe(False, "a product dies: Illegal instruction"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert result.exit_code == 0
    for expected in ("cores for us", torch.__version__, "Illegal instruction", "MKL_NUM_THREADS=3", "0 sets"):
        assert expected in result.stdout
    found = {finding.what: finding for finding in doctor.examine()}
    assert not found["bf16 on the CPU"].good
    assert str(own_home / "tokens") in found["tokens"].found


def test_doctor_without_torch_or_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    monkeypatch.setenv("MINBERT_TOKEN_CACHE", "off")
    found = {finding.what: finding for finding in doctor.examine()}
    assert "pip install 'minbert[train]'" in found["torch"].found
    assert found["tokens"].found == "not kept: MINBERT_TOKEN_CACHE is off"


def test_doctor_clears_the_tokens(own_home: Path) -> None:
    entry = own_home / "tokens" / ("a" * 64)
    entry.mkdir(parents=True)
    (entry / "ids.npy").write_bytes(b"0" * (3 << 20))
    (own_home / "tokens" / "notes.txt").write_text("not ours")
    result = CliRunner().invoke(app, ["doctor", "--clear-cache"], catch_exceptions=False)
    assert "3 MiB of tokens removed" in result.stdout
    assert [path.name for path in (own_home / "tokens").iterdir()] == ["notes.txt"]


def test_importing_brings_no_torch() -> None:
    code = "import sys, minbert.machine, minbert.doctor, minbert.data.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
