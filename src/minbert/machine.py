"""What this machine can do: the cores we may use, and the number formats in which products come out right.

    set_threads()
    choose_precision("auto", torch.device("cuda"))     # "bf16"
    probe("bf16", "cpu").reason                        # "a product dies: Illegal instruction"

A processor's own word is not enough: some that advertise bf16 die of an illegal instruction at the first product. So a
child process tries it, and only the child dies. The answer is kept in `MINBERT_HOME`/probes.json; `MINBERT_PROBE=off`
tries nothing and takes the answer to be no.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from minbert.atomic import write_text
from minbert.encoders import home
from minbert.errors import MinbertError

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
WantedPrecision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SHARE_SETTING = "MINBERT_GPU_SHARE"
KERNEL_SETTINGS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
TIMEOUT = 120.0  # seconds: importing torch from a slow disk takes most of it
WRONG = 3  # the child's exit code for numbers that are not those of fp32

# Products of the shapes that reach the fast kernels, forward and backward, as a training step does them: linear layers
# and attention under autocast. Then the time of each format on the largest.
CHILD = """
import sys, time
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a death here is expected; it leaves no core file
except (ImportError, ValueError, OSError):
    pass
import torch
from torch.nn import functional as F

precision, device = sys.argv[1:]
low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
generator = torch.Generator().manual_seed(1)


def draw(*shape):
    return torch.randn(*shape, generator=generator).to(device)


def run(tensors, lower):
    torch.backends.cuda.matmul.allow_tf32 = lower and precision == "tf32"
    x, up, down = (tensor.clone().requires_grad_() for tensor in tensors)
    with torch.autocast(device, low or torch.bfloat16, enabled=lower and low is not None):
        y = F.linear(F.gelu(F.linear(x, up)), down)
        heads = y.view(len(y) // 8, 8, 4, -1).transpose(1, 2)
        y = y + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(y.shape)
    y.float().square().sum().mul(1e-3).backward()
    return [y.detach().float(), x.grad, up.grad, down.grad]


def seconds(tensors, lower):
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        run(tensors, lower)[0].sum().item()
        best = min(best, time.perf_counter() - started)
    return best


worst = 0.0
for rows, width, inner in [(8, 32, 64), (128, 384, 1536), (64, 768, 3072), (256 if device == "cpu" else 16384, 384, 1536)]:
    tensors = draw(rows, width), draw(inner, width) / width**0.5, draw(width, inner) / inner**0.5
    for found, expected in zip(run(tensors, True), run(tensors, False)):
        error = ((found - expected).norm() / expected.norm()).item()
        if not error < 0.05:
            print(f"products are wrong by {error:.0%}")
            sys.exit(3)
        worst = max(worst, error)
ratio = seconds(tensors, False) / seconds(tensors, True)
print(f"works, {ratio:.2g} times the speed of fp32, off by {worst:.1%}")
"""


def available_cores(root: Path = Path("/")) -> int:
    """The cores this process may use: those of its affinity mask, or fewer where a container's quota says so."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """The CPU quotas, in cores, of our control group and of those above it, in either version of cgroups."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, group = [*line.split(":", 2), "", ""][:3]
        if names and "cpu" not in names.split(","):
            continue
        places = [mount / names, mount / "cpu"] if names else [mount, mount / "unified"]
        inside = PurePosixPath(group.lstrip("/"))
        for place in places:
            for part in [inside, *inside.parents]:  # inside a container, what /proc says may not exist; the top does
                folder = place / part
                quota = _read(folder / "cpu.max").split() or [
                    _read(folder / "cpu.cfs_quota_us"),
                    _read(folder / "cpu.cfs_period_us"),
                ]
                try:
                    microseconds, period = map(float, quota)
                except ValueError:  # "max 100000", or no such file
                    continue
                if microseconds > 0 and period > 0:
                    yield microseconds / period


def set_threads() -> int:
    """Let torch use no more threads than there are cores for us; returns how many it uses.

    Only ever lowers: torch starts with the cores it sees, which in a container are the whole machine's, and whoever
    asked for fewer is obeyed. OMP_NUM_THREADS and MKL_NUM_THREADS are left to say otherwise.
    """
    import torch

    threads = torch.get_num_threads()
    cores = available_cores()
    if cores < threads and not any(os.environ.get(name) for name in THREAD_SETTINGS):
        torch.set_num_threads(cores)
        threads = cores
    return threads


def choose_device(name: str) -> torch.device:
    """The device by name; "auto" is a GPU where there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise MinbertError(f'device is "{name}"; expected auto, cpu, cuda or cuda:N')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MinbertError(f'device is "{name}", but torch sees no GPU here; expected cpu')
    return device


@contextmanager
def share_gpu(device: torch.device) -> Iterator[None]:
    """Products on no more than a part of the GPU's multiprocessors while the block lasts, where MINBERT_GPU_SHARE is set.

    A product of a small batch spreads over the whole GPU and uses little of it. Alone that is fastest; beside other
    processes it keeps theirs waiting.
    """
    import torch

    share = _wanted_share()
    if device.type != "cuda" or share == 1:
        yield
        return
    count = torch.cuda.get_device_properties(device).multi_processor_count
    library, spared = torch.backends.cuda.preferred_blas_library(), torch._C._get_sm_carveout_experimental()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the one that keeps to it
    torch._C._set_sm_carveout_experimental(count - max(1, round(share * count)))
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(spared)
        torch.backends.cuda.preferred_blas_library(library)


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """float32 products in tf32 where that is the precision, for as long as the block lasts."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream of our own on a GPU: graphs cannot be recorded on the default one. It goes before others, such as the
    encoder's second one, whose work nobody waits for.
    """
    if device.type != "cuda":
        yield
        return
    import torch

    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def _wanted_share() -> float:
    said = os.environ.get(SHARE_SETTING) or "1"
    try:
        share = float(said)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise MinbertError(f'{SHARE_SETTING} is "{said}"; expected a part of the GPU, such as 0.25, or 1')
    return share


@dataclass(frozen=True)
class Probe:
    """Whether a number format works here, and how that was found or what went wrong."""

    works: bool
    reason: str


def supports(precision: Precision, device: Literal["cpu", "cuda"]) -> bool:
    """Do products in this format work on this device? Tried once in a child process, then remembered."""
    return probe(precision, device).works


def probe(
    precision: Precision,
    device: Literal["cpu", "cuda"],
    *,
    again: bool = False,
    child: str = CHILD,
    timeout: float = TIMEOUT,
) -> Probe:
    """Try a format in a child process, unless the answer is known.

    Args:
        precision: the format.
        device: where to try it.
        again: try although the answer is known.
        child: Python code that gets format and device as arguments; 0 is its exit code for "works".
        timeout: seconds until the child is given up.
    """
    if os.environ.get("MINBERT_PROBE", "").strip().lower() == "off":
        return Probe(False, "it was not tried, because MINBERT_PROBE is off")
    place, key = home() / "probes.json", _probe_key(precision, device, child)
    if not again and (known := _known_probes(place).get(key)):
        return known
    found, lasting = _try(precision, device, child, timeout)
    if lasting:
        try:
            kept = {name: asdict(value) for name, value in {**_known_probes(place), key: found}.items()}
            write_text(place, json.dumps(kept, indent=2) + "\n")
        except OSError:  # no room, no permission: it is tried again next time
            pass
    return found


def _try(precision: str, device: str, child: str, timeout: float) -> tuple[Probe, bool]:
    """The answer, and whether it will be the same tomorrow: a busy machine or a full memory may not be."""
    command = [sys.executable, "-P", "-c", child, precision, device]  # -P: no module from the current folder
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Probe(False, f"a product did not end within {timeout:g} seconds"), False
    except OSError as error:
        return Probe(False, f"a product could not be tried ({error})"), False
    said = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()] or ["no message"]
    if done.returncode == 0:
        return Probe(True, said[-1]), True
    if done.returncode == WRONG:
        return Probe(False, said[-1]), True
    if done.returncode < 0:
        number = -done.returncode
        lasting = number in (signal.SIGILL, signal.SIGSEGV, signal.SIGFPE)
        return Probe(False, f"a product dies: {signal.strsignal(number) or f'signal {number}'}"), lasting
    return Probe(False, f"a product fails with exit code {done.returncode}: {said[-1]}"), False


def choose_precision(wanted: WantedPrecision, device: torch.device) -> Precision:
    """The number format of matrix products that a setting means on a device, or why it cannot be had there.

    "auto" is fp32 on a CPU, so that a run gives the same numbers on the next machine; on a GPU it is the lowest format
    that its tensor cores have, bf16 before fp16.
    """
    if wanted == "fp32" or (wanted == "auto" and device.type == "cpu"):
        return "fp32"
    if device.type != "cpu":
        return _choose_on_gpu(wanted, device)
    if wanted != "bf16":
        raise MinbertError(f'precision is "{wanted}", which is for GPUs; expected auto, fp32 or bf16 on a CPU')
    found = probe("bf16", "cpu")
    if not found.works:
        way_out = "fp32, or ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
        raise MinbertError(f'precision is "bf16", but on this CPU {found.reason}; expected {way_out}')
    return "bf16"


def _choose_on_gpu(wanted: WantedPrecision, device: torch.device) -> Precision:
    """No child here: the driver knows what its GPU can do, and what it cannot is an error and no death."""
    import torch

    with torch.cuda.device(device):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        name, generation = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    has = {"bf16": bf16, "fp16": True, "tf32": generation >= (8, 0)}
    if wanted == "auto":
        return "bf16" if bf16 else "fp16" if generation >= (7, 0) else "fp32"  # before 7.0, fp16 is slower than fp32
    if not has[wanted]:
        good = ", ".join(precision for precision, there in has.items() if there)
        raise MinbertError(f'precision is "{wanted}", which {name} does not have; expected auto, fp32, {good}')
    return wanted


def cpu_model(root: Path = Path("/")) -> tuple[str, str]:
    """The processor's name, and a hash of everything that it says it can do."""
    first = _read(root / "proc/cpuinfo").strip().split("\n\n")[0]  # the others are alike
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    same = {key: value for key, value in fields.items() if key not in ("processor", "cpu MHz", "bogomips", "apicid")}
    same = {key: value for key, value in same.items() if not key.endswith((" id", " apicid"))}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, hashlib.sha256(json.dumps([name, same], sort_keys=True).encode()).hexdigest()[:16]


def _probe_key(precision: str, device: str, child: str) -> str:
    import torch

    where = list(cpu_model()) if device == "cpu" else [torch.cuda.get_device_name()]
    settings = [f"{name}={os.environ[name]}" for name in KERNEL_SETTINGS if os.environ.get(name)]
    code = hashlib.sha256(child.encode()).hexdigest()[:16]
    return " | ".join([precision, device, *where, f"torch {torch.__version__}", *settings, code])


def _known_probes(path: Path) -> dict[str, Probe]:
    """What was found before; a file that makes no sense is as good as none."""
    try:
        return {
            key: Probe(bool(value["works"]), str(value["reason"])) for key, value in json.loads(_read(path)).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _read(path: Path) -> str:
    """A small text file; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
