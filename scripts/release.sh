#!/usr/bin/env bash
# Builds a release into dist/, checks it as a user would get it, and stops before uploading.
#
#   scripts/release.sh          PYTHON chooses the interpreter (default: python3)
#
# The wheel and the sdist are each installed into an environment of their own, without verl, torch or a GPU, and
# scripts/smoke.py is run there, outside the checkout. Needs access to a package index.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

cd "$root"
say "Building"
rm -rf dist
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine
# In a copy, where links become absolute: an index shows the README, and cannot follow paths.
tree=$work/tree
mkdir "$tree"
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard | tar --null -T - --ignore-failed-read -cf -
else
    tar --exclude=./.venv --exclude=./dist --exclude=./build -cf - .
fi | tar -C "$tree" -xf -
"$work/tools/bin/python" scripts/addresses.py "$tree"
"$work/tools/bin/python" -m build --outdir dist "$tree"
"$work/tools/bin/python" -m twine check --strict dist/*

version=$("$work/tools/bin/python" - <<'PY'
from pathlib import Path
print(next(Path("dist").glob("*.whl")).name.split("-")[1])
PY
)
for package in dist/*.whl dist/*.tar.gz; do
    say "Installing $package into a clean environment"
    name=$(basename "$package")
    "$python" -m venv "$work/$name"
    "$work/$name/bin/python" -m pip install --quiet "$root/$package"
    (cd "$work" && "$work/$name/bin/python" "$root/scripts/smoke.py" --version "$version")
done

say "$version is built and checked; nothing was uploaded"
head -20 CHANGELOG.md | grep -q "^## $version (unreleased)" && echo "CHANGELOG.md still calls it unreleased: put the date."
[ -z "$(git status --porcelain 2>/dev/null)" ] || echo "The checkout has changes that are not committed."
echo "To release: git tag v$version && git push origin v$version && python -m twine upload dist/*"
