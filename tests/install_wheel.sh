#!/usr/bin/env bash
# Install a wheel into an empty environment of each Python, far from the checkout, and serve the built-in model with it.
#     tests/install_wheel.sh WHEEL PYTHON...     (a PYTHON that this machine lacks is skipped)
# The environments come from the package index and take one to two minutes each, nearly all of it for torch.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
port=${PORT:-18010}
served=0
shift

# Each file of the package is in the wheel: a template that package-data forgets fails only where it is needed.
packed=$(python3 -m zipfile --list "$wheel" | awk '/^dynamo\// {print $1}' | sort)
written=$(git -C "$here" ls-files --cached src/dynamo | sed 's,^src/,,' | sort)
diff <(echo "$written") <(echo "$packed") || { echo "expected the files of src/dynamo in $wheel"; exit 1; }

for python in "$@"; do
  if ! "$python" --version > /dev/null 2>&1; then
    pyenv=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${python#python}".*/bin/python 2>/dev/null | tail -n 1)
    [ -n "$pyenv" ] || { echo "$python: not on this machine, skipped"; continue; }
    python=$pyenv
  fi
  empty=$(mktemp -d)
  trap 'rm -rf "$empty"' EXIT
  "$python" -m venv "$empty"
  "$empty/bin/pip" install --quiet --no-compile --constraint "$here/constraints.txt" "$wheel[native]"
  cd "$empty"
  "$here/tests/serve_and_ask.sh" "$port" "$empty/bin/dynamo" serve --http-port "$port"
  missing=$("$empty/bin/python" -m dynamo.frontend --http-port 0 --kserve-grpc-server 2>&1 || true)
  grep -qF "pip install 'dynamo-serving[kserve]'" <<< "$missing" || { echo "expected pip's command: $missing"; exit 1; }
  echo "$("$empty/bin/python" --version): the wheel installs and serves"
  cd /
  rm -rf "$empty"
  served=$((served + 1))
done
[ "$served" -gt 0 ] || { echo "expected one of $* on this machine"; exit 1; }
