"""One target under atheris: `python -m reliability.fuzz TARGET [options of libFuzzer] [folders of inputs]`.

It ends as libFuzzer does; an input that breaks something is written to a file beside the given artifact prefix.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
import tempfile

TARGETS = ("sse", "heads", "requests", "answers", "resume", "peek", "ids")
CORPUS = pathlib.Path(__file__).parent / "corpus"


def main() -> None:
    import atheris

    target, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["epochgate"]):
        module = importlib.import_module(f"reliability.fuzz_{target}")
    with tempfile.NamedTemporaryFile("w", suffix=".dict") as dictionary:
        dictionary.writelines('"{}"\n'.format(word.replace('"', '\\"')) for word in module.DICTIONARY)
        dictionary.flush()
        program = f"{sys.executable} -m reliability.fuzz {target}"  # with -merge=1 libFuzzer starts itself, by a shell
        atheris.Setup([program, f"-dict={dictionary.name}", *options], module.check)
        atheris.Fuzz()


def seeds(target: str) -> list[bytes]:
    """The inputs that are kept for a target."""
    return [file.read_bytes() for file in sorted((CORPUS / target).iterdir())]


if __name__ == "__main__":
    main()
