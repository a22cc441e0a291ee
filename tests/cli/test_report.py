"""`attnops report`: one page that stands alone, with what was declared, planned, compiled, kept and run; in a browser too."""

from __future__ import annotations

import html
import html.parser
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnops.drawing.charts import Bar, Point, bars, curve, roofline
from attnops.drawing.sequences import SequenceBar, sequences
from attnops.verify.passes import target_reports

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
MESH = ("--mesh", "fsdp=2,sp=4")
EMPTY = {"meta", "br"}


class Page(html.parser.HTMLParser):
    """Text by section, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.section = "head"
        self.texts: dict[str, str] = {}
        self.outside: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.outside += [value for name in ("src", "href") if (value := given.get(name)) and not value.startswith("#")]
        assert tag != "script"
        if tag == "section":
            self.section = given.get("id") or ""
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts[self.section] = self.texts.get(self.section, "") + " " + data


def written(attnops: Callable[..., Any], path: Path, *arguments: object, status: int = 0) -> Page:
    output = path.parent / "page.html"
    result = attnops("report", path, "--output", output, *arguments)
    assert (result.status, result.out) == (status, f"wrote {output}\n"), result.err
    text = output.read_text()
    assert "url(" not in text
    assert "@import" not in text
    page = Page(text)
    assert page.outside == []  # nothing is loaded from elsewhere
    return page


def test_a_plan_alone(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("splash", {"backend": "tpu"}, q_len=512, head_dim=64, batch=3)
    page = written(attnops, path, "--mesh", "fsdp=2")
    declared = page.texts["declaration"].partition("Declaration")[2]
    assert json.loads(declared) == json.loads(path.read_text()) | {"schema_version": 1}
    plan = attnops("plan", path, "--mesh", "fsdp=2").said
    for part in ("splash.forward_tpu (the platform's own implementation)", "mesh axis 'fsdp' (2) splits nothing"):
        assert part in " ".join(page.texts["plan"].split())
        assert part in plan
    assert "fsdp of batch dropped: 3 is not divisible by fsdp=2" in " ".join(page.texts["plan"].split())
    assert "496 full" in page.texts["mask"]
    assert "Nothing was compiled" in page.texts["plan"]
    assert "attnops tune runs one" in page.texts["tuning"]
    assert "--run runs it" in page.texts["timings"]


def test_compiled_and_run_here(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("splash", batch=2, q_len=64, kv_lengths=True)
    page = written(attnops, path, *MESH, "--target", "here", "--run", "--repeats", 1)
    target = " ".join(page.texts["target-0"].split())
    told = json.loads(attnops("verify", path, *MESH, "--json").out)[0]
    for one in told["passes"]:
        for found in one["collectives"]:
            assert f"{found['count']} {found['kind']} of" in target
    assert "all-gather: the least" in target
    assert "The program sends exactly what is needed." in target
    assert "Forward and backward" in target
    assert "pass output against float64 reference" in " ".join(page.texts["timings"].split())
    assert "median" not in page.texts["timings"]
    assert "this depends on the call's arrays" in page.texts["mask"]


@needs_libtpu
def test_for_a_tpu_with_a_search(
    attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnops.planning.tune_cache import Measured, keep
    from attnops.planning.tuning import tune_key

    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path / "kept"))
    path = config("splash", q_len=256, head_dim=128, dtype="bfloat16", mode="prefill")
    plans = []

    def reports(*args: Any, **options: Any) -> Any:
        for report in target_reports(*args, **options):
            plans.append(report.plan)
            yield report

    monkeypatch.setattr("attnops.cli.verified.target_reports", reports)
    written(attnops, path, "--target", "v5e:1x1")
    plan = plans[0]
    measured = [Measured("forward", {"block_q": n}, "static", n * 1e-5) for n in (256, 128)]
    measured.append(Measured("forward", {"block_q": 64}, "static", None, "too small"))
    keep(tune_key(plan.method, plan.problem, plan.placement), measured)
    page = written(attnops, path, "--target", "v5e:1x1")
    target = " ".join(page.texts["target-0"].split())
    assert re.search(r"[\d.]+ [KM]iB of [\d.]+ MiB of VMEM", target)
    assert "Roofline of TPU v5 lite" in target
    assert re.search(r"bound by (HBM|arithmetic)", target)
    tuning = " ".join(page.texts["tuning"].split())
    assert "block_q=128: 1.28 ms" in tuning
    assert "2 candidates; 1 more don't compile or run" in tuning


def test_gpus_and_failures(tmp_path: Path) -> None:
    """What a compiler says of a GPU's kernels, and a kernel that doesn't fit, by reports made by hand."""
    import jax

    from attnops import OperationMetadata, OperationRegistry
    from attnops.cli.report_data import PageData
    from attnops.cli.report_page import report_page
    from attnops.registry.declaration import Declaration
    from attnops.verify.compiled import Failure, KernelUse
    from attnops.verify.devices import device_limits
    from attnops.verify.gpu.gpu_kernels import GpuKernelUse, GpuLoop
    from attnops.verify.gpu.sass import TileLoop
    from attnops.verify.report import PassReport, TargetReport
    from attnops.verify.targets import devices_named

    declaration = Declaration.from_dict({"operation": "splash"})
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), "bfloat16")

    def page(name: str, one: PassReport) -> str:
        target = devices_named(name, 1)
        assert target is not None
        plan = OperationRegistry.create("splash", OperationMetadata(mesh=target.abstract({"fsdp": 1}))).plan(x, x, x)
        device = device_limits(plan.problem.platform, plan.problem.device_kind)
        report = TargetReport(name, plan, device, 16 * 2**20, 128 * 2**20, (one,), ("a warning",), ("forward",))
        text = report_page(PageData(declaration, plan, (report,), (), None, (), "now"))
        return " ".join(Page(text).texts["target-0"].split())

    kernel = GpuKernelUse("attnops_flash_forward", 168, 0, 64 * 1024, 128)
    work = {"argument_bytes": 2**20, "peak_bytes": 2**21, "flops": 1e9, "bytes_moved": 1e6, "intensity": 1000.0}
    said = page(
        "h100", PassReport("forward", True, None, kernels=(kernel,), roofline_seconds=1e-6, bound="HBM", **work)
    )
    assert "64.0 KiB of 227.0 KiB of shared memory" in said
    assert "168 of 255 registers, 0 B spilled" in said
    assert "Roofline of NVIDIA H100 80GB HBM3" in said
    assert "a warning" in said
    computing, loading = TileLoop(322, 12, 1e6, 34, 100, 667), TileLoop(210, 0, 0.0, 0, 0, 513, 8)
    roles = GpuKernelUse(
        "attnops_hopper_pages", 157, 0, None, 256, loops=(GpuLoop(computing, None),), loading=(loading,)
    )
    said = page("h100", PassReport("forward", True, None, kernels=(roles,), **work))
    assert "157 registers per thread, none spilled; blocks of 256 threads" in said
    assert "157 of 255 registers, 0 B spilled" in said
    assert "computes 667; 12 products, 34 exponentials" in said
    assert "loads 513; 8 copies" in said
    failure = Failure("needs 20.0 MiB of 16.0 MiB of VMEM", "vmem")
    said = page("v5e", PassReport("forward", True, failure, "smaller blocks: block_q=128", (("query block", 2**20),)))
    assert "doesn't compile: needs 20.0 MiB" in said
    assert "query block 1.0 MiB" in said
    assert "smaller blocks: block_q=128" in said
    used = KernelUse("attnops_splash_forward", 17 * 2**20, None)
    said = page("v5e", PassReport("forward", True, None, kernels=(used,), **work))
    assert "17.0 MiB of 16.0 MiB of VMEM: over the limit" in said
    said = page("v5e", PassReport("forward", False, None, seconds=1.0, uncompiled="libtpu isn't installed"))
    assert "NOT COMPILED" in said
    assert "not compiled: libtpu isn't installed" in said


def test_a_refused_plan_has_its_page(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config("splash", {"backend": "tpu", "fallback": "error"}, return_weights=True)
    page = written(attnops, path, status=1)
    assert "REFUSED" in page.texts["plan"]
    assert "attention weights" in page.texts["plan"]


def test_bad_input(attnops: Callable[..., Any], config: Callable[..., Path], examples: Path, tmp_path: Path) -> None:
    result = attnops("report", config(), "--output", tmp_path / "nowhere" / "page.html")
    assert (result.status, result.out) == (2, "")
    assert "is not a folder" in result.err
    result = attnops("report", config(), "--target", "v9")
    assert result.status == 2
    assert "generations" in result.err
    assert not (tmp_path / "report.html").exists()
    step = tmp_path / "step.json"
    declared = json.loads((examples / "serve" / "smollm2.json").read_text())
    step.write_text(json.dumps({name: value for name, value in declared.items() if name != "step"}))
    result = attnops("report", step)
    assert result.status == 2
    assert "the file declares none; declare `step`" in result.err


def test_names_can_not_break_out(attnops: Callable[..., Any], config: Callable[..., Path]) -> None:
    """What a file says stands on the page as text."""
    from attnops.drawing.html import code, document, rows, section, title

    nasty = "<script>alert('x')</script> & \"quoted\""
    text = document(
        nasty, title(nasty, [(nasty, nasty)]) + section(nasty, [code(nasty), rows([(nasty, nasty)])], nasty)
    )
    assert nasty in Page(text).texts[nasty]
    Page(document("bars", bars([Bar(nasty, 1.0, nasty), Bar("over", 3.0, "3 of 2", 2.0)])))
    assert "over the limit" in bars([Bar("over", 3.0, "3 of 2", 2.0)])
    assert "over the limit" not in bars([Bar("all", 2.0, "2 of 2", 2.0), Bar("none", 0.0, "0 of 0", 0.0)])


@pytest.mark.parametrize("count", [1, 2, 16])
def test_charts(count: int) -> None:
    import xml.etree.ElementTree as ET

    values = [(f"candidate {n}", 1.0 + n / 100) for n in range(count)]
    for heuristic in (None, 0, count - 1):
        ET.fromstring(curve("forward", "ms", values, 0, heuristic))
    points = [Point(f"pass {n}", 10.0**n, 1e9 * 10.0**n) for n in range(-1, count % 5)]
    root = ET.fromstring(roofline(1.97e14, 8.2e11, points, "TPU v5 lite"))
    said = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "197 TFLOP/s, 820 GB/s, knee at 240 FLOP/B" in said
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.get("cx", -1)) <= 440
        assert 0 <= float(circle.get("cy", -1)) <= 270


# -- in a browser ----------------------------------------------------------------------------------------------------

_MEASURE = """
<iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe><pre id="found"></pre><script>
onload = () => {{
  const frame = document.querySelector("iframe"), page = frame.contentDocument, root = page.documentElement;
  const colour = (where) => frame.contentWindow.getComputedStyle(where).getPropertyValue("background-color");
  const ink = (where) => frame.contentWindow.getComputedStyle(where).color;
  const wide = [...page.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > {width} + 1);
  const fonts = [...page.querySelectorAll("svg text")].map((e) => e.getBoundingClientRect().height).filter((h) => h > 0);
  document.getElementById("found").textContent = JSON.stringify({{
    scroll: root.scrollWidth, wide: wide.map((e) => e.tagName + "." + e.className), pictures: page.querySelectorAll("svg").length,
    drawn: [...page.querySelectorAll("svg")].every((e) => e.getBoundingClientRect().height > 50),
    ground: colour(page.body), ink: ink(page.body), least: Math.min(...fonts), height: root.scrollHeight,
  }});
}};
</script>
"""


def measured(page: str, width: int, *, dark: bool, folder: Path) -> dict[str, Any]:
    """What Chromium makes of a page in a window of this width."""
    harness = folder / "harness.html"
    harness.write_text(_MEASURE.format(width=width, page=html.escape(page)))
    assert CHROMIUM is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", scheme, f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", "--dump-dom", harness.as_uri(),
    ]  # fmt: skip
    environment = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@needs_chromium
def test_in_a_browser(attnops: Callable[..., Any], config: Callable[..., Path], tmp_path: Path) -> None:
    """On a phone and on a desk, light and dark: nothing is cut off, text can be read, pictures are drawn."""
    path = config("splash", batch=2, q_len=256)
    written(attnops, path, *MESH, "--target", "here", "--mode", "prefill")
    page = (tmp_path / "page.html").read_text()
    for width, dark in ((390, False), (390, True), (1200, False)):
        found = measured(page, width, dark=dark, folder=tmp_path)
        assert found["scroll"] <= width
        assert found["wide"] == []
        assert found["drawn"]
        assert found["pictures"] == page.count("<svg")
        assert found["least"] >= 10
        assert found["ground"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
        assert found["ink"] == ("rgb(230, 235, 240)" if dark else "rgb(31, 41, 51)")


STEP = {
    "operation": "paged",
    "metadata": {"mesh": {"tp": 2}},
    "cache": {
        "layers": 3, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "page_size": 8, "pages": 64, "max_sequences": 4,
        "max_length": 128,
    },
    "step": {"q_heads": 4, "q_lens": [1, 1, 20], "kv_lens": [100, 9, 20], "sliding_window": [31, 0]},
}  # fmt: skip


def test_a_step_over_pages(attnops: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(STEP))
    page = written(attnops, path, "--target", "here", "--run", "--repeats", 1)
    said = {name: " ".join(text.split()) for name, text in page.texts.items()}
    # Of 100 tokens in pages of 8, the last query sees 32: tokens 68 to 99, in pages 8 to 12.
    for line in ("1 of 100, 5 pages", "1 of 9, 2 pages", "20 of 20, 3 pages"):
        assert line in said["batch"]
    assert "22 queries of 3 sequences: 10 pages of 18 that hold keys" in said["batch"]
    assert "cache: 3 layers, 2 kv heads of 64" in said["cache"]
    assert "paged.forward_native" in said["target-0"]
    assert "nothing is sent between devices" in said["target-0"]
    assert "pass output against float64 reference" in said["timings"]


def test_a_search_for_a_step_is_on_its_page(
    attnops: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNOPS_TUNE_CACHE", str(tmp_path / "kept"))
    path = tmp_path / "step.json"
    path.write_text(json.dumps(STEP | {"metadata": {}}))
    assert "no search for this step" in written(attnops, path).texts["tuning"]
    assert attnops("tune", path, "--most", 2).status == 0
    tuning = " ".join(written(attnops, path).texts["tuning"].split())
    assert "step: 2 candidates" in tuning
    assert "by rule: " in tuning


def test_a_step_that_nothing_runs_and_a_cache_that_does_not_fit(attnops: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(STEP | {"metadata": {"platform": "tpu", "fallback": "error"}}))
    page = written(attnops, path, status=1)
    assert "fallback is an error by policy" in page.texts["plan"]
    refused = attnops("report", path, "--inputs", "some.npz", "--output", tmp_path / "page.html")
    assert refused.status == 2
    assert "--inputs some.npz" in refused.err


def test_many_sequences_are_cut_off() -> None:
    drawn = sequences([SequenceBar(str(n), 100 + n, 10, 1, "1") for n in range(30)])
    assert "and 6 more" in drawn
    assert drawn.count("ao-part") >= 24
    assert "NaN" not in sequences([])
