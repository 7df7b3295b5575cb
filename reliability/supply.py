"""The supply chain: what is installed, what is known of it, and whether a build can be done again."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from dataclasses import dataclass

from reliability.part import Figure, Options, Part

HERE = pathlib.Path(__file__).parents[1]
RUN = HERE / "requirements" / "run.txt"
# Every file that something is installed from; tests/test_supply.py sees to it that none is missing here.
PINNED = (
    RUN,
    HERE / "requirements" / "test.txt",
    HERE / "requirements" / "audit.txt",
    HERE / "requirements" / "build.txt",
    HERE / "requirements" / "fuzz.txt",
    HERE / "deploy" / "image" / "build.txt",
    *sorted((HERE / "bench").glob("requirements-*.txt")),
    *sorted((HERE / "tests").glob("*/requirements-*.txt")),
)
ARGUED: dict[str, str] = {}  # the id of an advisory that does not concern the product: why not
LIMIT = 300  # s, for one command


@dataclass(frozen=True, slots=True)
class Pin:
    """One requirement as it is pinned: its text up to the hashes, and how many of these there are."""

    text: str
    hashes: int

    @property
    def name(self) -> str:
        return normal(re.split(r"[=<>!~;\[ ]", self.text, maxsplit=1)[0])

    @property
    def version(self) -> str:
        return self.text.partition("==")[2].partition(";")[0].strip()


def normal(name: str) -> str:
    """The name of a project in its one form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: pathlib.Path) -> list[Pin]:
    """The requirements of a file."""
    lines = re.sub(r"\\\n", " ", path.read_text()).splitlines()
    written = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [Pin(line.partition(" --hash")[0].strip(), len(re.findall(r"--hash=sha256:[0-9a-f]{64}", line)))
            for line in written]  # fmt: skip


def unargued() -> tuple[list[str], list[str]]:
    """The direct dependencies, and those of them that docs/adr/0008-dependencies.md gives no reason for."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    names = [normal(re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0]) for line in declared]
    page = (HERE / "docs" / "adr" / "0008-dependencies.md").read_text()
    argued = {normal(name) for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for name in row.split(", ")}
    return names, [name for name in names if name not in argued]


def run(options: Options) -> list[Figure]:
    return [hashed(), argued(), *built(options.work), audited(options.work)]


def hashed() -> Figure:
    found = [pin for path in PINNED for pin in pins(path)]
    good = [pin for pin in found if pin.hashes and pin.version]
    value = f"{len(good)} of {len(found)} in {len(PINNED)} files"
    return Figure("requirements pinned to one version with its SHA-256", value, "all", holds=len(good) == len(found))


def argued() -> Figure:
    names, missing = unargued()
    value = f"{len(names) - len(missing)} of {len(names)}"
    return Figure("direct dependencies argued (docs/adr/0008)", value, "all", holds=not missing)


def built(work: pathlib.Path) -> list[Figure]:
    """Two builds that have in common nothing but the sources and the time that they are told."""
    tools = tools_of("build")
    made = {}
    for number, (mask, zone) in enumerate(((0o022, "UTC"), (0o077, "Asia/Tokyo"))):
        to = work.absolute() / f"dist-{number}"
        shutil.rmtree(to, ignore_errors=True)
        with tempfile.TemporaryDirectory() as copy:
            source = copy_sources(pathlib.Path(copy, f"number-{number}"), mask, touched=number > 0)
            environment = os.environ | {"SOURCE_DATE_EPOCH": "1796083200", "TZ": zone, "PYTHONHASHSEED": str(number)}
            command = ["sh", "deploy/dist.sh", str(tools), str(to)]
            subprocess.run(command, check=True, cwd=source, env=environment, timeout=LIMIT)
        made[number] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(to.iterdir())}
    same = made[0] == made[1] and len(made[0]) == 2
    wheel = next(digest for name, digest in made[0].items() if name.endswith(".whl"))
    bill = json.loads((work / "dist-0" / "epochgate.cdx.json").read_text())
    listed = {(normal(one["name"]), one["version"]) for one in bill["components"]}
    wanted = {(pin.name, pin.version) for pin in pins(RUN)}
    return [
        Figure(
            "wheel and bill of materials built twice, in other places, at other times, with another umask and zone",
            f"same bytes, wheel {wheel[:12]}" if same else "different bytes",
            "the same bytes",
            holds=same,
        ),
        Figure(
            f"bill of materials (CycloneDX {bill['specVersion']})",
            f"{len(listed & wanted)} of {len(wanted)} pinned packages listed, {len(listed - wanted)} others",
            "all, no other",
            holds=listed == wanted,
        ),
    ]


def copy_sources(to: pathlib.Path, mask: int, *, touched: bool) -> pathlib.Path:
    """What `deploy/dist.sh` needs, made under another umask and, if `touched`, dated anew."""
    before = os.umask(mask)
    try:
        to.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copyfile(HERE / name, to / name)
        for name in ("proxy", "deploy", "requirements"):
            shutil.copytree(HERE / name, to / name, copy_function=shutil.copyfile)
    finally:
        os.umask(before)
    if touched:
        for path in to.rglob("*"):
            os.utime(path, (1e9, 1e9))
    return to


def audited(work: pathlib.Path) -> Figure:
    """What pip-audit knows of the pinned packages. What it could not ask about is no good news."""
    report = work / "audit.json"
    report.unlink(missing_ok=True)
    what = "known vulnerabilities of the pinned packages (pip-audit)"
    words = ["-r", str(RUN), "--disable-pip", "--require-hashes", "--progress-spinner", "off", "-f", "json"]
    with (work / "audit.log").open("wb") as log:
        subprocess.run(
            [tools_of("audit") / "bin" / "pip-audit", *words, "-o", report],
            stdout=log, stderr=log, check=False, timeout=LIMIT,
        )  # fmt: skip
    bound = "all asked about, none that is not argued"
    if not report.exists():
        return Figure(what, "could not ask: no advisory database was reached", bound, holds=False, unreachable=True)
    packages = json.loads(report.read_text())["dependencies"]
    asked = [one for one in packages if "skip_reason" not in one]
    found = {flaw["id"]: one["name"] for one in asked for flaw in one["vulns"] if flaw["id"] not in ARGUED}
    if not asked:
        return Figure(what, "could not ask: no advisory database was reached", bound, holds=False, unreachable=True)
    value = f"{len(found)} ({time.strftime('%Y-%m-%d')}), {len(asked)} of {len(packages)} packages asked about"
    value += "".join(f", {name}: {identifier}" for identifier, name in sorted(found.items()))
    return Figure(what, value, bound, holds=not found and len(asked) == len(packages), unreachable=not found)


def tools_of(name: str) -> pathlib.Path:
    tools = HERE / ".tools" / name
    if not (tools / ".done").exists():
        raise RuntimeError(f"{tools} is not there: run this by `make reliability ONLY=supply`")
    return tools


PART = Part(
    name="supply",
    title="Supply chain",
    about="""
Everything that is installed for the product, its tests, its image and the products that it is compared with is pinned
to one version with the digests of its files; npm packages of the tests are pinned by version only, and Debian's not at
all. `make dist` builds the wheel and its bill of materials from a clean copy of the sources with pinned tools; the
image carries one of its own. `pip-audit` looks the pinned packages up among known vulnerabilities. Where no
advisory database can be reached that is said, as a figure that does not hold; since it tells nothing about the product,
it alone does not fail the run.
""",
    run=run,
)
