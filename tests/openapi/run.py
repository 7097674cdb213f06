"""Ask a served frontend by schemathesis, with all its checks: `python tests/openapi/run.py [ARGUMENTS OF st run]`."""

import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "system")]

from deployment import Deployment  # noqa: E402 # which is found since the line above

MODEL = "MODEL"  # as the examples of the description say


def main(arguments):
    """Return the exit status of schemathesis."""
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(pathlib.Path(folder))
        try:
            frontend = deployment.frontend()
            frontend.others = [
                deployment.mocker(
                    "--speedup-ratio", "1000000", "--model-name", MODEL, "--max-model-len", "8192"
                )
            ]
            frontend.await_models([MODEL])
            command = [pathlib.Path(sys.executable).with_name("schemathesis")]
            command += ["--config-file", HERE / "schemathesis.toml", "run", "--checks", "all"]
            command += ["--phases", "examples,coverage", "--seed", "1", *arguments]
            environ = {"PYTHONPATH": str(HERE), "SCHEMATHESIS_HOOKS": "short_answers"}
            environ |= {"SERVED_MODEL": MODEL}
            url = f"{frontend.url}/openapi.json"
            return subprocess.run([*command, url], env=os.environ | environ, check=False).returncode
        finally:
            deployment.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
