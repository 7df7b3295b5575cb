"""Who may do what: the attacks of tests/security, counted by topic."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from reliability.part import Figure, Options, Part

TESTS = pathlib.Path(__file__).parents[1] / "tests"
LIMIT = 1200  # s, for all of them


@dataclass(slots=True)
class Topic:
    """The attacks of one file: how many were tried, how many succeeded or could not be tried."""

    title: str
    tried: int = 0
    succeeded: int = 0
    left_out: int = 0


def run(options: Options) -> list[Figure]:
    report = options.work / "attacks.xml"
    report.unlink(missing_ok=True)
    with (options.work / "attacks.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider",
             f"--junitxml={report.absolute()}", "-o", "junit_family=xunit1", str(TESTS / "security")],
            cwd=TESTS.parent, stdout=log, stderr=log, check=False, timeout=LIMIT,
        )  # fmt: skip
    topics = count(ET.parse(report).getroot())
    missing = {path.name for path in (TESTS / "security").glob("test_*.py")} - set(topics)
    assert not missing, f"no attack was tried of {', '.join(sorted(missing))}: see {log.name}"
    return [figure(topic) for _, topic in sorted(topics.items())]


def count(root: ET.Element) -> dict[str, Topic]:
    """The topics by the names of their files."""
    topics: dict[str, Topic] = {}
    for case in root.iter("testcase"):
        path = pathlib.Path(case.get("file") or case.get("classname", "").replace(".", "/") + ".py")
        topic = topics.setdefault(path.name, Topic(title_of(TESTS / "security" / path.name)))
        left_out = case.find("skipped") is not None
        topic.left_out += left_out
        topic.tried += not left_out
        topic.succeeded += case.find("failure") is not None or case.find("error") is not None
    return topics


def title_of(path: pathlib.Path) -> str:
    """What a file's first line says it is about."""
    found = re.match(r'"""(.*?)[.:;,]?(?: \((?:[A-Z]\d|S\d).*)?(?:"""|[:.\n])', path.read_text())
    return found[1] if found else path.stem


def figure(topic: Topic) -> Figure:
    value = f"{topic.tried} tried, {topic.succeeded} succeeded"
    if topic.left_out:
        value += f", {topic.left_out} could not be tried"
    return Figure(topic.title, value, "none succeeds", holds=not topic.succeeded and not topic.left_out)


PART = Part(
    name="access",
    title="Who may do what",
    about="""
Each test in `tests/security` is one attack: a session id without its credentials, the cursor of another user, a
planted id, somebody else's fence, redirects and cookies, the admin side from a page or from afar, secrets in what is
shown or left behind, text that forges a log line, a label, a key of the store or markup, and what strangers make the
proxy remember. An attack that succeeds is a test that fails. The [threat model](THREAT_MODEL.md) names the test of each
promise.
""",
    run=run,
)
