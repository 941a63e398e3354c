#!/usr/bin/env bash
# Builds wheel and sdist, installs each into a clean environment, and tries it there.
#
#   packaging/smoke.sh                        the Python on the PATH, without torch
#   packaging/smoke.sh --torch python3.12     another Python, with torch
#   packaging/smoke.sh --torch-of .venv/bin/python    the Python of an environment, with the torch that it has
set -euo pipefail
cd "$(dirname "$0")/.."
torch="" theirs=""
if [ "${1:-}" = "--torch" ]; then torch="[torch]"; shift; fi
if [ "${1:-}" = "--torch-of" ]; then torch="of another environment"; shift; fi
python="${1:-python3}"
if [ "$torch" = "of another environment" ]; then
    theirs="$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')"
    python="$("$python" -c 'import sys; print(sys._base_executable)')"
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build
"$work/build/bin/python" -m build --outdir "$work/dist" . >/dev/null

cat > "$work/train.py" <<'SCRIPT'
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    weight = torch.ones(4) * (step != 5)
    loss = (model(torch.randn(4, 4)).pow(2).squeeze(1) * weight).sum() / weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
SCRIPT

for package in "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
    echo "== $(basename "$package") on $("$python" --version)${torch:+, with torch}"
    rm -rf "$work/env" "$work/run"
    "$python" -m venv "$work/env"
    if [ -n "$theirs" ]; then
        "$work/env/bin/pip" install --quiet --disable-pip-version-check "$package"
        echo "$theirs" > "$(echo "$work"/env/lib/python*/site-packages)/torch-of-another.pth"
    else
        "$work/env/bin/pip" install --quiet --disable-pip-version-check "$package$torch"
    fi
    mkdir "$work/run" && cp "$work/train.py" "$work/run"
    (
        cd "$work/run"
        PATH="$work/env/bin:$PATH"
        nanguard --version
        python -c 'import nanguard, sys; assert nanguard.__file__.startswith(sys.prefix)'
        nanguard --help | grep -q "  check "
        nanguard completion bash | bash -n
        nanguard explain clip-before-unscale | grep -q clip
        nanguard check train.py --fail-on none | tail -1
        nanguard preset --task lm > lm.yaml
        nanguard check lm.yaml --fail-on error
        test -e "$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/nanguard-run.pth"
        if [ -n "$torch" ]; then
            nanguard doctor
            nanguard run -- python train.py 2>&1 | grep "divides by weight.sum()"
            nanguard explain | grep -q division-by-zero
            nanguard fix
            nanguard report
        fi
    )
done
echo "all of it works"
