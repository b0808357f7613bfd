"""What this machine has: the first thing to send along with a question."""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

PACKAGES = ("torch", "deepspeed", "ray", "mlflow", "optuna", "polars", "pydantic")
KERNELS = {"flash-attn": "flash_attn", "flash-linear-attention": "fla"}
# Who takes a port by default. None of them must be free: each of ours looks for another where it is taken.
PORTS = {"mlflow ui": 5000, "ray": 6379, "ray dashboard": 8265, "torch.distributed": 29500}


def examine(root: Path) -> dict[str, Any]:
    """The document of `gridlaw doctor --json`. Imports torch, so takes seconds; creates nothing.

    `problems` lists what would stop a study here, one line each with its remedy.
    """
    import torch

    existing = nearest_existing(root)
    devices = [
        {
            "name": torch.cuda.get_device_name(i),
            "memory_bytes": torch.cuda.get_device_properties(i).total_memory,
            "bfloat16": torch.cuda.is_bf16_supported(),
        }
        for i in range(torch.cuda.device_count())
    ]
    document: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch_threads": torch.get_num_threads(),
        "devices": devices,
        "packages": {name: _version(name) for name in PACKAGES},
        "kernels": {name: importlib.util.find_spec(module) is not None for name, module in KERNELS.items()},
        "compiler": _compiler(),
        "ports_free": {f"{who} {port}": _is_free(port) for who, port in PORTS.items()},
        "root": str(root),
        "root_writable": os.access(existing, os.W_OK | os.X_OK),
        "disk_free_bytes": shutil.disk_usage(existing).free,
    }
    document["mixers"] = _mixers("cuda" if devices else "cpu")
    document["problems"] = _problems(document)
    return document


def _mixers(device: str) -> dict[str, Any]:
    """Pattern word → the kernel that training would take here, and why none before it: bfloat16 on a GPU."""
    import torch

    from model.config import ModelConfig
    from model.kernels import chosen
    from model.mixers.table import MIXERS, parse_pattern

    words = [f"{name}-128" if mixer.windowed else name for name, mixer in MIXERS.items()]
    layers = parse_pattern(" ".join(words), len(words), "rope")
    config = ModelConfig(1, 4096, 128, 2, 2, 64, 128, layers)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {
        word: {"kernel": kernel, "refused": refused}
        for word, (kernel, refused) in chosen(config, device, dtype).items()
    }


def nearest_existing(path: Path) -> Path:
    """The path itself, or the closest folder above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def usable_cpus() -> int:
    """CPUs this process may use: fewer than the machine has where an affinity is set."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    name = os.environ.get("CXX", "g++")
    if not shutil.which(name):
        return None
    done = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.stdout else name


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _problems(document: dict[str, Any]) -> list[str]:
    found = [
        f"{name}: not installed; install gridlaw again with pip install -c constraints.txt -e ."
        for name, version in document["packages"].items()
        if version is None
    ]
    if document["compiler"] is None:
        found.append("compiler: no C++ compiler; compiled models and DeepSpeed ops need one (Debian: apt install g++)")
    if not document["root_writable"]:
        found.append(f"root: {document['root']} cannot be written; give another with --root")
    if document["disk_free_bytes"] < 2**30:
        found.append(f"disk: {document['disk_free_bytes'] / 2**20:.0f} MiB free at the root; a study needs about 1 GiB")
    if document["devices"]:
        found += [
            f"{name}: not installed; attention runs without it, slower (pip install -e '.[cuda]')"
            for name, there in document["kernels"].items()
            if not there
        ]
    return found


def _kernel_line(word: str, told: dict[str, Any]) -> str:
    why = "; ".join(f"{kernel}: {reason}" for kernel, reason in told["refused"].items())
    return f"{word}: {told['kernel']}" + (f" ({why})" if why else "")


def show(document: dict[str, Any]) -> RenderableType:
    """The document as two columns, problems last."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    gib = 2**30
    devices = [f"{d['name']}, {d['memory_bytes'] / gib:.0f} GiB" for d in document["devices"]] or ["no GPU: CPU only"]
    table.add_row("python", f"{document['python']} on {document['system']}")
    table.add_row("cpus", f"{document['cpus']} usable, {document['memory_bytes'] / gib:.0f} GiB memory")
    table.add_row("devices", "\n".join(devices))
    table.add_row("packages", ", ".join(f"{name} {version}" for name, version in document["packages"].items()))
    table.add_row("kernels", ", ".join(f"{n}: {'yes' if there else 'no'}" for n, there in document["kernels"].items()))
    table.add_row("mixers", "\n".join(_kernel_line(word, told) for word, told in document["mixers"].items()))
    table.add_row("compiler", document["compiler"] or "none")
    table.add_row("ports", ", ".join(f"{p}: {'free' if ok else 'taken'}" for p, ok in document["ports_free"].items()))
    table.add_row("root", f"{document['root']}, {document['disk_free_bytes'] / gib:.1f} GiB free")
    problems = [Text(problem, style="yellow") for problem in document["problems"]] or [Text("no problem found")]
    return Group(table, Text(), *problems)
