"""`torch-marlin-metal doctor`: describes this installation and checks its products. --deep runs long GPU checks."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torch_marlin_metal import extension
from torch_marlin_metal.cli import doctor_steps
from torch_marlin_metal.cli.bench import facts, gpu_name
from torch_marlin_metal.cli.output import ANSWER_IS_NO, DONE, Json, show

# Metal's two kinds of validation. Both change what is tested: shader validation can double a kernel's threadgroup
# memory (Metal.jl#839) and lower its thread limit, and API validation can abort the process in PyTorch's own kernels
# (pytorch#186580). A check's run without validation therefore decides its result.
VALIDATION = {"API validation": {"MTL_DEBUG_LAYER": "1"}, "shader validation": {"MTL_SHADER_VALIDATION": "1"}}
# Runs a check with this process's modules. `-m` alone would prefer modules in the current folder.
CHILD_PROGRAM = """
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module("torch_marlin_metal.cli.doctor_steps", run_name="__main__")
"""
CHILD = (sys.executable, "-c", CHILD_PROGRAM)
STEP_SECONDS = 900  # shader validation compiles the kernels again, which takes minutes


def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also run the long checks of the GPU.")] = False,
    report: Annotated[Path | None, typer.Option(help="Also write the report to this JSON file, to send.")] = None,
    as_json: Json = False,
) -> int:
    """Reports this installation and tests it.

    Compares a product of each kernel with fp64 and torch.matmul. --deep runs further checks on the GPU: each without
    Metal's validation, then under API validation, then under shader validation. The first run decides the result.

    Each run is a separate process. If a run fails or crashes, the report says so, and the next run starts.
    """
    has_mps = torch.backends.mps.is_available()
    if deep and not has_mps:
        raise ValueError("--deep: expected a torch with an mps device, got one without")
    found: dict[str, Any] = {"machine": machine(), "checks": []}
    if extension.refusal is None:
        steps = [name for name in doctor_steps.QUICK if has_mps or not name.endswith("mps")]
        found["checks"] = [run_check(name) for name in steps]
        if deep:
            found["checks"] += [
                {**run_check(name), "validated": {kind: run_check(name, kind) for kind in VALIDATION}}
                for name in doctor_steps.STEPS
            ]
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n")
    show(found, as_lines(found), as_json)
    works = extension.refusal is None and all(check["result"] == "passed" for check in found["checks"])
    return DONE if works else ANSWER_IS_NO


def as_lines(report: dict[str, Any]) -> str:
    """Formats a report as plain lines that can be pasted into an issue."""
    lines = list(report["machine"].items())
    for check in report["checks"]:
        lines.append((check["check"], f"{check['result']}: {check['summary']}"))
        for kind, under in check.get("validated", {}).items():
            failure = f": {under['summary']}" if under["result"] == "failed" else ""
            lines.append((f"  under {kind}", under["result"] + failure))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in lines)


def machine() -> dict[str, str]:
    return {
        **facts(),
        "python": platform.python_version(),
        "extension": "loaded" if extension.refusal is None else extension.refusal,
        "isa": extension.cpu_capability().isa if extension.refusal is None else "unknown",
        "mps": gpu_name() if torch.backends.mps.is_available() else "no",
    }


def run_check(name: str, validation: str | None = None, seconds: float = STEP_SECONDS) -> dict[str, Any]:
    """Runs one check in a child process. Returns its name, result, summary, values and printed output."""
    kinds = {variable for kind in VALIDATION.values() for variable in kind}
    environment = {variable: value for variable, value in os.environ.items() if variable not in kinds}
    if validation is not None:
        environment.update(VALIDATION[validation])
    command = [*CHILD, json.dumps(sys.path), name]
    check: dict[str, Any] = {"check": name, "values": {}}
    try:
        pipes: Any = {"capture_output": True, "text": True, "errors": "replace"}
        done = subprocess.run(command, env=environment, timeout=seconds, **pipes)
    except subprocess.TimeoutExpired:
        return {**check, "result": "failed", "summary": f"did not end within {seconds:g} s", "output": ""}
    check["output"] = done.stderr[-20000:]
    try:
        check["values"] = doctor_steps.values_in(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        return {**check, "result": "failed", "summary": f"exit code {done.returncode}: {last}"}
    if done.returncode != 0:  # the check printed its values, but its process failed at the end
        return {**check, "result": "failed", "summary": f"exit code {done.returncode} after the check"}
    return {**check, "result": "passed", "summary": ", ".join(f"{k} {v}" for k, v in check["values"].items())}
