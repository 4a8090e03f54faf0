import sys
import tempfile
from pathlib import Path

from tests.codegen import cases

for name in sys.argv[1:] or cases.names():
    with tempfile.TemporaryDirectory() as folder:
        cases.accept(name, Path(folder).resolve())
