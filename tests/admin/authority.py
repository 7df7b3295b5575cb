"""Certificates for tests."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pair:
    cert: str
    key: str

    def serial(self) -> int:
        text = subprocess.check_output(["openssl", "x509", "-noout", "-serial", "-in", self.cert], text=True)
        return int(text.partition("=")[2], 16)


class Authority:
    """Makes certificates for 127.0.0.1, with the openssl of the machine."""

    def __init__(self, home: Path, name: str = "ca") -> None:
        self.home = home
        self.root = self._make(name, "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE")

    def issue(self, name: str) -> Pair:
        signed = ("-CA", self.root.cert, "-CAkey", self.root.key)
        return self._make(name, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", *signed)

    def _make(self, name: str, *options: str) -> Pair:
        pair = Pair(str(self.home / f"{name}.pem"), str(self.home / f"{name}.key"))
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
        command = ["openssl", "req", "-x509", *curve, "-keyout", pair.key, "-out", pair.cert, *options]
        subprocess.run(command, check=True, capture_output=True)
        return pair
