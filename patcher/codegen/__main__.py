"""`python -m patcher.codegen`."""

from patcher.codegen.cli import app

if __name__ == "__main__":
    app(prog_name="python -m patcher.codegen")
